"""Ending the whole job when one rank fails, with one readable traceback."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.failures import (
    FailureDetector,
    expect_exits,
    has_failed_ranks,
)
from mpidist.comm.consensus.signatures import END, call_site, exits
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.context import default_strategy, explain
from mpidist.device.binding import current_gpu, use_gpu
from mpidist.errors import CollectiveError, DivergenceError, MpidistError, RemoteError
from mpidist.launch.launchers import find_local_size
from mpidist.launch.mpi_defaults import (
    abort_while_importing,
    claim_report,
    is_alarm_free,
    report_launch_error,
)
from mpidist.monitor import statistics, timeline
from mpidist.resilience.watchdog import abort_job
from mpidist.util import logs
from mpidist.util.available_memory import available_cores
from mpidist.util.forks import is_forked
from mpidist.util.native_timers import NativeTimer, say_later
from mpidist.util.settings import HANG_SECONDS, hang_seconds
from mpidist.util.tracebacks import hide_internal_frames

# How long a rank waits for the origin rank to report its error, and at most while
# another rank of its node is reporting. The job usually ends before
_GRACE_SECONDS = 10.0
_OTHERS_SECONDS = 60.0
_LOOK_SECONDS = 0.02
# How long the reporting rank waits before, since the job may be ending already, and
# after, so that other ranks with the same error stay silent
_REPORT_SECONDS = 0.3
# Of MPI_Finalize, for each rank that shares a core: 256 ranks on 2 cores take 15 s
_FINALIZE_SECONDS = 3.0
# After the text, for it to be read
_SAY_SECONDS = 0.5
_has_left = False
_saying = NativeTimer(None)


def abort_on_exception() -> None:
    """Make an uncaught exception end all ranks of the job. `import mpidist` calls it.

    The traceback is printed once per node, by the rank that failed first, and headed by
    the rank. Nothing changes for a job of one rank, in an interactive session, or if
    sys.excepthook was replaced, as by debuggers. Test runners catch exceptions
    themselves.
    """
    if sys.excepthook in (sys.__excepthook__, abort_while_importing):
        sys.excepthook = _report_and_abort


def leave_together() -> None:
    """Make the end of the program a collective, as MPI_Finalize is.

    If a rank ends while others wait for it in a collective, they raise an error that
    says so, instead of waiting for ever. It also waits for checkpoints that are being
    saved. `import mpidist` calls it.

    A program may call MPI.Finalize itself, which first deletes the attributes of
    COMM_SELF, while MPI still works (MPI-4.1, section 11.2.4).
    """
    sys.exit = _note_exit(sys.exit)
    os._exit = _note_hard_exit(os._exit, os.getpid())
    atexit.register(_leave_at_exit, os.getpid())
    if MPI.Is_initialized() and not MPI.Is_finalized():
        key = MPI.Comm.Create_keyval(delete_fn=_leave_before_finalize)
        MPI.COMM_SELF.Set_attr(key, os.getpid())


def _note_exit(leave: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """Return `sys.exit` so that messages can say where the program called it."""

    @functools.wraps(leave)
    def exit(status: Any = None, /) -> NoReturn:
        shown = repr(status) if isinstance(status, int) else type(status).__name__
        text = f"{call_site()}, by sys.exit({'' if status is None else shown})"
        exits[:] = [text]
        leave(status)

    return exit


def _note_hard_exit(leave: Callable[[int], NoReturn], pid: int) -> Any:
    """Return `os._exit` so that it cannot end a job with status 0 in the middle.

    MPICH's mpirun kills the other ranks without a word, and ends with the status of
    this one.
    """

    @functools.wraps(leave)
    def _exit(status: int) -> NoReturn:
        if status == 0 and os.getpid() == pid and _in_job() and not _has_left:
            rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
            logs.report(
                "resilience",
                f"mpidist: rank {rank} of {size} ends by os._exit(0) at {call_site()}, "
                "while MPI runs, which ends the job; so its exit status is 1. Use "
                "sys.exit(), or call MPI.Finalize() before",
            )
            status = 1
        leave(status)

    _exit.__module__ = "os"  # by which it is pickled
    return _exit


def _leave_at_exit(pid: int) -> None:
    if os.getpid() == pid and not MPI.Is_finalized():  # a forked child is not a rank
        _leave()
        if has_failed_ranks():
            _finalize_in_time()
        else:
            _limit_the_end()


def _leave_before_finalize(_: MPI.Comm, __: int, pid: int) -> None:
    # MPI would ignore an error of this function
    if os.getpid() == pid:
        _leave(has_handled_errors=True)
        if _limit_the_end():
            threading.Thread(target=_end_the_limit, daemon=True).start()


def _leave(has_handled_errors: bool = False) -> None:
    """End saves, timelines and strategies; a second call does nothing. Collective.

    Args:
      has_handled_errors: whether ranks may have left strategies by errors before.
    """
    global _has_left
    if _has_left:
        return
    _has_left = True
    expect_exits()
    handled = sys.exc_info()[1]  # what the program handles while it calls MPI.Finalize
    try:
        if (save := sys.modules.get("mpidist.checkpoint.save")) is not None:
            save.finish_all()
        for consensus in list(Consensus.in_use):
            _leave_together(consensus, has_handled_errors)
        with contextlib.suppress(Exception):  # all ranks are here
            timeline.finish()
        with contextlib.suppress(Exception):
            statistics.report()
        ReplicaGroup.end_all(kept=default_strategy().extended)
        for consensus in list(Consensus.in_use):  # those of threads
            consensus.close()
    except BaseException as error:
        if handled is not None or not isinstance(error, MpidistError):
            _report("".join(traceback.format_exception(error)), is_others=False)
        # If other ranks are in another collective, they raise the same error
        _report(
            f"{type(error).__name__}: {error}",
            isinstance(error, DivergenceError) or _is_copy(error),
        )


def _leave_together(consensus: Consensus, may_be_broken: bool) -> None:
    try:
        consensus.require_same(END)
    except CollectiveError as error:
        is_broken = type(error) is CollectiveError and consensus.broken is not None
        # The program may have handled an error on all ranks, which all come here
        has_met = may_be_broken or (
            is_broken and consensus.departures.meet(_GRACE_SECONDS)
        )
        if not (is_broken and has_met):
            raise


def _limit_the_end() -> bool:
    """Let the system end this process if MPI_Finalize hangs; return whether it will.

    MPI_Finalize runs after the end of Python, or holds Python's lock, so no thread
    could do it. Not done in programs that use SIGALRM.
    """
    global _saying
    limit = hang_seconds(os.environ)
    is_limited = _in_job() and is_alarm_free() and limit < threading.TIMEOUT_MAX
    if is_limited:
        rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        text = (
            f"mpidist: rank {rank} of {size} has ended its program"
            f"{f' ({exits[0]})' if exits else ''}, and waited {limit:g} s for other "
            f"ranks to end theirs, more than {HANG_SECONDS.name} allows. The job ends"
        )
        _saying = say_later(logs.formatted(text), limit)
        signal.setitimer(signal.ITIMER_REAL, limit + _SAY_SECONDS)
    return is_limited


def _end_the_limit() -> None:
    """Undo `_limit_the_end` after MPI_Finalize, if the program has set no timer."""
    end = time.monotonic() + signal.getitimer(signal.ITIMER_REAL)[0]
    while not MPI.Is_finalized():
        time.sleep(_LOOK_SECONDS)
    _saying.cancel()
    left = signal.getitimer(signal.ITIMER_REAL)[0]
    if left and abs(time.monotonic() + left - end) < _REPORT_SECONDS:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _finalize_in_time() -> None:
    """End MPI after a death: Open MPI 5 sometimes waits for dead ranks for ever.

    Not needed if `mpi_defaults` was imported in time. The program ends while a thread
    waits.
    """
    FailureDetector.stop_polling()
    gpu = current_gpu()

    def finalize() -> None:
        if gpu is not None:
            use_gpu(gpu)  # where MPI has memory and streams
        # By ctypes, since mpi4py would keep all other threads waiting
        ctypes.CDLL(MPI.__file__).MPI_Finalize()

    ending = threading.Thread(target=finalize, daemon=True)
    ending.start()
    ranks = find_local_size(os.environ) or 1
    ending.join(_FINALIZE_SECONDS * max(1.0, ranks / len(available_cores())))


def _report_and_abort(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    explain(error)
    if isinstance(error, MpidistError):
        hide_internal_frames(error)
    if not _in_job() or is_forked() or hasattr(sys, "ps1") or sys.flags.interactive:
        report_launch_error(kind, error, trace)
        return
    if not _is_copy(error):
        with contextlib.suppress(Exception):
            timeline.end()
    text = "".join(traceback.format_exception(kind, error, trace))
    _report(text, _is_copy(error))


def _is_copy(error: BaseException) -> bool:
    """Return whether an error originates from another rank, which reports it."""
    return isinstance(error.__cause__, RemoteError)


def _report(text: str, is_others: bool) -> NoReturn:
    """Report why the job ends, unless another rank does, and end it."""
    if is_others:
        time.sleep(_GRACE_SECONDS)
    end = time.monotonic() + _OTHERS_SECONDS
    while (claim := claim_report()) is None and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
    time.sleep(_REPORT_SECONDS)
    if isinstance(sys.stderr, io.StringIO):
        # The hook of torch.distributed would print it when this function returns
        sys.stderr = sys.__stderr__
    with contextlib.suppress(Exception):  # a replaced stream may raise anything
        sys.stdout.flush()
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    head = f"mpidist: rank {rank} of {size} failed; the job ends\n"
    logs.report("resilience", head + text.removesuffix("\n"))
    time.sleep(_REPORT_SECONDS)
    if claim is not None:
        claim.close()  # held until now
    abort_job()


def _in_job() -> bool:
    return (
        MPI.Is_initialized()
        and not MPI.Is_finalized()
        and MPI.COMM_WORLD.Get_size() > 1
    )
