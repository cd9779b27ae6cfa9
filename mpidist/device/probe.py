"""Probe whether MPI accepts GPU memory, in a separate job: it may crash.

`run` starts this file as a program, on two ranks if the MPI library's mpirun is found,
else on one. The program makes the MPI calls that mpidist makes.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpidist.launch.commands import python_child
from mpidist.launch.launchers import environ_of_another_job

_SECONDS = 60
_CRASH = re.compile("it ended by SIG(SEGV|BUS|ABRT|ILL|FPE)$")
_DONE = "mpidist: MPI took addresses of GPU memory"


class Outcome(NamedTuple):
    """The result of a probe.

    Args:
      is_aware: whether MPI accepted addresses of GPU memory.
      why: what happened.
      is_certain: whether another probe would give the same; false after a time-out or
        an error that a busy machine may cause.
    """

    is_aware: bool
    why: str
    is_certain: bool


def run(index: int) -> Outcome:
    """Return whether MPI accepts addresses of GPU `index`'s memory."""
    environ = _clean(os.environ)
    start = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    program = python_child(start, str(index))
    alone = _run_one(program, environ)
    if alone:
        return Outcome(False, f"tried on one rank: {alone}", _is_crash(alone))
    mpirun = _mpirun(library_path())
    if mpirun is None:
        return Outcome(True, "tried on one rank", True)
    together = _run_one([str(mpirun), "-n", "2", *program], environ)
    if together:
        why = f"tried by {mpirun} on two ranks: {together}"
        return Outcome(False, why, _is_crash(together))
    return Outcome(True, "tried on two ranks", True)


def _run_one(command: list[str], environ: Mapping[str, str]) -> str:
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"no end after {_SECONDS} s"
    if _DONE in out and process.returncode == 0:
        return ""
    if number := _signal_of(process.returncode, out + err):
        return f"it ended by {signal.Signals(number).name}"
    lines = [line for line in err.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "nothing on stderr"
    return f"it ended with {process.returncode}: {last}"


def _signal_of(status: int, text: str) -> int:
    """Return the signal that ended a process, or one that mpirun has started; or 0."""
    if status < 0:
        return -status
    # What MPICH's mpirun says, and PRRTE's
    said = re.search(r"(?:\(|on\s+)signal (\d+)", text)
    return int(said[1]) if said and status else 0


def _is_crash(text: str) -> bool:
    return _CRASH.search(text) is not None


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    kept = environ_of_another_job(environ)
    # Start two ranks on one core, too
    kept.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    kept.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
    return kept


def library_path() -> Path | None:
    """Return the path of the MPI library that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    except OSError:  # not on Linux
        return None
    pattern = r"^\S+ r\S+ .*?(/\S*/libmpi(?:_cray|ch)?\.so[.\d]*)$"
    match = re.search(pattern, maps, re.MULTILINE)
    return None if match is None else Path(match[1])


def _mpirun(library: Path | None) -> Path | None:
    for folder in () if library is None else library.parents[1:3]:
        mpirun = folder / "bin" / "mpirun"
        if mpirun.exists():
            return mpirun
    return None


class DeviceArray:
    """A one-dimensional array on a GPU, by CUDA's driver: importing CuPy takes longer.

    Args:
      values: the values to copy there.
    """

    def __init__(self, values: npt.NDArray[Any]):
        self._like = values
        address = ctypes.c_uint64()
        _driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(values.nbytes))
        self._address = address.value
        self.set(values)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self._like.shape,
            "typestr": self._like.dtype.str,
            "data": (self._address, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    def set(self, values: npt.NDArray[Any]) -> None:
        """Copy values to the GPU, synchronously."""
        to, source = ctypes.c_uint64(self._address), ctypes.c_void_p(_address(values))
        _driver("cuMemcpyHtoD_v2", to, source, ctypes.c_size_t(values.nbytes))

    def get(self) -> npt.NDArray[Any]:
        """Return the values."""
        values = np.empty_like(self._like)
        to, source = ctypes.c_void_p(_address(values)), ctypes.c_uint64(self._address)
        _driver("cuMemcpyDtoH_v2", to, source, ctypes.c_size_t(values.nbytes))
        return values


def _address(values: npt.NDArray[Any]) -> int:
    return int(values.__array_interface__["data"][0])


def _driver(name: str, *arguments: Any) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with CUresult {status}")


def use_gpu(index: int) -> None:
    """Make GPU `index` the current device of this thread, by CUDA's driver."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _driver("cuInit", 0)
    _driver("cuDeviceGet", ctypes.byref(device), index)
    _driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _driver("cuCtxSetCurrent", context)


def _main(index: int) -> None:
    """Make the MPI calls that mpidist makes, on GPU memory, and check the results."""
    # Nobody else ends ranks whose mpirun was killed, and they keep memory of the GPU
    signal.alarm(2 * _SECONDS)
    use_gpu(index)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    # By MPI's eager protocol, and by rendezvous
    for count in (16, 1 << 20):
        values = np.full(count, rank + 1, np.float32)
        ours, counts = DeviceArray(values), [count] * size
        total, everyone = (DeviceArray(np.zeros(n * count, "f4")) for n in (1, size))
        comm.Allreduce(ours, total)
        _check("Allreduce", total, size * (size + 1) / 2)
        comm.Allgatherv(ours, [everyone, counts])
        expected = np.repeat(np.arange(1, size + 1, dtype="f4"), count)
        _check("Allgatherv", everyone, expected)
        everyone.set(np.zeros_like(expected))
        comm.Alltoallv([DeviceArray(np.tile(values, size)), counts], [everyone, counts])
        _check("Alltoallv", everyone, expected)
        comm.Bcast(ours, 0)
        _check("Bcast", ours, 1)
    comm.Barrier()
    if rank == 0:
        print(_DONE, flush=True)


def _check(call: str, found: DeviceArray, expected: Any) -> None:
    """Raise an error if MPI has left something else (also under `python -O`)."""
    if not (found.get() == expected).all():
        raise RuntimeError(f"{call} gives wrong numbers")


if __name__ == "__main__":
    _main(int(sys.argv[1]))
