"""Scopes, replica and cross-replica contexts, run and merge_call."""

import collections
import concurrent.futures
import threading

import numpy as np
import pytest

import mpidist

Point = collections.namedtuple("Point", "x y")


class Sub(dict):
    pass


@pytest.fixture
def other(comm):
    strategy = mpidist.MirroredStrategy(communicator=comm)
    yield strategy
    strategy.experimental_finalize()


def local(value):
    return value.values[0] if isinstance(value, mpidist.DistributedValues) else value


def test_outside_everything_holds_the_default_strategys_replica_context():
    context = mpidist.get_replica_context()
    assert context.replica_id_in_sync_group == 0
    assert context.num_replicas_in_sync == 1
    assert context.strategy is mpidist.get_strategy()
    assert context.devices == ("CPU:0",)
    assert not mpidist.has_strategy()
    assert not mpidist.in_cross_replica_context()


def test_the_default_strategy_reduces_to_the_identity():
    default = mpidist.get_strategy()
    assert default.reduce("SUM", 3, axis=None) == 3
    assert default.gather([1, 2], axis=0) == [1, 2]
    assert default.run(lambda x: x + 1, args=(2,)) == 3
    assert default.experimental_local_results(4) == (4,)


def test_in_scope_the_context_is_cross_replica(strategy):
    with strategy.scope() as yielded:
        assert yielded is strategy
        assert mpidist.get_strategy() is strategy
        assert mpidist.has_strategy()
        assert mpidist.in_cross_replica_context()
        assert mpidist.get_replica_context() is None
    assert not mpidist.has_strategy()


def test_a_scope_can_be_nested_and_entered_again(strategy):
    scope = strategy.scope()
    for _ in range(2):
        with scope, strategy.scope(), scope:
            assert mpidist.get_strategy() is strategy
        assert not mpidist.has_strategy()


def test_scopes_of_two_strategies_do_not_mix(strategy, other):
    with strategy.scope():
        with pytest.raises(RuntimeError, match="Mixing different"):
            other.scope().__enter__()
        with pytest.raises(RuntimeError, match="Mixing different"):
            other.run(lambda: None)
        with pytest.raises(RuntimeError, match="Mixing different"):
            mpidist.get_strategy() and other.reduce("SUM", 1.0)
    with other.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        strategy.gather(np.ones(1), axis=0)


def test_the_default_strategys_scope_inside_another_is_refused(strategy):
    default = mpidist.get_strategy()
    with strategy.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        default.scope().__enter__()


def test_leaving_scopes_in_the_wrong_order_is_an_error(strategy):
    outer, inner = strategy.scope(), strategy.scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="scope nesting error"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert not mpidist.has_strategy()


def test_set_strategy_holds_until_it_is_unset(strategy):
    mpidist.experimental_set_strategy(strategy)
    try:
        assert mpidist.get_strategy() is strategy
        assert mpidist.in_cross_replica_context()
        match = "inside a strategy's scope"
        with strategy.scope(), pytest.raises(RuntimeError, match=match):
            mpidist.experimental_set_strategy(None)
        assert local(strategy.run(lambda: 7)) == 7
    finally:
        mpidist.experimental_set_strategy(None)
    assert not mpidist.has_strategy()


def test_in_run_the_context_is_the_replicas(strategy):
    def step():
        context = mpidist.get_replica_context()
        assert mpidist.get_strategy() is strategy
        assert not mpidist.in_cross_replica_context()
        assert context.strategy is strategy
        assert context.devices == (strategy.extended.device,)
        return context.replica_id_in_sync_group, context.num_replicas_in_sync

    replica, replicas = map(local, strategy.run(step))
    assert replica == strategy.extended.topology.rank
    assert replicas == strategy.num_replicas_in_sync


def test_calls_that_need_cross_replica_context_are_refused_in_a_replica(strategy):
    def step():
        for call in (
            lambda: strategy.run(lambda: None),
            lambda: strategy.reduce("SUM", 1.0),
            lambda: strategy.scope().__enter__(),
            lambda: strategy.extended.update(None, None),
        ):
            with pytest.raises(RuntimeError, match="in replica context"):
                call()
        with pytest.raises(RuntimeError, match="all_gather"):
            strategy.gather(np.ones(1), axis=0)

    strategy.run(step)


def test_a_replica_context_is_of_no_use_outside_run(strategy):
    contexts = []
    strategy.run(lambda: contexts.append(mpidist.get_replica_context()))
    for call in (
        lambda c: c.all_reduce("SUM", 1.0),
        lambda c: c.all_gather(np.ones(1), 0),
        lambda c: c.merge_call(lambda s: None),
    ):
        with pytest.raises(RuntimeError, match="not the current one"):
            call(contexts[0])


