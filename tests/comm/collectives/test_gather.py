"""strategy.gather and ReplicaContext.all_gather, with numpy.concatenate as oracle."""

import functools

import ml_dtypes
import numpy as np
import pytest
from collective_calls import LAYOUTS, Batch, Pair, check_nest, in_replica, lay_out

import mpidist
from mpidist import CommunicationOptions

DTYPES = ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "g", "c8", "c16"]
DTYPES += [ml_dtypes.bfloat16, "U3", "S2", "M8[s]", [("x", "i4"), ("y", "f8")]]
# How long the gathered axis is on each replica: uneven, and empty on one
LENGTHS = [2, 3, 0, 1]


def part(rank, shape, axis, dtype="f8", lengths=LENGTHS):
    """What replica `rank` contributes, of its own length along `axis`."""
    shape = list(shape)
    shape[axis] = lengths[rank]
    numbers = np.random.default_rng([rank, *shape]).integers(0, 100, shape)
    return numbers.astype(dtype)


def parts(strategy, *args, **kwargs):
    n = strategy.num_replicas_in_sync
    return [part(rank, *args, **kwargs) for rank in range(n)]


@pytest.fixture(params=["gather", "all_gather"])
def gather(request, strategy):
    """Each of the two calls, as `gather(value, axis)`."""
    if request.param == "gather":
        return strategy.gather
    return functools.partial(in_replica, strategy, "all_gather")


def check(result, expected):
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(result, expected)


AXES = [((), 0), ((), -1), *(((2,), axis) for axis in range(-2, 2))]
AXES += [((2, 3), axis) for axis in range(-3, 3)]


@pytest.mark.parametrize(("others", "axis"), AXES)
def test_every_axis_with_uneven_lengths(gather, strategy, others, axis):
    mine = parts(strategy, (1, *others), axis)
    expected = np.concatenate(mine, axis)
    check(gather(mine[strategy.extended.replica_id], axis), expected)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(gather, strategy, dtype, axis):
    mine = parts(strategy, (2, 2), axis, dtype)
    expected = np.concatenate(mine, axis)
    check(gather(mine[strategy.extended.replica_id], axis), expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("lengths", [[0, 0, 0, 0], [0, 0, 0, 5], [1, 1, 1, 1]])
@pytest.mark.parametrize("shape", [(2, 1, 3), (1, 1, 1), (0, 2, 0)])
def test_empty_parts(gather, strategy, shape, lengths, axis):
    mine = parts(strategy, shape, axis, lengths=lengths)
    expected = np.concatenate(mine, axis)
    check(gather(mine[strategy.extended.replica_id], axis), expected)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shift", range(len(LAYOUTS)))
def test_layouts_may_differ_between_replicas(gather, strategy, shift, axis):
    rank = strategy.extended.replica_id
    mine = parts(strategy, (2, 3, 2), axis)
    value = lay_out(mine[rank], rank + shift)
    check(gather(value, axis), np.concatenate(mine, axis))


def test_arguments_are_neither_changed_nor_returned(gather, strategy):
    rank = strategy.extended.replica_id
    value = part(rank, (1, 3), 0)
    assert not np.shares_memory(gather(value, 0), value)
    check(value, part(rank, (1, 3), 0))


def nest_of(leaf):
    return {
        "list": [leaf((1, 2), "f4"), leaf((1, 3), "f4")],
        "pair": Pair(leaf((1, 1), "?"), (leaf((1, 0), "f8"),)),
        "batch": Batch(b=leaf((1, 4), "f4"), a=leaf((1,), "U2")),
        "empty": [],
    }


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 4, 40, 10**9])
@pytest.mark.parametrize("timeout", [None, 60])
def test_nests_in_packs_of_any_size(strategy, bytes_per_pack, timeout):
    rank, equal = strategy.extended.replica_id, [3] * 4
    value = nest_of(lambda shape, dtype: part(rank, shape, 0, dtype, equal))
    expected = nest_of(
        lambda shape, dtype: np.concatenate(parts(strategy, shape, 0, dtype, equal))
    )
    options = CommunicationOptions(bytes_per_pack, timeout_seconds=timeout)
    result = in_replica(strategy, "all_gather", value, 0, options)
    check_nest(result, expected, check)


