"""Bind ranks to GPUs: count them, select one, and detect ranks that share one."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpidist.errors import LaunchError
from mpidist.util.logs import warn

_DRIVER = "libcuda.so.1"
_NO_DEVICE = 100  # cudaErrorNoDevice
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NONE_VISIBLE = ("", "-1", "NoDevFiles")
cuda_errors: list[str] = []  # why no GPU is used


class GpuIdentity(NamedTuple):
    """Identifies one GPU among those of all nodes.

    Args:
      host: MPI's name of the node.
      pci_bus_id: such as "0000:3b:00.0".
      uuid: in hexadecimal digits. MIG instances of one GPU have the same PCI bus id but
        different uuids.
      name: the GPU's model.
      driver: the CUDA version that the driver supports, such as 13000.
    """

    host: str
    pci_bus_id: str
    uuid: str
    name: str
    driver: int


def gpu_count() -> int:
    """Return how many GPUs CuPy can use in this process; 0 without CuPy or a driver.

    An error of CUDA is a warning, the first time: the job computes on the CPU then.
    """
    if "cupy" not in sys.modules and not _may_have_gpus():
        return 0
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        visible = os.environ.get(_VISIBLE, "")
        is_expected = error.status == _NO_DEVICE and visible in _NONE_VISIBLE
        if not is_expected and str(error) not in cuda_errors:
            cuda_errors.append(str(error))
            named = f" ({_VISIBLE}={visible})" if visible else ""
            warn(f"no GPU is used, since CUDA fails: {error}{named}", stacklevel=2)
        return 0


def _may_have_gpus() -> bool:
    """Return whether there are CuPy and a driver, without an import of CuPy.

    CuPy needs 9 MiB and a tenth of a second, on each rank of a machine without GPUs.
    """
    if importlib.util.find_spec("cupy") is None:
        return False
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def current_gpu() -> int | None:
    """Return the GPU of this thread's current CUDA context; None without a context."""
    if "cupy" not in sys.modules or gpu_count() == 0:
        return None
    import cupy

    # Without a context the CUDA runtime returns GPU 0
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

    In a thread without a CUDA context the GPU stays current after the block. Unlike
    `cupy.cuda.Device`: for such a thread the runtime returns GPU 0 as the current
    device, and setting that again would create a context on GPU 0.
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
    """Return the identity of this process's GPU `index`."""
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
    """Return, for each GPU that several ranks use, the list of those ranks.

    Args:
      identities: each rank's GPU, by rank; None for a rank on a CPU.
    """
    ranks_on: dict[tuple[str, str, str], list[int]] = {}
    for rank, gpu in enumerate(identities):
        if gpu is not None:
            key = gpu.host, gpu.pci_bus_id, gpu.uuid
            ranks_on.setdefault(key, []).append(rank)
    return [ranks for ranks in ranks_on.values() if len(ranks) > 1]


def require_own_gpus(identities: Sequence[GpuIdentity | None]) -> None:
    """Raise a LaunchError if two ranks have the same GPU; see `shared_gpus`."""
    for ranks in shared_gpus(identities):
        gpu = identities[ranks[0]]
        assert gpu is not None
        raise LaunchError(
            f"ranks {', '.join(map(str, ranks))} would share one GPU, "
            f"{gpu.pci_bus_id} ({gpu.name}) on {gpu.host}: start one rank per "
            "GPU (srun --gpus-per-task=1, or as many ranks per node as it has GPUs), "
            "pass devices=['CPU:0'], or allow_shared_gpu=True if sharing is intended"
        )


def cupy_version() -> str:
    """Return CuPy's version."""
    import cupy

    return str(cupy.__version__)


def nccl_version() -> int:
    """Return the version of CuPy's NCCL, such as 22703; 0 if it has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns if NCCL is missing
            from cupy.cuda import nccl

        return int(nccl.get_version())
    except (ImportError, AttributeError, RuntimeError):
        return 0
