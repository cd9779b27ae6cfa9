"""MIN, MAX and PRODUCT, with NumPy as the oracle."""

import functools

import ml_dtypes
import numpy as np
import pytest
from collective_calls import in_replica

import mpidist
from mpidist import CommunicationOptions
from mpidist.comm.cross_device_ops import MpiAllReduce

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
UFUNCS = {"MIN": np.minimum, "MAX": np.maximum, "PRODUCT": np.multiply}
DTYPES = ["i1", "u2", "i4", "i8", "u8", "f2", BFLOAT16, "f4", "f8", "g"]
# How long the reduced axis is on each replica: uneven, and empty on one
LENGTHS = [2, 0, 3, 1]
# Below and above what travels along with the comparison of calls
SIZES = [(), (0,), (3, 4), (300, 700)]


def part(rank, shape, dtype="f8"):
    numbers = np.random.default_rng([7, rank]).integers(1, 3, shape)
    return np.asarray(numbers).astype(dtype)


def parts(strategy, shape, dtype="f8"):
    return [part(rank, shape, dtype) for rank in range(strategy.num_replicas_in_sync)]


@pytest.fixture(params=["reduce", "all_reduce"])
def reduce(request, strategy):
    if request.param == "reduce":
        return strategy.reduce
    return functools.partial(in_replica, strategy, "all_reduce")


def check(result, expected):
    expected = np.asarray(expected)
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(result, expected, equal_nan=expected.dtype.kind in "fc")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", UFUNCS)
def test_the_dtype_is_kept(reduce, strategy, op, dtype):
    mine = parts(strategy, (3, 4), dtype)
    result = reduce(op, mine[strategy.extended.replica_id])
    check(result, functools.reduce(UFUNCS[op], mine).astype(dtype))


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("op", UFUNCS)
def test_every_shape(reduce, strategy, op, shape):
    mine = parts(strategy, shape)
    result = reduce(op, mine[strategy.extended.replica_id])
    check(result, functools.reduce(UFUNCS[op], mine))


@pytest.mark.parametrize("size", [3, 200_000])
@pytest.mark.parametrize("op", UFUNCS)
@pytest.mark.parametrize(
    "options",
    [
        None,
        CommunicationOptions(implementation="MPI"),
        CommunicationOptions(reproducible=True),
        CommunicationOptions(bytes_per_pack=1024),
        CommunicationOptions(timeout_seconds=600.0),
    ],
    ids=["default", "MPI", "reproducible", "packs", "timeout"],
)
def test_nests_by_every_way(strategy, comm, op, size, options):
    def value(rank):
        one = part(rank, size)
        return {"a": one, "b": [one.astype("i8")[::2], float(rank + 1)], "c": one[:0]}

    result = in_replica(strategy, "all_reduce", op, value(comm.rank), options)
    everyone = [value(rank) for rank in range(comm.size)]
    combine = functools.partial(functools.reduce, UFUNCS[op])
    check(result["a"], combine([v["a"] for v in everyone]))
    check(result["b"][0], combine([v["b"][0] for v in everyone]))
    check(np.asarray(result["b"][1]), combine([v["b"][1] for v in everyone]))
    check(result["c"], np.empty(0))


@pytest.mark.parametrize("size", [4, 200_000])
@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_what_is_not_a_number_stays(reduce, comm, op, size):
    def value(rank):
        a = np.full(size, float(rank))
        a[rank % 4] = np.nan
        a[3] = -0.0 if rank else np.inf
        return a

    expected = functools.reduce(UFUNCS[op], map(value, range(comm.size)))
    check(reduce(op, value(comm.rank)), expected)


@pytest.mark.parametrize("op", UFUNCS)
def test_repeated_calls(reduce, comm, op):
    for step in range(4):
        result = reduce(op, np.array([comm.rank + step + 1.0, -1.0]))
        each = [np.array([rank + step + 1.0, -1.0]) for rank in range(comm.size)]
        check(result, functools.reduce(UFUNCS[op], each))


@pytest.mark.parametrize("size", [3, 200_000])
@pytest.mark.parametrize("dtype", ["i1", "u2", "i4", "u8", "i8"])
def test_a_product_that_does_not_fit(reduce, comm, strategy, dtype, size):
    value = np.ones(size, dtype)
    value[1] = np.iinfo(dtype).max
    if comm.rank:
        value[1] = 2 if comm.rank == 1 else 1
    if comm.size == 1:
        check(reduce("PRODUCT", value), value)
        return
    exact = int(np.iinfo(dtype).max) * 2
    with pytest.raises(mpidist.ArgumentError, match=rf"product .* \(1,\)|{exact}"):
        reduce("PRODUCT", value)
    check(reduce("PRODUCT", np.ones(2, dtype)), np.ones(2, dtype))


