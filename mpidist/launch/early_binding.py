"""Choosing a GPU before MPI is initialised, for MPI libraries that need it.

MVAPICH, and Cray MPICH where it is asked to support GPUs, take the GPU that is current
in MPI_Init for the one of their process. For that it must have a CUDA context, which
takes memory of the GPU even if the job then computes on CPUs: set MPIDIST_BIND_GPU=0 or
CUDA_VISIBLE_DEVICES= to go without. Open MPI, MPICH and Intel MPI look at a GPU when
they are given its memory; for them `Topology.bind_device` makes the first context.

Before MPI_Init only the launcher's variables tell which rank of its node a process is.
So this is no more than a hint: which GPU is used, `Topology.bind_device` decides. It is
done past CuPy, through the driver itself, because importing CuPy takes a second.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping

from mpidist.util.settings import BIND_GPU

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
_CRAY_GPUS = "MPICH_GPU_SUPPORT_ENABLED"
_DRIVER = "libcuda.so.1"


def choose_early(environ: Mapping[str, str], library: str) -> int | None:
    """Make this process's likely GPU the current one; return its number, or None.

    Nothing is done for an MPI library that does not need it, without CuPy, without a
    driver, or where no launcher tells a local rank. The variable MPIDIST_BIND_GPU
    decides for any library: 1 does it, 0 does not. (What is neither is refused later,
    when all ranks can be told.)

    Args:
      environ: the environment variables of this process.
      library: `MPI.Get_library_version()`.
    """
    local_rank = _local_rank(environ)
    if local_rank is None or not _is_wanted(environ, library):
        return None
    if importlib.util.find_spec("cupy") is None:
        return None
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    return _make_current(driver, local_rank)


def _is_wanted(environ: Mapping[str, str], library: str) -> bool:
    switch = BIND_GPU.read_or_default(environ)
    if switch is not None:
        return switch
    is_cray = "CRAY MPICH" in library
    return "MVAPICH" in library or (is_cray and environ.get(_CRAY_GPUS) == "1")


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
