import pytest

from mpidist.comm.consensus.consensus import Consensus


@pytest.fixture
def consensus(comm):
    """The consensus of a communicator of its own."""
    consensus = Consensus(comm.Dup())
    yield consensus
    consensus.close()
    consensus.comm.Free()
