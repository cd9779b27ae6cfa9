"""Start MPI, after the settings that its libraries need before.

Importing this module sets them in the environment; existing values are kept. If the
program has imported mpi4py before, they have no effect.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from mpidist.errors import LaunchError
from mpidist.launch import launchers
from mpidist.util import logs
from mpidist.util.settings import BIND_GPU, hang_seconds

_START_SECONDS = 300.0
# After an abort, launchers may drop output that they have not forwarded yet
_REPORT_SECONDS = 0.3
# While a process reports an error of all processes of its node, others do not
_OTHERS_SECONDS = 1.0
# How long a process takes at most from binding an address to listening there
_HELD_SECONDS = 0.1
_CRAY_GPUS = "MPICH_GPU_SUPPORT_ENABLED"
_DRIVER = "libcuda.so.1"

# Open MPI warns on stderr about an unusable window component, and uses another
os.environ.setdefault("OMPI_MCA_osc_ucx_verbose", "-1")

if launchers.is_elastic(os.environ):
    # After a death, Open MPI sometimes waits for dead ranks at its end.
    # (`resilience.exit_handling` synchronises the end of programs instead.)
    os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")

# srun's variables for mpirun's daemons are not for the ranks: MPICH fails if it finds
# both
if launchers.HYDRA.is_here(os.environ):
    os.environ.pop("PMIX_NAMESPACE", None)


def _limit_seconds() -> float:
    limit = hang_seconds(os.environ)
    # If a rank dies before MPI has started, the other ranks would wait for ever
    return min(limit, _START_SECONDS) if launchers.is_elastic(os.environ) else limit


def _import_mpi() -> None:
    """Import mpi4py.MPI without initialisation, then initialise MPI as usual.

    In between, the library's name decides which preparations are needed.
    """
    import mpi4py

    initialize, finalize = mpi4py.rc.initialize, mpi4py.rc.finalize
    finalize_too = initialize if finalize is None else finalize
    mpi4py.rc(initialize=False, finalize=finalize_too)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise LaunchError(
            f"mpidist needs an MPI library, but mpi4py finds none ({reason}): "
            f"{launchers.NO_MPI}"
        ) from None
    finally:
        mpi4py.rc(initialize=initialize, finalize=finalize)
    library = MPI.Get_library_version()
    choose_early(os.environ, library)
    if not initialize or MPI.Is_initialized():
        return  # the program has initialised MPI, or will
    launchers.check_before(os.environ, library)
    if mpi4py.rc.threads:
        MPI.Init_thread(getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}"))
    else:
        MPI.Init()


def _start_mpi() -> None:
    """Start MPI, which waits for the other ranks; some may never arrive.

    Python would handle Ctrl-C only after MPI has started, so the system handles it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    is_seen = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_main and is_seen:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _import_mpi()
    finally:
        if is_main and is_seen:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _start_in_time(limit: float) -> None:
    """Start MPI, and end this process with its stack if that takes too long."""
    # A signal: MPI may be started while Python's lock is held, so no thread of Python
    # could do it, and the program may use faulthandler's only timer. Its handler is
    # `_exit`, because `mpirun --with-ft ulfm` tolerates what signals end
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGALRM, ctypes.cast(libc._exit, ctypes.c_void_p))
    with open(os.devnull, "w") as nowhere:
        try:
            faulthandler.register(signal.SIGALRM, chain=True)
        except (AttributeError, OSError, RuntimeError, ValueError):  # no stderr
            faulthandler.register(signal.SIGALRM, nowhere, chain=True)
        try:
            signal.setitimer(signal.ITIMER_REAL, limit)
            _start_mpi()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.unregister(signal.SIGALRM)
            libc.signal(signal.SIGALRM, None)  # as it was


def choose_early(environ: Mapping[str, str], library: str) -> int | None:
    """Make this process's likely GPU the current one; return its number, or None.

    MVAPICH, and Cray MPICH with GPU support, use the GPU that is current in MPI_Init.
    It needs a CUDA context, which takes GPU memory even if the job computes on CPUs:
    set MPIDIST_BIND_GPU=0 or CUDA_VISIBLE_DEVICES= to avoid it. Open MPI, MPICH and
    Intel MPI determine the GPU from the memory they get; for them
    `Topology.bind_device` creates the first context.

    Before MPI_Init only the launcher's variables give the local rank. So this is only a
    hint: `Topology.bind_device` decides which GPU is used. It uses the driver directly,
    because importing CuPy takes a second.

    Does nothing if the MPI library does not need it, without CuPy, without a driver, or
    if no launcher gives a local rank. MPIDIST_BIND_GPU=1 or 0 overrides this for any
    library. (Other values are refused later, when all ranks can raise.)

    Args:
      environ: the environment variables of this process.
      library: `MPI.Get_library_version()`.
    """
    local_rank = launchers.find_local_rank(environ)
    if local_rank is None or not _is_gpu_wanted(environ, library):
        return None
    if importlib.util.find_spec("cupy") is None:
        return None
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    return _make_current(driver, local_rank)


