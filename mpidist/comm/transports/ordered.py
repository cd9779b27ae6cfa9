"""Reductions by MPI that add in rank order, so that every bit is reproducible.

The order of additions in `MPI_Allreduce` depends on the library, the number of ranks
and the size; it changes the last bits of floating-point sums.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.comm import packing
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.transports.blocks import BlockSum
from mpidist.comm.transports.mpi import MpiTransport

# The network is idle while the first block is added up, and the last one: there should
# be many. Each block also takes a fixed time of a core: where that is needed for other
# work they should be large. These are bytes received from one rank, and from all: two
# blocks are in memory
_BLOCKS = 32
_PART_BYTES = range(64 << 10, 256 << 10)
_MOST_BYTES = 4 << 20
_LEAST_PART_BYTES = 32 << 10


class OrderedTransport(MpiTransport):
    """Each rank adds one part of every block and sends it to all: see `BlockSum`.

    Args:
      consensus: of all ranks.
      block_bytes: the block size; None for sizes that suit networks.
    """

    name = "ordered"
    is_ordered = True
    packs_in_place = False

    def __init__(self, consensus: Consensus, block_bytes: int | None = None):
        super().__init__(consensus)
        self._block_bytes = block_bytes

    def allreduce(
        self,
        sends: Sequence[Any],
        receive: Any,
        deadline: float | None,
        wire: np.dtype[Any] | None = None,
    ) -> None:
        send = packing.pack(sends)
        self._add(send, receive, wire or send.dtype, deadline)

    def _add(
        self, send: Any, receive: Any, wire: np.dtype[Any], deadline: float | None
    ) -> None:
        # A rank that has left a collective by an error will not answer: raise before
        # sending.
        self._consensus.departures.require_none()
        wait = functools.partial(
            self._consensus.wait, deadline=deadline, operation="all_reduce"
        )
        send, receive = send.reshape(-1), receive.reshape(-1)
        blocks = 1 if self._consensus.departures.yields_cpu else _BLOCKS
        size_bytes, ranks = receive.size * wire.itemsize, self._consensus.size
        block_bytes = self._block_bytes or _block_bytes(size_bytes // blocks, ranks)
        step = max(1, block_bytes // wire.itemsize)
        begun: BlockSum | None = None
        shared: BlockSum | None = None
        # One turn more than blocks: the last turn shares the last block.
        for start in range(0, receive.size + step, step):
            block = slice(start, start + step)
            following = None
            if start < receive.size:
                following = BlockSum(self._comm, send[block], receive[block], wire)
            # Three blocks are in flight: parts of the next one arrive, this one is
            # added up and sent on, and totals of the one before arrive.
            if begun is not None:
                begun.share(wait)
            if shared is not None:
                shared.end(wait)
            begun, shared = following, begun
        if shared is not None:
            shared.end(wait)


def _block_bytes(wanted: int, ranks: int) -> int:
    """Return the size of a block, near the one that is wanted."""
    least, most = _PART_BYTES.start, _PART_BYTES.stop
    part = min(max(wanted // ranks, least), most, _MOST_BYTES // ranks)
    # With many ranks, too, messages should not be so short that only latency counts
    return max(part, _LEAST_PART_BYTES) * ranks
