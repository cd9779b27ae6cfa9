"""Reductions in two levels: in the memory of each node, then between nodes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus.barrier import NodeBarrier
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.transports.base import MOST_RANKS
from mpidist.comm.transports.blocks import BlockSum, WholeSum
from mpidist.comm.transports.mpi import MpiTransport
from mpidist.comm.transports.shared import SharedTransport


class HierarchicalTransport(SharedTransport):
    """Each rank of a node adds up one part, then all-reduces it with other nodes.

    Every byte crosses the network once per node. All ranks of a node send while they
    work on the next block. If nodes have different numbers of ranks, the smallest
    number of ranks per node adds. Gathers and broadcasts use MPI directly.

    Collective to make.

    Args:
      consensus: of all ranks.
      barrier: that of the ranks of this node, with three slots; borrowed.
    """

    name = "hierarchical"
    is_ordered = False
    shares_memory = False
    most_nodes = MOST_RANKS  # that exchange parts; with more nodes, MPI adds

    def __init__(self, consensus: Consensus, barrier: NodeBarrier):
        # The smallest node limits how many ranks add: each adder needs a partner
        # everywhere.
        sizes = consensus.gather_objects("HierarchicalTransport", lambda: barrier.size)
        adders = min(sizes)
        super().__init__(consensus, barrier, adders)
        self._direct = MpiTransport(consensus)
        # In which nodes send; None for the arrays' dtype
        self._wire: np.dtype[Any] | None = None
        # Ranks with the same number in their nodes form one communicator across nodes.
        color = barrier.rank if barrier.rank < adders else MPI.UNDEFINED
        with Pending("making a communicator", consensus.comm):
            like = consensus.comm.Split(color, consensus.rank)
        # COMM_NULL on ranks beyond the smallest node's size: they do not add.
        self._inter_node_comm = cast(MPI.Intracomm, like)
        if self._inter_node_comm != MPI.COMM_NULL:
            consensus.failures.add(self._inter_node_comm)

    def close(self) -> None:
        """Free the communicator. Collective."""
        if self._inter_node_comm != MPI.COMM_NULL:
            self._consensus.failures.free(self._inter_node_comm)

    def allreduce(
        self,
        sends: Sequence[Any],
        receive: Any,
        deadline: float | None,
        wire: np.dtype[Any] | None = None,
    ) -> None:
        """See `Transport.allreduce`; narrow between nodes only."""
        self._wire = wire  # for `_add_other_nodes`, in the loop of the base class
        try:
            super().allreduce(sends, receive, deadline)
        finally:
            self._wire = None

    def _add_other_nodes(self, total: Any) -> Any:
        # Many nodes: MPI's log(n) algorithm sends fewer messages than one to each node.
        if self._wire is None and self._inter_node_comm.Get_size() > self.most_nodes:
            return WholeSum(self._inter_node_comm, total)
        return BlockSum(self._inter_node_comm, total, total, self._wire or total.dtype)

    def _finish_other_nodes(self, begun: Any, deadline: float | None) -> None:
        wait = functools.partial(
            self._consensus.wait, deadline=deadline, operation="all_reduce"
        )
        # Requests of all blocks are waited for in the same order on all ranks.
        begun.share(wait)
        begun.end(wait)

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        self._direct.allgatherv(send, receive, counts, deadline)

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        self._direct.broadcast(buffer, root, deadline)
