"""One object, or one memory, at several places of a state; all of it is restored."""

from __future__ import annotations

import collections
import dataclasses
import types

import ml_dtypes
import numpy as np
import pytest
from stateful import Stateful

import mpidist
from mpidist import CheckpointError

BASE = np.arange(9.0).reshape(3, 3)


def ties(base):
    """Pairs of one memory, by name: they cannot hold unlike values."""
    return {
        "one array": (base, base),
        "views": (base[:2], base[1:]),
        "a transpose": (base, base.T),
        "a reversed view": (base, base[::-1, ::-1]),
        "its bytes": (base, base.view(np.uint8)),
        "a scalar": (base[0, :1].reshape(()), base[0]),
        "apart": (base[::2], base[1::2]),
        "columns": (base[:, ::2], base[:, 1]),
    }


def state(path, strategy, **objects):
    return mpidist.Checkpoint(strategy=strategy, **objects).save(path / "ckpt")


@pytest.mark.parametrize("dtype", ["f8", "i2", "U2", ml_dtypes.bfloat16])
@pytest.mark.parametrize("tie", ties(BASE))
def test_arrays_of_one_memory(strategy, mpi_tmp_path, tie, dtype):
    a, b = (x.copy() for x in ties(BASE.astype("i8").astype(dtype))[tie])
    b[...] = b[..., ::-1].copy() if b.ndim == 1 else np.roll(b, 1, axis=0)
    unlike = state(mpi_tmp_path, strategy, a=a, b=b)
    x, y = ties((BASE * 3).astype("i8").astype(dtype))[tie]
    checkpoint = mpidist.Checkpoint(strategy=strategy, a=x, b=y)
    is_free = tie in ("apart", "columns")
    kept = x.copy(), y.copy()
    alike = checkpoint.save(mpi_tmp_path / "tied")
    checkpoint.restore(unlike)
    np.testing.assert_array_equal(checkpoint.a, a)
    np.testing.assert_array_equal(checkpoint.b, b)
    assert checkpoint.a is x
    assert (checkpoint.b is y) == is_free
    x, y = ties(np.zeros((3, 3), dtype))[tie]
    checkpoint = mpidist.Checkpoint(strategy=strategy, a=x, b=y)
    checkpoint.restore(alike)
    assert checkpoint.a is x
    assert checkpoint.b is y
    np.testing.assert_array_equal(x, kept[0])
    np.testing.assert_array_equal(y, kept[1])


def generator(seed, kind=np.random.Generator):
    bits = np.random.MT19937(seed)
    return kind(bits)


def two_of(seed):
    """A generator and a RandomState of one bit generator."""
    bits = np.random.MT19937(seed)
    return np.random.RandomState(bits), np.random.Generator(bits)


def draws(value):
    """Something to compare: the content, or the next numbers."""
    if hasattr(value, "random_sample"):
        return value.random_sample(3).tolist()
    return value.random(3).tolist() if hasattr(value, "random") else repr(value)


