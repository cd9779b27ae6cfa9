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
