"""Direct MPI: the arrays' own memory is what MPI sends and receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidist import packing
from mpidist.agreement.agree import Agreement

__all__ = ["MpiTransport"]


class MpiTransport:
    """Blocking MPI collectives, nonblocking ones where there is a deadline."""

    name = "mpi"
    device = False

    def __init__(self, agreement: Agreement):
        self._agreement = agreement
        self._comm = agreement.comm

    def allreduce_sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        """See `Transport.allreduce_sum`."""
        if deadline is None:
            self._comm.Allreduce(send, receive, MPI.SUM)
            return
        request = self._comm.Iallreduce(send, receive, MPI.SUM)
        self._agreement.wait(request, deadline, "all_reduce")

    def allreduce_packed(
        self, sends: Sequence[Any], receive: Any, deadline: float | None
    ) -> None:
        """See `Transport.allreduce_packed`."""
        self.allreduce_sum(packing.pack(sends), receive, deadline)

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        """See `Transport.allgatherv`."""
        # MPI adds nothing up here, so bytes will do for dtypes that it does not know
        width = send.dtype.itemsize
        bytes_from = [count * width for count in counts]
        send_spec = [_bytes_of(send), MPI.BYTE]
        receive_spec = [_bytes_of(receive), bytes_from, MPI.BYTE]
        if deadline is None:
            self._comm.Allgatherv(send_spec, receive_spec)
            return
        request = self._comm.Iallgatherv(send_spec, receive_spec)
        self._agreement.wait(request, deadline, "all_gather")

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        """See `Transport.broadcast`."""
        spec = [_bytes_of(buffer), MPI.BYTE]
        if deadline is None:
            self._comm.Bcast(spec, root)
            return
        request = self._comm.Ibcast(spec, root)
        self._agreement.wait(request, deadline, "broadcast")


def _bytes_of(array: Any) -> Any:
    """Return the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)
