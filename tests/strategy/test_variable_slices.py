"""Parts of variables: arrays like any other, and assigned by `w[...].assign`."""

import copy
import gc
import json
import pickle

import numpy as np
import pytest
import variables
from variables import MEAN, NONE

START = np.arange(24.0).reshape(2, 3, 4)
KEYS = [
    0,
    -1,
    (0, 1),
    (1, 2, 3),
    (1, -1, -1),
    slice(None),
    slice(1, None),
    (slice(None), 1),
    (slice(None), slice(None, None, -1), slice(None, None, 2)),
    (..., 0),
    (None, 0, ..., 3),
    slice(0, 0),
    (),
    ...,
]


def make(strategy, aggregation=NONE, initial=START, on_read=False, **kwargs):
    return variables.make(strategy, aggregation, initial, on_read, **kwargs)


def changed(key, value, start=START):
    new = start.copy()
    new[key] = value
    return new


def part_for(key, rank=0):
    """New values for the part `key`, which differ from rank to rank."""
    return np.full(START[key].shape, 100.0 + rank) + np.arange(START[key].size).reshape(
        START[key].shape
    )


# They are what they were


@pytest.mark.parametrize("key", KEYS)
def test_a_part_is_the_array_that_it_was(strategy, key):
    w, expected = make(strategy), START[key]
    part = w[key]
    assert isinstance(part, type(expected))
    assert (part.dtype, part.shape) == (expected.dtype, np.shape(expected))
    np.testing.assert_array_equal(part, expected)
    assert repr(part) == repr(expected)
    assert str(part) == str(expected)
    for result in (
        part + 1,
        1 - part,
        part * part,
        part @ np.ones(part.shape[-1]) if part.ndim else part,
        np.exp(part),
        -part,
        part > 3,
        part.sum(),
        part.max(initial=0.0),
        np.where(part > 1, part, 0),
        np.concatenate([np.atleast_1d(part)] * 2),
    ):
        kinds = (np.ndarray, np.float64, np.bool_)
        assert type(result) in kinds or isinstance(part, float), type(result)
    assert type(part.sum()) is np.float64
    assert type(part + 1) is type(expected + 1)
    assert type(pickle.loads(pickle.dumps(part))) is type(expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(part)), expected)
    np.testing.assert_array_equal(copy.deepcopy(part), expected)
    if part.ndim:
        assert not part.flags.writeable
        assert part.copy().flags.writeable
        own = np.zeros_like(expected)
        own += part
        np.testing.assert_array_equal(own, expected)
        np.testing.assert_array_equal(memoryview(part).tolist(), expected.tolist())


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i8", "u4", "c16", "?"])
def test_numbers_are_those_that_they_were(strategy, dtype):
    expected = np.array([1, 0], dtype)[0]
    number = make(strategy, initial=np.array([1, 0], dtype))[0]
    assert isinstance(number, type(expected))
    assert number == expected == 1
    assert hash(number) == hash(expected)
    assert (repr(number), str(number)) == (repr(expected), str(expected))
    assert type(number + number) is type(expected + expected)
    assert f"{number}" == f"{expected}"
    assert {number: 5}[1] == 5
    assert complex(number) == 1
    if dtype == "f8":
        assert isinstance(number, float)
        assert json.dumps({"x": number}) == '{"x": 1.0}'
        assert round(number, 1) == 1.0
        assert f"{number:.3f}" == "1.000"
    if np.dtype(dtype).kind in "iu":
        assert list(range(number)) == [0]


def test_collectives_and_assignments_take_parts(strategy):
    n = strategy.num_replicas_in_sync
    w, v = make(strategy), make(strategy, initial=START[0])
    for key in (0, (0, 1), (1, 2, 3)):
        total = strategy.reduce("SUM", w[key])
        np.testing.assert_array_equal(total, n * START[key])
        assert not hasattr(total, "assign")
        results = strategy.run(lambda key=key: w[key])
        (local,) = strategy.experimental_local_results(results)
        np.testing.assert_array_equal(local, START[key])
    gathered = strategy.gather(w[1], axis=0)
    np.testing.assert_array_equal(gathered, np.concatenate([START[1]] * n))
    assert type(v.assign(w[1]).value()) is np.ndarray
    np.testing.assert_array_equal(v, START[1])
    strategy.extended.update(v, lambda v: v.assign_add(w[1]))
    assert type(v.local) is np.ndarray
    np.testing.assert_array_equal(v, 2 * START[1])
    assert type(v * w[0]) is np.ndarray


# Assignments, by the tables


@pytest.mark.parametrize("key", KEYS)
def test_a_part_is_assigned_in_cross_replica_context(strategy, key):
    w, new = make(strategy), part_for(key)
    assert w[key].assign(new) is w
    np.testing.assert_array_equal(w, changed(key, new))
    with strategy.scope():
        w[key].assign(5)  # numbers fill it, as in TensorFlow
    np.testing.assert_array_equal(w, changed(key, 5))
    assert type(w.local) is np.ndarray
    assert not w.local.flags.writeable


