"""The transports of arrays in one kind of memory, and which is taken for what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpidist.errors import LaunchError
from mpidist.options import CommunicationImplementation
from mpidist.transports.base import Transport
from mpidist.transports.by_size import BySizeTransport, Table

__all__ = ["Ways"]


class Ways:
    """Transports for arrays on the host, or for arrays on GPUs.

    Args:
      by_name: all of them; "mpi" is what stands for MPI's own calls.
      ordered: the names of those that add in the order of the ranks, the best first;
        one of them at least does so.
      table: see `BySizeTransport`. All ranks pass the same.

    Raises:
      LaunchError: the table names a transport that is not there.
    """

    def __init__(
        self, by_name: Mapping[str, Transport], ordered: Sequence[str], table: Table
    ):
        self.by_name = dict(by_name)
        used = {name for rows in table.values() for _, name in rows}
        if unknown := used - set(self.by_name):
            raise LaunchError(
                f"the table of transports names {sorted(unknown)}, but there are "
                f"{sorted(self.by_name)}; let `python -m mpidist tune` measure again"
            )
        self.default: Transport = BySizeTransport(self.by_name, table)
        there = (self.by_name[name] for name in ordered if name in self.by_name)
        self._ordered = next(way for way in there if way.is_ordered)
        # Where the user asks for calls of MPI
        self._direct = self.by_name["mpi"]
        direct = (self.by_name[n] for n in ("device", "ordered") if n in self.by_name)
        self._direct_ordered = next(direct)
        self._nccl = self.by_name.get("nccl", self.default)

    def pick(
        self, implementation: CommunicationImplementation, is_ordered: bool
    ) -> Transport:
        """Return the transport for a call.

        Args:
          implementation: what the user asks for. (NCCL moves arrays on GPUs only.)
          is_ordered: whether sums must be added up in the order of the ranks.
        """
        if implementation is CommunicationImplementation.MPI:
            return self._direct_ordered if is_ordered else self._direct
        if is_ordered:
            return self.default if self.default.is_ordered else self._ordered
        if implementation is CommunicationImplementation.NCCL:
            return self._nccl
        return self.default
