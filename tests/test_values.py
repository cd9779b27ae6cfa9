"""PerReplica and Mirrored values."""

import copy
import operator
import pickle

import numpy as np
import pytest

import mpidist


def test_the_base_class_cannot_be_made():
    with pytest.raises(TypeError, match="base class"):
        mpidist.DistributedValues((1,))


def test_per_replica_shows_its_component_and_replica():
    value = mpidist.PerReplica((np.array([5.0]),), (3,))
    assert value.values == (np.array([5.0]),)
    assert value.replica_ids == (3,)
    assert repr(value) == "PerReplica:{\n  3: array([5.])\n}"


def test_as_many_components_as_replica_ids():
    with pytest.raises(ValueError, match="1 values came with 2"):
        mpidist.PerReplica((1,), (0, 1))
    with pytest.raises(ValueError, match="at least one"):
        mpidist.PerReplica(())


@pytest.mark.parametrize(
    "use",
    [
        np.asarray,
        np.sum,
        np.exp,
        float,
        int,
        len,
        list,
        operator.neg,
        lambda v: v + 1,
        lambda v: 1 + v,
        lambda v: np.ones(2) * v,
        lambda v: v @ np.ones(2),
        lambda v: v[0],
        lambda v: v > 0,
        lambda v: np.concatenate([v, v]),
        lambda v: divmod(v, 2),
        lambda v: divmod(2, v),
        lambda v: v << 1,
        lambda v: 1 >> v,
        lambda v: ~v,
        round,
        lambda v: f"{v:.2f}",
        lambda v: operator.setitem(v, 0, 1),
        lambda v: 1.0 in v,
        reversed,
    ],
)
def test_a_per_replica_value_is_not_an_array(use):
    value = mpidist.PerReplica((np.ones(2),), (0,))
    with pytest.raises(ValueError, match=r"reduce.*gather.*local_results"):
        use(value)


@pytest.mark.parametrize("name", ["item", "numpy", "shape", "mean", "T"])
def test_a_per_replica_value_has_no_attributes_of_arrays(name):
    value = mpidist.PerReplica((np.ones(2),), (0,))
    match = f"(?s)no attribute '{name}': .*reduce.*gather.*local_results"
    with pytest.raises(AttributeError, match=match):
        getattr(value, name)
    assert not hasattr(value, "__array_interface__")
    with pytest.raises(AttributeError, match=r"no attribute 'losses'$"):
        value.losses  # noqa: B018
    assert f"{value}" == str(value)


@pytest.mark.parametrize("component", [0, np.zeros(3), np.ones(3), None, ()])
def test_a_per_replica_value_is_true_as_any_object(component):
    """As in `value or default`, and in `if value:`."""
    value = mpidist.PerReplica((component,), (0,))
    assert bool(value) is True
    assert (value or 5) is value
    assert value


def test_per_replica_values_compare_and_hash_by_identity():
    one, two = mpidist.PerReplica((1,)), mpidist.PerReplica((1,))
    assert one == one
    assert one != two
    assert len({one, two}) == 2


def test_mirrored_works_as_its_component():
    array = np.arange(6.0).reshape(2, 3)
    value = mpidist.Mirrored((array,), (1,))
    np.testing.assert_array_equal(value + 1, array + 1)
    np.testing.assert_array_equal(1 - value, 1 - array)
    np.testing.assert_array_equal(np.ones(2) @ value, array.sum(axis=0))
    np.testing.assert_array_equal(np.exp(value), np.exp(array))
    np.testing.assert_array_equal(value[1], array[1])
    np.testing.assert_array_equal(value.T, array.T)
    assert (value.shape, value.dtype, value.ndim, value.size) == ((2, 3), "f8", 2, 6)
    assert value.sum() == 15
    assert len(value) == 2
    assert [row.sum() for row in value] == [3, 12]
    assert repr(value).startswith("Mirrored:{\n  1: array([[")


def test_mirrored_numbers_convert():
    value = mpidist.Mirrored((np.float64(2.5),))
    assert (float(value), int(value), bool(value), complex(value)) == (
        2.5,
        2,
        True,
        2.5,
    )
    assert f"{value:.2f}" == "2.50"
    assert operator.index(mpidist.Mirrored((np.int64(3),))) == 3