@pytest.mark.parametrize("dtype", ["i8", "u8", "i1"])
def test_a_part_of_integers_whose_mean_is_read_changes_no_others(strategy, dtype):
    most = np.iinfo(dtype).max
    v = make(strategy, MEAN, np.array([most, most - 1, most - 2], dtype), on_read=True)
    v[1:0:-1].assign(np.array([5], dtype))
    np.testing.assert_array_equal(v.local, np.array([most, 5, most - 2], dtype))


@pytest.mark.mpi(min_size=2)
def test_other_parts_on_other_replicas_are_an_error_on_all(strategy):
    w, rank = make(strategy, MEAN), strategy.extended.replica_id
    for key in (rank % 2, (0, rank % 2), (0, 0, rank % 2)):
        with pytest.raises(ValueError, match="part"):
            w[key].assign(1.0)
        with pytest.raises(ValueError, match="part"):
            strategy.run(lambda key=key: w[key].assign(part_for(key)))
    np.testing.assert_array_equal(w, START)
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (0, np.ones(3), "shape"),
        ((0, 0, 0), np.ones(2), "shape"),
        (0, np.ones((1, 3, 4)), "shape"),
        (0, 1j, "complex128"),
        ((0, 0, 0), "x", "array or a number"),
    ],
)
def test_bad_values_on_one_rank_are_an_error_on_all(strategy, key, value, message):
    w = make(strategy)
    is_last = strategy.extended.replica_id == strategy.num_replicas_in_sync - 1
    with pytest.raises((TypeError, ValueError), match=message):
        w[key].assign(value if is_last else 1.0)
    np.testing.assert_array_equal(w, START)
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


# Parts of parts, and what is none


def test_parts_of_parts_are_parts(strategy):
    w = make(strategy)
    w[0][1].assign(np.full(4, 7.0))
    np.testing.assert_array_equal(w, changed((0, 1), 7))
    w = make(strategy)
    w[1].T[0][1:].assign([7.0, 8.0])
    np.testing.assert_array_equal(w, changed((1, slice(1, None), 0), [7, 8]))


def test_a_part_that_was_read_before_stays_and_is_still_that_part(strategy):
    w = make(strategy)
    part, number = w[0], w[1, 2, 3]
    w.assign(2 * START)
    np.testing.assert_array_equal(part, START[0])
    part.assign(np.zeros((3, 4)))
    number.assign(-1)
    np.testing.assert_array_equal(
        w, changed((1, 2, 3), -1, changed(0, 0, start=2 * START))
    )
    assert number == START[1, 2, 3]


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_order_in_memory_does_not_matter(strategy, order):
    w = make(strategy, initial=np.zeros((3, 4)))
    v = make(strategy, initial=np.zeros((3, 4)))
    f = np.asarray(START[0], order=order)
    strategy.extended.update(w, lambda w: w.assign_add(f))
    part = w[:, 1]
    w.assign(np.asarray(START[0], order="C" if order == "F" else "F"))
    part.assign(np.full(3, -1.0))
    w[2, 3].assign(9)
    np.testing.assert_array_equal(w, changed((2, 3), 9, changed((..., 1), -1, f)))
    np.testing.assert_array_equal(v, 0)


def test_what_is_no_part_any_more_is_refused(strategy):
    w = make(strategy)
    for other in (
        w[[0, 1]],
        w[0].copy(),
        w[0].astype("f4"),
        w[0].view("i8"),
        w[0].reshape(-1).copy(),
    ):
        with pytest.raises((TypeError, ValueError), match="assign"):
            other.assign(np.zeros(other.shape))
    with pytest.raises(ValueError, match="read-only"):
        w[0] += 1
    with pytest.raises(ValueError, match="read-only"):
        w[0][0] = 1
    np.testing.assert_array_equal(w, START)
    part = w[0]
    del w
    gc.collect()
    np.testing.assert_array_equal(part, START[0])
    with pytest.raises(ValueError, match="no longer"):
        part.assign(np.zeros((3, 4)))


def test_integers_and_copies(strategy):
    n = make(strategy, initial=np.zeros(3, "i1"))
    n[1].assign(5)
    n[2:].assign(np.array([7]))
    assert n.numpy().tolist() == [0, 5, 7]
    with pytest.raises(TypeError, match="does not fit"):
        n[0].assign(300)
    twin = copy.deepcopy(n)
    twin[0].assign(1)
    assert (n.numpy().tolist(), twin.numpy().tolist()) == ([0, 5, 7], [1, 5, 7])
    zero = make(strategy, initial=np.array(1.0))
    zero[()].assign(4.0)
    assert zero.numpy() == 4.0
    b = make(strategy, initial=np.array([True, False]))
    b[1:].assign([True])
    assert b.numpy().all()


def test_an_assignment_while_another_thread_reads_is_seen_afterwards(strategy):
    """It comes between the making of what is indexed and its keeping."""
    w = make(strategy, initial=np.zeros(3))
    read = w._array

    def assign_then_read():
        old = read()
        del w.__dict__["_array"]
        w.assign(np.ones(3))  # as another thread could do
        return old

    w.__dict__["_array"] = assign_then_read
    assert w[0] == 0
    assert w[0] == 1
