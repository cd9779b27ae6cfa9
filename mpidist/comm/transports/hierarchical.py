"""Reductions in two levels: in the memory of each node, then between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from mpi4py import MPI

from mpidist.comm.consensus.agreement import Agreement
from mpidist.comm.consensus.barrier import Board
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.transports.mpi import MpiTransport
from mpidist.comm.transports.shared import SharedTransport

__all__ = ["HierarchicalTransport"]


class HierarchicalTransport(SharedTransport):
    """Each rank of a node adds up one part, then all-reduces it with other nodes.

    Every byte crosses the network once per node, and all ranks of a node send, while
    they work on the next block. Where nodes have unlike numbers of ranks, as many add
    as the smallest node has. Gathers and broadcasts are direct MPI's.

    Collective to make.

    Args:
      agreement: of all ranks.
      board: where the ranks of this node meet, with three slots; borrowed.
    """

    name = "hierarchical"
    is_ordered = False

    def __init__(self, agreement: Agreement, board: Board):
        adders = min(agreement.gather("HierarchicalTransport", board.size))
        super().__init__(agreement, board, adders)
        self._direct = MpiTransport(agreement)
        color = board.rank if board.rank < adders else MPI.UNDEFINED
        with Pending("making a communicator", agreement.comm):
            like = agreement.comm.Split(color, agreement.rank)
        self._like = cast(MPI.Intracomm, like)
        if self._like != MPI.COMM_NULL:
            agreement.losses.add(self._like)

    def close(self) -> None:
        """Free the communicator. Collective."""
        if self._like != MPI.COMM_NULL:
            self._agreement.losses.free(self._like)

    def _add_other_nodes(self, total: Any) -> Any:
        return self._like.Iallreduce(MPI.IN_PLACE, total, MPI.SUM)

    def _finish_other_nodes(self, request: Any, deadline: float | None) -> None:
        if deadline is None:
            request.Wait()
        else:
            self._agreement.wait(request, deadline, "all_reduce")

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        """See `Transport.allgatherv`."""
        self._direct.allgatherv(send, receive, counts, deadline)

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        """See `Transport.broadcast`."""
        self._direct.broadcast(buffer, root, deadline)
