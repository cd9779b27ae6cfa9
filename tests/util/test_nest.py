"""Nested structures: flatten, put back, name the leaves."""

import collections
import concurrent.futures
import contextlib
import threading
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.util import nest

Pair = collections.namedtuple("Pair", "left right")


class Batch(dict):
    pass


class Rows(list):
    pass


class Point(tuple):
    pass


LEAVES = st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
KEYS = st.text(max_size=3) | st.integers()


def containers(inner):
    several = st.lists(inner, max_size=3)
    mappings = st.dictionaries(KEYS, inner, max_size=3)
    return st.one_of(
        several,
        several.map(tuple),
        several.map(Rows),
        several.map(Point),
        mappings,
        mappings.map(Batch),
        mappings.map(lambda d: collections.defaultdict(int, d)),
        mappings.map(collections.OrderedDict),
        st.builds(Pair, inner, inner),
    )


NESTS = st.recursive(LEAVES, containers, max_leaves=12)
PURE = settings(derandomize=True, deadline=None)


def same_structure(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return set(one) == set(other) and all(
            same_structure(one[k], other[k]) for k in one
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_structure, one, other))
    return one == other


@PURE
@given(NESTS)
def test_unflatten_puts_back_what_flatten_took_apart(value):
    leaves, spec = nest.flatten(value)
    assert same_structure(nest.unflatten(spec, leaves), value)


@PURE
@given(NESTS)
def test_each_leaf_is_named_as_python_would_write_it(value):
    leaves, spec = nest.flatten(value)
    names = nest.leaf_names(spec, "value")
    for leaf, name in zip(leaves, names, strict=True):
        found = eval(name, {}, {"value": value})  # the names are this library's
        assert found is leaf


@PURE
@given(NESTS)
def test_specs_are_values(value):
    leaves, spec = nest.flatten(value)
    copy = nest.flatten(nest.unflatten(spec, leaves))[1]
    assert (copy, hash(copy), str(copy)) == (spec, hash(spec), str(spec))


@PURE
@given(NESTS)
def test_map_leaves_keeps_the_structure(value):
    boxed = nest.map_leaves(lambda leaf: {leaf}, value)
    assert same_structure(nest.map_leaves(lambda box: box.copy().pop(), boxed), value)


def test_a_spec_reads_the_same_in_every_process(comm):
    # Each process has its own order of keys and its own classes' addresses
    keys = ["a", "b", "c"][comm.rank % 3 :] + ["a", "b", "c"][: comm.rank % 3]
    value = {
        "d": dict.fromkeys(keys, 1),
        "b": Batch(dict.fromkeys(keys, 2)),
        "p": Pair(3, Rows()),
    }
    spec = str(nest.flatten(value)[1])
    assert len(set(comm.allgather(spec))) == 1


@pytest.mark.parametrize(
    ("value", "leaves"),
    [
        ({"b": 1, "a": 2}, [2, 1]),
        (Batch(b=1, a=2), [2, 1]),
        (collections.defaultdict(int, b=1, a=2), [2, 1]),
        (collections.UserDict(b=1, a=2), [2, 1]),
        (collections.OrderedDict(b=1, a=2), [1, 2]),  # its order is part of it
        (Pair(right=1, left=2), [2, 1]),
        ({2: "two", 10: "ten"}, ["two", "ten"]),
        ({"a": (), "b": [{}, Rows()]}, []),
        (Batch({1: "one", "b": "letter"}), ["one", "letter"]),
    ],
)  # fmt: skip
def test_leaves_come_in_the_order_of_sorted_keys(value, leaves):
    assert nest.flatten(value)[0] == leaves


def test_distributed_values_are_leaves():
    value = mpidist.PerReplica(([1, 2],))
    assert nest.flatten([value])[0] == [value]


def test_mappings_that_are_no_dict_are_structure():
    leaves, spec = nest.flatten([types.MappingProxyType({"x": 1})])
    assert leaves == [1]
    assert nest.leaf_names(spec, "batch") == ["batch[0]['x']"]


@pytest.mark.parametrize("other", [(1, 2), [1], {"a": 1, "b": 2}, [1, [2]], 3])
def test_map_leaves_refuses_another_structure(other):
    with pytest.raises(mpidist.ArgumentError, match="structures differ"):
        nest.map_leaves(lambda x, y: x, [1, 2], other)


class SlowToHash(type):
    """The metaclass of classes at whose registration threads meet."""

    met = threading.Barrier(2)

    def __hash__(cls):
        with contextlib.suppress(threading.BrokenBarrierError):
            SlowToHash.met.wait(0.01)
        return super().__hash__()


def test_two_threads_may_use_a_class_for_the_first_time_at_once():
    for i in range(10):
        batch = SlowToHash(f"Batch{i}", (dict,), {})(b=1, a=2)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            found = list(pool.map(nest.flatten, [batch, batch]))
        assert [leaves for leaves, _ in found] == [[2, 1], [2, 1]]
