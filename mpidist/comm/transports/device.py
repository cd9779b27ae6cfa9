"""MPI on GPU memory: MPI's own calls, and reductions with addition on the GPU.

MPI gets an address only after the current stream has written the data. Results are
complete when an MPI call returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.comm import packing
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.transports.mpi import MpiTransport
from mpidist.device import arrays, kernels
from mpidist.device.streams import DeviceBuffer, Order, assign, is_plain

_BLOCK_BYTES = 16 << 20
# Parts begin with cache lines of their own
_LINE_BYTES = 128


class DeviceTransport(MpiTransport):
    """Exchanges parts by MPI on device memory, and adds them up by a kernel.

    For MPI libraries that reduce device memory on the host (most do), and for
    deadlines, because nonblocking reductions of device memory crash in some libraries.

    Args:
      consensus: of all ranks.
      block_bytes: the block size.
    """

    name = "device"
    device = True
    is_ordered = True
    packs_in_place = False

    def __init__(self, consensus: Consensus, block_bytes: int = _BLOCK_BYTES):
        super().__init__(consensus)
        self._block_bytes = block_bytes
        # Allocate before the collective, so that an error of one rank is raised on all
        size = block_bytes + _LINE_BYTES * (consensus.size + 1)
        self._parts, self._totals = DeviceBuffer(size), DeviceBuffer(size)
        self._order = Order()

    def allreduce(
        self,
        sends: Sequence[Any],
        receive: Any,
        deadline: float | None,
        wire: np.dtype[Any] | None = None,
    ) -> None:
        send = packing.pack(sends)
        send, receive = send.reshape(-1), receive.reshape(-1)
        step = max(1, self._block_bytes // receive.dtype.itemsize)
        with self._order:
            for start in range(0, receive.size, step):
                block = slice(start, start + step)
                self._reduce(send[block], receive[block], deadline)

    def _reduce(self, send: Any, receive: Any, deadline: float | None) -> None:
        ranks, rank = self._comm.Get_size(), self._comm.Get_rank()
        dtype = np.dtype(send.dtype)
        edges = packing.edges(receive.size, ranks, dtype.itemsize)
        counts = np.diff(edges).tolist()
        mine = counts[rank]
        # Get this rank's part from all
        if not is_plain(send):  # other processes cannot read this memory
            copy = _as(self._totals, send.size, dtype)
            assign(copy, send)
            send = copy
        parts = _as(self._parts, ranks * mine, dtype)
        self.alltoallv(send, counts, parts, [mine] * ranks, deadline, "all_reduce")
        own = receive[edges[rank] : edges[rank + 1]]
        places = [parts.data.ptr + r * mine * dtype.itemsize for r in range(ranks)]
        kernels.add_parts(places, own, dtype)
        # Send the total in the dtype of the parts
        narrow = parts[:mine]
        assign(narrow, own)
        totals = _as(self._totals, receive.size, dtype)
        self.allgatherv(narrow, totals, counts, deadline)
        assign(receive, totals)

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        arrays.synchronize(send)
        super().allgatherv(send, receive, counts, deadline)

    def alltoallv(self, send: Any, *arguments: Any, **options: Any) -> None:
        arrays.synchronize(send)
        super().alltoallv(send, *arguments, **options)

    def _broadcast(
        self, buffer: Any, root: int, deadline: float | None, operation: str
    ) -> None:
        arrays.synchronize(buffer)
        super()._broadcast(buffer, root, deadline, operation)


class DeviceMpiTransport(MpiTransport):
    """MPI's own collectives on device memory.

    Args:
      consensus: of all ranks.
      adder: for reductions with a deadline.
    """

    device = True
    packs_in_place = False

    def __init__(self, consensus: Consensus, adder: DeviceTransport):
        super().__init__(consensus)
        self._adder = adder

    def allreduce(
        self,
        sends: Sequence[Any],
        receive: Any,
        deadline: float | None,
        wire: np.dtype[Any] | None = None,
    ) -> None:
        if deadline is not None:
            self._adder.allreduce(sends, receive, deadline)
            return
        send = packing.pack(sends).reshape(-1)
        arrays.synchronize(send)
        # mpi4py takes no empty array of several dimensions
        super().allreduce([send], receive.reshape(-1), deadline)

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        self._adder.allgatherv(send, receive, counts, deadline)

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        self._adder.broadcast(buffer, root, deadline)


def _as(buffer: DeviceBuffer, size: int, dtype: np.dtype[Any]) -> Any:
    size_bytes = size * dtype.itemsize
    assert size_bytes <= buffer.array.size
    return buffer.array[:size_bytes].view(dtype)