def test_run_takes_apart_the_distributed_values_in_a_nest(strategy):
    value = strategy.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group * 10
    )
    rank = strategy.extended.replica_id

    def step(pair, plain, *, keyword):
        assert pair == {"a": [rank * 10, 5]}
        assert plain == "text"
        assert keyword == (rank * 10,)

    strategy.run(step, ({"a": [value, 5]}, "text"), {"keyword": (value,)})
    strategy.run(step, [{"a": [value, 5]}, "text"], {"keyword": (value,)})


def test_run_keeps_the_structure_of_results(strategy):
    rank = strategy.extended.replica_id

    def step():
        return [rank, Point((rank, None), {"b": rank})], Sub(a=rank)

    listed, sub = strategy.run(step)
    first, (nested, mapping) = listed
    assert isinstance(listed[1], Point)
    assert isinstance(nested, tuple)
    assert isinstance(sub, Sub)
    assert [local(v) for v in (first, nested[0], mapping["b"], sub["a"])] == [rank] * 4
    assert nested[1] is None
    assert isinstance(first, mpidist.PerReplica)  # also with one replica


def test_run_returns_none_and_variables_bare(strategy):
    with strategy.scope():
        w = mpidist.Variable(1.0)
    assert strategy.run(lambda: None) is None
    assert strategy.run(lambda: w) is w


@pytest.mark.parametrize("args", [1, "ab", {"x": 1}, None])
def test_run_refuses_args_that_are_neither_list_nor_tuple(strategy, args):
    with pytest.raises(ValueError, match="args must be a tuple or a list"):
        strategy.run(lambda *a: a, args)


class CustomError(Exception):
    def __init__(self, a, b):  # cannot be unpickled by its args alone
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize("error", [KeyError("no"), ZeroDivisionError("no")])
def test_an_exception_of_one_replica_is_raised_on_all(strategy, error):
    last = strategy.num_replicas_in_sync - 1

    def step():
        if mpidist.get_replica_context().replica_id_in_sync_group == last:
            raise error
        return mpidist.get_replica_context().all_reduce("SUM", 1.0)

    with pytest.raises(type(error), match="no") as caught:
        strategy.run(step)
    if strategy.num_replicas_in_sync > 1:
        assert caught.value.origin_rank == last
    if strategy.extended.replica_id != last:
        assert f"on rank {last}" in str(caught.value.__cause__)
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


def test_an_exception_that_cannot_travel_is_quoted(strategy):
    def step():
        if mpidist.get_replica_context().replica_id_in_sync_group == 0:
            raise CustomError("this", "that")

    is_first = strategy.extended.replica_id == 0
    expected = CustomError if is_first else mpidist.errors.RemoteError
    with pytest.raises(expected, match="this and that"):
        strategy.run(step)
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


def test_merge_call_runs_in_cross_replica_context(strategy):
    def merge(current, total, *, keyword):
        assert current is strategy
        assert mpidist.in_cross_replica_context()
        assert mpidist.get_replica_context() is None
        return current.reduce("SUM", total), keyword

    def step():
        context = mpidist.get_replica_context()
        replica = context.replica_id_in_sync_group
        total, keyword = context.merge_call(merge, (replica,), {"keyword": replica})
        assert mpidist.get_replica_context() is context
        assert keyword == replica
        return total

    n = strategy.num_replicas_in_sync
    assert local(strategy.run(step)) == n * (n - 1) // 2


@pytest.mark.mpi(min_size=2)
def test_unequal_numbers_of_merge_calls_raise_on_all(strategy):
    def step():
        context = mpidist.get_replica_context()
        for _ in range(1 + (context.replica_id_in_sync_group == 0)):
            context.merge_call(lambda s: None)

    with pytest.raises(RuntimeError, match=r"different collectives.*merge_call"):
        strategy.run(step)
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


def test_each_thread_has_its_own_stack(strategy):
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(mpidist.has_strategy()))
        thread.start()
        thread.join()
        assert mpidist.has_strategy()
    assert seen == [False]


def test_local_results_are_a_one_tuple(strategy):
    value = strategy.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group
    )
    rank = strategy.extended.replica_id
    assert isinstance(value, mpidist.PerReplica)
    assert strategy.experimental_local_results(value) == (rank,)
    assert strategy.unwrap({"a": [value, 1]}) == ({"a": [rank, 1]},)
    assert strategy.experimental_local_results(3) == (3,)


