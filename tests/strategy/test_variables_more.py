"""Scatters, copies and the audit of variables; NumPy is the oracle."""

import copy
import pickle
import tracemalloc

import numpy as np
import pytest
from variables import MEAN, START, SUM, make

import mpidist
from mpidist import IndexedSlices


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        (IndexedSlices(np.ones((1, 3)), [4]), "out of range"),
        (IndexedSlices(np.ones((1, 3)), [-1]), "out of range"),
        (IndexedSlices(np.ones((2, 3)), np.array([0])), "1 rows"),
        (IndexedSlices(np.ones((1, 2)), np.array([0])), "shape"),
        (np.ones(3), "IndexedSlices"),
    ],
)
def test_bad_slices_on_one_rank_are_an_error_on_all(strategy, delta, message):
    w = make(strategy)
    is_last = strategy.extended.replica_id == strategy.num_replicas_in_sync - 1
    if isinstance(delta, IndexedSlices):
        delta = IndexedSlices(delta.values, np.asarray(delta.indices))
    with pytest.raises(ValueError, match=message):
        w.scatter_add(delta if is_last else IndexedSlices(START, np.arange(4)))
    np.testing.assert_array_equal(w, START)
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


def test_a_deep_copy_has_a_state_of_its_own(strategy):
    w = make(strategy, MEAN, name="w")
    twin = copy.deepcopy({"w": w})["w"]
    w.assign_add(1.0)
    np.testing.assert_array_equal(twin, START)
    assert twin.distribute_strategy is strategy
    assert (twin.name, twin.aggregation) == ("w", MEAN)
    twin.assign(START * 2)
    np.testing.assert_array_equal(w, START + 1)


def test_a_per_replica_value_on_one_rank_is_an_error_on_all(strategy):
    w = make(strategy)
    last = strategy.num_replicas_in_sync - 1
    is_last = strategy.extended.replica_id == last
    with pytest.raises(ValueError, match="reduce it first"):
        w.assign(mpidist.PerReplica((START,), (last,)) if is_last else START + 1)
    np.testing.assert_array_equal(w, START)
    assert strategy.reduce("SUM", 1) == last + 1


def test_equal_variables_pass_the_audit(strategy):
    make(strategy, initial=np.array([0.0, np.nan]))
    w = make(strategy)
    on_read = make(strategy, SUM, on_read=True)
    rank = strategy.extended.replica_id
    strategy.run(lambda: on_read.assign(START + rank))
    strategy.extended.audit_variables()
    w.assign_add(1.0)
    strategy.extended.audit_variables()


def test_the_audit_passes_over_what_was_refused(strategy):
    with pytest.raises(TypeError, match="initial_value") as kept:
        make(strategy, initial=object())
    strategy.extended.audit_variables()
    assert kept.value.__traceback__ is not None  # it holds what was begun


@pytest.mark.mpi(min_size=2)
def test_the_audit_names_the_first_variable_that_differs(strategy):
    last = strategy.num_replicas_in_sync - 1
    make(strategy, name="good")
    bad, worse = make(strategy, name="bad"), make(strategy, name="worse")

    def drift(v):
        if strategy.extended.replica_id == last:
            changed = START.copy()
            changed[1, 2] = -7
            v.assign(changed)

    strategy.extended.update(worse, drift)
    strategy.extended.update(bad, drift)
    message = rf"bad differs .* on rank {last}, first in element \(1, 2\): .*5.0.*-7.0"
    with pytest.raises(ValueError, match=message):
        strategy.extended.audit_variables()
    assert strategy.reduce("SUM", 1) == last + 1


def test_variables_of_one_rank_alone_do_not_shift_names(strategy):
    if strategy.extended.replica_id == 0:
        mpidist.Variable(1.0)  # of the default strategy
    w = make(strategy)
    consensus = strategy.extended.consensus
    assert len(set(consensus.gather_objects("names", lambda: w.name))) == 1


def test_variables_that_are_dropped_leave_nothing(new_strategy):
    strategy = new_strategy
    extended = strategy.extended
    kept = [make(strategy) for _ in range(3)]
    numbers = list(extended.variables)
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(3):
            for _ in range(200):
                with strategy.scope():
                    twin = copy.deepcopy(mpidist.Variable(0.0))
            here = tracemalloc.Filter(True, "*/replica_group.py")
            found = tracemalloc.take_snapshot().filter_traces([here])
            sizes.append(sum(s.size for s in found.statistics("filename")))
    finally:
        tracemalloc.stop()
    assert sizes[2] <= sizes[1] + 500  # 400 references to nothing take 28,000
    # The numbers go on, and are the same on all replicas
    last = make(strategy)
    assert list(extended.variables) == [
        *numbers,
        numbers[-1] + 1200,
        numbers[-1] + 1201,
    ]
    assert list(extended.variables.values()) == [*kept, twin, last]
    assert len(set(extended.consensus.gather_objects("names", lambda: last.name))) == 1


def test_what_belongs_to_this_process_cannot_be_pickled(strategy):
    w = make(strategy, name="w")
    with pytest.raises(mpidist.ContextError, match=r"w cannot be pickled.*Checkpoint"):
        pickle.dumps({"w": w})
    for value in (strategy, mpidist.get_strategy()):
        with pytest.raises(mpidist.ContextError, match=r"Strategy cannot be pickled"):
            pickle.dumps(value)
    with pytest.raises(mpidist.ContextError, match="cannot be pickled"):
        strategy.run(lambda: pickle.dumps(mpidist.get_replica_context()))


def test_what_a_variable_on_read_is_assigned_as(strategy):
    """In cross-replica context its value is that of all replicas."""
    n, sync = strategy.num_replicas_in_sync, mpidist.VariableSynchronization.ON_READ
    with strategy.scope():
        counter = mpidist.Variable(
            np.zeros(3), synchronization=sync, aggregation=SUM, name="counter"
        )
        silent = mpidist.Variable(np.zeros(3), synchronization=sync)
        w, table = mpidist.Variable(np.zeros(3)), mpidist.Variable(np.zeros((2, 3)))
    strategy.run(lambda: (counter.assign_add(np.full(3, 2.0)), None)[1])
    with strategy.scope():
        assert np.array_equal(w.assign(counter), np.full(3, 2.0 * n))
        assert np.array_equal(w.assign_add(counter), np.full(3, 4.0 * n))
        assert np.array_equal(mpidist.Variable(counter), np.full(3, 2.0 * n))
        assert np.array_equal(mpidist.Variable(lambda: counter), np.full(3, 2.0 * n))
        table[1].assign(counter)
        table.scatter_add(IndexedSlices(np.asarray(counter)[None], np.array([0])))
        assert np.array_equal(table, np.full((2, 3), 2.0 * n))
        with pytest.raises(mpidist.ArgumentError, match="aggregation NONE"):
            w.assign(silent)
        assert np.array_equal(w, np.full(3, 4.0 * n))
    strategy.extended.update(w, lambda w: (w.assign(counter), None)[1])
    assert np.array_equal(w, np.full(3, 2.0))
