"""Reductions and gathers in memory that the ranks of a node share.

Of two ranks both add up everything; of more each rank adds up one part of every array.
In blocks, so that what is written for others is still in the cache when they read it;
two of them in turn, so that a rank can write the next one while others read the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.agree import Agreement
from mpidist.board import Board

__all__ = ["SharedTransport"]

_LINE_BYTES = 64
_KNOWN = 1000  # kinds of blocks whose places are remembered


class _Places(NamedTuple):
    """Where a block of an array goes in the slots of one turn.

    Args:
      own: the part that this rank adds up.
      for_others: parts of this rank's array, and where it writes them.
      shares: where each rank writes what it has of `own`.
      total: where the total of `own` is put.
      totals: the part that each rank adds up, and where its total is.
    """

    own: slice
    for_others: list[tuple[slice, Any]]
    shares: list[Any]
    total: Any
    totals: list[tuple[slice, Any]]


class SharedTransport:
    """Copies and adds in shared memory; all ranks are on one node.

    Totals are added up in the order of the ranks, so they do not depend on how arrays
    are packed.

    Args:
      agreement: of all ranks.
      board: where they meet; borrowed. An array is worked on in blocks of its slots.
    """

    name = "shared"
    device = False

    def __init__(self, agreement: Agreement, board: Board):
        self._agreement = agreement
        self._board = board
        self._rank, self._size = agreement.rank, agreement.size
        self._turn = 0
        self._known: dict[Any, _Places] = {}

    def allreduce_sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        """See `Transport.allreduce_sum`."""
        send, receive = send.reshape(-1), receive.reshape(-1)
        step = self._board.slot_bytes // send.dtype.itemsize
        reduce_block = self._exchange_block if self._size == 2 else self._reduce_block
        for start in range(0, send.size, step):
            block = slice(start, start + step)
            reduce_block(send[block], receive[block], deadline)

    def _exchange_block(self, send: Any, receive: Any, deadline: float | None) -> None:
        """Reduce what fits into a slot: both of two ranks add up all of it.

        That needs one meeting instead of two, and moves as many bytes between them.
        """
        self._turn ^= 1
        slots = self._slots(send.dtype)
        slots[self._rank][: send.size] = send
        self._meet("all_reduce", deadline)
        shares = [slot[: send.size] for slot in slots]
        shares[self._rank] = send
        np.add(shares[0], shares[1], out=receive)

    def _reduce_block(self, send: Any, receive: Any, deadline: float | None) -> None:
        """Reduce what fits into a slot; the other ranks do it at the same time."""
        self._turn ^= 1
        kind = send.dtype, send.size, self._turn
        if (places := self._known.get(kind)) is None:
            places = self._places(send.dtype, send.size)
            if len(self._known) < _KNOWN:
                self._known[kind] = places
        # Write what the others add up
        for part, place in places.for_others:
            place[...] = send[part]
        self._meet("all_reduce", deadline)
        # Add up this rank's part, in the order of the ranks
        shares = places.shares
        shares[self._rank] = send[places.own]
        np.add(shares[0], shares[1], out=places.total)
        for share in shares[2:]:
            np.add(places.total, share, out=places.total)
        self._meet("all_reduce", deadline)
        for part, place in places.totals:
            receive[part] = place

    def _places(self, dtype: np.dtype[Any], count: int) -> _Places:
        """Return where in the slots of this turn what is of an array."""
        slots, rank = self._slots(dtype), self._rank
        parts = self._parts(dtype, count)
        own, mine = parts[rank], slots[rank]
        edges = slice(0, own.start), slice(own.stop, count)
        return _Places(
            own,
            [(edge, mine[edge]) for edge in edges if edge.start < edge.stop],
            [slot[own] for slot in slots],
            mine[own],
            [(part, slot[part]) for part, slot in zip(parts, slots, strict=True)],
        )

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
        """Return which part of an array each rank adds up: whole cache lines."""
        line = max(1, _LINE_BYTES // dtype.itemsize)
        lines = -(-count // line)
        edges = [
            min(lines * rank // self._size * line, count)
            for rank in range(self._size + 1)
        ]
        return [slice(*edge) for edge in itertools.pairwise(edges)]

    def _next_slots(self) -> list[Any]:
        """Return the slots of all ranks that nobody reads any more, as bytes."""
        self._turn ^= 1
        return self._board.slots[self._turn]

    def _slots(self, dtype: np.dtype[Any]) -> list[Any]:
        return [slot.view(dtype) for slot in self._board.slots[self._turn]]

    def _meet(self, operation: str, deadline: float | None) -> None:
        self._agreement.meet(self._board, operation, deadline)


def _bytes_of(array: Any) -> Any:
    """Return the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)
