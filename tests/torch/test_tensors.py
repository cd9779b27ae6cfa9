"""Tensors go in and come out of what takes arrays."""

from __future__ import annotations

import numpy as np
import pytest

import mpidist

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_symmetric_tensors_are_reduced_where_they_lie(strategy, dtype):
    dtype = getattr(torch, dtype)
    like = {"w": torch.ones(3, 2, dtype=dtype), "b": np.zeros(2)}
    given = strategy.symmetric_like(like)
    assert isinstance(given["w"], torch.Tensor)
    assert type(given["b"]) is np.ndarray
    assert given["w"].dtype == dtype
    assert given["w"].shape == (3, 2)
    group = strategy.extended
    if group.num_replicas > 1 and dtype == torch.float32:
        assert group.symmetric_memory.place_of([given["w"].numpy()])
        assert group.symmetric_memory.place_of([given["w"][1:].numpy()])
    for step in range(3):
        given["w"].fill_(step + 1)
        given["b"][...] = step
        total = strategy.reduce("SUM", given)
        assert isinstance(total["w"], torch.Tensor)
        ranks = strategy.num_replicas_in_sync
        assert (total["w"] == ranks * (step + 1)).all()
        assert (total["b"] == ranks * step).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buckets_of_tensors_give_tensors(strategy, dtype):
    dtype = getattr(torch, dtype)
    like = {"w": torch.zeros(1000, 30, dtype=dtype), "b": np.zeros(2)}
    buckets = strategy.gradient_buckets(like, "MEAN")
    for step in range(2):
        with buckets:
            buckets.put("b", np.full(2, 3.0))
            buckets.put("w", torch.full((1000, 30), step + 1.0, dtype=dtype))
        assert isinstance(buckets.result["w"], torch.Tensor)
        assert buckets.result["w"].dtype == dtype
        assert (buckets.result["w"] == step + 1).all()
        assert type(buckets.result["b"]) is np.ndarray
    buckets.close()


def test_gathered_tensors(strategy):
    rank, ranks = strategy.extended.replica_id, strategy.num_replicas_in_sync
    rows = torch.full((rank, 2), rank, dtype=torch.bfloat16)
    got = strategy.gather((rows, torch.tensor([rank])), axis=0)
    assert got[0].dtype == torch.bfloat16
    assert got[0].shape == (sum(range(ranks)), 2)
    assert got[1].tolist() == list(range(ranks))


def test_a_replica_function_gets_and_returns_tensors(strategy):
    def step(x):
        context = mpidist.get_replica_context()
        return context.all_reduce("MEAN", [x, x.sum()])

    mean, total = strategy.run(step, (torch.ones(3),))
    assert torch.equal(strategy.experimental_local_results(mean)[0], torch.ones(3))
    assert strategy.experimental_local_results(total)[0] == 3
