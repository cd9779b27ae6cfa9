"""Reductions in two levels: inside each node, then between one rank of each node."""

from __future__ import annotations

from typing import Any, cast

from mpi4py import MPI

from mpidist.agree import Agreement
from mpidist.transports.mpi import MpiTransport

__all__ = ["HierarchicalTransport"]


class HierarchicalTransport(MpiTransport):
    """Reduce to the first rank of each node, all-reduce over those, broadcast in nodes.

    Fewer messages cross the network than in a flat algorithm that does not know the
    nodes. Gathers and broadcasts are direct MPI's.

    Args:
      agreement: of all ranks.
      node: the ranks that count as this rank's node; borrowed.
    """

    name = "hierarchical"

    def __init__(self, agreement: Agreement, node: MPI.Intracomm):
        super().__init__(agreement)
        self._node = node
        color = 0 if node.Get_rank() == 0 else MPI.UNDEFINED
        leaders = agreement.comm.Split(color, agreement.rank)
        self._leaders = cast(MPI.Intracomm, leaders)

    def allreduce_sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        """See `Transport.allreduce_sum`."""
        is_leader = self._leaders != MPI.COMM_NULL
        partial = receive.copy() if is_leader else None
        if deadline is None:
            self._node.Reduce(send, partial, MPI.SUM, root=0)
            if is_leader:
                self._leaders.Allreduce(partial, receive, MPI.SUM)
            self._node.Bcast(receive, root=0)
            return
        self._wait(self._node.Ireduce(send, partial, MPI.SUM, root=0), deadline)
        if is_leader:
            self._wait(self._leaders.Iallreduce(partial, receive, MPI.SUM), deadline)
        self._wait(self._node.Ibcast(receive, root=0), deadline)

    def close(self) -> None:
        """Free the communicator of the nodes' first ranks. Collective."""
        if self._leaders != MPI.COMM_NULL:
            self._leaders.Free()

    def _wait(self, request: MPI.Request, deadline: float) -> None:
        self._agreement.wait(request, deadline, "all_reduce")