def test_mirrored_arrays_are_read_only_views():
    value = mpidist.Mirrored((np.zeros(3),))
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(value)[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        value[1:][0] = 1
    with pytest.raises(TypeError, match="in place"):
        value += 1
    assert np.array(value, dtype="f4").dtype == np.float32


def test_copies_of_mirrored_values():
    value = mpidist.Mirrored((np.zeros(3),), (2,))
    shallow, deep = copy.copy(value), copy.deepcopy(value)
    assert shallow.values[0] is value.values[0]
    assert deep.values[0] is not value.values[0]
    assert deep.replica_ids == (2,)
    np.testing.assert_array_equal(deep, value)


@pytest.mark.parametrize("other", [1.0, 1, True, np.float64(1), np.ones(1), [1.0]])
def test_a_per_replica_value_is_not_compared_with_an_array(other):
    value = mpidist.PerReplica((1.0,))
    for compare in (
        lambda: value == other,
        lambda: other == value,
        lambda: value != other,
        lambda: value in [other],
        lambda: value == mpidist.Mirrored((other,)),
    ):
        with pytest.raises(ValueError, match=r"reduce.*gather.*local_results"):
            compare()
    assert value in [value, other]
    assert value not in (None, "loss", mpidist.PerReplica((1.0,)))
    assert {value: 1}[value] == 1


IN_PLACE = {
    "item of the component": lambda v: v.values[0].__setitem__(0, 9),
    "transposed": lambda v: v.T.__setitem__((0, 0), 9),
    "add.at": lambda v: np.add.at(v, 0, 9),
    "out": lambda v: np.negative(v, out=v),
    "reduction's out": lambda v: np.add.reduce(np.ones((2, 2)), axis=0, out=v[0]),
    "asarray": lambda v: np.asarray(v).fill(9),
    "row": lambda v: v[0].fill(9),
    "copyto": lambda v: np.copyto(np.asarray(v), 9),
}
METHODS = {
    "sort": lambda v: v.sort(axis=0),
    "fill": lambda v: v.fill(9),
    "flat": lambda v: v.flat.__setitem__(0, 9),
    "itemset": lambda v: v.data.__setitem__((0, 0), 9.0),
    "real": lambda v: v.real.__setitem__(0, 9),
    "item": lambda v: operator.setitem(v, 0, 9),
    "reshape": lambda v: v.reshape(-1).__setitem__(0, 9),
    "partition": lambda v: v.partition(1),
}


@pytest.mark.parametrize("change", IN_PLACE | METHODS)
def test_mirrored_values_cannot_be_changed_in_place(change):
    array = np.array([[3.0, 2.0], [1.0, 0.0]])
    given = array.copy()
    value = mpidist.Mirrored((given,), (0,))
    with pytest.raises((TypeError, ValueError)):
        (IN_PLACE | METHODS)[change](value)
    np.testing.assert_array_equal(value, array)
    given[0, 0] = 3.0  # the caller's own array stays as it was


@pytest.mark.parametrize("change", IN_PLACE)
def test_variables_cannot_be_changed_in_place(strategy, change):
    array = np.array([[3.0, 2.0], [1.0, 0.0]])
    on_read = mpidist.VariableSynchronization.ON_READ
    mean = mpidist.VariableAggregation.MEAN
    with strategy.scope():
        w = mpidist.Variable(np.zeros((2, 2)))
        r = mpidist.Variable(array, synchronization=on_read, aggregation=mean)
    variables = [
        w.assign(array),
        copy.deepcopy(w),
        mpidist.Variable(array),
        w.assign_sub(array).assign_add(array),
        r,
    ]
    w.scatter_add(mpidist.IndexedSlices(array[:1] * 0, np.array([0])))
    for variable in variables:
        with pytest.raises((TypeError, ValueError)):
            strategy.run(lambda v=variable: IN_PLACE[change](v))
        np.testing.assert_array_equal(variable, array)


def test_mirrored_values_are_read_only_after_pickling():
    value = pickle.loads(pickle.dumps(mpidist.Mirrored((np.zeros(3),), (2,))))
    assert value.replica_ids == (2,)
    with pytest.raises(ValueError, match="read-only"):
        value.values[0][0] = 1


def test_a_refused_value_says_what_it_is_and_never_its_numbers(strategy):
    """With one replica as with two."""
    batch = strategy.run(lambda: np.full((50, 4), 12345.678, "f4"))
    with pytest.raises(ValueError, match="dtype float32 and shape") as caught:
        np.ones((2, 50)) @ batch
    text = str(caught.value)
    assert "12345" not in text
    assert len(text.splitlines()) == 3
    for name in ("strategy.run", "as_arrays", "strategy.reduce", "local_results"):
        assert name in text
    with pytest.raises(AttributeError, match="as_arrays"):
        batch.mean()
