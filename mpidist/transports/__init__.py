"""Ways to move bytes between ranks, all with the contract of `Transport`."""

from __future__ import annotations

from typing import Any

from mpidist import arrays
from mpidist.agreement.agree import Agreement
from mpidist.agreement.board import Board
from mpidist.errors import ArgumentError, LaunchError
from mpidist.gpu.facts import GpuFacts
from mpidist.options import CommunicationImplementation
from mpidist.transports.base import Transport
from mpidist.transports.by_size import Table
from mpidist.transports.defaults import default_device_table, default_table
from mpidist.transports.device_transports import ORDERED, DeviceTransports
from mpidist.transports.hierarchical import HierarchicalTransport
from mpidist.transports.mpi import MpiTransport
from mpidist.transports.ordered import OrderedTransport
from mpidist.transports.shared import SharedTransport
from mpidist.transports.ways import Ways

__all__ = ["Routes", "Transport"]


class Routes:
    """The transports of one strategy, and which is taken for what. Collective to make.

    Args:
      agreement: of all ranks.
      board: where the ranks of this node meet; borrowed. None on all ranks where no
        ranks share memory.
      table: see `BySizeTransport`; None for `default_table`. All ranks pass the same.
      library: what `MPI.Get_library_version()` begins with.
      gpus: of all ranks, for a strategy on GPUs, which the table is for then.
      has_nccl: whether NCCL may be used, which only one of several may.

    Raises:
      LaunchError: the table names a transport that is not there.
    """

    def __init__(
        self,
        agreement: Agreement,
        board: Board | None = None,
        table: Table | None = None,
        library: str = "",
        gpus: GpuFacts | None = None,
        has_nccl: bool = True,
    ):
        transports: dict[str, Transport] = {
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
        in_node = "mpi" if self.in_node is None else self.in_node.name
        if self.in_node is not None:
            transports[in_node] = self.in_node
        self.default_table = host_table = default_table(in_node, library)
        if gpus is None and table is not None:
            host_table = table
        self._host = Ways(transports, [in_node, "ordered"], host_table)
        self._device: Ways | None = None
        self._gpus: DeviceTransports | None = None
        if gpus is not None:
            self._gpus = DeviceTransports(agreement, board, self._host, gpus, has_nccl)
            by_name = self._gpus.by_name
            self.default_table = default_device_table(by_name)
            self._device = Ways(by_name, ORDERED, table or self.default_table)
        self.table = self.default_table if table is None else table
        own = self._device or self._host
        self.by_name, self.default = own.by_name, own.default

    def pick(
        self,
        implementation: CommunicationImplementation,
        is_ordered: bool,
        is_device: bool,
    ) -> Transport:
        """Return the transport for a call.

        Args:
          implementation: what the user asks for.
          is_ordered: whether sums must be added up in the order of the ranks.
          is_device: whether the arrays are on GPUs.
        """
        ways = self._device if is_device else self._host
        assert ways is not None
        return ways.pick(implementation, is_ordered)

    def require_implementation(
        self, implementation: CommunicationImplementation
    ) -> None:
        """Raise a LaunchError if the user asks for NCCL, and it cannot be used."""
        if implementation is CommunicationImplementation.NCCL:
            self.require_nccl("implementation='NCCL'")

    def require_nccl(self, asked_for: str) -> None:
        """Raise a LaunchError if NCCL cannot be used."""
        if "nccl" in self.by_name:
            return
        reason = "replicas are on CPUs"
        if self._gpus is not None:
            reason = self._gpus.missing["nccl"]
        raise LaunchError(
            f"{asked_for} cannot be used: {reason}; leave it out to use MPI"
        )

    def require_reachable(self, array: Any, name: str) -> None:
        """Raise if an array lies where no transport can move it.

        Raises:
          ArgumentError: it is on a GPU, but replicas are not, or on another GPU.
        """
        if not arrays.is_device_array(array):
            return
        if self._gpus is None:
            raise ArgumentError(
                f"{name} is on a GPU, but this strategy's replicas are on CPUs: make "
                "it with devices=['GPU:0'] (or None), or pass cupy.asnumpy(...)"
            )
        own = self._gpus.index
        if array.size and array.device.id != own:
            raise ArgumentError(
                f"{name} is on GPU:{array.device.id}, but this replica computes on "
                f"GPU:{own}"
            )

    def close(self) -> None:
        """Free memory and communicators. Collective."""
        if self._gpus is not None:
            self._gpus.close()
        if self._like is not None:
            self._like.close()
