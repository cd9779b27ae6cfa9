"""Reductions and gathers in shared memory of a node.

Two ranks both add everything; with more, each rank adds one part of every block, and
publishes the totals of the last block together with its part of the next one. Blocks
are small, so that data are still in the cache when other ranks read them. Successive
blocks use different memory, so that a rank can write the next one while others read the
last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm import arithmetic, packing
from mpidist.comm.consensus.barrier import NodeBarrier
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.transports.base import Transport
from mpidist.comm.transports.mpi import bytes_of

# Bytes between two barriers if nothing is copied
_NO_COPY_BYTES = 2 << 20
# What stays in a cache while it is added and copied
_IN_PLACE_BYTES = 256 << 10


class _Block(NamedTuple):
    """A block of which this rank has added up its part.

    Args:
      slots: of each rank: where the totals are published.
      receive: where the totals of all parts belong.
      parts: which part each rank adds.
      request: of MPI, for the sum over nodes.
    """

    slots: Sequence[Any]
    receive: Any
    parts: Sequence[slice]
    request: Any


class SharedTransport(Transport):
    """Copies and adds in shared memory; all ranks are on one node.

    Totals are added up in the order of the ranks, so they do not depend on how arrays
    are packed.

    Args:
      consensus: of all ranks.
      barrier: that of the node, with three slots; borrowed. Arrays are processed in
        blocks of a slot.
      adders: the number of ranks of a node that add; None for all.
    """

    name = "shared"
    is_ordered = True
    shares_memory = True

    def __init__(
        self, consensus: Consensus, barrier: NodeBarrier, adders: int | None = None
    ):
        self._consensus = consensus
        self._barrier = barrier
        self._rank, self._size = barrier.rank, barrier.size
        self._adders = adders or barrier.size
        # One barrier for each block is enough, and as many bytes move between the two
        self._all_add = self._size == 2 and adders is None
        self._turns = 2 if self._all_add else 3
        # Three sets of slots in turn: one is written while another is read and a third
        # is published, so one barrier per block is enough.
        self._turn = 0

    def has_idle_cores(self, threads: int) -> bool:
        """Return whether there are more cores than ranks that use so many threads."""
        return self._barrier.cores > self._size * threads

    def allreduce(
        self,
        sends: Sequence[Any],
        receive: Any,
        deadline: float | None,
        wire: np.dtype[Any] | None = None,
    ) -> None:
        """See `Transport.allreduce`. The slots are the pack."""
        receive = receive.reshape(-1)
        dtype = sends[0].dtype
        step = self._barrier.slot_bytes // dtype.itemsize
        blocks = _cut([send.reshape(-1) for send in sends], step)
        # One step behind: the last block's totals are published and fetched at the
        # barriers that this block needs anyway.
        last = None
        for start, pieces in zip(range(0, receive.size, step), blocks, strict=True):
            slots = [slot.view(dtype) for slot in self._next_slots()]
            mine = slots[self._rank]
            for place, piece in pieces:
                # Written straight into the slot: no pack is made in private memory
                # first.
                mine[place : place + piece.size] = piece
            last = self._add(
                slots, slots, receive[start : start + step], last, deadline
            )
        if last is not None:
            self._end(last, deadline)

    def allreduce_symmetric(
        self,
        everyone: Sequence[Sequence[Any]],
        receives: Sequence[Any],
        deadline: float | None,
    ) -> None:
        """Put the sums over all ranks of arrays in shared memory into other arrays.

        Args:
          everyone: for each array, those of all ranks of this node, by rank.
          receives: for each array, the array for its sum.
          deadline: see `Transport`.
        """
        last = None
        # Before this barrier a neighbour may still be computing its gradient in place.
        self._synchronize("all_reduce", deadline)  # all have written their arrays
        for copies, receive in zip(everyone, receives, strict=True):
            copies, receive = [a.reshape(-1) for a in copies], receive.reshape(-1)
            # With two ranks nothing goes through slots, so blocks may exceed them.
            bytes_ = _NO_COPY_BYTES if self._all_add else self._barrier.slot_bytes
            step = bytes_ // receive.dtype.itemsize
            for start in range(0, receive.size, step):
                block = slice(start, start + step)
                slots = [slot.view(receive.dtype) for slot in self._next_slots()]
                inputs = [a[block] for a in copies]
                last = self._add(inputs, slots, receive[block], last, deadline)
        if last is not None:
            self._end(last, deadline)
        # After this barrier every rank may overwrite its symmetric arrays again.
        self._synchronize("all_reduce", deadline)  # all have read them

    def allreduce_in_place(
        self, everyone: Sequence[Any], deadline: float | None
    ) -> None:
        """Put the sum of arrays in shared memory into all of them.

        All ranks have written theirs, and have met since.

        Args:
          everyone: the arrays of all ranks, by rank.
          deadline: see `Transport`.
        """
        first, *others = everyone
        edges = packing.edges(first.size, self._size, first.dtype.itemsize)
        step = _IN_PLACE_BYTES // first.dtype.itemsize
        start, stop = edges[self._rank : self._rank + 2]
        for begin in range(start, stop, step):
            block = slice(begin, min(begin + step, stop))
            total = first[block]
            arithmetic.add_in_order([array[block] for array in everyone], out=total)
            for array in others:
                array[block] = total
        self._synchronize("all_reduce", deadline)  # all totals are written

    def _add(
        self,
        inputs: Sequence[Any],
        slots: Sequence[Any],
        receive: Any,
        last: _Block | None,
        deadline: float | None,
    ) -> _Block | None:
        """Begin a block that this rank has written, and end the previous one."""
        if last is not None:
            self._publish(last, deadline)
        # After it all ranks have written this block, and published the last one.
        self._synchronize("all_reduce", deadline)
        if self._all_add:
            # Two ranks: each adds everything up itself, which moves as many bytes as
            # halves would.
            inputs = [copy[: receive.size] for copy in inputs]
            arithmetic.add_in_order(inputs, out=receive)
            return None
        edges = packing.edges(receive.size, self._adders, receive.dtype.itemsize)
        parts = [slice(*edge) for edge in itertools.pairwise(edges)]
        request = None
        if self._rank < self._adders:
            own = parts[self._rank]
            # Totals go to private memory first; `_publish` copies them to the slot
            # later, when nobody reads this rank's numbers there any more.
            total = receive[own]
            if len(inputs) == 1:
                total[...] = inputs[0][own]
            else:
                arithmetic.add_in_order([copy[own] for copy in inputs], out=total)
            request = self._add_other_nodes(total)
        if last is not None:
            # The totals of the last block were published before the barrier above.
            self._fetch(last)
        return _Block(slots, receive, parts, request)

    def _end(self, last: _Block, deadline: float | None) -> None:
        self._publish(last, deadline)
        self._synchronize("all_reduce", deadline)
        self._fetch(last)

    def _publish(self, block: _Block, deadline: float | None) -> None:
        if self._rank < self._adders:
            self._finish_other_nodes(block.request, deadline)
            own = block.parts[self._rank]
            block.slots[self._rank][own] = block.receive[own]

    def _fetch(self, block: _Block) -> None:
        # Its own part is in place already: the total was added up there.
        for rank, part in enumerate(block.parts):
            if rank != self._rank:
                block.receive[part] = block.slots[rank][part]

    def _add_other_nodes(self, total: Any) -> Any:
        """Start the sum of this rank's part over nodes: there is one node."""

    def _finish_other_nodes(self, request: Any, deadline: float | None) -> None:
        """Wait for `_add_other_nodes`."""

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        width, step = send.dtype.itemsize, self._barrier.slot_bytes
        send, receive = bytes_of(send), bytes_of(receive)
        ends = [end * width for end in itertools.accumulate(counts)]
        starts = [0, *ends[:-1]]
        # By the largest count: all ranks take the same number of turns, also those with
        # less.
        for done in range(0, max(counts) * width, step):
            slots = self._next_slots()
            mine = send[done : done + step]
            slots[self._rank][: mine.size] = mine
            self._synchronize("all_gather", deadline)
            for slot, start, end in zip(slots, starts, ends, strict=True):
                # Ranks with fewer bytes have empty pieces in the last turns.
                part = receive[start + done : min(start + done + step, end)]
                part[...] = slot[: part.size]

    def allgather_columns(
        self, send: Any, receive: Any, widths: Sequence[int], deadline: float | None
    ) -> None:
        """Put the columns of each rank beside those of the rank before.

        Args:
          send: of shape (rows, widths[rank]), contiguous.
          receive: of shape (rows, sum of widths).
          widths: of each rank.
          deadline: see `Transport`.
        """
        dtype, (rows, _) = send.dtype, receive.shape
        room = self._barrier.slot_bytes // dtype.itemsize
        assert room > 0
        ends = list(itertools.accumulate(widths))
        # As many whole rows as there is room for, and of wide ones pieces
        # Rows may be wider than a slot; then columns are cut, too.
        width = min(max(widths), room)
        height = max(1, room // max(width, 1))
        for top, left in itertools.product(
            range(0, rows, height), range(0, max(widths), max(width, 1))
        ):
            block = slice(top, top + height)
            # Narrow ranks have nothing left of `left` on: empty columns, but they take
            # part.
            columns = [slice(min(left, w), min(left + width, w)) for w in widths]
            slots, mine = self._next_slots(), send[block, columns[self._rank]]
            _as_block(slots[self._rank], mine)[...] = mine
            self._synchronize("all_gather", deadline)
            for slot, end, w, piece in zip(slots, ends, widths, columns, strict=True):
                start = end - w
                place = receive[block, start + piece.start : start + piece.stop]
                place[...] = _as_block(slot, place)

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        buffer, step = bytes_of(buffer), self._barrier.slot_bytes
        for start in range(0, buffer.size, step):
            # All ranks take the turn together, though only one of them writes.
            block = buffer[start : start + step]
            slot = self._next_slots()[root]
            if self._rank == root:
                slot[: block.size] = block
            self._synchronize("broadcast", deadline)
            if self._rank != root:
                block[...] = slot[: block.size]

    def _next_slots(self) -> list[Any]:
        """Return slots of all ranks that no rank reads any more, as bytes."""
        # Before a set is written again, every rank has arrived at a later barrier, so
        # it has read all of it
        self._turn = (self._turn + 1) % self._turns
        return self._barrier.slots[self._turn]

    def _synchronize(self, operation: str, deadline: float | None) -> None:
        self._consensus.wait_at(self._barrier, operation, deadline)


def _as_block(slot: Any, like: Any) -> Any:
    return slot[: like.nbytes].view(like.dtype).reshape(like.shape)


def _cut(arrays: Sequence[Any], step: int) -> Iterator[list[tuple[int, Any]]]:
    """Cut a sequence of arrays into blocks of `step` elements.

    Yields the pieces of arrays in each block, and their offsets in it.
    """
    pieces: list[tuple[int, Any]] = []
    place = 0
    for array in arrays:
        start = 0
        while start < array.size:
            # Never beyond the block that is being filled: `place` elements of it are
            # taken.
            piece = array[start : start + step - place]
            pieces.append((place, piece))
            start += piece.size
            place += piece.size
            if place == step:
                yield pieces
                pieces, place = [], 0
    if pieces:
        yield pieces
