"""Barriers in memory that the ranks of a communicator share."""

from mpidist.comm.consensus.barrier import NodeBarrier
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.shared_memory.node import map_together


def make_node_barrier(comm, page_bytes, slot_bytes=0, names=None):
    """Return a barrier for ranks of one node. Collective."""
    size = NodeBarrier.count_bytes(comm.size, page_bytes, slot_bytes)
    consensus = Consensus(comm)
    memory = map_together(consensus, "a barrier", comm, size, lambda where, free: None)
    consensus.close()
    return NodeBarrier(comm, memory, page_bytes, slot_bytes, names)
