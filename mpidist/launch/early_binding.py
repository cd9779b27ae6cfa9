"""Choosing a GPU before MPI is initialised, for MPI libraries that need it.

MVAPICH, and Cray MPICH with GPU support, use the GPU that is current in MPI_Init. It
needs a CUDA context, which takes GPU memory even if the job computes on CPUs: set
MPIDIST_BIND_GPU=0 or CUDA_VISIBLE_DEVICES= to avoid it. Open MPI, MPICH and Intel MPI
determine the GPU from the memory they get; for them `Topology.bind_device` creates the
first context.

Before MPI_Init only the launcher's variables give the local rank. So this is only a
hint: `Topology.bind_device` decides which GPU is used. It uses the driver directly,
because importing CuPy takes a second.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping

from mpidist.util.settings import BIND_GPU, decimal

__all__ = ["choose_early"]

# Variables in which launchers give the local rank
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

    Does nothing if the MPI library does not need it, without CuPy, without a driver, or
    if no launcher gives a local rank. MPIDIST_BIND_GPU=1 or 0 overrides this for any
    library. (Other values are refused later, when all ranks can raise.)

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
    found = (decimal(environ.get(name, "")) for name in _LOCAL_RANKS)
    return next((number for number in found if number is not None), None)


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
