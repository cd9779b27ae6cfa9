"""The interface of all transports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# With more ranks there are too many messages: MPI has algorithms with log(ranks) steps
MOST_RANKS = 16
# For longer messages MPI uses a rendezvous, and ranks that share cores answer slowly:
# over Ethernet, 4 nodes of 2 ranks on 2 cores take a third of the time
MESSAGE_BYTES = 32 << 10


class Transport:
    """Collectives on contiguous arrays of a dtype that MPI knows.

    All ranks of the communicator call the same method with matching arguments, which
    were compared before. Arrays are NumPy arrays, or CuPy arrays where `device` is
    True. Methods do not change send buffers, which do not overlap with receive buffers
    unless a method says so.

    `deadline` is a time on time.monotonic's clock, None to wait for ever. After it,
    methods raise DeadlineError.
    """

    name = ""
    device = False
    is_ordered = False  # whether it adds in the order of the ranks, as `add_in_order`
    # What else it can do
    can_exchange = False  # `alltoallv`
    shares_memory = False  # `allreduce_symmetric`, `allgather_columns`

    def allreduce(
        self,
        sends: Sequence[Any],
        receive: Any,
        deadline: float | None,
        wire: np.dtype[Any] | None = None,
    ) -> None:
        """Put the sum over all ranks of `sends` into `receive`, the same on all ranks.

        Args:
          sends: arrays of one dtype, which are added as if concatenated.
          receive: has the size of all together, and the same dtype; if `is_ordered`, it
            may have a wider floating dtype, in which the sum is formed. Totals may be
            sent in the narrower dtype. On the host it may be the only array of `sends`.
          deadline: see the class.
          wire: the narrower dtype in which nodes send; for some transports only, see
            `TransportSelector.narrowing`.
        """
        raise NotImplementedError

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        """Concatenate the `counts[r]` elements of each rank r into `receive`."""
        raise NotImplementedError

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        """Copy `buffer` of rank `root` into `buffer` of all other ranks."""
        raise NotImplementedError

    def close(self) -> None:
        """Free memory and communicators, if it has any. Collective."""
