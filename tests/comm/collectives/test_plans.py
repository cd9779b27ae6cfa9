"""Calls of a kind that was seen before: other lengths, other values, other faults."""

import numpy as np
import pytest

import mpidist


@pytest.fixture
def rank(strategy):
    return strategy.extended.replica_id


@pytest.fixture
def size(strategy):
    return strategy.num_replicas_in_sync


def in_replica(strategy, fn):
    """Return what `fn(replica context)` returns on this replica."""
    result = strategy.run(lambda: (fn(mpidist.get_replica_context()),))
    (local,) = strategy.experimental_local_results(result[0])
    return local


def test_results_are_not_changed_by_later_calls(strategy, rank, size):
    def collect(context):
        kept = []
        for i in range(5):
            kept.append(
                (
                    context.all_gather(np.array([rank, i]), 0),
                    context.all_reduce("SUM", np.array([1.0, i])),
                    context.reduce_scatter("SUM", np.full(2 * size, float(i))),
                    context.all_to_all(np.full(size, 10 * i + rank)),
                )
            )
        return kept

    for i, (gathered, total, part, exchanged) in enumerate(
        in_replica(strategy, collect)
    ):
        expected = np.array([[r, i] for r in range(size)]).reshape(-1)
        np.testing.assert_array_equal(gathered, expected)
        np.testing.assert_array_equal(total, [size, i * size])
        np.testing.assert_array_equal(part, [i * size, i * size])
        np.testing.assert_array_equal(exchanged, 10 * i + np.arange(size))


def test_components_of_any_structure_are_reduced(strategy, size):
    def make(first):
        return strategy.run(lambda: first)

    for _ in range(2):
        total = strategy.reduce("SUM", [make(1.5), make(np.ones(2))])
        np.testing.assert_array_equal(total[0], 1.5 * size)
        np.testing.assert_array_equal(total[1], [size, size])
        nested = mpidist.PerReplica(({"a": np.ones(2)},))
        found = strategy.reduce("SUM", nested)
        np.testing.assert_array_equal(found["a"], [size, size])
        found = strategy.reduce("SUM", {"x": make(np.float32(2)), "y": make(1.0)})
        assert (found["x"], found["y"]) == (2 * size, size)


def test_lists_and_tuples_are_kinds_of_their_own(strategy, size):
    for kind in (list, tuple, list):
        value = kind([np.ones(2), np.ones(3)])
        assert type(strategy.reduce("SUM", value)) is kind
        assert type(strategy.reduce("SUM", value, axis=0)) is kind
        assert type(strategy.gather(value, 0)) is kind


@pytest.mark.mpi(min_size=2)
def test_what_fails_on_one_rank_in_a_repeated_call_fails_on_all(strategy, rank):
    class Unreadable(dict):
        def __getitem__(self, key):
            raise RuntimeError("cannot be read")

    for _ in range(2):
        strategy.gather({"a": np.ones(2)}, 0)
        with pytest.raises(RuntimeError, match="cannot be read"):
            strategy.gather((Unreadable if rank else dict)(a=np.ones(2)), 0)
