"""What tf.Variable has besides values and assignments; NumPy is the oracle."""

import gc

import numpy as np
import pytest
from variables import FIRST, MEAN, NONE, ON_READ, ON_WRITE, START, SUM, make

import mpidist
from mpidist import IndexedSlices
from mpidist import VariableSynchronization as Synchronization


def each_replica(strategy, fn):
    """Call `fn(replica id)` on each replica, in replica context."""
    strategy.run(lambda: fn(strategy.extended.replica_id))


# trainable


@pytest.mark.parametrize("synchronization", Synchronization)
@pytest.mark.parametrize("trainable", [None, True, False])
def test_which_variables_are_trainable(strategy, synchronization, trainable):
    if synchronization is Synchronization.NONE:
        return
    with strategy.scope():
        w = mpidist.Variable(
            1.0, trainable=trainable, synchronization=synchronization, aggregation=SUM
        )
        by_default = mpidist.Variable(1.0, synchronization=synchronization)
    expected = synchronization is not ON_READ
    assert w.trainable is (expected if trainable is None else trainable)
    assert by_default.trainable is expected


# Local results


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
def test_local_results_of_on_read_are_this_replicas_own(strategy, aggregation):
    w = make(strategy, aggregation, on_read=True)
    rank = strategy.extended.replica_id
    each_replica(strategy, lambda rank: w.assign_add(START * rank))
    own, calls = START * (rank + 1), strategy.extended.consensus.calls

    def check():
        nest = strategy.experimental_local_results({"w": [w]})
        np.testing.assert_array_equal(nest[0]["w"][0], own)
        (result,) = strategy.experimental_local_results(w)
        np.testing.assert_array_equal(result, own)
        assert isinstance(result, np.ndarray)
        assert not result.flags.writeable

    check()
    with strategy.scope():
        check()
    if rank == 0:  # no communication: one replica alone may ask
        check()
    assert strategy.extended.consensus.calls == calls
    strategy.run(check)


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
def test_run_returns_a_variable_itself(strategy, aggregation):
    w = make(strategy, aggregation, on_read=True)
    rank = strategy.extended.replica_id

    def step():
        return {"w": w.assign_add(START * rank), "all": (w, None)}

    result = strategy.run(step)
    assert result["w"] is result["all"][0] is w
    assert result["all"][1] is None
    each_replica(strategy, lambda rank: w.assign_add(START))
    if rank == 0:  # no communication: one replica alone may ask
        (local,) = strategy.experimental_local_results(result["w"])
        np.testing.assert_array_equal(local, START * 2)
    n = strategy.num_replicas_in_sync
    total = strategy.reduce("SUM", strategy.run(lambda: w))
    np.testing.assert_array_equal(total, START * (2 * n + n * (n - 1) / 2))
    v = make(strategy, aggregation)
    assert strategy.run(lambda: v) is v


def test_merge_call_gets_on_read_variables_whole(strategy):
    w = make(strategy, SUM, on_read=True)

    def merge(strategy, v):
        assert v is w
        return v

    context = mpidist.get_replica_context
    strategy.run(lambda: context().merge_call(merge, (w,)).assign_add(START))


# The errors of kinds


@pytest.mark.parametrize(
    "kinds",
    [
        {"synchronization": "ON_READ"},
        {"synchronization": 7},
        {"synchronization": []},
        {"synchronization": SUM},
        {"synchronization": Synchronization.NONE},
        {"aggregation": "SUM"},
        {"aggregation": 3.5},
        {"aggregation": {}},
        {"aggregation": ON_READ},
    ],
)
def test_kinds_that_do_not_exist_are_value_errors_on_all(strategy, kinds):
    is_last = strategy.extended.replica_id == strategy.num_replicas_in_sync - 1
    (name,) = kinds
    with strategy.scope(), pytest.raises(ValueError, match=f"{name} must be"):
        mpidist.Variable(1.0, **(kinds if is_last else {}))
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


def test_kinds_may_be_none_or_values(strategy):
    with strategy.scope():
        w = mpidist.Variable(1.0, synchronization=None, aggregation=None)
        v = mpidist.Variable(1.0, synchronization=3, aggregation=2)
    assert (w.synchronization, w.aggregation) == (ON_WRITE, NONE)
    assert (v.synchronization, v.aggregation, v.trainable) == (ON_READ, MEAN, False)