def test_values_from_a_function_that_fails_on_one_replica(strategy):
    def make(context):
        if context.replica_id_in_sync_group == context.num_replicas_in_sync - 1:
            raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        strategy.experimental_distribute_values_from_function(make)
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


@pytest.mark.mpi(min_size=2)
def test_some_replicas_in_run_and_others_not_raise_and_go_on(strategy):
    def step():
        mpidist.get_replica_context().all_reduce("SUM", 1.0)

    is_first = strategy.extended.replica_id == 0
    with pytest.raises(mpidist.DivergenceError, match=r"reduce at .*all_reduce at "):
        strategy.reduce("SUM", 1.0) if is_first else strategy.run(step)
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


COLLECTIVES = {
    "all_reduce": lambda context: context.all_reduce("SUM", 3),
    "all_gather": lambda context: context.all_gather(np.array([3]), 0)[0],
    "merge_call": lambda context: context.merge_call(lambda strategy: 3),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_outside_run_are_refused_where_there_are_several_ranks(comm, name):
    def call():
        return COLLECTIVES[name](mpidist.get_replica_context())

    if comm.size > 1:
        with pytest.raises(mpidist.ContextError, match=rf"{name} .*strategy\.run"):
            call()
        with pytest.raises(mpidist.ContextError, match=f"of {comm.size} in this job"):
            run_in_thread(call)
    else:
        assert call() == 3
    # The default strategy was asked for
    assert mpidist.get_strategy().run(call) == 3


def run_in_thread(call):
    """Run a function in a thread of its own, which no context has been entered in."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_to_do_without_a_replica_context_is_said(strategy, name):
    def call(*_):
        return COLLECTIVES[name](mpidist.get_replica_context())

    with strategy.scope():
        v = mpidist.Variable(1.0)
    match = rf"has no attribute '{name}'.*cross-replica context.*strategy\.run"
    with pytest.raises(AttributeError, match=match), strategy.scope():
        call()
    with pytest.raises(AttributeError, match=match):
        strategy.run(lambda: mpidist.get_replica_context().merge_call(call))
    with pytest.raises(AttributeError, match=match) as info:
        strategy.extended.update(v, call)
    assert str(info.value).count("strategy.run") == 1
    with pytest.raises(AttributeError, match=r"'upper'$"), strategy.scope():
        None.upper()
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


SET = """
import mpidist

mpidist.experimental_set_strategy(mpidist.MirroredStrategy())
mpidist.get_replica_context().all_reduce("SUM", 1.0)
"""


def test_what_to_do_without_a_replica_context_is_said_at_the_end(mpirun):
    result = mpirun(2, SET, fails=True)
    line = "AttributeError: 'NoneType' object has no attribute 'all_reduce': "
    assert line + "get_replica_context() is None" in result.stderr


def test_a_scope_may_be_entered_by_several_threads(strategy):
    scope = strategy.scope()
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        other.submit(scope.__enter__).result()
        with scope:
            other.submit(scope.__exit__, None, None, None).result()
            assert mpidist.has_strategy()
        assert not other.submit(mpidist.has_strategy).result()
    assert not mpidist.has_strategy()


def test_the_default_strategys_scope_changes_nothing(strategy):
    default = mpidist.get_strategy()
    scope = default.scope()
    with scope as yielded, scope, default.scope():
        assert yielded is default
        test_outside_everything_holds_the_default_strategys_replica_context()
        v = mpidist.Variable(1.0)
        assert v.distribute_strategy is default
        assert float(v.assign_add(2.0)) == 3.0
        assert default.run(lambda: 5) == 5
        for enter in (strategy.scope().__enter__, lambda: strategy.scope().__enter__()):
            with pytest.raises(RuntimeError, match="Mixing different"):
                enter()
        test_outside_everything_holds_the_default_strategys_replica_context()
    with strategy.scope():
        assert mpidist.has_strategy()
    assert not mpidist.has_strategy()


def test_the_default_strategys_scope_in_its_own_run_changes_nothing(strategy):
    default = mpidist.get_strategy()

    def step():
        context = mpidist.get_replica_context()
        with default.scope():
            assert mpidist.get_replica_context() is context
            with pytest.raises(RuntimeError, match="Mixing different"):
                strategy.scope().__enter__()
        return 5

    assert default.run(step) == 5


def test_scopes_are_left_in_the_reverse_order_of_the_default_strategy_too(strategy):
    outer, inner = mpidist.get_strategy().scope(), mpidist.get_strategy().scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="scope nesting error"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    with strategy.scope():
        pass
