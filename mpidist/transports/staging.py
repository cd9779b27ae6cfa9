"""Device arrays by way of host memory, for an MPI that takes no device pointers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist import arrays, packing
from mpidist.transports.base import Transport

__all__ = ["StagingTransport"]


class StagingTransport:
    """Copies to the host, lets another transport work there, and copies back.

    `to_host` waits for the array's stream, so MPI never sees unfinished data.
    """

    name = "staging"
    device = True

    def __init__(self, host: Transport):
        self._host = host
        self.is_ordered = host.is_ordered

    def allreduce_sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        """See `Transport.allreduce_sum`."""
        result = np.empty(receive.shape, receive.dtype)
        self._host.allreduce_sum(arrays.to_host(send), result, deadline)
        receive[...] = arrays.to_device_like(result, receive)

    def allreduce_packed(
        self, sends: Sequence[Any], receive: Any, deadline: float | None
    ) -> None:
        """See `Transport.allreduce_packed`; packs on the device."""
        self.allreduce_sum(packing.pack(sends), receive, deadline)

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        """See `Transport.allgatherv`."""
        result = np.empty(receive.shape, receive.dtype)
        self._host.allgatherv(arrays.to_host(send), result, counts, deadline)
        receive[...] = arrays.to_device_like(result, receive)

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        """See `Transport.broadcast`."""
        result = np.ascontiguousarray(arrays.to_host(buffer))
        self._host.broadcast(result, root, deadline)
        buffer[...] = arrays.to_device_like(result, buffer)
