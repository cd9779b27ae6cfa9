"""ON_WRITE and ON_READ variables; their tables are those of the model of variables."""

import copy

import numpy as np
import pytest
import variables
from variables import FIRST, MEAN, NONE, SUM

import mpidist
from mpidist import VariableSynchronization as Synchronization
from mpidist.strategy import assignment


def make(strategy, initial=(0.0, 0.0), aggregation=NONE, on_read=False, **kwargs):
    initial = np.array(initial) if isinstance(initial, tuple) else initial
    return variables.make(strategy, aggregation, initial, on_read, **kwargs)


def test_the_initial_value_is_replica_0s(strategy):
    rank = strategy.extended.replica_id
    w = make(strategy, np.full((2, 3), rank, "f4"))
    np.testing.assert_array_equal(w, np.zeros((2, 3)))
    assert (w.shape, w.dtype, w.ndim, w.size) == ((2, 3), np.float32, 2, 6)
    v = make(strategy, lambda: rank + 1, dtype="f2", name="v", trainable=False)
    assert (v.numpy(), v.dtype, v.name, v.trainable) == (1, np.float16, "v", False)


def test_attributes(strategy):
    w = make(strategy, aggregation=MEAN)
    assert w.synchronization is Synchronization.ON_WRITE
    assert w.aggregation is MEAN
    assert w.distribute_strategy is strategy
    assert isinstance(w, mpidist.DistributedValues)
    assert repr(w).startswith("<mpidist.Variable")


def test_outside_all_scopes_a_variable_is_this_processes_own(comm):
    w = mpidist.Variable([1.0, 2.0][comm.rank % 2])
    assert w.assign_add(1.0) is w
    assert w.numpy() == [2.0, 3.0][comm.rank % 2]


def test_initial_values_of_unlike_shape_or_one_that_fails_raise_on_all(strategy):
    last = strategy.num_replicas_in_sync - 1
    is_last = strategy.extended.replica_id == last
    if last > 0:
        with pytest.raises(ValueError, match="value"):
            make(strategy, np.zeros(3 if is_last else 2))
    with pytest.raises(TypeError, match="initial_value"):
        make(strategy, object() if is_last else 1.0)
    assert strategy.reduce("SUM", 1) == last + 1


# What is refused


ONE_ROW = mpidist.IndexedSlices(np.ones(1), np.zeros(1, int))
UPDATES = ["min", "max", "mul", "div", "update", "nd_update"]
# A variable's aggregation, whether it is ON_READ, and a call in replica context or not
REFUSED = {
    "no aggregation": (NONE, False, True, lambda w: w.assign(w.local), "is NONE"),
    "its scatter": (NONE, False, True, lambda w: w.scatter_add(ONE_ROW), "is NONE"),
    "its part": (NONE, False, True, lambda w: w[0].assign(1.0), "is NONE"),
    "a number": (SUM, False, True, lambda w: w.assign_add(1.0), "Python number"),
    "no value": (NONE, True, False, lambda w: w.value(), "aggregation NONE"),
    "a sum": (
        SUM,
        True,
        False,
        lambda w: w.assign_add(w.local),
        "with aggregation SUM",
    ),
    "on read": (SUM, True, False, lambda w: w.scatter_add(ONE_ROW), "ON_READ"),
}


def update(kind):
    """Return a change of a row whose total is none."""
    arguments = ([[0]], [1.0]) if kind == "nd_update" else (ONE_ROW,)
    return lambda w: getattr(w, f"scatter_{kind}")(*arguments)


