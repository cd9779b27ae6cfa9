"""One transport for small messages, another one for large ones, as a table says."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from mpidist.transports.base import Transport

__all__ = ["BySizeTransport", "Table"]

# For each method of a transport: from how many bytes on which one is used
Table = Mapping[str, Sequence[tuple[int, str]]]


class BySizeTransport:
    """Gives each call to the transport that a table names for its size.

    The bytes are those of the result, which all ranks know.

    Args:
      transports: by name; all on the host or all on the device.
      table: for "allreduce", "allgatherv" and "broadcast" rows that begin with 0 bytes;
        equal on all ranks.
    """

    def __init__(self, transports: Mapping[str, Transport], table: Table):
        used = {name for rows in table.values() for _, name in rows}
        self.name = ", ".join(sorted(used))
        self.device = all(transports[name].device for name in used)
        adders = {name for _, name in table["allreduce"]}
        self.is_ordered = all(transports[name].is_ordered for name in adders)
        self._edges = {m: [edge for edge, _ in rows] for m, rows in table.items()}
        self._rows = {m: [transports[n] for _, n in rows] for m, rows in table.items()}

    def _pick(self, method: str, receive: Any) -> Transport:
        row = bisect.bisect(self._edges[method], receive.nbytes) - 1
        return self._rows[method][row]

    def allreduce_sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        """See `Transport.allreduce_sum`."""
        self._pick("allreduce", receive).allreduce_sum(send, receive, deadline)

    def allreduce_packed(
        self, sends: Sequence[Any], receive: Any, deadline: float | None
    ) -> None:
        """See `Transport.allreduce_packed`."""
        self._pick("allreduce", receive).allreduce_packed(sends, receive, deadline)

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        """See `Transport.allgatherv`."""
        way = self._pick("allgatherv", receive)
        way.allgatherv(send, receive, counts, deadline)

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        """See `Transport.broadcast`."""
        self._pick("broadcast", buffer).broadcast(buffer, root, deadline)
