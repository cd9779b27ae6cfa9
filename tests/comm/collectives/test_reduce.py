"""strategy.reduce and ReplicaContext.all_reduce, with NumPy as the oracle."""

import functools

import ml_dtypes
import numpy as np
import pytest
from collective_calls import LAYOUTS, Batch, Pair, check_nest, in_replica, lay_out

import mpidist
from mpidist import CommunicationOptions, ReduceOp
from mpidist.comm.transports.mpi import MpiTransport

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
FLOATS = ["f2", BFLOAT16, "f4", "f8", "g", "c8", "c16"]
# How long the first summed axis is on each replica: uneven, and empty on one
LENGTHS = [2, 3, 0, 1]


def part(rank, shape, dtype="f8", seed=0):
    """What replica `rank` contributes: small whole numbers, so that sums are exact."""
    numbers = np.random.default_rng([seed, rank]).integers(0, 5, shape)
    unit = 1 + 2j if np.dtype(dtype).kind == "c" else 1
    return np.asarray(numbers * unit).astype(dtype)


def parts(strategy, shape, dtype="f8", seed=0):
    n = strategy.num_replicas_in_sync
    return [part(r, shape, dtype, seed) for r in range(n)]


def uneven_parts(strategy, shape, axis, dtype="f8"):
    """As `parts`, but along `axis` each replica has its own length."""
    n, before, after = strategy.num_replicas_in_sync, shape[:axis], shape[axis:][1:]
    return [part(r, (*before, LENGTHS[r], *after), dtype) for r in range(n)]


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


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_sum_keeps_the_dtype(reduce, strategy, dtype):
    mine = parts(strategy, (3, 4), dtype)
    result = reduce("SUM", mine[strategy.extended.replica_id])
    check(result, functools.reduce(np.add, mine))


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_mean_keeps_floats_and_makes_integers_float64(reduce, strategy, dtype):
    mine = parts(strategy, (3, 4), dtype)
    total = functools.reduce(np.add, mine)
    out = "f8" if dtype in INTEGERS else dtype
    wide = "f4" if dtype in ("f2", BFLOAT16) else out
    expected = total.astype(wide) / strategy.num_replicas_in_sync
    check(reduce("MEAN", mine[strategy.extended.replica_id]), expected.astype(out))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5,), (2, 3, 4)])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_every_shape(reduce, strategy, op, shape):
    mine = parts(strategy, shape)
    expected = np.asarray(getattr(np, op.lower())(mine, axis=0))
    check(reduce(op, mine[strategy.extended.replica_id]), expected)


@pytest.mark.parametrize("shift", range(len(LAYOUTS)))
def test_layouts_may_differ_between_replicas(reduce, strategy, shift):
    mine = parts(strategy, (2, 3, 4))
    rank = strategy.extended.replica_id
    value = lay_out(mine[rank], rank + shift)
    check(reduce("SUM", value), np.sum(mine, axis=0))


def test_arguments_are_neither_changed_nor_returned(reduce, strategy):
    value = part(strategy.extended.replica_id, (4,))
    for op in ReduceOp:
        result = reduce(op, value)
        assert not np.shares_memory(result, value)
    check(value, part(strategy.extended.replica_id, (4,)))


@pytest.mark.parametrize("op", ["sum", "Sum", "SUM", ReduceOp.SUM])
def test_operations_by_name_in_any_case(reduce, strategy, op):
    assert reduce(op, 1) == strategy.num_replicas_in_sync


def test_float16_is_added_up_in_float32(reduce):
    # A sum of two is already infinite in float16
    check(reduce("MEAN", np.full(3, 6e4, "f2")), np.full(3, 6e4, "f2"))


def test_bfloat16_is_added_up_in_float32(reduce, strategy):
    n = strategy.num_replicas_in_sync
    rngs = [np.random.default_rng(r) for r in range(n)]
    mine = [rng.uniform(1, 2, 1000).astype(BFLOAT16) for rng in rngs]
    # Float32 holds these sums exactly, so there is one rounding
    expected = np.sum([x.astype("f8") for x in mine], axis=0).astype(BFLOAT16)
    check(reduce("SUM", mine[strategy.extended.replica_id]), expected)


NUMBERS = [3, 2.5, 1 + 2j, np.float32(3), np.int16(3)]
NUMBERS += [np.float64(2.5), np.complex128(2j)]


@pytest.mark.parametrize("value", NUMBERS)
def test_numbers_give_numbers_of_their_type(reduce, strategy, value):
    total = reduce("SUM", value)
    assert type(total) is type(value)
    assert total == value * strategy.num_replicas_in_sync


def test_mean_of_python_integers_is_a_float(reduce, strategy):
    mean = reduce("MEAN", strategy.extended.replica_id)
    assert (type(mean), mean) == (float, (strategy.num_replicas_in_sync - 1) / 2)


