"""The interface of all transports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["MESSAGE_BYTES", "MOST_RANKS", "Transport"]

# With more ranks there are too many messages: MPI has algorithms with log(ranks) steps
MOST_RANKS = 16
# For longer messages MPI uses a rendezvous, and ranks that share cores answer slowly:
# over Ethernet, 4 nodes of 2 ranks on 2 cores take a third of the time
MESSAGE_BYTES = 32 << 10


class Transport(Protocol):
    """Collectives on contiguous arrays of a dtype that MPI knows.

    All ranks of the communicator call the same method with matching arguments, which
    were compared before. Arrays are NumPy arrays, or CuPy arrays where `device` is
    True. Methods do not change send buffers, which do not overlap with receive buffers
    unless a method says so.

    `deadline` is a time on time.monotonic's clock, None to wait for ever. After it,
    methods raise DeadlineError.
    """

    name: str
    device: bool
    is_ordered: bool  # whether it adds in the order of the ranks, as `add_in_order`

    def allreduce_sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        """Put the sum over all ranks of `send` into `receive`, the same on all ranks.

        Both have the same size and dtype. If `is_ordered`, `receive` may have a wider
        floating dtype, in which the sum is formed. Totals may be sent in the narrower
        dtype. On the host `receive` may be `send` itself.
        """

    def allreduce_packed(
        self, sends: Sequence[Any], receive: Any, deadline: float | None
    ) -> None:
        """Like `allreduce_sum`, for several arrays, concatenated.

        All have the same dtype; `receive` has one dimension, and room for all.
        """

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        """Concatenate the `counts[r]` elements of each rank r into `receive`."""

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        """Copy `buffer` of rank `root` into `buffer` of all other ranks."""
