"""MIN, MAX, PRODUCT, exchanges, broadcasts and sparse rows of arrays on GPUs."""

import functools

import numpy as np
import pytest

import mpidist
from mpidist import CommunicationOptions, IndexedSlices
from mpidist.device.binding import gpu_count

pytestmark = pytest.mark.gpu
if gpu_count():
    import cupy
else:
    pytest.skip("needs a GPU and CuPy", allow_module_level=True)

UFUNCS = {"MIN": np.minimum, "MAX": np.maximum, "PRODUCT": np.multiply}
OPTIONS = {
    "default": None,
    "MPI": CommunicationOptions(implementation="MPI"),
    "deadline": CommunicationOptions(timeout_seconds=60),
}
# What travels along with the comparison of calls, and what does not
COUNTS = [0, 5, 70_000]


@pytest.fixture
def strategy(comm):
    strategy = mpidist.MirroredStrategy(communicator=comm, allow_shared_gpu=True)
    yield strategy
    strategy.experimental_finalize()


def local(strategy, fn):
    return strategy.experimental_local_results(strategy.run(fn))[0]


def context():
    return mpidist.get_replica_context()


def part(rank, shape, dtype="f4"):
    numbers = np.random.default_rng([5, rank]).integers(1, 3, shape)
    return np.asarray(numbers).astype(dtype)


def require_equal(result, expected):
    assert isinstance(result, cupy.ndarray)
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(result.get(), expected)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", ["i4", "f4", "f8", "f2"])
@pytest.mark.parametrize("op", UFUNCS)
def test_reductions_that_do_not_add(comm, strategy, op, dtype, options):
    for count in COUNTS:
        everyone = [part(rank, count, dtype) for rank in range(comm.size)]
        mine = cupy.asarray(everyone[comm.rank])
        found = local(
            strategy,
            lambda mine=mine: context().all_reduce(op, mine, OPTIONS[options]),
        )
        require_equal(found, functools.reduce(UFUNCS[op], everyone))
        assert np.array_equal(mine.get(), everyone[comm.rank])


@pytest.mark.parametrize("op", UFUNCS)
def test_over_an_axis(comm, strategy, op):
    everyone = [part(rank, (rank + 1, 3), "i8") for rank in range(comm.size)]
    found = strategy.reduce(op, cupy.asarray(everyone[comm.rank]), axis=0)
    require_equal(found, UFUNCS[op].reduce(np.concatenate(everyone), axis=0))


def test_products_that_do_not_fit(strategy):
    value = cupy.full(70_000, 1 << 40)
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(mpidist.ArgumentError, match="does not fit int64"):
            strategy.reduce("PRODUCT", value)
    with pytest.raises(mpidist.ArgumentError, match="does not fit int64"):
        strategy.reduce("PRODUCT", value[:2], axis=0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("count", [3, 40_000])
def test_exchanges(comm, strategy, count, options):
    everyone = [part(rank, (count, 2)) for rank in range(comm.size)]
    mine = cupy.asarray(everyone[comm.rank])
    step = -(-count // comm.size)
    own = slice(comm.rank * step, (comm.rank + 1) * step)

    def exchange():
        options_ = OPTIONS[options]
        there = context().all_to_all(mine, options=options_)
        return there, context().reduce_scatter("SUM", mine, options=options_)

    there, total = local(strategy, exchange)
    require_equal(there, np.concatenate([a[own] for a in everyone]))
    require_equal(total, sum(everyone)[own])


def test_broadcast_and_objects(comm, strategy):
    value = {"w": cupy.arange(50_000.0), "n": 3, "host": np.ones(2)}
    for root in range(comm.size):
        found = strategy.broadcast(value if comm.rank == root else None, root)
        require_equal(found["w"], np.arange(50_000.0))
        assert found["n"] == 3
        assert isinstance(found["host"], np.ndarray)
    found = strategy.gather_objects([comm.rank, cupy.full(2, comm.rank)])
    assert [rank for rank, _ in found] == list(range(comm.size))
    assert [array.tolist() for _, array in found] == [[r, r] for r in range(comm.size)]


def test_sparse_rows(comm, strategy):
    rows = [part(rank, (rank + 1, 2)) for rank in range(comm.size)]
    mine = IndexedSlices(
        cupy.asarray(rows[comm.rank]), cupy.arange(comm.rank + 1), (9, 2)
    )
    found = strategy.reduce("SUM", mine)
    require_equal(found.values, np.concatenate(rows))
    expected = np.concatenate([np.arange(rank + 1) for rank in range(comm.size)])
    require_equal(found.indices, expected)


def test_calls_of_a_known_kind(comm, strategy):
    """Lengths and values change, arrays on the host come between."""
    for length in (3, 0, 5, 30_000, 2):
        everyone = [part(rank, (length + rank, 2)) for rank in range(comm.size)]
        rows = np.concatenate(everyone)
        value = strategy.experimental_distribute_values_from_function(
            lambda _, mine=everyone[comm.rank]: cupy.asarray(mine)
        )
        require_equal(strategy.gather(value, 0), rows)
        total = strategy.reduce("SUM", value, axis=0)
        np.testing.assert_allclose(total.get(), rows.sum(axis=0), rtol=1e-6)
        found = strategy.gather([value, everyone[comm.rank]], 0)
        require_equal(found[0], rows)
        assert isinstance(found[1], np.ndarray)
        np.testing.assert_array_equal(found[1], rows)
        scalar = mpidist.PerReplica((cupy.asarray(1.5),), (comm.rank,))
        assert strategy.reduce("SUM", scalar).get() == 1.5 * comm.size
