"""Reductions of IndexedSlices: rows of all replicas, one behind the other."""

from dataclasses import replace

import numpy as np
import pytest
from collective_calls import in_replica

import mpidist
from mpidist import IndexedSlices

# How many rows each replica has
COUNTS = [2, 0, 3, 1]


def rows_of(rank, dtype="f4"):
    count = COUNTS[rank]
    values = (10 * rank + np.arange(2 * count).reshape(count, 2)).astype(dtype)
    return IndexedSlices(values, np.arange(count) + rank, (9, 2))


def check(found, ranks, divisor=1, dtype="f4"):
    everyone = [rows_of(rank, dtype) for rank in range(ranks)]
    assert isinstance(found, IndexedSlices)
    expected = np.concatenate([s.values for s in everyone])
    assert np.array_equal(found.values, expected / divisor)
    assert np.array_equal(found.indices, np.concatenate([s.indices for s in everyone]))
    assert found.dense_shape == (9, 2)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_reduce_and_all_reduce(strategy, comm, op):
    divisor = comm.size if op == "MEAN" else 1
    for _ in range(2):
        check(strategy.reduce(op, rows_of(comm.rank)), comm.size, divisor)
        check(
            in_replica(strategy, "all_reduce", op, rows_of(comm.rank)),
            comm.size,
            divisor,
        )


def test_what_run_returns(strategy, comm):
    check(strategy.reduce("SUM", strategy.run(lambda: rows_of(comm.rank))), comm.size)


def test_in_a_nest_with_arrays(strategy, comm):
    value = {"table": rows_of(comm.rank), "w": np.ones(3), "more": [rows_of(0), 1.5]}
    found = in_replica(strategy, "all_reduce", "SUM", value)
    check(found["table"], comm.size)
    assert np.array_equal(found["w"], np.full(3, comm.size))
    assert found["more"][0].values.shape == (2 * comm.size, 2)
    assert found["more"][1] == 1.5 * comm.size


def test_batch_reduce(strategy, comm):
    ops = strategy.extended.cross_device_ops
    pairs = [(rows_of(comm.rank), "CPU:0"), (np.ones(2), "CPU:0")]
    slices, array = ops.batch_reduce("SUM", pairs)
    check(slices.values[0], comm.size)
    assert np.array_equal(array, np.full(2, comm.size))
    check(
        ops.reduce("MEAN", rows_of(comm.rank), "CPU:0").values[0], comm.size, comm.size
    )
    pairs = [(rows_of(comm.rank), "CPU:0")]
    found = strategy.extended.batch_reduce_to("SUM", pairs)[0]
    check(found.values[0], comm.size)


def test_they_are_added_to_a_table(strategy, comm):
    with strategy.scope():
        table = mpidist.Variable(np.zeros((9, 2)))
    total = strategy.reduce("SUM", rows_of(comm.rank, "f8"))
    table.scatter_add(total)
    expected = np.zeros((9, 2))
    for rank in range(comm.size):
        np.add.at(expected, rows_of(rank).indices, rows_of(rank, "f8").values)
    assert np.array_equal(table.numpy(), expected)


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        (
            IndexedSlices(np.ones((2, 2)), np.zeros(3, int)),
            ValueError,
            "3 indices .* 2",
        ),
        (IndexedSlices(np.ones((2, 2)), np.zeros(2)), TypeError, "indices .* float64"),
        (IndexedSlices(1.0, np.zeros(1, int)), ValueError, "values .* dimension"),
        (
            IndexedSlices("x", np.zeros(1, int)),
            TypeError,
            "values of IndexedSlices must be",
        ),
        (
            IndexedSlices(np.ones((1, 3)), np.zeros(1, int)),
            ValueError,
            "replicas|ranks",
        ),
    ],
)
def test_bad_slices_are_an_error_on_all(strategy, comm, bad, kind, message):
    good = IndexedSlices(np.ones((2, 2)), np.zeros(2, int))
    if comm.size == 1 and "ranks" in message:
        pytest.skip("needs two ranks")
    with pytest.raises(kind, match=message if "ranks" not in message else None):
        strategy.reduce("SUM", bad if comm.rank == comm.size - 1 else good)
    assert strategy.reduce("SUM", good).values.shape == (2 * comm.size, 2)


@pytest.mark.mpi(min_size=2)
def test_another_kind_on_one_rank_is_an_error_on_all(strategy, comm):
    with pytest.raises(mpidist.CollectiveError, match="IndexedSlices"):
        strategy.reduce("SUM", rows_of(0) if comm.rank else np.ones((9, 2)))


def test_they_have_no_extremes(strategy):
    with pytest.raises(mpidist.ArgumentError, match=r"IndexedSlices .* MAX"):
        strategy.reduce("MAX", rows_of(0))


@pytest.mark.parametrize("shape", [(9, 2), [9, 2], np.array([9, 2]), None])
def test_dense_shapes_as_tensorflow_has_them(strategy, comm, shape):
    rows = replace(rows_of(comm.rank), dense_shape=shape)
    for _ in range(2):
        found = in_replica(strategy, "all_reduce", "SUM", rows)
        assert np.array_equal(found.dense_shape, shape)
        check(replace(found, dense_shape=(9, 2)), comm.size)


@pytest.mark.parametrize("shape", ["text", [9.5], [[9]], 5])
def test_a_bad_dense_shape_of_one_rank_is_an_error_on_all(strategy, comm, shape):
    rows = rows_of(comm.rank)
    if comm.rank == comm.size - 1:
        rows = replace(rows, dense_shape=shape)
    with pytest.raises(mpidist.MpidistError):
        in_replica(strategy, "all_reduce", "SUM", rows)
    assert strategy.reduce("SUM", 1.0) == comm.size
