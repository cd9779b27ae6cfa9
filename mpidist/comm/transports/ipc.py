"""Reductions and gathers in GPU memory shared by the ranks of a node.

Each rank has slots that the other ranks' GPUs read through CUDA IPC handles. The ranks
may have one GPU each, or share GPUs. Two ranks both add everything; with more, each
adds one part of every block in its own slot, and the others fetch it after the next
barrier.

The GPU stays busy while ranks wait: a block is written to its slot before the barrier
of the previous block. Block k + 2 is written, at the earliest, before the barrier of
block k + 1; by then all ranks have read block k - 2, so four slots are enough. Only the
host waits for other ranks: a waiting kernel would block a shared GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm import packing
from mpidist.comm.consensus.barrier import NodeBarrier
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.transports.base import Transport
from mpidist.comm.transports.mpi import bytes_of
from mpidist.device import kernels
from mpidist.device.streams import DeviceBuffer, Order, assign, record

SLOTS = 4


class _Block(NamedTuple):
    """The part of an array that is processed at a time.

    Args:
      slots: of each rank, as arrays of the sent dtype.
      receive: where the totals belong.
      parts: which part each rank adds.
    """

    slots: Sequence[Any]
    receive: Any
    parts: Sequence[slice]


class IpcTransport(Transport):
    """Copies and adds on GPUs; all ranks are on one node.

    Args:
      consensus: of all ranks.
      barrier: that of the node; borrowed.
      buffers: of four slots; owned by the transport from now on.
    """

    name = "ipc"
    device = True
    is_ordered = True

    def __init__(self, consensus: Consensus, barrier: NodeBarrier, buffers: IpcBuffers):
        self._consensus = consensus
        self._barrier = barrier
        self._buffers = buffers
        self._rank, self._size = consensus.rank, consensus.size
        # A multiple of 256 bytes, so that slots are aligned for every dtype.
        self._slot_bytes = buffers.arrays[0].size // SLOTS // 256 * 256
        self._turn = 0
        self._packer = kernels.Packer()
        self._order = Order()

    def close(self) -> None:
        """Free the memory. Collective."""
        try:
            # Kernels of this rank may still read neighbours' memory.
            self._order.wait_on_host()
        finally:  # the others wait there
            self._buffers.close()

    def allreduce(
        self,
        sends: Sequence[Any],
        receive: Any,
        deadline: float | None,
        wire: np.dtype[Any] | None = None,
    ) -> None:
        """See `Transport.allreduce`. The slots are the pack."""
        receive, dtype = receive.reshape(-1), sends[0].dtype
        if not receive.size:
            return
        # The stream of the calling thread waits for earlier work, and later work for
        # this.
        with self._order:
            if len(sends) > 1:
                self._packer.begin(sends)
            step = self._slot_bytes // dtype.itemsize
            # Slots of all blocks are chosen beforehand: which one a block gets depends
            # on the turn alone, equal on all ranks.
            blocks = [
                self._block(dtype, receive[start : start + step])
                for start in range(0, receive.size, step)
            ]
            starts = range(0, receive.nbytes, step * dtype.itemsize)
            self._work(sends, blocks, starts, deadline)

    def _block(self, dtype: Any, receive: Any) -> _Block:
        slots = [slot.view(dtype)[: receive.size] for slot in self._next_slots()]
        edges = packing.edges(receive.size, self._size, dtype.itemsize)
        return _Block(slots, receive, [slice(*e) for e in itertools.pairwise(edges)])

    def _work(
        self,
        sends: Sequence[Any],
        blocks: Sequence[_Block],
        starts: Sequence[int],
        deadline: float | None,
    ) -> None:
        """Add block after block; each is written before the previous one is added."""
        # Two ranks read each other's whole block, and need no second exchange.
        all_add = self._size == 2
        done = self._write(sends, blocks[0], starts[0])
        last = None
        for k, block in enumerate(blocks):
            # Written while the previous block is being added: copies and kernels
            # overlap.
            following = None
            if k + 1 < len(blocks):
                following = self._write(sends, blocks[k + 1], starts[k + 1])
            # The event, not the barrier, says that the GPU has finished writing; the
            # barrier then says so of all ranks.
            done.synchronize()
            self._synchronize("all_reduce", deadline)
            if all_add:
                _add(block.slots, block.receive)
                done = following
                continue
            if last is not None:
                # Between these barriers every rank has left its totals in its own slot.
                self._fetch(last)
            self._add_part(block)
            done, last = record(), block
        if last is not None:
            done.synchronize()
            self._synchronize("all_reduce", deadline)
            self._fetch(last)

    def _write(self, sends: Sequence[Any], block: _Block, first: int) -> Any:
        """Start copying this rank's numbers into its slot; return the event."""
        # The GPU copies; only an event is returned, so that the host continues.
        mine = block.slots[self._rank]
        if len(sends) > 1:
            self._packer.copy(first, mine.nbytes, mine)
        else:
            start = first // mine.dtype.itemsize
            assign(mine, sends[0].reshape(-1)[start : start + mine.size])
        return record()

    def _add_part(self, block: _Block) -> None:
        own = block.parts[self._rank]
        _add([slot[own] for slot in block.slots], block.receive[own])
        assign(block.slots[self._rank][own], block.receive[own])

    def _fetch(self, block: _Block) -> None:
        for rank, part in enumerate(block.parts):
            if rank != self._rank:
                assign(block.receive[part], block.slots[rank][part])

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        width, step = send.dtype.itemsize, self._slot_bytes
        send, receive = bytes_of(send), bytes_of(receive)
        ends = [end * width for end in itertools.accumulate(counts)]
        starts = [0, *ends[:-1]]
        with self._order:
            for done in range(0, max(counts) * width, step):
                slots = self._next_slots()
                mine = send[done : done + step]
                assign(slots[self._rank][: mine.size], mine)
                # A kernel launch is asynchronous: without this, others would read too
                # early.
                record().synchronize()
                self._synchronize("all_gather", deadline)
                for slot, start, end in zip(slots, starts, ends, strict=True):
                    part = receive[start + done : min(start + done + step, end)]
                    assign(part, slot[: part.size])

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        buffer, step = bytes_of(buffer), self._slot_bytes
        with self._order:
            for start in range(0, buffer.size, step):
                block = buffer[start : start + step]
                slot = self._next_slots()[root]
                if self._rank == root:
                    assign(slot[: block.size], block)
                record().synchronize()
                self._synchronize("broadcast", deadline)
                if self._rank != root:
                    assign(block, slot[: block.size])

    def _next_slots(self) -> list[Any]:
        start = self._turn * self._slot_bytes
        # Four: while block k + 2 is written, a slow rank may still read k - 1 to k + 1.
        self._turn = (self._turn + 1) % SLOTS
        return [a[start : start + self._slot_bytes] for a in self._buffers.arrays]

    def _synchronize(self, operation: str, deadline: float | None) -> None:
        self._consensus.wait_at(self._barrier, operation, deadline)


def _add(parts: Sequence[Any], totals: Any) -> None:
    if totals.size:
        addresses = [part.data.ptr for part in parts]
        kernels.add_parts(addresses, totals, np.dtype(parts[0].dtype))


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
    """Return this rank's buffer and its handle, or why there is none."""
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
    """Map the others' buffers; return why not, if so."""
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
    """Return whether a buffer does not begin with its rank's mark."""
    marks = [int(array[:8].view(np.int64)[0]) for array in arrays]
    return marks != [_MARK + rank for rank in range(len(arrays))]
