"""Sums of arrays over ranks, block by block, by messages from rank to rank.

Each rank receives one part of a block from all ranks, adds it in rank order, and sends
the total to all; with many ranks, by MPI collectives. This moves as many bytes as the
best all-reduces for large arrays, which work in pairs (R. Thakur et al., Optimization
of collective communication operations in MPICH, 2005, section 4.5: reduce-scatter and
all-gather). Several blocks are in flight at the same time, so that the network is busy
while a rank adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidist.comm import arithmetic, packing
from mpidist.comm.consensus.signatures import Tag
from mpidist.comm.consensus.waiting import abandon
from mpidist.comm.transports.base import MESSAGE_BYTES, MOST_RANKS

Wait = Callable[[list[MPI.Request]], None]


class InFlight:
    """Requests that MPI may complete after the last wait for them.

    A rank may leave by an error while several blocks are in flight. Late ranks still
    send parts of them, so their buffers are kept.
    """

    def __init__(self) -> None:
        self.requests: list[MPI.Request] = []

    def wait_for_all(self, wait: Wait) -> None:
        """Wait until all are complete."""
        # Forget them only after the wait: if it raises, they are still in flight, and
        # `__del__` must keep their buffers.
        wait(self.requests)
        self.requests = []

    def __del__(self) -> None:
        # MPI may still write to these buffers; freeing them would corrupt memory.
        if self.requests:
            abandon(self.requests)


class WholeSum(InFlight):
    """The sum of an array over all ranks of a communicator, by MPI. Collective.

    Args:
      comm: the ranks.
      total: what this rank adds, and where the sum goes.
    """

    def __init__(self, comm: MPI.Intracomm, total: Any):
        super().__init__()
        self.requests.append(comm.Iallreduce(MPI.IN_PLACE, total, MPI.SUM))

    def end(self, wait: Wait) -> None:
        self.wait_for_all(wait)

    def share(self, wait: Wait) -> None:
        """See `BlockSum.share`: there is nothing to do."""


class BlockSum(InFlight):
    """The sum of one block over all ranks of a communicator. Collective.

    The constructor sends the parts that other ranks add; `share` sends this rank's
    total; `end` completes the sum. All ranks call these in the same order; other blocks
    may come between.

    Args:
      comm: the ranks.
      send: what this rank adds, of one dimension.
      receive: where the sum goes; it may have a wider floating dtype, in which the sum
        is formed. It may be `send`.
      wire: the dtype in which parts and totals are sent.
    """

    def __init__(
        self, comm: MPI.Intracomm, send: Any, receive: Any, wire: np.dtype[Any]
    ):
        super().__init__()
        self._comm, self._receive, self._wire = comm, receive, wire
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        # Each rank starts with its successor: if all began with rank 0, they would
        # queue up there.
        self._others = [(self._rank + d) % self._size for d in range(1, self._size)]
        edges = packing.edges(receive.size, self._size, wire.itemsize)
        # Rank r adds up slice r of the block, so every rank has 1/size of the work, and
        # no rank receives a whole block per peer.
        self._slices = [slice(*edges[rank : rank + 2]) for rank in range(self._size)]
        self._own = own = self._slices[self._rank]
        self._totals: Any = None
        narrow = send.astype(wire, copy=False)
        # Row r is what rank r sends of this rank's slice.
        gathered = np.empty((self._size, own.stop - own.start), wire)
        self._parts = list(gathered)
        if self._size > MOST_RANKS:
            # Counts are the same for all peers: everybody sends this rank's own slice
            # here.
            n = own.stop - own.start
            rows = [slice(k * n, (k + 1) * n) for k in range(self._size)]
            parts = [gathered, self._spans(rows), MPI.BYTE]
            whole = [narrow, self._spans(self._slices), MPI.BYTE]
            self.requests.append(comm.Ialltoallv(whole, parts))
            return
        # `share` writes the total to receive[own]. If that is the same memory as
        # `send`, the sum would overwrite its own summand.
        is_same = np.may_share_memory(narrow, receive)
        mine = narrow[own].copy() if is_same else narrow[own]
        self._parts[self._rank] = mine
        sends = [narrow[part] for part in self._slices]
        self._exchange(Tag.BLOCK_PART, self._parts, sends)

    def share(self, wait: Wait) -> None:
        """Add this rank's part, and send the total to all."""
        self.wait_for_all(wait)
        receive, own = self._receive, self._own
        # `own` of all ranks were received by now: the wait above includes them.
        if self._size > 1:
            arithmetic.add_in_order(self._parts, out=receive[own])
        else:
            receive[...] = self._parts[0]
        # Totals are as narrow as parts, and on this rank, too
        totals = receive
        if receive.dtype != self._wire:
            totals = self._totals = np.empty(receive.size, self._wire)
            # Round here too: a total that is wide on this rank and narrow on others
            # would differ between ranks.
            totals[own] = receive[own]
        if self._size > MOST_RANKS:
            whole = [totals, self._spans(self._slices), MPI.BYTE]
            self.requests.append(self._comm.Iallgatherv(MPI.IN_PLACE, whole))
            return
        # What was sent of `receive` has left: the requests of the first exchange are
        # complete, so other ranks' totals may overwrite it.
        places = [totals[part] for part in self._slices]
        self._exchange(Tag.BLOCK_TOTAL, places, [places[self._rank]])

    def end(self, wait: Wait) -> None:
        """Wait until the sum is complete."""
        self.wait_for_all(wait)
        # Only now: parts of `_totals` arrive until the wait returns.
        if self._totals is not None:
            self._receive[...] = self._totals

    def _spans(self, parts: Sequence[slice]) -> tuple[list[int], list[int]]:
        width = self._wire.itemsize
        counts = [(part.stop - part.start) * width for part in parts]
        return counts, [part.start * width for part in parts]

    def _exchange(self, tag: int, places: Sequence[Any], sends: Sequence[Any]) -> None:
        comm, requests = self._comm, self.requests
        # Receives are posted first, so that an early message needs no buffer inside
        # MPI.
        for rank in self._others:
            for piece in pieces_of(places[rank]):
                requests.append(comm.Irecv([piece, MPI.BYTE], rank, tag))
        # To all ranks at the same time, as each gets from all
        pieces = [pieces_of(sends[r if len(sends) > 1 else 0]) for r in self._others]
        for together in itertools.zip_longest(*pieces):
            for rank, piece in zip(self._others, together, strict=True):
                if piece is not None:
                    requests.append(comm.Isend([piece, MPI.BYTE], rank, tag))


def pieces_of(array: Any, most_pieces: int | None = None) -> list[Any]:
    """Return the bytes of a contiguous array in messages that MPI sends eagerly.

    In larger ones if there would be more than `most_pieces`.
    """
    data, step = array.view(np.uint8), MESSAGE_BYTES
    if most_pieces is not None:
        step = max(step, -(-data.size // most_pieces))
    return [data[start : start + step] for start in range(0, data.size, step)]
