"""Direct MPI: MPI sends from and receives into the arrays' own memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidist.comm import packing
from mpidist.comm.consensus.comparison import SharedMemoryComparison
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.signatures import Tag
from mpidist.comm.transports.base import Transport

# MPI libraries before MPI-4 count in 32 bits, and some fail far below that limit
_MOST_BYTES = 1 << 30


class MpiTransport(Transport):
    """Nonblocking MPI collectives; on one node, and on GPUs, blocking ones.

    While a rank waits for a nonblocking call, it detects ranks that have left, signals
    are handled, and ranks of lost nodes become known. Blocking calls are up to five
    times as fast on one node under Open MPI, and some libraries have no nonblocking
    reductions of device memory. With a deadline all calls are nonblocking.

    Args:
      consensus: of all ranks.
      most_bytes: the maximum number of bytes per MPI call; more are sent in several
        calls.
    """

    name = "mpi"
    can_exchange = True
    packs_in_place = True  # in the memory of the result

    def __init__(self, consensus: Consensus, most_bytes: int | None = None):
        self._consensus = consensus
        self._comm = consensus.comm
        is_one_node = isinstance(consensus.comparison, SharedMemoryComparison)
        self._blocks = self.device or is_one_node
        self.most_bytes = _MOST_BYTES if most_bytes is None else most_bytes

    def allreduce(
        self,
        sends: Sequence[Any],
        receive: Any,
        deadline: float | None,
        wire: np.dtype[Any] | None = None,
    ) -> None:
        if self.packs_in_place and (len(sends) > 1 or sends[0] is receive):
            receive = receive.reshape(-1)
            # Pack into the result, where MPI then adds in place: no separate pack
            if len(sends) > 1:
                np.concatenate([send.reshape(-1) for send in sends], out=receive)
            self._add_in_place(receive, deadline)
            return
        send = packing.pack(sends)
        if send is receive:
            send = send.copy()
        if send.nbytes <= self.most_bytes:
            self._allreduce(send, receive, deadline)
            return
        step = max(1, self.most_bytes // send.dtype.itemsize)
        send, receive = send.reshape(-1), receive.reshape(-1)
        # Sizes are the same on all ranks, and so is the number of calls
        for start in range(0, send.size, step):
            piece = slice(start, start + step)
            self._allreduce(send[piece], receive[piece], deadline)

    def _add_in_place(self, receive: Any, deadline: float | None) -> None:
        step = max(1, self.most_bytes // receive.dtype.itemsize)
        for start in range(0, receive.size, step):
            self._allreduce(MPI.IN_PLACE, receive[start : start + step], deadline)

    def _allreduce(self, send: Any, receive: Any, deadline: float | None) -> None:
        comm = self._comm
        if self._may_block(deadline):
            comm.Allreduce(send, receive, MPI.SUM)
        else:
            self._wait(comm.Iallreduce(send, receive, MPI.SUM), deadline, "all_reduce")

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        # MPI only moves data here, so bytes work for dtypes that it does not know
        width = send.dtype.itemsize
        send, receive = bytes_of(send), bytes_of(receive)
        bytes_from = [count * width for count in counts]
        # The total is known to all ranks, so all take the same branch
        if receive.size > self.most_bytes:
            self._gather_one_by_one(send, receive, bytes_from, deadline)
            return
        comm, specs = self._comm, ([send, MPI.BYTE], [receive, bytes_from, MPI.BYTE])
        if self._may_block(deadline):
            comm.Allgatherv(*specs)
        else:
            self._wait(comm.Iallgatherv(*specs), deadline, "all_gather")

    def _gather_one_by_one(
        self, send: Any, receive: Any, bytes_from: Sequence[int], deadline: float | None
    ) -> None:
        """Broadcast each rank's bytes, so that offsets stay below MPI's limit."""
        ends = itertools.accumulate(bytes_from)
        for root, (size, end) in enumerate(zip(bytes_from, ends, strict=True)):
            part = receive[end - size : end]
            if root == self._comm.Get_rank():
                part[...] = send
            self._broadcast(part, root, deadline, "all_gather")

    def alltoallv(
        self,
        send: Any,
        counts_to: Sequence[int],
        receive: Any,
        counts_from: Sequence[int],
        deadline: float | None,
        operation: str = "all_to_all",
        is_large: bool = False,
    ) -> None:
        """Send elements to each rank, and receive elements from each.

        They are contiguous. Only of transports that `can_exchange`.

        Args:
          send: the send buffer.
          counts_to: the number of elements for each rank.
          receive: the receive buffer, of the same dtype.
          counts_from: the number of elements from each rank.
          deadline: see `Transport`.
          operation: the public call, for messages.
          is_large: whether one call of MPI cannot move it all; the same on all ranks.
        """
        width = send.dtype.itemsize
        send, receive = bytes_of(send), bytes_of(receive)
        bytes_to = [count * width for count in counts_to]
        bytes_from = [count * width for count in counts_from]
        if is_large:
            self._exchange_in_pairs(
                send, bytes_to, receive, bytes_from, deadline, operation
            )
            return
        specs = [send, bytes_to, MPI.BYTE], [receive, bytes_from, MPI.BYTE]
        if self._may_block(deadline):
            self._comm.Alltoallv(*specs)
        else:
            self._wait(self._comm.Ialltoallv(*specs), deadline, operation)

    def _exchange_in_pairs(
        self,
        send: Any,
        bytes_to: Sequence[int],
        receive: Any,
        bytes_from: Sequence[int],
        deadline: float | None,
        operation: str,
    ) -> None:
        """Send to one rank and receive from another, in pieces, until all are done."""
        comm, rank, ranks = self._comm, self._comm.Get_rank(), self._comm.Get_size()
        most = self.most_bytes
        starts_to = [0, *itertools.accumulate(bytes_to)]
        starts_from = [0, *itertools.accumulate(bytes_from)]
        # In each turn every rank sends to one rank and gets from one
        for shift in range(ranks):
            to, source = (rank + shift) % ranks, (rank - shift) % ranks
            mine = send[starts_to[to] : starts_to[to + 1]]
            place = receive[starts_from[source] : starts_from[source + 1]]
            # Receives first, and nothing blocks: two ranks that send to each other must
            # not wait for each other's receive
            requests = [
                comm.Irecv([place[k : k + most], MPI.BYTE], source, Tag.PIECE)
                for k in range(0, place.size, most)
            ] + [
                comm.Isend([mine[k : k + most], MPI.BYTE], to, Tag.PIECE)
                for k in range(0, mine.size, most)
            ]
            for request in requests:
                self._wait(request, deadline, operation)

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        self._broadcast(bytes_of(buffer), root, deadline, "broadcast")

    def _broadcast(
        self, buffer: Any, root: int, deadline: float | None, operation: str
    ) -> None:
        comm = self._comm
        for start in range(0, buffer.size, self.most_bytes):
            spec = [buffer[start : start + self.most_bytes], MPI.BYTE]
            if self._may_block(deadline):
                comm.Bcast(spec, root)
            else:
                self._wait(comm.Ibcast(spec, root), deadline, operation)

    def _may_block(self, deadline: float | None) -> bool:
        """Return whether to use blocking calls; raise if a rank has left."""
        if self._blocks and deadline is None:
            self._consensus.departures.require_none()
            return True
        return False

    def _wait(
        self, request: MPI.Request, deadline: float | None, operation: str
    ) -> None:
        if not self._consensus.waiting.poll(request, deadline):
            self._consensus.wait(request, deadline, operation)


def bytes_of(array: Any) -> Any:
    """Return the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)
