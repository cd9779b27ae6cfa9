"""NVIDIA's NCCL, for replicas that have a GPU each."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist import packing
from mpidist.agreement.agree import Agreement
from mpidist.agreement.pending import Pending
from mpidist.gpu.streams import record
from mpidist.transports.mpi import bytes_of

__all__ = ["NcclTransport"]

_PAUSE_SECONDS = 1e-4
_SUM = 0  # ncclSum
# ncclDataType_t, by NumPy's names
_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float32": 7,
    "float64": 8,
}
# What NCCL does not know, as what is added up in its place. Integers of 16 bits are the
# last bits of wider sums; the real and the imaginary part are numbers of their own
_WIDER = {"int16": "int32", "uint16": "uint32"}
_PARTS = {"complex64": "float32", "complex128": "float64"}


class NcclTransport:
    """Collectives that GPUs do among themselves, in the order of the current stream.

    Of two communicators, all ranks would have to use one after the other, in the same
    order (NCCL's user guide): so there is one for each GPU at most.

    Args:
      agreement: of all ranks, each with a GPU of its own. Collective to make.
    """

    name = "nccl"
    device = True
    is_ordered = False

    def __init__(self, agreement: Agreement):
        from cupy.cuda import nccl

        self._agreement = agreement
        # Its first calls would wait for the other ranks, whatever the deadline
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        number = agreement.root_only("NcclTransport", nccl.get_unique_id)
        self._nccl = nccl
        with Pending("making a communicator of NCCL", agreement.comm):
            self._comm = nccl.NcclCommunicator(agreement.size, number, agreement.rank)
        # Streams would wait for the GPUs of dead ranks for ever
        agreement.losses.react(self._comm.abort)

    def close(self) -> None:
        """Free the communicator. Collective."""
        self._comm.destroy()

    def allreduce_sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        """See `Transport.allreduce_sum`."""
        name = np.dtype(send.dtype).name
        if name in _WIDER:
            wide = send.astype(_WIDER[name])
            total = wide.copy()
            self._sum(wide, total, deadline)
            receive[...] = total.astype(send.dtype).reshape(receive.shape)
        elif name in _PARTS:
            part = _PARTS[name]
            self._sum(
                send.reshape(-1).view(part), receive.reshape(-1).view(part), deadline
            )
        else:
            self._sum(send, receive, deadline)

    def _sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        kind = _TYPES[np.dtype(send.dtype).name]
        self._comm.allReduce(
            send.data.ptr, receive.data.ptr, send.size, kind, _SUM, _stream()
        )
        self._wait("all_reduce", deadline)

    def allreduce_packed(
        self, sends: Sequence[Any], receive: Any, deadline: float | None
    ) -> None:
        """See `Transport.allreduce_packed`."""
        self.allreduce_sum(packing.pack(sends), receive, deadline)

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        """See `Transport.allgatherv`: each rank broadcasts, all at the same time."""
        width = send.dtype.itemsize
        send, receive = bytes_of(send), bytes_of(receive)
        sizes = [count * width for count in counts]
        starts = [0, *itertools.accumulate(sizes)]
        kind, stream = _TYPES["uint8"], _stream()
        self._nccl.groupStart()
        try:
            for root, (start, size) in enumerate(zip(starts, sizes)):
                to = receive.data.ptr + start
                if size:
                    self._comm.broadcast(send.data.ptr, to, size, kind, root, stream)
        finally:
            self._nccl.groupEnd()
        self._wait("all_gather", deadline)

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        """See `Transport.broadcast`."""
        address, kind = buffer.data.ptr, _TYPES["uint8"]
        self._comm.broadcast(address, address, buffer.nbytes, kind, root, _stream())
        self._wait("broadcast", deadline)

    def _wait(self, operation: str, deadline: float | None) -> None:
        """Return once the GPUs are done; at once where there is no deadline."""
        if deadline is None:
            return
        done = record()
        while not done.done:
            self._comm.check_async_error()
            if time.monotonic() > deadline:
                self._comm.abort()
                self._agreement.give_up(operation, deadline)
            time.sleep(_PAUSE_SECONDS)


def _stream() -> int:
    import cupy

    return int(cupy.cuda.get_current_stream().ptr)
