"""Choosing a GPU before MPI is initialised.

Some MPI libraries take the GPU that is current when they start for the one of their
process (MVAPICH's and Cray's guides ask for it to be chosen before MPI_Init). At that
time only the launcher's variables tell which rank of its node a process is. This is
done past CuPy, through the driver itself, because importing CuPy takes a second; and it
is no more than a hint: which GPU is used, `Topology.bind_device` decides.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Mapping

__all__ = ["choose_early"]

# Where launchers tell the number of a process on its node
_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)
_BIND = "MPIDIST_BIND_GPU"
_DRIVER = "libcuda.so.1"


def choose_early(environ: Mapping[str, str]) -> int | None:
    """Make this process's likely GPU the current one; return its number, or None.

    Nothing is done without CuPy, without a driver, after MPI has started, where no
    launcher tells a local rank, or where the variable MPIDIST_BIND_GPU is 0. (What is
    neither 0 nor 1 is refused later, when all ranks can be told.)

    Args:
      environ: the environment variables of this process.
    """
    local_rank = _local_rank(environ)
    is_late = "mpi4py.MPI" in sys.modules
    if local_rank is None or is_late or environ.get(_BIND) == "0":
        return None
    if importlib.util.find_spec("cupy") is None:
        return None
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    return _make_current(driver, local_rank)


def _local_rank(environ: Mapping[str, str]) -> int | None:
    found = (environ.get(name, "") for name in _LOCAL_RANKS)
    return next((int(text) for text in found if text.isdecimal()), None)


def _make_current(driver: ctypes.CDLL, local_rank: int) -> int | None:
    """Make a GPU's primary context, which CUDA's runtime uses too, the current one."""
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
