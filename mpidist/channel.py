"""What the ranks of one communicator reduce and gather with."""

from __future__ import annotations

from mpi4py import MPI

from mpidist.agreement.agree import Agreement
from mpidist.agreement.comparing import BoardComparison
from mpidist.collectives.collectives import Collectives
from mpidist.collectives.results import Results
from mpidist.gpu.facts import GpuFacts
from mpidist.memory.boards import make_board
from mpidist.memory.symmetric import SymmetricMemory
from mpidist.topology import Topology
from mpidist.transports import Routes
from mpidist.transports.table_file import (
    Layout,
    find_table,
    short_name,
    table_path,
)

__all__ = ["Channel"]

# What all ranks of a node, and what each of them, can tell the others at once: more of
# them have more to read
_PAYLOADS_BYTES = 256 << 10
_LEAST_PAYLOAD_BYTES = 2048
_HEADER_BYTES = 64


class Channel:
    """The board, the transports and the collectives of a communicator.

    Collective to make.

    Args:
      operation: the public call that this is for, for messages.
      agreement: of all ranks, on the communicator; borrowed. Where all ranks share
        memory, it compares there from now on.
      topology: the nodes of these ranks.
      symmetric: the arrays that lie in memory of the node.
      gpus: of all ranks, where replicas are on GPUs.
      is_beside: whether a thread uses it beside another channel of these ranks: it
        leaves the core to others while it waits, and does without NCCL.
      results: see `Collectives`.

    Raises, on all ranks:
      LaunchError: the file of measured transports cannot be used.
    """

    def __init__(
        self,
        operation: str,
        agreement: Agreement,
        topology: Topology,
        symmetric: SymmetricMemory,
        gpus: GpuFacts | None = None,
        *,
        is_beside: bool = False,
        results: Results | None = None,
    ):
        payload_bytes = max(_PAYLOADS_BYTES // agreement.size, _LEAST_PAYLOAD_BYTES)
        self._agreement = agreement
        self._board = None
        if topology.has_neighbours:
            self._board = make_board(
                operation,
                agreement,
                topology.node,
                _HEADER_BYTES + payload_bytes,
                is_patient=is_beside,
            )
        if self._board is not None and topology.is_one_node:
            agreement.comparison = BoardComparison(self._board, payload_bytes)
        kind = "CPU" if gpus is None else "GPU"
        library = short_name(MPI.Get_library_version())
        self.layout = Layout(library, topology.node_sizes, kind)
        table = None
        if agreement.size > 1:
            table = agreement.root_only(
                operation, lambda: find_table(table_path(), self.layout)
            )
        self._routes = agreement.block(
            operation,
            lambda: Routes(
                agreement, self._board, table, library, gpus, has_nccl=not is_beside
            ),
        )
        self.collectives = Collectives(
            agreement, self._routes, symmetric, results or Results()
        )

    def close(self) -> None:
        """Free memory and communicators. Collective.

        Where ranks have died they stay: it takes all to free a window of MPI.
        """
        if self._agreement.losses.ranks:
            return
        try:
            self._routes.close()
        finally:  # what it raises is raised on all ranks
            if self._board is not None:
                self._board.close()