def nest_of(leaf):
    return {
        "list": [leaf(0, "f4"), leaf(1, "f8")],
        "pair": Pair(leaf(2, "i4"), (leaf(3, "f2"),)),
        "batch": Batch(b=leaf(4, "f8"), a=leaf(5, "i4")),
        "empty": (),
    }


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 4, 20, 64, 10**9])
@pytest.mark.parametrize("timeout", [None, 60])
def test_nests_in_packs_of_any_size(strategy, bytes_per_pack, timeout):
    rank = strategy.extended.replica_id
    value = nest_of(lambda i, dtype: part(rank, (i, 3), dtype, seed=i))
    expected = nest_of(
        lambda i, dtype: functools.reduce(np.add, parts(strategy, (i, 3), dtype, i))
    )
    options = CommunicationOptions(bytes_per_pack, timeout_seconds=timeout)
    result = in_replica(strategy, "all_reduce", "SUM", value, options)
    check_nest(result, expected, check)


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


AXES = [((4,), 0), ((4,), -1), ((2, 3), (0, 1)), ((2, 3, 4), [2, -3])]
AXES += [((2, 3), axis) for axis in range(-2, 2)]
AXES += [((2, 3, 4), axis) for axis in [0, 1, 2, -1, -2, -3, (0, 1), (-1, 0), [1, 2]]]


@pytest.mark.parametrize(("shape", "axis"), AXES)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", ["f8", "i4"])
def test_every_axis_with_uneven_lengths(strategy, op, shape, axis, dtype):
    first = axis if isinstance(axis, int) else axis[0]
    mine = uneven_parts(strategy, shape, first, dtype)
    axes = axis if isinstance(axis, int) else tuple(axis)
    expected = getattr(np, op.lower())(np.concatenate(mine, first), axes)
    result = strategy.reduce(op, mine[strategy.extended.replica_id], axis=axis)
    check(result, expected.astype(dtype) if op == "SUM" else expected)


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_every_dtype_over_an_axis(strategy, op, dtype):
    mine = uneven_parts(strategy, (4, 3), 0, dtype)
    rows = np.concatenate(mine)
    wide = rows.astype({"g": "g", "c8": "c16", "c16": "c16"}.get(dtype, "f8"))
    expected = wide.sum(axis=0) / (len(rows) if op == "MEAN" else 1)
    out = "f8" if op == "MEAN" and dtype in INTEGERS else dtype
    result = strategy.reduce(op, mine[strategy.extended.replica_id], axis=0)
    check(result, expected.astype(out))


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


@pytest.mark.parametrize("dtype", ["f4", "i4", BFLOAT16])
def test_an_axis_that_is_empty_on_every_replica(strategy, dtype):
    value = np.empty((0, 2), dtype)
    check(strategy.reduce("SUM", value, axis=0), np.zeros(2, dtype))
    mean = strategy.reduce("MEAN", value, axis=0)
    assert mean.dtype == ("f8" if dtype == "i4" else dtype)
    assert np.isnan(mean.astype("f8")).tolist() == [True, True]


def test_a_nest_over_an_axis(strategy):
    rank = strategy.extended.replica_id
    rows = {"a": uneven_parts(strategy, (4, 2), 0), "b": parts(strategy, (3,), "i8")}
    value = {"a": rows["a"][rank], "b": [rows["b"][rank]]}
    result = strategy.reduce("MEAN", value, axis=0)
    check(result["a"], np.concatenate(rows["a"]).mean(axis=0))
    check(result["b"][0], np.concatenate(rows["b"]).mean(axis=0))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_over_an_axis(strategy, layout, axis):
    mine = parts(strategy, (3, 4))
    value = LAYOUTS[layout](mine[strategy.extended.replica_id])
    expected = np.concatenate(mine, axis).sum(axis=axis)
    check(strategy.reduce("SUM", value, axis=axis), expected)


@pytest.mark.parametrize("mixed", [False, True])
def test_layouts_of_what_is_left_over_an_axis(strategy, mixed):
    rank = strategy.extended.replica_id
    mine = parts(strategy, (2, 3, 4, 5))
    # All rotated, or Fortran order beside C order
    value = np.moveaxis(mine[rank].transpose(2, 1, 3, 0).copy(), [0, 1, 2], [2, 1, 3])
    if mixed:
        mine = parts(strategy, (2, 3, 4))
        value = mine[rank] if rank else np.asfortranarray(mine[rank])
    check(strategy.reduce("SUM", value, axis=0), np.concatenate(mine).sum(axis=0))


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


VIEWS = {
    "as it is": lambda a: a,
    "in Fortran order": np.asfortranarray,
    "backwards": lambda a: a[::-1],
    "every other": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "a scalar": lambda a: a[0, 0],
    "no dimension": lambda a: a[0, 0].reshape(()),
    "no rows": lambda a: a[:0],
    "read only": lambda a: np.broadcast_to(a[0], a.shape),
}


