"""strategy.reduce and ReplicaContext.all_reduce; what is usual the model draws."""

import functools

import ml_dtypes
import numpy as np
import pytest
from collective_calls import in_replica

import mpidist
from mpidist import CommunicationOptions
from mpidist.comm.transports.mpi import MpiTransport

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
FLOATS = ["f2", BFLOAT16, "f4", "f8", "g", "c8", "c16"]


def part(rank, shape, dtype="f8", seed=0):
    """What replica `rank` contributes: small whole numbers, so that sums are exact."""
    numbers = np.random.default_rng([seed, rank]).integers(0, 5, shape)
    unit = 1 + 2j if np.dtype(dtype).kind == "c" else 1
    return np.asarray(numbers * unit).astype(dtype)


def parts(strategy, shape, dtype="f8", seed=0):
    n = strategy.num_replicas_in_sync
    return [part(r, shape, dtype, seed) for r in range(n)]


@pytest.fixture(params=["reduce", "all_reduce"])
def reduce(request, strategy):
    """Each of the two calls that combine elementwise, as `reduce(op, value)`."""
    if request.param == "reduce":
        return strategy.reduce
    return functools.partial(in_replica, strategy, "all_reduce")


def check(result, expected):
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    assert result.dtype.isnative
    assert np.array_equal(result, expected)


def test_mean_of_python_integers_is_a_float(reduce, strategy):
    mean = reduce("MEAN", strategy.extended.replica_id)
    assert (type(mean), mean) == (float, (strategy.num_replicas_in_sync - 1) / 2)


