"""The tables of ON_WRITE and ON_READ variables; NumPy is the oracle."""

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


def replica_values(strategy, shape=(2,)):
    """What each replica contributes: 3, 4, 5, ... in all elements."""
    return [np.full(shape, 3.0 + r) for r in range(strategy.num_replicas_in_sync)]


def in_replica(strategy, fn):
    """Run `fn(this replica's value)` in replica context; return its result here."""
    values = replica_values(strategy)

    def step():
        rank = mpidist.get_replica_context().replica_id_in_sync_group
        return fn(values[rank])

    (result,) = strategy.experimental_local_results(strategy.run(step))
    return result


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


# ON_WRITE, replica context


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_on_write_in_replica_context_combines_then_applies(
    strategy, aggregation, method
):
    before = np.array([10.0, 20.0])
    w = make(strategy, before, aggregation)
    values = np.array(replica_values(strategy))
    combined = {
        SUM: values.sum(axis=0),
        MEAN: values.mean(axis=0),
        FIRST: values[0],
    }[aggregation]
    expected = {
        "assign": combined,
        "assign_add": before + combined,
        "assign_sub": before - combined,
    }[method]
    seen = in_replica(strategy, lambda v: getattr(w, method)(v).numpy())
    np.testing.assert_allclose(seen, expected, rtol=1e-15)
    np.testing.assert_allclose(w, expected, rtol=1e-15)


def test_on_write_without_aggregation_is_refused_in_replica_context(strategy):
    w = make(strategy)
    for method in (w.assign, w.assign_add, w.assign_sub):
        with pytest.raises(ValueError, match="aggregation is NONE"):
            in_replica(strategy, method)
    np.testing.assert_array_equal(w, [0, 0])


def test_python_numbers_in_replica_context(strategy):
    total, mean = make(strategy, aggregation=SUM), make(strategy, aggregation=MEAN)
    with pytest.raises(ValueError, match="Python number"):
        in_replica(strategy, lambda _: total.assign_add(1.0))
    in_replica(strategy, lambda _: mean.assign_add(1.0))
    np.testing.assert_array_equal(mean, [1, 1])


def test_a_mean_of_integers_is_refused(strategy):
    w = make(strategy, np.array([1, 2]), MEAN)
    with pytest.raises(ValueError, match="floating"):
        in_replica(strategy, lambda v: w.assign(v.astype(int)))


# ON_WRITE, cross-replica context


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
def test_on_write_in_cross_replica_context_sets_all_copies(strategy, aggregation):
    w = make(strategy, aggregation=aggregation)
    with strategy.scope():
        assert w.assign(np.array([1.0, 2.0])) is w
        w.assign_add(1)
        w.assign_sub(np.array([0.5, 0.25]))
    w.assign_add(mpidist.Mirrored((np.array([1.0, 1.0]),)))  # outside the scope too
    np.testing.assert_array_equal(w, [2.5, 3.75])


def test_a_per_replica_value_is_refused_in_cross_replica_context(strategy):
    w = make(strategy, aggregation=SUM)
    value = mpidist.PerReplica((np.zeros(2),), (strategy.extended.replica_id,))
    with pytest.raises(ValueError, match="same value"):
        w.assign(value)


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


# ON_READ


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_on_read_is_local_in_replica_context_and_reduced_across(strategy, aggregation):
    w = make(strategy, aggregation=aggregation, on_read=True)
    values = np.array(replica_values(strategy))
    own = in_replica(strategy, lambda v: w.assign(v).assign_add(v).numpy())
    np.testing.assert_array_equal(own, 2 * values[strategy.extended.replica_id])
    expected = {
        SUM: 2 * values.sum(axis=0),
        MEAN: 2 * values.mean(axis=0),
        FIRST: 2 * values[0],
    }[aggregation]
    with strategy.scope():
        np.testing.assert_allclose(w.read_value(), expected, rtol=1e-15)
    np.testing.assert_allclose(w.value(), expected, rtol=1e-15)


def test_on_read_without_aggregation_has_no_value_across(strategy):
    w = make(strategy, on_read=True)
    own = in_replica(strategy, lambda v: w.assign(v).numpy())
    assert own[0] == 3 + strategy.extended.replica_id
    with pytest.raises(ValueError, match="aggregation NONE"):
        w.value()


@pytest.mark.parametrize("total", [np.array([6.0, 1.0]), np.array([7, -5])])
def test_on_read_sum_assigned_across_reads_the_same(strategy, total):
    w = make(strategy, np.zeros_like(total), SUM, on_read=True)
    w.assign(total)
    np.testing.assert_allclose(w.value(), total, rtol=1e-15)
    with pytest.raises(ValueError, match="ON_READ with aggregation SUM"):
        w.assign_add(total)


@pytest.mark.parametrize("aggregation", [MEAN, FIRST])
def test_on_read_assigned_across_sets_all_copies(strategy, aggregation):
    w = make(strategy, aggregation=aggregation, on_read=True)
    w.assign(np.array([1.0, 2.0])).assign_add(np.array([1.0, 1.0]))
    own = in_replica(strategy, lambda _: w.numpy())
    np.testing.assert_array_equal(own, [2.0, 3.0])


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
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.copy(make(strategy))


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


def test_scatters_of_integers_that_do_not_fit_are_refused(strategy):
    w = make(strategy, np.array([100, 1], "i1"))
    for method, row in (("add", 28), ("sub", -28), ("update", 128), ("mul", 2)):
        delta = mpidist.IndexedSlices(np.array([row]), np.array([0]))
        with pytest.raises((TypeError, ValueError), match="does not fit int8"):
            getattr(w, f"scatter_{method}")(delta)
    assert w.numpy().tolist() == [100, 1]
    delta = mpidist.IndexedSlices(np.array([27]), np.array([0]))
    assert w.scatter_add(delta).numpy().tolist() == [127, 1]


@pytest.mark.mpi(min_size=2)
def test_a_copy_of_one_replica_that_does_not_fit_is_an_error_on_all(strategy):
    w = make(strategy, np.array([0], "i1"), FIRST, on_read=True)
    rank = strategy.extended.replica_id
    strategy.run(lambda: w.assign(np.array([100 * rank], "i1")[:1]) if rank < 2 else w)
    with pytest.raises(mpidist.ArgumentError, match=r"is 200 .*does not fit int8"):
        w.assign_add(np.array([100]))
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
