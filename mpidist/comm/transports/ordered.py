"""Reductions that add in the order of the ranks, by MPI, so that each bit is known.

What `MPI_Allreduce` adds up in which order is up to the library, the number of ranks
and the size; with floating-point numbers the last bits follow from it.
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

__all__ = ["OrderedTransport"]

# What a rank gets from another one at once, and from all: it has two blocks in memory
_PART_BYTES = 256 << 10
_BLOCK_BYTES = 4 << 20
_LEAST_PART_BYTES = 32 << 10


class OrderedTransport(MpiTransport):
    """Each rank adds up one part of every block, and sends it to all: see `BlockSum`.

    Args:
      consensus: of all ranks.
      block_bytes: how much of an array is a block; None for what suits networks.
    """

    name = "ordered"
    is_ordered = True
    packs_in_place = False

    def __init__(self, consensus: Consensus, block_bytes: int | None = None):
        super().__init__(consensus)
        if block_bytes is None:
            # Parts of at least 32 KiB, so that latency does not dominate with many
            # ranks.
            part_bytes = min(_PART_BYTES, _BLOCK_BYTES // consensus.size)
            block_bytes = max(part_bytes, _LEAST_PART_BYTES) * consensus.size
        self._block_bytes = block_bytes

    def allreduce_sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        """See `Transport.allreduce_sum`."""
        self._add(send, receive, send.dtype, deadline)

    def allreduce_narrow(
        self,
        sends: Sequence[Any],
        receive: Any,
        wire: np.dtype[Any],
        deadline: float | None,
    ) -> None:
        """Do what `allreduce_packed` does, but send numbers in another dtype.

        Args:
          sends: see `Transport.allreduce_packed`.
          receive: see there.
          wire: the narrower dtype.
          deadline: see `Transport`.
        """
        self._add(packing.pack(sends), receive, wire, deadline)

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
        step = max(1, self._block_bytes // wire.itemsize)
        begun: BlockSum | None = None
        shared: BlockSum | None = None
        # One turn more than blocks: it shares the last block, which the end waits for.
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