def test_reduce_takes_distributed_values(strategy):
    value = strategy.experimental_distribute_values_from_function(
        lambda context: {"id": np.full(2, context.replica_id_in_sync_group)}
    )
    value["one"] = strategy.run(lambda: [1, 1])
    n = strategy.num_replicas_in_sync
    result = strategy.reduce("SUM", value)
    check(result["id"], np.full(2, n * (n - 1) // 2))
    assert result["one"] == [n, n]
    assert strategy.reduce("SUM", value["id"], axis=0) == n * (n - 1)


@pytest.mark.parametrize("dtype", ["f2", BFLOAT16, "f4"])
def test_sums_over_an_axis_are_formed_in_double_precision(strategy, dtype):
    value = np.ones(3001, dtype)
    value[0] = 2.0 ** (25 if dtype == "f4" else 9)
    exact = value.astype("f8").sum() * strategy.num_replicas_in_sync
    assert strategy.reduce("SUM", value, axis=0) == exact.astype(dtype)


def test_mean_over_an_axis_is_no_mean_of_means(strategy):
    n, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    expected = np.repeat(np.arange(n), np.arange(1, n + 1)).mean()
    assert strategy.reduce("MEAN", np.full(rank + 1, rank), axis=0) == expected


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4"])
def test_a_sum_over_an_axis_that_does_not_fit_is_an_error(strategy, dtype):
    most, rank = np.iinfo(dtype).max, strategy.extended.replica_id
    total = strategy.num_replicas_in_sync * 2 * most
    value = np.array([most, most], dtype)
    with pytest.raises(mpidist.ArgumentError) as info:
        strategy.reduce("SUM", value, axis=0)
    assert f"{total}, which does not fit {np.dtype(dtype).name}" in str(info.value)
    # The limit itself fits, and means always do
    assert strategy.reduce("SUM", value[: int(rank == 0)], axis=0) == most
    assert strategy.reduce("MEAN", value, axis=0) == most
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


@pytest.mark.parametrize("implementation", ["mpi", "auto"])
@pytest.mark.parametrize("count", [3, 300_000])
def test_direct_mpi_can_be_asked_for(strategy, monkeypatch, implementation, count):
    called = []
    allreduce = MpiTransport.allreduce

    def note(self, *args):
        called.append(1)
        allreduce(self, *args)

    monkeypatch.setattr(MpiTransport, "allreduce", note)
    values = parts(strategy, (count,), "f4")
    options = CommunicationOptions(implementation=implementation)
    mine = values[strategy.extended.replica_id]
    result = in_replica(strategy, "all_reduce", "SUM", mine, options)
    check(result, np.sum(values, axis=0))
    topology = strategy.extended.topology
    is_direct = implementation == "mpi"
    if is_direct or topology.is_one_node:
        assert len(called) == (topology.size > 1 and is_direct)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("rows", [2, 100_000])
def test_a_repeated_nest_that_differs_on_one_rank_is_an_error_on_all(
    comm, strategy, rows
):
    good = [np.ones(rows), 1.0]
    for _ in range(2):
        strategy.reduce("SUM", good)
    with pytest.raises(mpidist.MismatchError, match=r"value\[0\]"):
        strategy.reduce("SUM", [np.ones(rows + 1), 1.0] if comm.rank == 0 else good)
    with pytest.raises(mpidist.MismatchError, match="reduce_op"):
        strategy.reduce("MEAN" if comm.rank == 0 else "SUM", good)
    assert strategy.reduce("SUM", good)[1] == comm.size


@pytest.mark.parametrize("bad", [["SUM"], {}, np.array(["SUM"])])
def test_an_operation_that_is_no_name_is_refused_on_all(comm, strategy, bad):
    value = np.ones(3)
    for _ in range(2):
        assert strategy.reduce("SUM", value).tolist() == [comm.size] * 3
        with pytest.raises(mpidist.ArgumentTypeError, match="reduce_op must be"):
            strategy.reduce(bad if comm.rank == 0 else "SUM", value)


@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_64_bit_integers_over_an_axis_whose_sum_does_not_fit(strategy, dtype):
    n, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    most = np.iinfo(dtype).max
    value = np.array([[most, 1]] * (rank + 2), dtype)
    rows = np.concatenate([np.array([[most, 1]] * (r + 2), dtype) for r in range(n)])
    mean = strategy.reduce("MEAN", value, axis=0)
    np.testing.assert_allclose(mean, rows.mean(axis=0), rtol=1e-15)
    assert (mean.dtype, mean.shape) == (np.float64, (2,))
    total = f"{most * len(rows)} in element (0,), which does not fit {rows.dtype}"
    with pytest.raises(mpidist.ArgumentError) as info:
        strategy.reduce("SUM", {"a": value, "b": 1.5 * value}, axis=0)
    assert f"the sum of value['a'] is {total}" in str(info.value)
    # Partial sums may overflow where the sum of all fits
    value = np.array([most, 1] if rank == 0 else [0], dtype)
    if dtype == "i8":
        value[-1] = -1 if rank == n - 1 else 0
        assert strategy.reduce("SUM", value, axis=0) == most - 1
    assert strategy.reduce("SUM", value[: int(rank == 0)], axis=0) == most


def reduce_packed(strategy, op, value):
    """Reduce an array that is packed with others."""
    nest = {"f": np.ones(3), "v": value, "w": value[:1] * 0}
    return strategy.reduce(op, nest)["v"]


def reduce_in_buckets(strategy, op, value):
    buckets = strategy.gradient_buckets([value], op)
    try:
        with buckets:
            buckets.put(0, value)
        return buckets.result[0]
    finally:
        buckets.close()


def reduce_symmetric(strategy, op, value):
    own = strategy.symmetric_like(value)
    own[...] = value
    return strategy.reduce(op, own)


def reduce_on_read(strategy, op, value):
    """Read an ON_READ variable."""
    with strategy.scope():
        w = mpidist.Variable(
            np.zeros_like(value, "f8" if op == "MEAN" else None),
            synchronization=mpidist.VariableSynchronization.ON_READ,
            aggregation=mpidist.VariableAggregation[op],
        )
    strategy.run(lambda: w.assign(value))
    return w.value()


BY_MPI = CommunicationOptions(implementation="MPI")
WAYS = {
    "reduce": lambda s, op, value: s.reduce(op, value),
    "by MPI": lambda s, op, value: in_replica(s, "all_reduce", op, value, BY_MPI),
    "packed": reduce_packed,
    "symmetric": reduce_symmetric,
    "in buckets": reduce_in_buckets,
    "on read": reduce_on_read,
}


OVERFLOWS = [(way, dtype) for way in WAYS for dtype in ("i8", "i1")]
OVERFLOWS += [("reduce", "u8"), ("reduce", "u4"), ("by MPI", "u1"), ("by MPI", "i2")]


@pytest.mark.parametrize(("way", "dtype"), OVERFLOWS)
@pytest.mark.parametrize("count", [3, 100_000])
def test_a_sum_of_integers_that_does_not_fit_is_an_error(strategy, dtype, count, way):
    limits, rank = np.iinfo(dtype), strategy.extended.replica_id
    n, last = strategy.num_replicas_in_sync, strategy.num_replicas_in_sync - 1
    value, expected = np.zeros(count, dtype), np.zeros(count, dtype)
    reduce = functools.partial(WAYS[way], strategy)
    # The limit itself fits
    value[-1] = limits.max - last if rank == 0 else 1
    expected[-1] = limits.max
    for _ in range(3):
        check(reduce("SUM", value), expected)
    # Means do, too
    value[-1] = limits.max
    mean = reduce("MEAN", value)
    np.testing.assert_allclose(mean[-1], float(limits.max), rtol=1e-15)
    if n == 1:
        return
    value[-1] = limits.max - last + 1 if rank == 0 else 1
    place = rf"is {limits.max + 1} in element \({count - 1},\), which does not fit"
    for _ in range(2):
        with pytest.raises(mpidist.ArgumentError, match=place):
            reduce("SUM", value)
    if limits.min < 0:
        value[-1] = limits.min
        with pytest.raises(mpidist.ArgumentError, match=f"is {limits.min * n} in"):
            reduce("SUM", value)
    if limits.min < 0 and n > 2:  # partial sums do not fit, that of all does
        value[-1] = limits.max if rank < 2 else -limits.max * (rank == last)
        check(reduce("SUM", value), expected)
    assert strategy.reduce("SUM", 1) == n


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("number", [2**62 + 2**61, np.int8(100), np.uint64(2**63)])
def test_a_sum_of_integer_numbers_that_does_not_fit_is_an_error(strategy, number):
    with pytest.raises(mpidist.ArgumentError, match=r"is \d+, which does not fit"):
        strategy.reduce("SUM", number)


def test_an_accumulation_function_gets_no_other_arrays(make_strategy):
    shapes = []

    def accumulate(values):
        shapes.append(values[0].shape)
        return np.max(values, axis=0)

    ops = mpidist.ReductionToOneDevice(accumulation_fn=accumulate)
    strategy = make_strategy(cross_device_ops=ops)
    value = np.full(3, np.iinfo("i8").max)
    check(strategy.reduce("SUM", value), value)
    assert set(shapes) <= {(3,)}


def test_a_nest_that_one_rank_cannot_read_is_an_error_on_all(strategy, comm):
    class Unread(dict):
        def __iter__(self):
            if comm.rank == 0:
                raise OSError("no keys")
            return super().__iter__()

    with pytest.raises(OSError, match="no keys"):
        strategy.reduce("SUM", Unread(a=1.0))
    assert strategy.reduce("SUM", 1.0) == comm.size


def test_python_integers_again_and_again(strategy, comm):
    """Also those beyond 64 bits, which have another dtype, in between."""
    ranks = comm.size
    for number in (5, -3, 5, 1 << 63, 7, 1 << 70, 0):
        value = {"x": np.ones(3), "rows": number}
        if number < 1 << 63 or (number < 1 << 64 and ranks == 1):
            found = strategy.reduce("SUM", value)
            assert (found["rows"], type(found["rows"])) == (ranks * number, int)
        else:
            with pytest.raises(mpidist.MpidistError):
                strategy.reduce("SUM", value)
    assert strategy.reduce("MEAN", comm.rank) == (ranks - 1) / 2
    assert strategy.reduce("MAX", -comm.rank) == 0


def test_a_product_over_an_axis_that_does_not_fit(strategy):
    rows = np.full((70, 2), 2)
    rows[:, 1] = 1
    with pytest.raises(mpidist.ArgumentError, match=r"the product of value is .* fit"):
        strategy.reduce("PRODUCT", rows, axis=0)
    rows[3] = 0
    assert strategy.reduce("PRODUCT", rows, axis=0).tolist() == [0, 0]
    with pytest.raises(mpidist.ArgumentError, match="the product of value is"):
        strategy.reduce("PRODUCT", np.full((2, 9), 5, "i1"), axis=1)


@pytest.mark.mpi(min_size=2)
def test_another_operation_elsewhere_is_an_error_on_all(strategy, comm):
    with pytest.raises(mpidist.MismatchError, match="reduce_op is MAX on rank 0"):
        strategy.reduce("MAX" if comm.rank == 0 else "MIN", 1.0)


def test_an_accumulation_function_is_for_sums(make_strategy):
    ops = mpidist.ReductionToOneDevice(accumulation_fn=lambda arrays: arrays[0])
    strategy = make_strategy(cross_device_ops=ops)
    with pytest.raises(mpidist.ArgumentError, match="accumulation_fn"):
        strategy.reduce("MAX", 1.0)


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
def test_results_have_the_leaves_types_and_memory_of_their_own(strategy, op):
    value = {
        "z": np.ones((2, 3)),
        "turned": np.ones((3, 2)).T,
        "count": 3,
        "loss": 2.0,
        "scale": np.float32(0.5),
        "wide": np.ones((), "f4"),
        "half": np.ones(3, "f2"),
    }
    times = strategy.num_replicas_in_sync if op == "SUM" else 1
    for _ in range(3):  # the first makes a plan
        result = strategy.reduce(op, value)
        assert list(result) == list(value)
        for name, leaf in value.items():
            expected = float if op == "MEAN" and name == "count" else type(leaf)
            assert type(result[name]) is expected
            np.testing.assert_array_equal(result[name], times * leaf)
            if isinstance(leaf, np.ndarray):
                assert result[name].dtype == leaf.dtype
                assert not np.shares_memory(result[name], leaf)
                result[name][...] = 7  # can be written to, and is nobody else's
