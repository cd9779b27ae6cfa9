"""Selects a transport by message size, with a tuning table."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from mpidist.comm.transports.base import Transport
from mpidist.comm.transports.blocks import MESSAGE_BYTES, MOST_RANKS
from mpidist.comm.transports.tuning_file import Table

__all__ = [
    "BySizeTransport",
    "Count",
    "all_by",
    "default_device_table",
    "default_table",
    "no_count",
]

Count = Callable[[str, int], None]


def no_count(transport: str, size_bytes: int) -> None:
    """Count nothing."""


class BySizeTransport:
    """Passes each call to the transport for its size in a table.

    The size is that of the result in bytes, which all ranks know.

    Args:
      transports: by name; all on the host or all on the device.
      table: for "allreduce", "allgatherv" and "broadcast" rows that begin with 0 bytes;
        equal on all ranks.
      count: called with the name of the transport and the bytes of each call.
    """

    def __init__(
        self, transports: Mapping[str, Transport], table: Table, count: Count = no_count
    ):
        used = {name for rows in table.values() for _, name in rows}
        self.name = ", ".join(sorted(used))
        self.device = all(transports[name].device for name in used)
        adders = {name for _, name in table["allreduce"]}
        self.is_ordered = all(transports[name].is_ordered for name in adders)
        self._count = count
        self._edges = {m: [edge for edge, _ in rows] for m, rows in table.items()}
        self._rows = {m: [transports[n] for _, n in rows] for m, rows in table.items()}

    def for_size(self, method: str, size_bytes: int) -> Transport:
        """Return the transport for results of this size, whose calls are not counted.

        Args:
          method: "allreduce", "allgatherv" or "broadcast".
          size_bytes: of the result.
        """
        edges = self._edges[method]
        return self._rows[method][bisect.bisect(edges, size_bytes) - 1]

    def _pick(self, method: str, receive: Any) -> Transport:
        way = self.for_size(method, receive.nbytes)
        self._count(way.name, receive.nbytes)
        return way

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


# Between nodes: below this size, MPI's own algorithms have fewer steps
_HIERARCHICAL_BYTES = 64 << 10
_BLOCKS_BYTES = 256 << 10
# A ring has as many steps as ranks, so it needs larger messages
_RING_RANKS = 64
_RING_MESSAGES_PER_RANK = 8
# On GPUs: below this size, copies to the host and back are faster than two kernels
_IPC_BYTES = 32 << 10
_DEVICE_BYTES = 64 << 10
# Inside a node, Intel MPI is faster if arrays fit in caches
_INTEL_BYTES = 16 << 20


def default_table(in_node: str, library: str, ranks: int) -> Table:
    """Return a table for a layout.

    Args:
      in_node: the transport of ranks that share memory; "mpi" if none do.
      library: what `MPI.Get_library_version()` begins with.
      ranks: how many there are.
    """
    by_mpi = [(0, "mpi")]
    if in_node in ("mpi", "hierarchical"):
        reduce = move = by_mpi
        if in_node == "hierarchical":
            reduce = [*by_mpi, (_HIERARCHICAL_BYTES, "hierarchical")]
        elif ranks <= MOST_RANKS:
            reduce = [*by_mpi, (_BLOCKS_BYTES, "ordered")]
        if 1 < ranks <= _RING_RANKS:
            edge = _RING_MESSAGES_PER_RANK * ranks * MESSAGE_BYTES
            move = [*by_mpi, (edge, "ring")]
        return {"allreduce": reduce, "allgatherv": move, "broadcast": move}
    near = [(0, in_node)]
    if in_node == "shared" and library.startswith("Intel"):
        reduce = [(0, "mpi"), (_INTEL_BYTES, "shared")]
        return {"allreduce": reduce, "allgatherv": by_mpi, "broadcast": near}
    if library.startswith("Open MPI"):  # the system copies for it, once
        return {"allreduce": near, "allgatherv": by_mpi, "broadcast": near}
    return {"allreduce": near, "allgatherv": near, "broadcast": near}


def default_device_table(names: Container[str]) -> Table:
    """Return a table for arrays on GPUs.

    Args:
      names: of the transports that there are.
    """
    if "nccl" in names:
        return all_by([(0, "nccl")])
    if "ipc" in names:
        return all_by([(0, "staging"), (_IPC_BYTES, "ipc")])
    if "device" in names:
        # Most MPI libraries reduce GPU arrays on the host
        reduce = [(0, "mpi"), (_DEVICE_BYTES, "device")]
        return {**all_by([(0, "mpi")]), "allreduce": reduce}
    return all_by([(0, "staging")])


def all_by(rows: list[tuple[int, str]]) -> dict[str, list[tuple[int, str]]]:
    """Return a table whose rows are the same for all methods."""
    return {"allreduce": rows, "allgatherv": rows, "broadcast": rows}
