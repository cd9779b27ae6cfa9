"""GPUs: how many there are, which one a rank takes, and whether two take the same."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpidist.errors import LaunchError

__all__ = [
    "GpuIdentity",
    "cuda_versions",
    "cupy_version",
    "current_gpu",
    "gpu_count",
    "identify_gpu",
    "nccl_version",
    "on_gpu",
    "require_own_gpus",
    "shared_gpus",
    "use_gpu",
]


class GpuIdentity(NamedTuple):
    """What tells one GPU from all others.

    Args:
      host: the node, as MPI names it.
      pci_bus_id: such as "0000:3b:00.0".
      uuid: in hexadecimal digits; parts of one GPU (MIG) have the same PCI bus id, but
        not the same uuid.
      name: of the model.
      driver: the CUDA version of the driver, such as 13000.
    """

    host: str
    pci_bus_id: str
    uuid: str
    name: str
    driver: int


def gpu_count() -> int:
    """Return how many GPUs CuPy can use in this process; 0 without CuPy or a driver."""
    if importlib.util.find_spec("cupy") is None:
        return 0
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def current_gpu() -> int | None:
    """Return the GPU of this thread's current CUDA context; None without a context."""
    if "cupy" not in sys.modules or gpu_count() == 0:
        return None
    import cupy

    # Without a context CUDA's runtime calls GPU 0 the current one
    if not cupy.cuda.driver.ctxGetCurrent():
        return None
    return int(cupy.cuda.runtime.getDevice())


def use_gpu(index: int) -> None:
    """Make GPU `index` the current device of this thread.

    Raises:
      LaunchError: CuPy is not installed, or there is no such GPU.
    """
    count = gpu_count()
    if index >= count:
        raise LaunchError(
            f"GPU:{index} cannot be used: CuPy sees {count} GPUs here. Install "
            "cupy-cuda12x or cupy-cuda13x on a machine with a GPU, or pass "
            "devices=['CPU:0']"
        )
    import cupy

    cupy.cuda.Device(index).use()


@contextlib.contextmanager
def on_gpu(index: int) -> Iterator[None]:
    """Make GPU `index` the current device of this thread, within a block.

    In a thread without a CUDA context it stays current: `cupy.cuda.Device` would go
    back to GPU 0, which the runtime calls current there, and make a context on it.
    """
    from cupy.cuda import driver, runtime

    before = runtime.getDevice() if driver.ctxGetCurrent() else None
    if before != index:
        runtime.setDevice(index)
    try:
        yield
    finally:
        if before is not None:
            runtime.setDevice(before)


def identify_gpu(index: int, host: str) -> GpuIdentity:
    """Return what tells GPU `index` of this process from others."""
    from cupy.cuda import runtime

    properties = runtime.getDeviceProperties(index)
    return GpuIdentity(
        host,
        runtime.deviceGetPCIBusId(index).lower(),
        bytes(properties.get("uuid", b"")).hex(),
        properties["name"].decode(),
        runtime.driverGetVersion(),
    )


def shared_gpus(identities: Sequence[GpuIdentity | None]) -> list[list[int]]:
    """Return the ranks that share a GPU, for each GPU that is shared.

    Args:
      identities: of the GPU of each rank, by rank; None for a CPU.
    """
    ranks_on: dict[tuple[str, str, str], list[int]] = {}
    for rank, found in enumerate(identities):
        if found is not None:
            key = found.host, found.pci_bus_id, found.uuid
            ranks_on.setdefault(key, []).append(rank)
    return [ranks for ranks in ranks_on.values() if len(ranks) > 1]


def require_own_gpus(identities: Sequence[GpuIdentity | None]) -> None:
    """Raise a LaunchError if two ranks have the same GPU; see `shared_gpus`."""
    for ranks in shared_gpus(identities):
        found = identities[ranks[0]]
        assert found is not None
        raise LaunchError(
            f"ranks {', '.join(map(str, ranks))} would share one GPU, "
            f"{found.pci_bus_id} ({found.name}) on {found.host}: start one rank per "
            "GPU (srun --gpus-per-task=1, or as many ranks per node as it has GPUs), "
            "pass devices=['CPU:0'], or allow_shared_gpu=True if that is meant"
        )


def cupy_version() -> str:
    """Return CuPy's version."""
    import cupy

    return str(cupy.__version__)


def cuda_versions() -> tuple[int, int]:
    """Return the CUDA versions of the driver and of the runtime, such as 13000."""
    from cupy.cuda import runtime

    return int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())


def nccl_version() -> int:
    """Return the version of NCCL that CuPy has, such as 22703; 0 without."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns where it finds no NCCL
            from cupy.cuda import nccl

        return int(nccl.get_version())
    except (ImportError, AttributeError, RuntimeError):
        return 0