@pytest.mark.parametrize("axis", [0, -1])
def test_nests_with_uneven_lengths_in_one_pack(gather, strategy, axis):
    mine = [parts(strategy, shape, axis) for shape in [(2, 2), (2, 2, 2), (2,)]]
    value = [each[strategy.extended.replica_id] for each in mine]
    expected = [np.concatenate(each, axis) for each in mine]
    check_nest(gather(value, axis), expected, check)


@pytest.mark.parametrize("lengths", [[1, 100, 1, 1], [9, 0, 1, 100]])
def test_nests_with_uneven_lengths_in_several_packs(strategy, lengths):
    mine = [parts(strategy, (1, i), 0, lengths=lengths) for i in (1, 2, 3)]
    value = [each[strategy.extended.replica_id] for each in mine]
    options = CommunicationOptions(bytes_per_pack=100)
    result = in_replica(strategy, "all_gather", value, 0, options)
    check_nest(result, [np.concatenate(each) for each in mine], check)


def test_gather_takes_distributed_values(strategy):
    value = strategy.experimental_distribute_values_from_function(
        lambda context: {"id": np.array([context.replica_id_in_sync_group])}
    )
    value["made"] = strategy.run(lambda: np.ones((1, 2)))
    n = strategy.num_replicas_in_sync
    result = strategy.gather(value, axis=0)
    check(result["id"], np.arange(n))
    check(result["made"], np.ones((n, 2)))


def test_the_result_is_writable_and_the_callers_own(gather, strategy):
    first, second = gather([np.ones(2), np.ones(2)], 0)
    first[...] = 5
    assert second.tolist() == [1, 1] * strategy.num_replicas_in_sync


def test_gather_in_replica_context_names_all_gather(strategy):
    with pytest.raises(mpidist.ContextError, match="all_gather"):
        strategy.run(lambda: strategy.gather(np.ones(1), axis=0))
    check(strategy.gather(np.ones(1), 0), np.ones(strategy.num_replicas_in_sync))


def test_gather_in_replica_context_on_one_replica_is_an_error_on_all(strategy):
    last = strategy.num_replicas_in_sync - 1

    def fn():
        if strategy.extended.replica_id == last:
            strategy.gather(np.ones(1), axis=0)

    with pytest.raises(mpidist.ContextError, match="all_gather"):
        strategy.run(fn)
    check(strategy.gather(np.ones(1), 0), np.ones(strategy.num_replicas_in_sync))


def test_gather_works_in_scope_and_in_merge_call(strategy):
    expected = np.ones(strategy.num_replicas_in_sync)
    with strategy.scope():
        check(strategy.gather(np.ones(1), 0), expected)

    def merge(strategy, value):
        return strategy.gather(value, axis=0)

    def fn():
        return mpidist.get_replica_context().merge_call(merge, (np.ones(1),))

    check(strategy.experimental_local_results(strategy.run(fn))[0], expected)


def test_the_default_strategy_gathers_nothing():
    value = np.ones(2)
    assert mpidist.get_strategy().gather(value, axis=0) is value

    def step():
        return mpidist.get_replica_context().all_gather(value, axis=0)

    check(mpidist.get_strategy().run(step), value)


