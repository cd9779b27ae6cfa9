"""Reductions and gathers in memory that the ranks of a node share.

Of two ranks both add up everything; of more each rank adds up one part of every array.
In blocks, so that what is written for others is still in the cache when they read it;
two of them in turn, so that a rank can write the next one while others read the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpidist.agreement.agree import Agreement
from mpidist.agreement.board import Board

__all__ = ["SharedTransport"]

_LINE_BYTES = 64


class SharedTransport:
    """Copies and adds in shared memory; all ranks are on one node.

    Totals are added up in the order of the ranks, so they do not depend on how arrays
    are packed.

    Args:
      agreement: of all ranks.
      board: where they meet; borrowed. An array is worked on in blocks of its slots.
      adders: how many of the ranks of a node add; None for all.
    """

    name = "shared"
    device = False

    def __init__(self, agreement: Agreement, board: Board, adders: int | None = None):
        self._agreement = agreement
        self._board = board
        self._rank, self._size = board.rank, board.size
        self._adders = adders or board.size
        self._turn = 0

    def allreduce_sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        """See `Transport.allreduce_sum`."""
        self.allreduce_packed([send], receive, deadline)

    def allreduce_packed(
        self, sends: Sequence[Any], receive: Any, deadline: float | None
    ) -> None:
        """See `Transport.allreduce_packed`. The slots are the pack."""
        receive = receive.reshape(-1)
        step = self._board.slot_bytes // receive.dtype.itemsize
        blocks = _cut([send.reshape(-1) for send in sends], step)
        for start, pieces in zip(range(0, receive.size, step), blocks, strict=True):
            slots = [slot.view(receive.dtype) for slot in self._next_slots()]
            mine = slots[self._rank]
            for place, piece in pieces:
                mine[place : place + piece.size] = piece
            self._meet("all_reduce", deadline)
            self._add(slots, receive[start : start + step], deadline)

    def _add(self, slots: Sequence[Any], receive: Any, deadline: float | None) -> None:
        """Add up a block that all ranks have written."""
        if self._size > 2:
            self._add_part(slots, receive, deadline)
            return
        # One meeting less, and as many bytes move between the two
        first, second = (slot[: receive.size] for slot in slots)
        np.add(first, second, out=receive)

    def _add_part(
        self, slots: Sequence[Any], receive: Any, deadline: float | None
    ) -> None:
        """Add up this rank's part of a block, in the order of the ranks, and share it.

        The other ranks do it at the same time.
        """
        parts = self._parts(receive.dtype, receive.size)
        if self._rank < self._adders:
            own = parts[self._rank]
            first, *others = (slot[own] for slot in slots)
            total = receive[own]
            total[...] = first
            for other in others:
                np.add(total, other, out=total)
            self._add_other_nodes(total, deadline)
            slots[self._rank][own] = total
        self._meet("all_reduce", deadline)
        for rank, (slot, part) in enumerate(zip(slots, parts, strict=False)):
            if rank != self._rank:
                receive[part] = slot[part]

    def _add_other_nodes(self, total: Any, deadline: float | None) -> None:
        """Add what other nodes have of this rank's part: there are none."""

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        """See `Transport.allgatherv`."""
        width, step = send.dtype.itemsize, self._board.slot_bytes
        send, receive = _bytes_of(send), _bytes_of(receive)
        ends = [end * width for end in itertools.accumulate(counts)]
        starts = [0, *ends[:-1]]
        for done in range(0, max(counts) * width, step):
            slots = self._next_slots()
            mine = send[done : done + step]
            slots[self._rank][: mine.size] = mine
            self._meet("all_gather", deadline)
            for slot, start, end in zip(slots, starts, ends, strict=True):
                part = receive[start + done : min(start + done + step, end)]
                part[...] = slot[: part.size]

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        """See `Transport.broadcast`."""
        buffer, step = _bytes_of(buffer), self._board.slot_bytes
        for start in range(0, buffer.size, step):
            block = buffer[start : start + step]
            slot = self._next_slots()[root]
            if self._rank == root:
                slot[: block.size] = block
            self._meet("broadcast", deadline)
            if self._rank != root:
                block[...] = slot[: block.size]

    def _parts(self, dtype: np.dtype[Any], count: int) -> list[slice]:
        """Return which part of an array each adder adds up: whole cache lines."""
        line = max(1, _LINE_BYTES // dtype.itemsize)
        lines = -(-count // line)
        edges = [
            min(lines * rank // self._adders * line, count)
            for rank in range(self._adders + 1)
        ]
        return [slice(*edge) for edge in itertools.pairwise(edges)]

    def _next_slots(self) -> list[Any]:
        """Return the slots of all ranks that nobody reads any more, as bytes."""
        self._turn ^= 1
        return self._board.slots[self._turn]

    def _meet(self, operation: str, deadline: float | None) -> None:
        self._agreement.meet(self._board, operation, deadline)


def _cut(arrays: Sequence[Any], step: int) -> Iterator[list[tuple[int, Any]]]:
    """Cut arrays that lie one behind the other into blocks of `step` elements.

    Yields for each block the pieces of arrays that are in it, and where in it they are.
    """
    pieces: list[tuple[int, Any]] = []
    place = 0
    for array in arrays:
        start = 0
        while start < array.size:
            piece = array[start : start + step - place]
            pieces.append((place, piece))
            start += piece.size
            place += piece.size
            if place == step:
                yield pieces
                pieces, place = [], 0
    if pieces:
        yield pieces


def _bytes_of(array: Any) -> Any:
    """Return the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)
