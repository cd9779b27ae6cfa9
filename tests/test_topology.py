"""Which ranks share a node, and what a strategy does over several."""

from __future__ import annotations

import numpy as np
import pytest

import mpidist


@pytest.fixture(params=[1, 2, 3])
def strategy_of_nodes(comm, monkeypatch, request):
    """A strategy for which so many ranks make a node."""
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", str(request.param))
    strategy = mpidist.MirroredStrategy(communicator=comm)
    node = strategy.extended.topology.node
    assert node.size == min(request.param, comm.size - comm.rank + node.rank)
    yield strategy
    strategy.experimental_finalize()


@pytest.mark.parametrize("count", [1, 1000, 200_000])
def test_collectives_over_several_nodes(comm, strategy_of_nodes, count):
    strategy = strategy_of_nodes
    values = [np.arange(count) % 5 + rank for rank in range(comm.size)]
    total = strategy.reduce("SUM", values[comm.rank])
    assert np.array_equal(total, np.sum(values, axis=0))
    gathered = strategy.gather(values[comm.rank][comm.rank :], axis=0)
    parts = [value[rank:] for rank, value in enumerate(values)]
    assert np.array_equal(gathered, np.concatenate(parts))


def test_hierarchical_reductions_over_several_nodes(comm, monkeypatch):
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "2")
    ops = mpidist.HierarchicalCopyAllReduce()
    strategy = mpidist.MirroredStrategy(cross_device_ops=ops, communicator=comm)
    for count in (0, 1, 300_000):
        values = [np.arange(count) % 7 + rank for rank in range(comm.size)]
        total = strategy.reduce("SUM", values[comm.rank])
        assert np.array_equal(total, np.sum(values, axis=0))
    strategy.experimental_finalize()


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_a_bad_number_of_ranks_per_node_is_refused_on_all(comm, monkeypatch, text):
    if comm.rank == comm.size - 1:
        monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", text)
    with pytest.raises(mpidist.LaunchError, match="RANKS_PER_NODE must be a positive"):
        mpidist.MirroredStrategy(communicator=comm)
