"""GPU memory shared by a node's ranks, with CUDA IPC handles."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.pending import Pending
from mpidist.device import kernels
from mpidist.device.memory import DeviceBuffer

_CALL = "MirroredStrategy: memory that GPUs share"
_MARK = 0x6D706964  # distinguishes a buffer from other memory
_abandoned: list[Any] = []


class IpcBuffers:
    """The buffers of all ranks of a node. `share_buffers` makes them.

    Attributes:
      arrays: of each rank, by rank, its bytes: CuPy arrays on this rank's GPU's map.
    """

    def __init__(
        self, consensus: Consensus, own: DeviceBuffer, addresses: dict[int, int]
    ):
        import cupy

        self._consensus = consensus
        self._own = own
        self._addresses = addresses
        self.arrays: list[Any] = []
        size, device = own.array.size, own.array.device.id
        for rank in range(consensus.size):
            if rank == consensus.rank:
                self.arrays.append(own.array)
            else:
                memory = cupy.cuda.UnownedMemory(addresses[rank], size, own, device)
                pointer = cupy.cuda.MemoryPointer(memory, 0)
                self.arrays.append(cupy.ndarray((size,), np.uint8, memptr=pointer))

    def close(self) -> None:
        """Unmap the other ranks' buffers, then free this rank's. Collective.

        After a timeout nothing is freed: other ranks may still read it.
        """
        if not self._consensus.can_free:
            _abandoned.append(self)
            return
        self.arrays.clear()
        try:
            _close(self._addresses)
        finally:  # the others wait, even if this rank's GPU failed
            # Memory that others have mapped must not be freed
            with Pending("freeing buffers of GPUs", self._consensus.comm):
                self._consensus.comm.Barrier()
            del self._own


def share_buffers(
    consensus: Consensus, size_bytes: int
) -> tuple[IpcBuffers | None, str]:
    """Return buffers that all ranks can read, or None and the reason. Collective.

    Args:
      consensus: of ranks of one node, all with a current GPU.
      size_bytes: of each rank's buffer.
    """
    own, handle, reason = _export(consensus.rank, size_bytes)
    handles = consensus.gather_objects(_CALL, lambda: handle)
    addresses: dict[int, int] = {}
    if all(handles):
        reason = _open(consensus.rank, handles, addresses)
    reasons = list(filter(None, consensus.gather_objects(_CALL, lambda: reason)))
    if reasons:
        # Once all have closed, own memory may be freed
        consensus.run(_CALL, _close, addresses)
        return None, reasons[0]
    assert own is not None
    buffers = IpcBuffers(consensus, own, addresses)
    wrong = consensus.gather_objects(_CALL, lambda: _find_wrong(buffers.arrays))
    if any(wrong):
        buffers.close()
        return None, "a GPU reads wrong data in the memory of another process"
    return buffers, ""


def _export(rank: int, size_bytes: int) -> tuple[DeviceBuffer | None, bytes, str]:
    from cupy.cuda import runtime

    try:
        kernels.load()  # its errors must be raised now, not later
        own = DeviceBuffer(size_bytes)
        own.array[:8].view(np.int64)[...] = _MARK + rank
        runtime.deviceSynchronize()
        return own, runtime.ipcGetMemHandle(own.array.data.ptr), ""
    except (
        Exception
    ) as error:  # of CUDA, of the compiler, of a disk: all can do without
        return None, b"", f"rank {rank}: {error}"


def _open(rank: int, handles: list[bytes], addresses: dict[int, int]) -> str:
    from cupy.cuda import runtime

    try:
        for other, handle in enumerate(handles):
            if other != rank:
                addresses[other] = runtime.ipcOpenMemHandle(handle)
    except Exception as error:
        return f"rank {rank} cannot map the memory of rank {other}: {error}"
    return ""


def _close(addresses: dict[int, int]) -> None:
    from cupy.cuda import runtime

    for address in addresses.values():
        runtime.ipcCloseMemHandle(address)
    addresses.clear()


def _find_wrong(arrays: list[Any]) -> bool:
    marks = [int(array[:8].view(np.int64)[0]) for array in arrays]
    return marks != [_MARK + rank for rank in range(len(arrays))]
