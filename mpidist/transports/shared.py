"""Reductions and gathers in memory that the ranks of a node share.

Each rank adds up one part of every array. In blocks, so that what is written for the
others is still in the cache when they read it; two of them in turn, so that a rank can
write the next one while others read the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.agree import Agreement
from mpidist.board import Board

__all__ = ["SharedTransport"]

_LINE_BYTES = 64


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

    def allreduce_sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        """See `Transport.allreduce_sum`."""
        send, receive = send.reshape(-1), receive.reshape(-1)
        step = self._board.slot_bytes // send.dtype.itemsize
        for start in range(0, send.size, step):
            block = slice(start, start + step)
            self._reduce_block(send[block], receive[block], deadline)

    def _reduce_block(self, send: Any, receive: Any, deadline: float | None) -> None:
        """Reduce what fits into a slot; the other ranks do it at the same time."""
        rank, count = self._rank, send.size
        slots = self._next_slots(send.dtype)
        mine, parts = slots[rank], self._parts(send)
        own = parts[rank]
        # Write what the others add up
        mine[: own.start] = send[: own.start]
        mine[own.stop : count] = send[own.stop :]
        self._meet("all_reduce", deadline)
        # Add up this rank's part, in the order of the ranks
        shares = [slot[own] for slot in slots]
        total, shares[rank] = shares[rank], send[own]
        np.add(shares[0], shares[1], out=total)
        for share in shares[2:]:
            np.add(total, share, out=total)
        self._meet("all_reduce", deadline)
        for slot, part in zip(slots, parts, strict=True):
            receive[part] = slot[part]

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        """See `Transport.allgatherv`."""
        width, step = send.dtype.itemsize, self._board.slot_bytes
        send, receive = _bytes_of(send), _bytes_of(receive)
        ends = [end * width for end in itertools.accumulate(counts)]
        starts = [0, *ends[:-1]]
        for done in range(0, max(counts) * width, step):
            slots = self._next_slots(send.dtype)
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
            slot = self._next_slots(block.dtype)[root]
            if self._rank == root:
                slot[: block.size] = block
            self._meet("broadcast", deadline)
            if self._rank != root:
                block[...] = slot[: block.size]

    def _parts(self, array: Any) -> list[slice]:
        """Return which part of an array each rank adds up: whole cache lines."""
        line = max(1, _LINE_BYTES // array.dtype.itemsize)
        lines = -(-array.size // line)
        edges = [
            min(lines * rank // self._size * line, array.size)
            for rank in range(self._size + 1)
        ]
        return [slice(*edge) for edge in itertools.pairwise(edges)]

    def _next_slots(self, dtype: np.dtype[Any]) -> list[Any]:
        """Return the slots of all ranks that nobody reads any more."""
        self._turn ^= 1
        return [slot.view(dtype) for slot in self._board.slots[self._turn]]

    def _meet(self, operation: str, deadline: float | None) -> None:
        self._agreement.meet(self._board, operation, deadline)


def _bytes_of(array: Any) -> Any:
    """Return the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)