def _is_gpu_wanted(environ: Mapping[str, str], library: str) -> bool:
    switch = BIND_GPU.read_or_default(environ)
    if switch is not None:
        return switch
    is_cray = "CRAY MPICH" in library
    return "MVAPICH" in library or (is_cray and environ.get(_CRAY_GPUS) == "1")


def _make_current(driver: ctypes.CDLL, local_rank: int) -> int | None:
    """Make a GPU's primary context current; CUDA's runtime uses the same one."""
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return None
    if count.value == 0:
        return None
    index = local_rank % count.value
    is_chosen = not (
        driver.cuDeviceGet(ctypes.byref(device), index)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or driver.cuCtxSetCurrent(context)
    )
    return index if is_chosen else None


def is_alarm_free() -> bool:
    """Return whether the program does not use SIGALRM."""
    is_default = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    return is_default and not signal.getitimer(signal.ITIMER_REAL)[0]


def abort_while_importing(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """End the job: other ranks may have finished the import and wait for this one.

    `exit_handling.abort_on_exception` replaces it at the end of the import.
    """
    sys.__excepthook__(kind, error, trace)
    world = sys.modules["mpi4py.MPI"].COMM_WORLD
    if world.Get_size() > 1 and not (hasattr(sys, "ps1") or sys.flags.interactive):
        time.sleep(_REPORT_SECONDS)
        world.Abort(1)


def report_launch_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show a LaunchError once on each node, with the program's line alone.

    Each process of a job that was started wrongly raises it, and none knows the others.
    """
    is_asked = hasattr(sys, "ps1") or sys.flags.interactive
    if not isinstance(error, LaunchError) or is_asked:
        sys.__excepthook__(kind, error, trace)
        return
    started = launchers.find_launcher(os.environ)
    # Launchers that are not MPI's may keep the output of each process for itself
    is_shared = started is None or started.launcher.is_mpi
    claim = claim_report() if is_shared else None
    if claim is None and is_shared:
        return
    trace_text = "".join(traceback.format_tb(trace, limit=1))
    text = "".join(traceback.format_exception_only(kind, error))
    logs.write(f"Traceback (most recent call last):\n{trace_text}{text.rstrip()}")
    if claim is not None:
        time.sleep(_OTHERS_SECONDS)
        claim.close()


def claim_report() -> socket.socket | None:
    """Return a claim to report for this node; None if another rank has it.

    The claim is an abstract socket address (Linux), which vanishes with the process.
    Ranks of one job on one node have the same parent: the launcher's daemon. Others can
    guess the address, but not hold it in this user's name.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = f"\0mpidist-failure-{_namespace()}-{os.getuid()}-{os.getppid()}"
    try:
        claim.bind(address)
        claim.listen()
    except OSError:
        if _is_held_by_us(address):
            claim.close()
            return None
    return claim


def _namespace() -> int:
    """Return the number of the process ids' namespace: containers have their own."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _is_held_by_us(address: str) -> bool:
    """Return whether a process of this user listens at a local address."""
    end = time.monotonic() + _HELD_SECONDS
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        while time.monotonic() < end:
            try:
                asking.connect(address)
            except OSError:  # it is about to listen, or it never will
                time.sleep(_HELD_SECONDS / 10)
                continue
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            user: int = struct.unpack("3i", credentials)[1]
            return user == os.getuid()
    return False


if "mpi4py.MPI" not in sys.modules:
    launchers.leave_job(os.environ)
    limit = _limit_seconds()
    try:
        if limit < threading.TIMEOUT_MAX and is_alarm_free():
            _start_in_time(limit)
        else:
            _start_mpi()
    except LaunchError:
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = report_launch_error
        raise
_MPI: Any = sys.modules["mpi4py.MPI"]
if not _MPI.Is_initialized() or _MPI.Is_finalized():
    done = "ended" if _MPI.Is_initialized() else "not begun"
    raise LaunchError(
        f"MPI has {done}, so mpidist cannot be imported. It starts MPI unless "
        "mpi4py.rc.initialize (or MPI4PY_RC_INITIALIZE) is false. Then the program "
        "must do so before: MPI.Init_thread(MPI.THREAD_MULTIPLE), `import mpidist`"
    )
logs.start(_MPI.COMM_WORLD.Get_rank())
if sys.excepthook is sys.__excepthook__:
    sys.excepthook = abort_while_importing