CONTAINERS = {
    "dict": lambda n: {"n": n},
    "list": lambda n: [n, "text"],
    "longer": lambda n: [0] * (n + 1),
    "empty": lambda n: [n] if n else [],
    "deque": lambda n: collections.deque([n], maxlen=3),
    "OrderedDict": lambda n: collections.OrderedDict(b=n, a=1),
    "defaultdict": lambda n: collections.defaultdict(int, {"n": n}),
    "arrays": lambda n: {"w": np.full(2, n), "n": n},
    "frozen arrays": lambda n: {"w": mpidist.Mirrored((np.full(2, n),), (0,))},
    "nested": lambda n: {"x": [{"w": np.full(2, n)}, n]},
    "tuple": lambda n: (np.full(2, n), [n]),
    "Generator": generator,
    "RandomState": lambda n: generator(n, np.random.RandomState),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_or_generator_at_two_places(strategy, mpi_tmp_path, kind):
    make = CONTAINERS[kind]
    unlike = state(mpi_tmp_path, strategy, a=make(1), b=make(2), c=make(2))
    one = make(0)
    checkpoint = mpidist.Checkpoint(strategy=strategy, a=one, b=one, c=one)
    checkpoint.restore(unlike)
    found = [draws(checkpoint.objects[name]) for name in "abc"]
    assert found == [draws(make(n)) for n in (1, 2, 2)]
    same = make(5)
    alike = state(mpi_tmp_path, strategy, a=same, b=same, c=same)
    one = make(0)
    checkpoint = mpidist.Checkpoint(strategy=strategy, a=one, b=one, c=one)
    checkpoint.restore(alike)
    assert draws(checkpoint.a) == draws(make(5))
    if kind not in ("tuple", "frozen arrays"):  # what cannot change is replaced
        assert checkpoint.a is checkpoint.b is checkpoint.c is one
    elif kind == "tuple":
        assert checkpoint.a[1] is checkpoint.b[1] is one[1]


def test_generators_of_one_bit_generator_stay_tied(strategy, mpi_tmp_path):
    old, new = two_of(1)
    path = state(mpi_tmp_path, strategy, old=old, new=new)
    expected = [old.random_sample(), new.random(), old.random_sample()]
    old, new = two_of(2)
    checkpoint = mpidist.Checkpoint(strategy=strategy, old=old, new=new)
    checkpoint.restore(path)
    old, new = checkpoint.old, checkpoint.new
    assert [old.random_sample(), new.random(), old.random_sample()] == expected


def layer(strategy, n):
    return types.SimpleNamespace(w=np.full(2, n), v=variable(strategy, n))


def variable(strategy, n):
    with strategy.scope():
        return mpidist.Variable(np.full(2, n))


SINGLE = {  # how to make one, and what it holds
    "Variable": (variable, lambda one: one.numpy().tolist()),
    "state": (lambda strategy, n: Stateful(n), lambda one: one.state),
    "layer": (layer, lambda one: [one.w.tolist(), one.v.numpy().tolist()]),
    "Checkpoint": (
        lambda strategy, n: mpidist.Checkpoint(strategy=strategy, n=n),
        lambda one: one.n,
    ),
}


@pytest.mark.parametrize("kind", SINGLE)
def test_an_object_at_two_places_is_not_two(strategy, mpi_tmp_path, kind):
    def root(a, b):
        root = types.SimpleNamespace(a=a, b=b)
        return mpidist.Checkpoint(root, strategy=strategy)

    make, content = SINGLE[kind]
    unlike = root(make(strategy, 1), make(strategy, 2)).save(mpi_tmp_path / "x")
    one = make(strategy, 0)
    checkpoint, before = root(one, one), content(one)
    with pytest.raises(CheckpointError, match=r"'a.*' and 'b.*' are one object"):
        checkpoint.restore(unlike)
    assert content(one) == before
    same = make(strategy, 3)
    alike = root(same, same).save(mpi_tmp_path / "same")
    checkpoint.restore(alike)
    assert checkpoint.root.a is checkpoint.root.b is one
    assert content(one) == content(same) != before


def test_attributes_of_one_array(strategy, mpi_tmp_path):
    def optimizer():
        root = types.SimpleNamespace()
        root.m = root.v = np.zeros(2)
        root.slots = {"m": root.m, "v": root.v}
        return root

    trained = optimizer()
    trained.m = trained.m + 1
    trained.v = trained.v + 2
    trained.slots = {"m": trained.m, "v": trained.v}
    path = mpidist.Checkpoint(trained, strategy=strategy).save(mpi_tmp_path / "o")
    new = optimizer()
    mpidist.Checkpoint(new, strategy=strategy).restore(path)
    assert [new.m.tolist(), new.v.tolist()] == [[1, 1], [2, 2]]
    assert [new.slots[n].tolist() for n in "mv"] == [[1, 1], [2, 2]]
    assert new.slots["m"] is new.m


CHANGES = {
    "0-d": (lambda root: np.zeros(()), lambda old: old + 1, r"'x' of root was saved"),
    "array": (lambda root: np.zeros(2), lambda old: 3.0, "'x' of root was saved"),
    "list": (lambda root: np.zeros(2), lambda old: old.tolist(), "'x' of root was"),
    "int": (lambda root: 0, lambda old: np.array(old + 1), "'x' .* was not saved"),
    "NumPy's": (lambda root: np.float32(0), np.asarray, "'x' .* was not saved"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before the first save", "later"])
@pytest.mark.parametrize("depth", [0, 2])
def test_attributes_that_change_their_kind(strategy, mpi_tmp_path, change, when, depth):
    make, changed, message = CHANGES[change]
    inner = types.SimpleNamespace(w=np.zeros(2))
    inner.x = make(inner)
    root = types.SimpleNamespace(layers=[np.zeros(1), inner]) if depth else inner
    checkpoint = mpidist.Checkpoint(root, strategy=strategy)
    if when == "later":
        checkpoint.save(mpi_tmp_path / "a")
    inner.x = changed(inner.x)
    if depth:
        message = message.replace("'x'", "'layers/1/x'")
    outer = mpidist.Checkpoint(strategy=strategy, inner=checkpoint)
    for each in (checkpoint, outer):
        with pytest.raises(mpidist.ArgumentTypeError, match=message):
            each.save(mpi_tmp_path / "a")
    assert len(list(mpi_tmp_path.iterdir())) == (when == "later")
    inner.x = make(inner)
    checkpoint.save(mpi_tmp_path / "a")


def test_attributes_may_come_and_go(strategy, mpi_tmp_path):
    root = types.SimpleNamespace(a=np.zeros(1), b=np.zeros(1), rows=[np.zeros(1)] * 2)
    root.n, root.later = 0, None
    checkpoint = mpidist.Checkpoint(root, strategy=strategy)
    del root.a, root.rows[1]
    root.b, root.n, root.later = None, np.int64(3), np.zeros(3)
    checkpoint.save(mpi_tmp_path / "a")


@dataclasses.dataclass(frozen=True)
class Frozen:
    w: object
    n: int = 0


def test_members_of_a_frozen_dataclass(strategy, mpi_tmp_path):
    read_only = np.zeros(2)
    read_only.flags.writeable = False
    root = types.SimpleNamespace(layer=Frozen(np.ones(2)), last=np.ones(1))
    path = mpidist.Checkpoint(root, strategy=strategy).save(mpi_tmp_path / "a")
    root = types.SimpleNamespace(layer=Frozen(read_only), last=np.zeros(1))
    mpidist.Checkpoint(root, strategy=strategy).restore(path)
    assert root.layer.w.tolist() + root.last.tolist() == [1, 1, 1]
