"""Reductions in two levels: in the memory of each node, then between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from mpi4py import MPI

from mpidist.agreement.agree import Agreement
from mpidist.agreement.board import Board
from mpidist.transports.mpi import MpiTransport
from mpidist.transports.shared import SharedTransport

__all__ = ["HierarchicalTransport"]

_SLOT_BYTES = 512 << 10


class HierarchicalTransport(SharedTransport):
    """Each rank of a node adds up one part, then all-reduces it with other nodes.

    Every byte crosses the network once per node, and all ranks of a node send. Where
    nodes have unlike numbers of ranks, as many add as the smallest node has. Gathers
    and broadcasts are direct MPI's. Collective to make.

    Args:
      agreement: of all ranks.
      node: the ranks that count as this rank's node, which share memory; borrowed.
      slot_bytes: how much of an array is worked on at a time.
    """

    name = "hierarchical"

    def __init__(
        self, agreement: Agreement, node: MPI.Intracomm, slot_bytes: int = _SLOT_BYTES
    ):
        names = node.group.Translate_ranks(None, agreement.comm.group)
        sizes = agreement.gather("HierarchicalTransport", node.Get_size())
        board = Board(node, 0, slot_bytes, names)
        super().__init__(agreement, board, adders=min(sizes))
        self._direct = MpiTransport(agreement)
        is_adder = node.Get_rank() < min(sizes)
        color = node.Get_rank() if is_adder else MPI.UNDEFINED
        like = agreement.comm.Split(color, agreement.rank)
        self._like = cast(MPI.Intracomm, like)

    def close(self) -> None:
        """Free memory and communicator. Collective."""
        if self._like != MPI.COMM_NULL:
            self._like.Free()
        self._board.close()

    def _add(self, slots: Sequence[Any], receive: Any, deadline: float | None) -> None:
        self._add_part(slots, receive, deadline)

    def _add_other_nodes(self, total: Any, deadline: float | None) -> None:
        if deadline is None:
            self._like.Allreduce(MPI.IN_PLACE, total, MPI.SUM)
            return
        request = self._like.Iallreduce(MPI.IN_PLACE, total, MPI.SUM)
        self._agreement.wait(request, deadline, "all_reduce")

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        """See `Transport.allgatherv`."""
        self._direct.allgatherv(send, receive, counts, deadline)

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        """See `Transport.broadcast`."""
        self._direct.broadcast(buffer, root, deadline)
