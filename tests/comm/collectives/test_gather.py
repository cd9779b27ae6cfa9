"""strategy.gather and ReplicaContext.all_gather; what is usual the model draws."""

import functools

import numpy as np
import pytest
from collective_calls import in_replica

import mpidist


@pytest.fixture(params=["gather", "all_gather"])
def gather(request, strategy):
    """Each of the two calls, as `gather(value, axis)`."""
    if request.param == "gather":
        return strategy.gather
    return functools.partial(in_replica, strategy, "all_gather")


def check(result, expected):
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(result, expected)


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


@pytest.mark.parametrize("is_alone", [False, True])
def test_gather_in_replica_context_is_an_error_on_all(strategy, is_alone):
    last = strategy.num_replicas_in_sync - 1

    def fn():
        if strategy.extended.replica_id == last or not is_alone:
            strategy.gather(np.ones(1), axis=0)

    with pytest.raises(mpidist.ContextError, match="all_gather"):
        strategy.run(fn)
    check(strategy.gather(np.ones(1), 0), np.ones(strategy.num_replicas_in_sync))


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
