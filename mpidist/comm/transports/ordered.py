"""Reductions that add in the order of the ranks, by MPI, so that each bit is known.

What `MPI_Allreduce` adds up in which order is up to the library, the number of ranks
and the size; with floating-point numbers the last bits follow from it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist.comm import arithmetic, packing
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.transports.mpi import MpiTransport

__all__ = ["OrderedTransport"]

_BLOCK_BYTES = 16 << 20


class OrderedTransport(MpiTransport):
    """Each rank gets one part of an array from all ranks, adds it up, and shares it.

    As many bytes move as in the best all-reduces for large arrays, which do the same in
    pairs (R. Thakur et al., Optimization of collective communication operations in
    MPICH, 2005, section 4.5: reduce-scatter and all-gather).

    Args:
      consensus: of all ranks.
      block_bytes: how much of an array is worked on at a time.
    """

    name = "ordered"
    is_ordered = True
    packs_in_place = False

    def __init__(self, consensus: Consensus, block_bytes: int = _BLOCK_BYTES):
        super().__init__(consensus)
        self._block_bytes = block_bytes

    def allreduce_sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        """See `Transport.allreduce_sum`."""
        send, receive = send.reshape(-1), receive.reshape(-1)
        step = max(1, self._block_bytes // receive.dtype.itemsize)
        for start in range(0, receive.size, step):
            block = slice(start, start + step)
            self._reduce(send[block], receive[block], deadline)

    def _reduce(self, send: Any, receive: Any, deadline: float | None) -> None:
        ranks, width = self._comm.Get_size(), receive.dtype.itemsize
        edges = packing.edges(receive.size, ranks, width)
        counts = np.diff(edges).tolist()
        mine = counts[self._comm.Get_rank()]
        # Get this rank's part from all
        parts = np.empty((ranks, mine), send.dtype)
        self.alltoallv(send, counts, parts, [mine] * ranks, deadline, "all_reduce")
        total = np.empty(mine, receive.dtype)
        arithmetic.add_in_order(list(parts), out=total)
        # Share what it adds up to, as narrow as the parts came
        totals = np.empty(receive.size, send.dtype)
        narrow = total.astype(send.dtype, copy=False)
        self.allgatherv(narrow, totals, counts, deadline)
        receive[...] = totals