ONE = np.ones((2, 3))
BAD = [
    ((ONE, 2), mpidist.ArgumentError, "axis 2 is out of range for value"),
    (([ONE, ONE[0]], -2), mpidist.ArgumentError, r"axis -2 .* value\[1\]"),
    ((ONE, "0"), mpidist.ArgumentTypeError, "axis .* not '0'"),
    ((ONE, None), mpidist.ArgumentTypeError, "axis .* not None"),
    ((ONE, (0,)), mpidist.ArgumentTypeError, r"axis .* not \(0,\)"),
    ((1.0, 0), mpidist.ArgumentError, "value is a scalar"),
    (({"a": ONE, "b": np.int8(1)}, 0), mpidist.ArgumentError, r"value\['b'\] is a sc"),
    (("text", 0), mpidist.ArgumentTypeError, "value must be .* not 'text'"),
    ((np.array([None]), 0), mpidist.DTypeError, "value has dtype object"),
]


@pytest.mark.parametrize(("args", "error", "match"), BAD)
def test_one_bad_argument_is_an_error_on_all(gather, strategy, args, error, match):
    n, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    with pytest.raises(error, match=match) as info:
        gather(*(args if rank == n - 1 else (ONE, 0)))
    assert type(info.value) is error
    assert n == 1 or info.value.origin_rank == n - 1
    check(gather(np.ones(1), 0), np.ones(n))


UNLIKE = [
    ((ONE, 1), "axis is 0 on .*; 1 on {last}"),
    ((ONE[:, :2], 0), r"value is float64 .*3\) on .*; float64 .*2\) on {last}"),
    ((ONE[0], 0), "value is .* on .*; .* on {last}"),
    ((ONE > 0, 0), "value is float64 .* on .*; bool .* on {last}"),
    (([ONE], 0), "the structure of value is .* on .*; .* on {last}"),
]


@pytest.mark.parametrize(("args", "match"), UNLIKE)
def test_unlike_arguments_are_an_error_on_all(gather, strategy, args, match):
    n, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    if n == 1:
        pytest.skip("replicas can differ only where there are several")
    match = match.format(last=f"rank {n - 1}")
    with pytest.raises(mpidist.MismatchError, match=f"gather: .* differ: {match}$"):
        gather(*(args if rank == n - 1 else (ONE, 0)))
    check(gather(np.ones(1), 0), np.ones(n))


@pytest.mark.parametrize("dtype", ["f4", "c16", "S3", "U3"])
@pytest.mark.parametrize("implementation", ["AUTO", "MPI"])
@pytest.mark.parametrize("axis", [1, -1])
def test_large_arrays_along_inner_axes(comm, strategy, dtype, implementation, axis):
    """They are put into their places at once, or come in packs; both alike."""
    shapes = [(60, 40 * (rank % 3) + 7, 41) for rank in range(comm.size)]
    if axis == -1:
        shapes = [(a, c, b) for a, b, c in shapes]
    parts = [np.arange(np.prod(shape)).reshape(shape).astype(dtype) for shape in shapes]
    mine, small = parts[comm.rank], np.full((2, 3), comm.rank)
    options = CommunicationOptions(implementation=implementation)
    for value in (mine, mine.transpose(2, 1, 0).T.transpose(2, 1, 0).T):
        found = in_replica(strategy, "all_gather", [value, small], axis, options)
        assert np.array_equal(found[0], np.concatenate(parts, axis=axis))
        assert found[1].tolist() == [[r for r in range(comm.size) for _ in "abc"]] * 2


def test_text_is_told_where_to_go(strategy, comm):
    with pytest.raises(mpidist.ArgumentTypeError, match=r"\[1\] must be .*gather_obj"):
        strategy.gather([np.ones(1), "text"], axis=0)
    if comm.size > 1:
        with pytest.raises(mpidist.MismatchError, match="pass one width"):
            strategy.gather(np.array(["a" * (comm.rank + 1)]), axis=0)
    with pytest.raises(mpidist.ArgumentTypeError, match=r"dataclasses\.asdict"):
        strategy.gather_objects([object()])
    with pytest.raises(mpidist.ArgumentTypeError, match="comes first"):
        strategy.reduce(1.0, "SUM")