@pytest.mark.parametrize("bad", ["SUM", None, NONE, FIRST, 7])
def test_aggregations_without_an_operation(bad):
    with pytest.raises(ValueError, match="has no ReduceOp"):
        mpidist.ReduceOp.from_variable_aggregation(bad)


# Signatures


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_assignments_take_tensorflows_arguments(strategy, method):
    w = make(strategy, MEAN)
    assign = getattr(w, method)
    assert assign(START, False, "name") is w
    assert assign(START, use_locking=True, name="name", read_value=True) is w
    assert assign(START, read_value=False) is None
    strategy.run(lambda: assign(START, read_value=False))
    update = strategy.extended.update
    assert update(w, lambda v: getattr(v, method)(START, True, "n", False)) is None
    each = {"assign": START, "assign_add": 6 * START, "assign_sub": -4 * START}
    np.testing.assert_array_equal(w, each[method])


# Members


def test_harmless_members(strategy):
    def clip(value):
        return value

    w = make(strategy, constraint=clip)
    assert w.get_shape() == w.shape == (4, 3)
    assert w.device == strategy.extended.device
    assert w.constraint is clip
    assert make(strategy).constraint is None
    assert w.is_initialized()
    with pytest.raises(RuntimeError, match="is not kept"):
        w.initial_value  # noqa: B018
    with pytest.raises(TypeError, match="constraint must be a function"):
        make(strategy, constraint=3)


def test_references(strategy):
    w, v = make(strategy), make(strategy)
    assert w.ref() == w.ref() != v.ref()
    assert {w.ref(): 1}[w.ref()] == 1
    assert w.ref().deref() is w
    assert w.ref() != "w"
    assert {w: 1}[w] == 1
    kept = w.ref()
    del w
    gc.collect()
    np.testing.assert_array_equal(kept.deref(), START)


@pytest.mark.parametrize("name", ["eval", "handle", "op", "graph", "load"])
def test_members_of_graphs_are_absent(strategy, name):
    assert not hasattr(make(strategy), name)


def test_rows_are_read_by_numbers(strategy):
    w = make(strategy)
    rows = [2, 0, 2]
    np.testing.assert_array_equal(w.sparse_read(rows), START[rows])
    np.testing.assert_array_equal(
        w.sparse_read(np.array([[1, 2]])), START[np.array([[1, 2]])]
    )
    np.testing.assert_array_equal(w.gather_nd([[1], [3]]), START[[1, 3]])
    np.testing.assert_array_equal(w.gather_nd([[1, 2], [3, 0]]), [5.0, 9.0])
    np.testing.assert_array_equal(w.gather_nd([1, 2]), 5.0)
    assert w.gather_nd(np.zeros((0, 2), int)).shape == (0,)
    for bad in ([4], [-1], [[0, 7]]):
        with pytest.raises(ValueError, match="out of range"):
            w.sparse_read(bad)
    for bad in ([[4]], [[-1]], [[0, 3]], [[0, -1]]):
        with pytest.raises(ValueError, match="out of range"):
            w.gather_nd(bad)
    with pytest.raises(ValueError, match="2 dimensions"):
        w.gather_nd([[0, 0, 0]])
    with pytest.raises(TypeError, match="indices must be integers"):
        w.sparse_read([0.5])


# Scatters of elements


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("scatter_nd_add", ([[4, 0]], [1.0]), "out of range"),
        ("scatter_nd_add", ([[0, -1]], [1.0]), "out of range"),
        ("scatter_nd_add", ([[0, 0, 0]], [1.0]), "2 dimensions"),
        ("scatter_nd_add", ([[0, 0]], [1.0, 2.0]), "shape"),
        ("scatter_nd_update", (3, 1.0), "2 dimensions"),
        ("batch_scatter_update", (3,), "IndexedSlices"),
        ("batch_scatter_update", (IndexedSlices([1.0], [[[0]]]),), "2 dimensions"),
    ],
)
def test_bad_elements_on_one_rank_are_an_error_on_all(
    strategy, method, arguments, message
):
    w = make(strategy)
    is_last = strategy.extended.replica_id == strategy.num_replicas_in_sync - 1
    good = ([[0, 0]], [1.0])
    if method == "batch_scatter_update":
        good = (IndexedSlices(START, np.arange(4)),)
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(w, method)(*(arguments if is_last else good))
    np.testing.assert_array_equal(w, START)
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync
