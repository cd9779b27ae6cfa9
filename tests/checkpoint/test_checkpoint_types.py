"""What is saved comes back as the type that it was; padding is no difference."""

from __future__ import annotations

import collections
import gzip
import pathlib
import random
import typing

import h5py
import numpy as np
import pytest
from stateful import Stateful

import mpidist
from mpidist.checkpoint import tree

Point = collections.namedtuple("Point", "x y")


class Named(typing.NamedTuple):
    x: int
    more: typing.Any

    def double(self):
        return 2 * self.x


# Lists of numbers, and the dtype of those that are one dataset
NUMBERS = {
    "floats": ([0.1, -0.0, 1.0, float("nan"), float("inf")], "f8"),
    "bools": ((True, False), "?"),
    "complex": (collections.deque([1 + 2j, complex(-0.0, float("nan"))], 2), "c16"),
    "float32": ([np.float32(0.1), np.float32("nan")], "f4"),
    "times": ([np.datetime64(1, "s"), np.datetime64("NaT", "s")], "i8"),
    "large": ([1, 2**63], None),
    "mixed": ([1, 1.0, True, None, np.float64(1)], None),
    "units": ([np.datetime64(1, "s"), np.datetime64(1, "D")], None),
}


def shape_of(value):
    """Say of what types a nest is, with all that `==` does not compare."""
    if isinstance(value, collections.abc.Mapping):
        factory = getattr(value, "default_factory", None)
        items = [(key, shape_of(child)) for key, child in value.items()]
        return type(value).__name__, factory, items
    if isinstance(value, list | tuple | collections.deque):
        about = getattr(value, "maxlen", None), getattr(value, "_fields", None)
        return type(value).__name__, about, [shape_of(child) for child in value]
    return type(value).__name__, repr(value)


def test_classes_of_the_program_are_taken_where_it_has_some(
    strategy, comm, mpi_tmp_path
):
    log = [Named(1, Named(2, None))]
    counts = {"a": collections.defaultdict(lambda: 7, b=1)}
    checkpoint = mpidist.Checkpoint(strategy=strategy, log=log, counts=counts)
    log.append(Named(5, None))
    path = checkpoint.write(mpi_tmp_path / "x")
    del log[1:]
    counts["a"].clear()
    checkpoint.restore(path)
    assert [type(one) for one in log] == [Named, Named]
    assert type(log[0].more) is Named
    assert log[1].double() == 10
    assert counts["a"] == {"b": 1}
    assert counts["a"]["new"] == 7


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.mpi(min_size=2)
def test_another_order_on_one_rank(strategy, comm, mpi_tmp_path, is_own):
    """Of a dict all get the order of rank 0; of an OrderedDict it is a mismatch."""
    pairs = [("b", 1), ("a", 2)][:: -1 if comm.rank else 1]
    own = Stateful(dict(pairs))
    kept = own if is_own else own.state
    checkpoint = mpidist.Checkpoint(strategy=strategy, kept=kept)
    checkpoint.restore(checkpoint.write(mpi_tmp_path / "x"))
    assert list(own.state) == ["b", "a"]
    checkpoint.kept = collections.OrderedDict(pairs)
    with pytest.raises(mpidist.MismatchError, match="kept"):
        checkpoint.write(mpi_tmp_path / "x")


class Config(dict):
    """A dict of the program."""


@pytest.mark.parametrize("cls", [dict, collections.OrderedDict, Config])
def test_the_order_of_a_dict_of_arrays(strategy, mpi_tmp_path, cls):
    held = cls(z=np.zeros(2), m=1, a=np.ones(2))
    path = mpidist.Checkpoint(strategy=strategy, held=held).write(mpi_tmp_path / "x")
    other = cls(new=np.full(2, 3), a=np.zeros(2), z=np.zeros(2), m=2)
    arrays = dict(other)
    checkpoint = mpidist.Checkpoint(strategy=strategy, held=other)
    checkpoint.restore(path, is_partial=True)
    is_known = cls is not Config  # a class of the program may mind
    assert list(other) == (["z", "m", "a", "new"] if is_known else list(arrays))
    assert other["m"] == 1
    assert all(other[name] is arrays[name] for name in ("z", "a", "new"))
    np.testing.assert_array_equal(other["a"], np.ones(2))


@pytest.mark.parametrize("name", NUMBERS)
def test_lists_of_numbers(strategy, mpi_tmp_path, name):
    """As arrays in the file, and as they were, whatever the program has there."""
    values, dtype = NUMBERS[name]
    checkpoint = mpidist.Checkpoint(strategy=strategy, kept=values, rows=[values])
    path = checkpoint.write(mpi_tmp_path / "x")
    with h5py.File(path) as file:
        assert isinstance(file["kept"], h5py.Group) == (dtype is None)
        if dtype is not None:
            assert file["kept"].dtype == dtype
            assert file["rows/0"].shape == (len(values),)
    for other in (None, [], [1], [0.5, "text", 3], values):
        again = mpidist.Checkpoint(strategy=strategy, kept=other, rows=[other])
        again.restore(path)
        is_replaced = other is None or isinstance(values, tuple)
        kind = type(values) if is_replaced or other is values else list
        assert shape_of(kind(again.kept)) == shape_of(kind(values))
        assert shape_of(again.rows) == shape_of([values])
    for other in (1.0, {"a": 1}, np.zeros(len(values)), [np.zeros(1)]):
        again = mpidist.Checkpoint(strategy=strategy, kept=values, rows=other)
        with pytest.raises(mpidist.CheckpointError, match=r"'rows"):
            again.restore(path)


def test_long_lists_of_numbers_lie_in_shards(strategy, comm, mpi_tmp_path):
    numbers, queue = [float(comm.rank)] * 300_000, collections.deque(range(300_000))
    checkpoint = mpidist.Checkpoint(
        strategy=strategy,
        shard_bytes=1 << 20,
        both=queue,
        own=mpidist.PerReplica((list(numbers),)),
        state=Stateful(tuple(numbers)),
    )
    path = checkpoint.write(mpi_tmp_path / "x")
    with h5py.File(path) as file:
        assert list(file["both"][-3:]) == list(queue)[-3:]
    checkpoint.both = checkpoint.state.state = None
    checkpoint.own.values[0].append(7)
    checkpoint.restore(path)
    assert checkpoint.both == queue
    assert checkpoint.own.values[0] == list(checkpoint.state.state) == numbers
    if comm.size > 1:
        with pytest.raises(mpidist.MismatchError, match="'unlike'"):
            checkpoint.unlike = numbers
            checkpoint.write(mpi_tmp_path / "x")


class Momentum(typing.NamedTuple):
    x: float
    y: float


def ten():
    return 10


def test_a_state_gets_the_classes_of_the_state_before(strategy, mpi_tmp_path):
    def start(n):
        counts = collections.defaultdict(ten, a=n)
        log = [Momentum(i, 0.5) for i in range(n)] + [Named(1, {})]
        return {"m": Momentum(n, 0.5), "counts": counts, "log": log, "c": Config(n=n)}

    own = Stateful(start(3))
    checkpoint = mpidist.Checkpoint(strategy=strategy, own=own)
    path = checkpoint.write(mpi_tmp_path / "x")
    own.state = start(1)
    checkpoint.restore(path)
    assert shape_of(own.state) == shape_of(start(3))
    assert [type(x) for x in own.state["log"]] == [Momentum] * 3 + [Named]
    assert own.state["counts"]["new"] == 10
    own.state = before = {}
    with pytest.raises(mpidist.CheckpointError, match=r"own.*default_factory"):
        checkpoint.restore(path)
    assert own.state is before
    del checkpoint.own.state
    own.state = Momentum(1.0, 2.0)  # alone, and no others known
    path = checkpoint.write(mpi_tmp_path / "x")
    own.state = None
    checkpoint.restore(path)
    assert (type(own.state).__name__, own.state.y) == ("Momentum", 2.0)


def test_a_checkpoint_of_an_older_version(strategy, comm, mpi_tmp_path):
    """Written before lists were datasets and dicts had an order."""
    path = mpi_tmp_path / "older.h5"
    if comm.rank == 0:
        packed = pathlib.Path(__file__).with_name("older.h5.gz").read_bytes()
        path.write_bytes(gzip.decompress(packed))
    comm.Barrier()
    own, rng, python = Stateful({}), np.random.default_rng(0), random.Random(0)
    w = {"b": np.zeros(3), "a": np.zeros(2, int)}
    checkpoint = mpidist.Checkpoint(
        strategy=strategy, kept={}, own=own, w=w, rng=rng, python=python
    )
    checkpoint.restore(path).assert_consumed()
    kept = {
        "losses": [0.5, 0.25],
        "steps": (1, 2, 3),
        "mixed": [1, 2.5, None, "text", 2**70],
        "flags": [True, False],
        "dict": {"a": 2, "z": 1},
        "numbers": {10: 1, 9: 2},
        "ordered": collections.OrderedDict(z=1, a=2),
        "none": collections.OrderedDict(),
        "counter": collections.Counter("aab"),
        "default": collections.defaultdict(int, b=1),
        "function": collections.defaultdict(None, n=1),
        "queue": collections.deque([1, 2], 5),
        "point": Point(1, 2),
        "scalars": [np.float32(1.5), np.datetime64(1, "s")],
    }
    state = {
        "a": (0.5,),
        "b": np.arange(3, dtype=">i4"),
        "p": Point(1, 2.5),
        "r": collections.deque([1.5, 2.5], 3),
        "z": [1, 2],
    }
    in_order = {name: kept[name] for name in sorted(kept)}  # as there
    assert shape_of(checkpoint.kept) == shape_of(in_order)
    assert shape_of(own.state) == shape_of(state)
    assert list(w) == ["b", "a"]  # its order is unknown
    assert w["b"].tolist() == [0, 1, 2]
    assert rng.random() == np.random.default_rng(1).random()
    assert python.random() == random.Random(1).random()


@pytest.mark.parametrize("fields", ["x class", "x x", "x _y", "x y; import os"])
def test_names_of_fields_that_python_refuses_are_damage(
    strategy, comm, mpi_tmp_path, fields, monkeypatch
):
    monkeypatch.setattr(Point, "_fields", tuple(fields.split(" ", 1)))
    checkpoint = mpidist.Checkpoint(strategy=strategy, kept=[Point(1, 2)])
    path = checkpoint.write(mpi_tmp_path / "x")
    checkpoint.kept = []
    with pytest.raises(mpidist.CheckpointError, match="'kept'"):
        checkpoint.restore(path)
    assert checkpoint.kept == []


PADDED = {
    "long double": np.dtype("g"),
    "complex": np.dtype("G"),
    "aligned": np.dtype([("a", "i1"), ("b", "f8"), ("c", "i2", (3,))], align=True),
    "nested": np.dtype(
        [("x", np.dtype([("a", "i1"), ("b", "g")], align=True), (2,)), ("y", "?")],
        align=True,
    ),
}


def is_value(dtype):
    """Say of each byte of an element whether it is a part of the value."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return is_value(base) * int(np.prod(shape))
    if dtype.names is None:
        number = [i < 10 or np.finfo("g").nmant > 63 for i in range(16)]
        return number * ("gG".find(dtype.char) + 1) or [True] * dtype.itemsize
    found = [False] * dtype.itemsize
    for field, start, *_ in dtype.fields.values():
        found[start : start + field.itemsize] = is_value(field)
    return found


def fill(array):
    if array.dtype.names is None:
        array[...] = np.arange(array.size).reshape(array.shape)
    for name in array.dtype.names or ():
        fill(array[name])


def with_padding(dtype, count, filler):
    """Return an array that counts, whose bytes that mean nothing are `filler`."""
    array = np.zeros(count, dtype)
    fill(array)
    raw = array.view(np.uint8).reshape(count, -1)
    raw[:, ~np.array(is_value(dtype))] = filler
    return array


def values(array):
    """Return the bytes of an array without padding."""
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(array.size, -1)
    return raw[:, np.array(is_value(array.dtype))].tobytes()


@pytest.mark.parametrize("name", sorted(PADDED))
@pytest.mark.parametrize("count", [1, 9_000])
def test_padding_is_no_difference(strategy, comm, mpi_tmp_path, name, count):
    if np.finfo("g").nmant != 63:
        pytest.skip("long doubles are not of 80 bits here")
    array = with_padding(PADDED[name], count, comm.rank)
    kept = {"array": array, "own": Stateful({"x": array})}
    if count == 1:
        kept["scalar"] = array[0]
    with strategy.scope():
        if name in ("long double", "complex"):
            kept["variable"] = mpidist.Variable(array)
    checkpoint = mpidist.Checkpoint(strategy=strategy, kept=kept)
    path = checkpoint.write(mpi_tmp_path / "x")
    strategy.extended.audit_variables()
    expected = values(array)
    array[...] = np.zeros((), array.dtype)
    checkpoint.restore(path)
    assert values(array) == values(kept["own"].state["x"]) == expected
    with h5py.File(path) as file:  # one for all: no rank has another one
        assert "x" in file["kept/own"]
    if comm.size > 1:
        raw = array.view(np.uint8).reshape(count, -1)
        raw[-1, 0] += comm.rank
        with pytest.raises(mpidist.MismatchError, match="array"):
            checkpoint.write(mpi_tmp_path / "x")


def float_of(digits, largest):
    """Return HDF5's type of numbers in 16 bytes, with so many binary digits."""
    kind, exponent = h5py.h5t.IEEE_F64LE.copy(), largest.bit_length() + 1
    kind.set_size(16)
    kind.set_precision(digits + exponent + 1)
    kind.set_fields(digits + exponent, digits, exponent, 0, digits)
    kind.set_ebias(largest)
    return kind


@pytest.mark.parametrize("place", ["small", "large", "parts", "field", "complex"])
@pytest.mark.parametrize("digits", [112, 100, 52])
def test_long_doubles_of_another_processor_are_refused(
    strategy, comm, mpi_tmp_path, monkeypatch, digits, place
):
    """In as many bytes, x86 has 64 binary digits and Arm 113."""
    theirs = kind = float_of(digits - (digits == np.finfo("g").nmant), 16383)
    value = np.ones(10_000 if place == "large" else 3, "g")
    if place == "field":
        value = value.astype([("a", "i4"), ("b", "g")])
        theirs = h5py.h5t.create(h5py.h5t.COMPOUND, 20)
        theirs.insert(b"a", 0, h5py.h5t.NATIVE_INT32)
        theirs.insert(b"b", 4, kind)
    elif place == "complex":
        value = value.astype("G")
        theirs = h5py.h5t.create(h5py.h5t.COMPOUND, 32)
        theirs.insert(b"r", 0, kind)
        theirs.insert(b"i", 16, kind)
    elif place == "parts":
        value = mpidist.PerReplica((value,))
    dtype = np.dtype(value.values[0].dtype if place == "parts" else value.dtype)
    assert tree.storage(dtype) == tree.Storage()  # which is remembered
    ours = h5py.h5t.py_create

    def create(given, **options):
        return theirs if given == dtype else ours(given, **options)

    checkpoint = mpidist.Checkpoint(strategy=strategy, a=1.0, kept={"w": value})
    with monkeypatch.context() as patched:
        patched.setattr(h5py.h5t, "py_create", create)
        path = checkpoint.write(mpi_tmp_path / "x")
    checkpoint.a = 2.0
    with pytest.raises(mpidist.CheckpointError, match=r"long double.*float64") as info:
        checkpoint.restore(path)
    assert "damaged" not in str(info.value)
    assert checkpoint.a == 2.0