@pytest.mark.parametrize("axis", [0, 1, -1, (0, 1)])
@pytest.mark.parametrize("dtype", ["i4", "i8", "f4", "f8", "f2"])
@pytest.mark.parametrize("op", UFUNCS)
def test_over_an_axis(strategy, comm, op, dtype, axis):
    along = axis if isinstance(axis, int) else 0

    def value(rank):
        shape = [3, 4]
        shape[along] = LENGTHS[rank]
        return part(rank, shape, dtype)

    result = strategy.reduce(op, value(comm.rank), axis=axis)
    everyone = np.concatenate([value(r) for r in range(comm.size)], axis=along)
    check(result, UFUNCS[op].reduce(everyone, axis=axis, dtype=dtype))


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_nothing_has_no_extreme(strategy, op):
    with pytest.raises(mpidist.ArgumentError, match=f"{op} of value.* no elements"):
        strategy.reduce(op, np.zeros((0, 3)), axis=0)
    check(strategy.reduce(op, np.zeros((0, 0)), axis=0), np.zeros(0))


def test_the_product_of_nothing_is_one(strategy):
    check(strategy.reduce("PRODUCT", np.zeros((0, 3)), axis=0), np.ones(3))


def test_a_product_over_an_axis_that_does_not_fit(strategy):
    rows = np.full((70, 2), 2)
    rows[:, 1] = 1
    with pytest.raises(mpidist.ArgumentError, match=r"the product of value is .* fit"):
        strategy.reduce("PRODUCT", rows, axis=0)
    rows[3] = 0
    check(strategy.reduce("PRODUCT", rows, axis=0), [0, 0])
    with pytest.raises(mpidist.ArgumentError, match="the product of value is"):
        strategy.reduce("PRODUCT", np.full((2, 9), 5, "i1"), axis=1)


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_complex_numbers_have_no_order(reduce, op):
    with pytest.raises(mpidist.DTypeError, match=f"value has dtype complex.*{op}"):
        reduce(op, np.ones(2, "c16"))


def test_a_product_of_complex_numbers(reduce, comm):
    expected = np.full(2, (1 + 1j) ** comm.size)
    assert np.allclose(reduce("PRODUCT", np.full(2, 1 + 1j)), expected)


@pytest.mark.mpi(min_size=2)
def test_another_operation_elsewhere_is_an_error_on_all(strategy, comm):
    with pytest.raises(mpidist.MismatchError, match="reduce_op is MAX on rank 0"):
        strategy.reduce("MAX" if comm.rank == 0 else "MIN", 1.0)


def test_buckets_add(strategy):
    with pytest.raises(mpidist.ArgumentError, match="reduce_op of gradient buckets"):
        strategy.gradient_buckets({"w": np.ones(2)}, "MAX")


class Same(mpidist.CrossDeviceOps):
    def reduce_implementation(self, *args):
        return super().reduce_implementation(*args)


@pytest.mark.parametrize(
    "make",
    [
        MpiAllReduce,
        mpidist.HierarchicalCopyAllReduce,
        mpidist.ReductionToOneDevice,
        Same,
    ],
)
@pytest.mark.parametrize("op", UFUNCS)
@pytest.mark.parametrize("size", [3, 200_000])
def test_cross_device_ops(comm, make, op, size, make_strategy):
    strategy = make_strategy(cross_device_ops=make())
    mine = parts(strategy, size)
    check(strategy.reduce(op, mine[comm.rank]), functools.reduce(UFUNCS[op], mine))
    result = strategy.reduce(op, mine[comm.rank][:3], axis=0)
    check(result, UFUNCS[op].reduce(np.concatenate([a[:3] for a in mine])))


def test_an_accumulation_function_is_for_sums(make_strategy):
    ops = mpidist.ReductionToOneDevice(accumulation_fn=lambda arrays: arrays[0])
    strategy = make_strategy(cross_device_ops=ops)
    with pytest.raises(mpidist.ArgumentError, match="accumulation_fn"):
        strategy.reduce("MAX", 1.0)