REFUSED |= {
    f"{kind} in {'replica' if where else 'cross-replica'} context": (
        *(MEAN, False, where, update(kind)),
        "scatter",
    )
    for kind in UPDATES
    for where in (False, True)
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_tables_refuse(strategy, case):
    aggregation, on_read, is_in_replica, call, match = REFUSED[case]
    w = make(strategy, aggregation=aggregation, on_read=on_read)
    kind = (
        NotImplementedError if "scatter" in match or case == "on read" else ValueError
    )
    with pytest.raises(kind, match=match):
        strategy.run(lambda: call(w)) if is_in_replica else call(w)
    np.testing.assert_array_equal(w.local, [0, 0])


def test_a_mean_of_integers_is_refused(strategy):
    w = make(strategy, np.array([1, 2]), MEAN)
    with pytest.raises(ValueError, match="floating"):
        strategy.run(lambda: w.assign(np.array([1, 2])))


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
@pytest.mark.parametrize("on_read", [False, True])
def test_changes_in_update_communicate_nothing(strategy, aggregation, on_read):
    w = make(strategy, aggregation=aggregation, on_read=on_read)
    calls = strategy.extended.consensus.calls

    def change(w):
        w.assign_add(np.ones(2))
        w.scatter_mul(mpidist.IndexedSlices(np.full(1, 5.0), np.array([1])))

    strategy.extended.update(w, change)
    assert strategy.extended.consensus.calls == calls
    np.testing.assert_array_equal(w.local, [1, 5])
    if not on_read:
        strategy.extended.update(w, lambda w: w[0].assign(7))
        assert strategy.extended.consensus.calls == calls


DIFFERING = {
    "assign": lambda w, value: w.assign(value),
    "assign_add": lambda w, value: w.assign_add(value),
    "a transposed view": lambda w, value: w.assign(value.reshape(-1, 2).T.reshape(-1)),
    "a part": lambda w, value: w[...].assign(value),
    "scatter_update": lambda w, value: w.scatter_update(
        mpidist.IndexedSlices(value, np.arange(len(value)))
    ),
    "scatter_nd_add": lambda w, value: w.scatter_nd_add(
        np.arange(len(value))[:, None], value
    ),
    "indices": lambda w, value: w.scatter_add(
        mpidist.IndexedSlices(np.ones(len(value)), value.astype(int))
    ),
    "a mean of numbers": lambda w, value: w.distribute_strategy.run(
        lambda: w.assign(float(value.max()))
    ),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("change", DIFFERING)
def test_values_that_differ_in_one_element_are_refused_on_all(strategy, change):
    is_number = change == "a mean of numbers"
    shape = () if is_number else (100_000,)
    w = make(strategy, np.zeros(shape), MEAN if is_number else NONE)
    for element in (0, 7, 50_001, 99_998):
        value = np.zeros(100_000)
        value[element] = strategy.extended.replica_id
        with pytest.raises(mpidist.MismatchError, match=r"of Variable.*differ"):
            DIFFERING[change](w, value)
        np.testing.assert_array_equal(w, np.zeros(shape))


def test_update_runs_on_each_copy(strategy):
    w = make(strategy, (1.0, 2.0))
    delta = mpidist.PerReplica((np.array([1.0, 1.0]),), (0,))

    def change(v, d, *, scale):
        assert mpidist.in_cross_replica_context()
        return v.assign_add(d * scale).value()

    update = strategy.extended.update
    assert update(w, change, (delta,), {"scale": 2.0}) is None
    result = update(w, change, (delta,), {"scale": 2.0}, group=False)
    np.testing.assert_array_equal(result, [5.0, 6.0])
    with pytest.raises(RuntimeError, match="not a variable of this strategy"):
        update(mpidist.Variable(1.0), change)


# Use as an array, dtypes and shapes


def test_a_variable_works_as_an_array(strategy):
    array = np.array([[1.0, -2.0], [3.0, 4.0]])
    w = make(strategy, array)
    np.testing.assert_array_equal(w + 1, array + 1)
    np.testing.assert_array_equal(array @ w, array @ array)
    np.testing.assert_array_equal(-w / 2, -array / 2)
    np.testing.assert_array_equal(abs(w) > 2, abs(array) > 2)
    np.testing.assert_array_equal(np.maximum(w, 0), np.maximum(array, 0))
    np.testing.assert_array_equal(w[:, 0], array[:, 0])
    assert np.asarray(w).base is not None
    assert len(w) == 2


def test_in_place_operators_are_refused(strategy):
    w = make(strategy)
    array = np.ones(2)
    with pytest.raises(TypeError, match="assign_add"):
        w += 1
    with pytest.raises(TypeError, match="assign"):
        w[0] = 1
    with pytest.raises(TypeError, match="assign"):
        np.add(w, 1, out=w)
    array += w  # an array of the user's own is his business
    np.testing.assert_array_equal(array, [1, 1])


def test_what_was_read_stays_and_cannot_be_written(strategy):
    w = make(strategy)
    given = np.array([1.0, 2.0])
    before = w.value()
    w.assign(given)
    given[:] = 99
    np.testing.assert_array_equal(before, [0, 0])
    np.testing.assert_array_equal(w, [1, 2])
    for view in (w.value(), np.asarray(w), w[:1]):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 5
    w.numpy()[0] = 5
    np.testing.assert_array_equal(w, [1, 2])


def test_assignments_keep_shape_and_dtype(strategy):
    w = make(strategy, np.zeros(2, "f4"))
    w.assign(np.array([0.1, 0.2]))  # float64: within the kind
    assert w.dtype == np.float32
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        w.assign(np.zeros(3))
    with pytest.raises(TypeError, match="complex128"):
        w.assign(np.zeros(2, complex))
    n = make(strategy, np.zeros(2, "i4"))
    n.assign_add(1)
    with pytest.raises(TypeError, match="float64"):
        n.assign_add(0.5)
    assert n.numpy().tolist() == [1, 1]
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


def test_under_another_strategy_a_variable_is_refused(strategy, make_strategy):
    w = make(strategy)
    other = make_strategy()
    with other.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        w.assign(np.zeros(2))


def test_a_shallow_copy_is_refused(strategy):
    for thing in (strategy, make(strategy)):
        with pytest.raises(RuntimeError, match="deepcopy"):
            copy.copy(thing)


# Integers that do not fit


@pytest.mark.parametrize(
    ("dtype", "value", "method"),
    [
        ("i1", 300, "assign"),
        ("i1", -129, "assign"),
        ("u1", -1, "assign"),
        ("u1", -1, "assign_add"),
        ("u8", -1, "assign_sub"),
        ("i8", 2**63, "assign"),
        ("i8", 2**70, "assign"),
        ("u1", np.int64(256), "assign"),
        ("i1", np.array([1, 128]), "assign"),
        ("i4", [2**31, 0], "assign"),
        ("i8", np.array([2**63, 0], "u8"), "assign"),
        ("i1", np.array([100, 0], "i1"), "assign_add"),
        ("u1", np.array([201, 0], "u1"), "assign_sub"),
        ("i8", np.array([2**63 - 1, 0]), "assign_add"),
    ],
)
@pytest.mark.parametrize("on_read", [False, True])
def test_integers_that_do_not_fit_are_refused(strategy, dtype, value, method, on_read):
    w = make(strategy, np.array([100, 1], dtype), FIRST, on_read)
    is_last = strategy.extended.replica_id == strategy.num_replicas_in_sync - 1
    kind, match = mpidist.DTypeError, r"does not fit|which has dtype|64 bits"
    if isinstance(value, np.ndarray) and method != "assign":
        kind = mpidist.ArgumentError  # the value fits, but not the result
    with pytest.raises(kind, match=match):
        getattr(w, method)(value)
    with pytest.raises(kind, match=match):
        strategy.run(lambda: getattr(w, method)(value))
    if method == "assign":  # by one replica alone
        with pytest.raises(kind, match=match):
            w.assign(value if is_last else np.ones(2, dtype))
    assert w.numpy().tolist() == [100, 1]
    # What fits is taken, whatever its dtype
    w.assign(np.array([127, 0], f"{dtype[0]}8"))
    assert w.numpy().tolist() == [127, 0]
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


def test_a_boolean_variable_takes_no_other_numbers(strategy):
    w = make(strategy, np.array([True, False]))
    with pytest.raises(mpidist.DTypeError, match="has dtype bool"):
        w.assign(np.array([2, 3]))
    with pytest.raises(mpidist.DTypeError, match="has dtype bool"):
        make(strategy, True).assign(2)
    assert make(strategy, True).assign(0).numpy() == np.False_


@pytest.mark.parametrize("initial", [300, np.array([300]), [-129], 2**70, 1e9, np.nan])
def test_initial_values_that_do_not_fit_are_refused(strategy, initial):
    with pytest.raises(mpidist.DTypeError, match=r"does not fit int8|64 bits"):
        make(strategy, initial, dtype="i1")


@pytest.mark.parametrize("replicas", [2, 128, 200, 300, 70_000])
@pytest.mark.parametrize("dtype", ["i1", "u1", "i8", "u8", "f4"])
def test_shares_of_a_total_add_up_to_it(dtype, replicas):
    limits = np.iinfo(dtype) if dtype != "f4" else np.finfo(dtype)
    total = np.array([limits.max, 1, 0, limits.min], dtype)
    ranks = range(0, replicas, max(1, replicas // 300))
    shares = [assignment.share(total, replicas, r) for r in ranks]
    assert {share.dtype for share in shares} == {total.dtype}
    if dtype != "f4" and len(shares) == replicas:
        assert [sum(s.tolist()[j] for s in shares) for j in range(4)] == total.tolist()