@pytest.mark.parametrize("dtype", ["f4", ">f4", "f2", "i4", ">i8", "c16", BFLOAT16])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("op", ["sum", ReduceOp.MEAN])
@pytest.mark.parametrize("rows", [2, 100_000])
def test_calls_that_are_repeated_do_the_same(strategy, dtype, view, op, rows):
    values = [VIEWS[view](p) for p in parts(strategy, (rows, 3), dtype)]
    mine = values[strategy.extended.replica_id]
    wide = "c16" if np.dtype(dtype).kind == "c" else "f8"
    total = np.sum([np.asarray(v).astype(wide) for v in values], axis=0)
    if op is ReduceOp.MEAN:
        total = total / len(values)
    results = [strategy.reduce(op, mine) for _ in range(3)]
    for result in results:
        assert type(result) is type(results[0])
        assert result.dtype == results[0].dtype
        assert result.dtype.isnative
        assert result.shape == total.shape
        tolerance = {"f2": 1e-3, BFLOAT16: 1e-2}.get(dtype, 1e-6)
        np.testing.assert_allclose(result.astype(wide), total, rtol=tolerance)
    if isinstance(mine, np.ndarray) and mine.ndim:
        before = results[0].copy()
        results[1][...] = 0  # results are new arrays, and not this rank's value
        assert np.array_equal(results[0], before)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("rows", [2, 100_000])
def test_nests_that_are_repeated_do_the_same(strategy, op, rows):
    """Also if values of another kind come in between, or keys in another order."""
    ranks = range(strategy.num_replicas_in_sync)

    def value(rank, step):
        x = np.arange(rows * 3, dtype="f4").reshape(rows, 3) + rank + step
        return {
            "w": [x, x.T[::-1], x[:1].astype("f2")],
            "loss": float(rank + step),
            "scalar": np.float64(rank * step),
            "count": np.int32(rank + 1) if step != 2 else np.int64(rank + 1),
            "integers": np.arange(rows) * rank,
        }

    mean = len(ranks) if op == "MEAN" else 1
    for step in range(4):
        mine = value(strategy.extended.replica_id, step)
        if step == 3:
            mine = dict(reversed(mine.items()))
        found = strategy.reduce(op, mine)
        assert list(found) == list(mine)
        all_values = [value(rank, step) for rank in ranks]
        for name in ("loss", "scalar", "count", "integers"):
            total = np.sum([v[name] for v in all_values], axis=0) / mean
            np.testing.assert_allclose(found[name], total, rtol=1e-6)
        for i, result in enumerate(found["w"]):
            total = np.sum([v["w"][i] for v in all_values], axis=0) / mean
            np.testing.assert_allclose(result, total, rtol=1e-6)
            assert (result.dtype, result.shape) == (total.dtype, total.shape)
        assert type(found["loss"]) is float
        assert type(found["scalar"]) is np.float64
        found["w"][0][...] = 0  # results are new arrays


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


def reduce_in(strategy, options):
    return lambda op, value: in_replica(strategy, "all_reduce", op, value, options)


def reduce_packed(strategy):
    """A reduction of an array that is packed with others, as `reduce(op, value)`."""

    def reduce(op, value):
        nest = {"f": np.ones(3), "v": value, "w": value[:1] * 0}
        return strategy.reduce(op, nest)["v"]

    return reduce


def reduce_in_buckets(strategy):
    """A reduction by gradient buckets, as `reduce(op, value)`."""

    def reduce(op, value):
        buckets = strategy.gradient_buckets([value], op)
        try:
            with buckets:
                buckets.put(0, value)
            return buckets.result[0]
        finally:
            buckets.close()

    return reduce


def reduce_symmetric(strategy):
    """A reduction of a symmetric array, as `reduce(op, value)`."""

    def reduce(op, value):
        own = strategy.symmetric_like(value)
        own[...] = value
        return strategy.reduce(op, own)

    return reduce


def reduce_on_read(strategy):
    """The reading of an ON_READ variable, as `reduce(op, value)`."""

    def reduce(op, value):
        with strategy.scope():
            w = mpidist.Variable(
                np.zeros_like(value, "f8" if op == "MEAN" else None),
                synchronization=mpidist.VariableSynchronization.ON_READ,
                aggregation=mpidist.VariableAggregation[op],
            )
        strategy.run(lambda: w.assign(value))
        return w.value()

    return reduce


BY_MPI = CommunicationOptions(implementation="MPI")
WAYS = {
    "reduce": lambda strategy: strategy.reduce,
    "all_reduce": lambda strategy: reduce_in(strategy, None),
    "by MPI": lambda strategy: reduce_in(strategy, BY_MPI),
    "by MPI, packed": reduce_packed,
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
    reduce = WAYS[way](strategy)
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


@pytest.mark.parametrize("name", ["ReductionToOneDevice", "HierarchicalCopyAllReduce"])
def test_sums_of_integers_by_other_ops_are_checked(comm, name, make_strategy):
    strategy = make_strategy(cross_device_ops=getattr(mpidist, name)())
    value = np.array([np.iinfo("i8").max, 1])
    if comm.size > 1:
        with pytest.raises(mpidist.ArgumentError, match="does not fit int64"):
            strategy.reduce("SUM", value)
    check(strategy.reduce("SUM", value[1:]), np.array([comm.size]))


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
