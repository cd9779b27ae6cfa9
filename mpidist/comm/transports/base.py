"""The contract that every transport keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Transport"]


class Transport(Protocol):
    """Collectives on contiguous arrays of a dtype that MPI knows.

    All ranks of the communicator call the same method with agreeing arguments: that was
    checked before. Arrays are NumPy arrays, or CuPy arrays where `device` is True. No
    method changes what it sends, and send and receive buffers do not overlap.

    `deadline` is a time on time.monotonic's clock, None to wait for ever; a missed one
    is a DeadlineError.
    """

    name: str
    device: bool
    is_ordered: bool  # whether it adds in the order of the ranks, as `add_in_order`

    def allreduce_sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        """Put the sum over all ranks of `send` into `receive`, the same on all ranks.

        Both have the same size and dtype; where `is_ordered`, `receive` may also have a
        wider floating dtype, in which all is added up then. What ranks tell each other
        of the total may be as narrow as what is sent.
        """

    def allreduce_packed(
        self, sends: Sequence[Any], receive: Any, deadline: float | None
    ) -> None:
        """Do what `allreduce_sum` does for several arrays, one behind the other.

        All have the same dtype; `receive` has one dimension, and room for all.
        """

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        """Put the `counts[r]` elements that each rank r sends one behind the other."""

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        """Copy `buffer` of rank `root` into `buffer` of all other ranks."""
