"""Ways to move bytes between ranks, all with the contract of `Transport`."""

from __future__ import annotations

from mpidist.agreement.agree import Agreement
from mpidist.agreement.board import Board
from mpidist.errors import LaunchError
from mpidist.transports.base import Transport
from mpidist.transports.by_size import BySizeTransport, Table
from mpidist.transports.defaults import default_table
from mpidist.transports.hierarchical import HierarchicalTransport
from mpidist.transports.mpi import MpiTransport
from mpidist.transports.ordered import OrderedTransport
from mpidist.transports.shared import SharedTransport
from mpidist.transports.staging import StagingTransport

__all__ = ["Routes", "Transport"]


class Routes:
    """The transports of one strategy, and which is taken for what. Collective to make.

    Args:
      agreement: of all ranks.
      device: of this rank; the same kind on all ranks.
      board: where the ranks of this node meet; borrowed. None on all ranks where no
        ranks share memory.
      table: see `BySizeTransport`; None for `default_table`. All ranks pass the same.
      library: what `MPI.Get_library_version()` begins with.

    Raises:
      LaunchError: the table names a transport that is not there.
    """

    def __init__(
        self,
        agreement: Agreement,
        device: str,
        board: Board | None = None,
        table: Table | None = None,
        library: str = "",
    ):
        host: dict[str, MpiTransport | SharedTransport] = {
            "mpi": MpiTransport(agreement),
            "ordered": OrderedTransport(agreement),
        }
        # What the ranks of a node do in the memory that they share
        self.in_node: SharedTransport | None = None
        self._like: HierarchicalTransport | None = None
        if board is not None and board.size == agreement.size:
            self.in_node = SharedTransport(agreement, board)
        elif board is not None:
            self.in_node = self._like = HierarchicalTransport(agreement, board)
        if self.in_node is not None:
            host[self.in_node.name] = self.in_node
        is_host = not device.startswith("GPU")
        self.by_name: dict[str, Transport] = {
            name: transport if is_host else StagingTransport(transport)
            for name, transport in host.items()
        }
        in_node = "mpi" if self.in_node is None else self.in_node.name
        self.default_table = default_table(in_node, library)
        if table is None:
            table = self.default_table
        used = {name for rows in table.values() for _, name in rows}
        if unknown := used - set(self.by_name):
            raise LaunchError(
                f"the table of transports names {sorted(unknown)}, but there are "
                f"{sorted(self.by_name)}; let `python -m mpidist tune` measure again"
            )
        self.default: Transport = BySizeTransport(self.by_name, table)

    def pick(self, is_direct: bool, is_ordered: bool) -> Transport:
        """Return the transport for a call.

        Args:
          is_direct: whether the user asked for calls of MPI.
          is_ordered: whether sums must be added up in the order of the ranks.
        """
        if is_direct:
            return self.by_name["ordered" if is_ordered else "mpi"]
        if is_ordered and not self.default.is_ordered:
            near = self.in_node
            is_near = near is not None and near.is_ordered
            return self.by_name[near.name if near and is_near else "ordered"]
        return self.default

    def close(self) -> None:
        """Free communicators. Collective."""
        if self._like is not None:
            self._like.close()
