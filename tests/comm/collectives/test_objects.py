"""broadcast, broadcast_object, gather_objects and barrier."""

import array
import collections
import enum
import math

import ml_dtypes
import numpy as np
import pytest

import mpidist

FIELDS = np.dtype([("a", "i4"), ("b", "f8", (2, 3)), ("c", [("d", "u1"), ("e", "S3")])])


def same(found, expected):
    """Compare objects with their types, and arrays with their dtypes."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        assert list(map(type, found)) == list(map(type, expected))
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
    elif isinstance(expected, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(found)
    else:
        assert found == expected


VALUES = [
    *(None, True, -3, 1 << 100, 0.1, -0.0, math.inf, math.nan, 1 - 2j),
    *("", "ünï\n\0 text", b"\0\xff", [], (), {}),
    {"a": [1, (2.5, None)], 3: {"b": b"x"}, (1, "t"): [True], None: "n", 2.5: 1},
    np.arange(6.0).reshape(2, 3),
    np.float32(1.5),
    bytearray(b"\0\xff"),
    np.zeros((0, 3), "i2"),
    np.zeros((2, 3), "V0"),
    np.zeros((), "V0")[()],
    np.zeros(3, np.dtype([("a", "S0"), ("b", "V0")])),
    np.zeros(0, "U0"),
    np.array(7, "u1"),
    np.array([True, False]),
    np.array(["a", "bcd"]),
    np.array(["2020-01-01"], "M8[D]"),
    np.ones(3, ml_dtypes.bfloat16),
    np.zeros(2, FIELDS),
    np.array([1, 2], ">i4"),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    {"w": np.ones((300, 500)), "more": [np.arange(3), "text", (np.float64(2.0),)]},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__}")
def test_objects_are_what_they_were(strategy, comm, value):
    expected = value
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        expected = value.astype(value.dtype.newbyteorder("="))
    for root in (0, comm.size - 1):
        mine = value if comm.rank == root else object()
        for call in (strategy.broadcast, strategy.broadcast_object):
            found = call(mine, root=root)
            same(found, expected)
            if isinstance(found, np.ndarray):
                assert found is not value
                assert found.flags.writeable
    found = strategy.gather_objects([comm.rank, value] if comm.rank else {"a": value})
    same(found, [{"a": expected}, *([r, expected] for r in range(1, comm.size))])


def test_in_replica_context(strategy, comm):
    def fn():
        strategy.barrier()
        return strategy.broadcast({"x": comm.rank}), strategy.gather_objects(comm.rank)

    found = strategy.experimental_local_results(strategy.run(fn))[0]
    assert found == ({"x": 0}, list(range(comm.size)))


def test_distributed_values_and_variables_are_their_values(strategy, comm):
    with strategy.scope():
        w = mpidist.Variable(np.arange(3.0))
    mine = strategy.run(lambda: np.array([comm.rank]))
    found = strategy.broadcast({"w": w, "mine": mine}, root=comm.size - 1)
    same(found, {"w": np.arange(3.0), "mine": np.array([comm.size - 1])})


Point = collections.namedtuple("Point", "x y")
Color = enum.IntEnum("Color", "RED")
Name = enum.Enum("Name", {"A": "a"}, type=str)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({1, 2}, "value is .* of type set"),
        ([object()], r"value\[0\] must be"),
        ({"a": Point(1, 2)}, r"value\['a'\] is .* of type Point"),
        ({Point(1, 2): 1}, "keys must be"),
        (collections.OrderedDict(a=1), "of type OrderedDict"),
        (memoryview(b"x"), "of type memoryview"),
        (array.array("i", [1]), "of type array"),
        ([Color.RED], r"value\[0\] is .* of type Color"),
        ({"a": Name.A}, r"value\['a'\] is .* of type Name"),
        (enum.IntFlag("Flag", "A")(1), "of type Flag"),
        (type("Length", (float,), {})(1.0), "of type Length"),
        ({Color.RED: 1}, "keys must be"),
        (np.rec.array([(1, 2.0)]), "is a recarray"),
        (np.array([None]), "object"),
        (lambda: 0, "value must be"),
    ],
)
def test_other_objects_are_refused_on_all(strategy, comm, bad, message):
    root = comm.size - 1
    mine = bad if comm.rank == root else 1
    for call in ("broadcast", "broadcast_object"):
        with pytest.raises(TypeError, match=message):
            getattr(strategy, call)(mine, root)
    with pytest.raises(TypeError, match=message):
        strategy.gather_objects(mine)
    assert strategy.reduce("SUM", 1) == comm.size


@pytest.mark.parametrize(
    ("root", "kind"), [(-1, ValueError), (99, ValueError), ("0", TypeError)]
)
def test_bad_roots(strategy, root, kind):
    with pytest.raises(kind, match="root"):
        strategy.broadcast(1, root)


@pytest.mark.mpi(min_size=2)
def test_other_calls_elsewhere_are_an_error_on_all(strategy, comm):
    with pytest.raises(mpidist.MismatchError, match="root is 0 on rank"):
        strategy.broadcast(1, root=min(comm.rank, 1))
    with pytest.raises(mpidist.DivergenceError, match="barrier"):
        if comm.rank:
            strategy.barrier()
        else:
            strategy.gather_objects(1)


def test_a_barrier_returns_when_all_have_come(strategy, comm, mpi_tmp_path):
    (mpi_tmp_path / str(comm.rank)).touch()
    strategy.barrier()
    assert len(list(mpi_tmp_path.iterdir())) == comm.size


def test_no_class_is_looked_up(strategy):
    class Evil:
        def __reduce__(self):
            raise AssertionError("pickled")

    with pytest.raises(TypeError, match="must be"):
        strategy.gather_objects(Evil())
