"""Barriers in memory that the ranks of a communicator share."""

from mpidist.comm.consensus.barrier import NodeBarrier
from mpidist.comm.shared_memory import node


def make_node_barrier(comm, page_bytes, slot_bytes=0, names=None):
    """Return a barrier for ranks of one node. Collective."""
    size = NodeBarrier.count_bytes(comm.size, page_bytes, slot_bytes)
    memory, error = node._map_together(comm, size, lambda where, free: None, False)
    assert error is None
    return NodeBarrier(comm, memory, page_bytes, slot_bytes, names)
