"""Every reduction, everywhere: a member of `ReduceOp` needs a line in `NUMPY`."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from all_ranks import local
from collective_calls import in_replica

import mpidist
from mpidist import ReduceOp

DTYPES = ["i1", "u2", "i8", "f2", "f4", "f8", "g", "c16"]


class Known(NamedTuple):
    """A reduction as NumPy has it.

    Args:
      along: reduces an array along its first axis.
      of_integers: the dtype of results, None for the integers' own.
      is_defined: of complex numbers, and of no elements.
      exact: the same for Python's integers, if those of NumPy may overflow.
      adds: whether it is a sum, whose derivative is itself.
      ulps: by how many of its smallest steps a result may differ.
    """

    along: Callable[[Any], Any]
    of_integers: str | None = None
    is_defined: tuple[bool, bool] = (True, True)
    exact: Callable[[Any], int] | None = None
    adds: bool = False
    ulps: int = 0


NUMPY = {
    "SUM": Known(lambda a: a.sum(axis=0), exact=sum, adds=True),
    "MEAN": Known(lambda a: a.sum(axis=0) / len(a), "f8", adds=True, ulps=1),
    "MIN": Known(lambda a: a.min(axis=0), is_defined=(False, False)),
    "MAX": Known(lambda a: a.max(axis=0), is_defined=(False, False)),
    "PRODUCT": Known(lambda a: a.prod(axis=0), exact=math.prod),
}
pytestmark = pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name)


def part(rank, shape, dtype):
    """What replica `rank` has: ones and twos, whose product is small."""
    numbers = np.random.default_rng(rank).integers(1, 3, shape)
    return np.asarray(numbers * (1 + 1j if dtype[0] == "c" else 1)).astype(dtype)


def expected(op, parts, dtype):
    """Reduce with so many bits that nothing is rounded before the end."""
    known = NUMPY[op.name]
    result = known.of_integers if dtype[0] in "iu" else None
    wide = np.asarray(parts).astype(np.clongdouble if dtype[0] == "c" else "g")
    return known.along(wide).astype(result or dtype)


def is_refused(op, dtype):
    return dtype[0] == "c" and not NUMPY[op.name].is_defined[0]


@pytest.fixture
def same(op):
    def check(found, wanted):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        is_exact = wanted.dtype.kind in "iu"
        step = 0 if is_exact else NUMPY[op.name].ulps * np.finfo(wanted.dtype).eps
        np.testing.assert_allclose(found, wanted, step)

    return check


@pytest.mark.parametrize("size", [2, 200_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise(strategy, same, op, dtype, size):
    parts = [part(r, size, dtype) for r in range(strategy.size)]
    mine = parts[strategy.rank]
    if is_refused(op, dtype):
        with pytest.raises(mpidist.DTypeError, match=f"complex.*{op.name}"):
            strategy.reduce(op, mine)
        return
    wanted = expected(op, parts, dtype)
    for _ in range(2):
        same(strategy.reduce(op, mine), wanted)
        same(in_replica(strategy, "all_reduce", op.name.lower(), mine), wanted)
    nest = strategy.reduce(op, {"x": mine, "y": [mine[:1], mine[1], mine[:0]]})
    same(nest["x"], wanted)
    same(nest["y"][0], wanted[:1])
    assert nest["y"][1] == strategy.reduce(op, mine[1])
    same(nest["y"][2], wanted[:0])


@pytest.mark.parametrize("columns", [2, 40_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_over_an_axis_of_uneven_lengths(strategy, same, op, dtype, columns):
    if is_refused(op, dtype):
        with pytest.raises(mpidist.DTypeError, match=f"complex.*{op.name}"):
            strategy.reduce(op, np.ones((2, 2), dtype), axis=0)
        return
    # The first rank has one row, the second none, unless it is alone
    rows = [
        part(r, (1 - r if r < 2 else r, columns), dtype) for r in range(strategy.size)
    ]
    wanted = expected(op, np.concatenate(rows), dtype)
    for _ in range(2):
        same(strategy.reduce(op, rows[strategy.rank], axis=0), wanted)
        same(strategy.reduce(op, rows[strategy.rank].T, axis=1), wanted)
    if columns == 2:
        few = [r[:1] for r in rows]
        both = expected(op, np.concatenate(few).reshape(-1), dtype)
        same(strategy.reduce(op, few[strategy.rank], axis=(0, 1)), both)


@pytest.mark.parametrize("dtype", ["i4", "f4"])
def test_over_no_elements(strategy, same, op, dtype):
    none = np.ones((0, 3), dtype)
    if not NUMPY[op.name].is_defined[1]:
        with pytest.raises(
            mpidist.ArgumentError, match=f"{op.name} of value.* no elem"
        ):
            strategy.reduce(op, none, axis=0)
        return
    with np.errstate(all="ignore"):
        wanted = expected(op, none, dtype)
    same(strategy.reduce(op, none, axis=0), wanted)


@pytest.mark.parametrize("columns", [1, 50_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_slices(strategy, same, op, dtype, columns):
    parts = [part(r, (strategy.size + 1, columns), dtype) for r in range(strategy.size)]

    def scatter():
        return in_replica(strategy, "reduce_scatter", op, parts[strategy.rank])

    if is_refused(op, dtype):
        with pytest.raises(mpidist.DTypeError, match=f"complex.*{op.name}"):
            scatter()
        return
    length = -(-(strategy.size + 1) // strategy.size)
    own = slice(strategy.rank * length, (strategy.rank + 1) * length)
    for _ in range(2):
        same(scatter(), expected(op, parts, dtype)[own])


@pytest.mark.parametrize("size", [3, 70_000])
@pytest.mark.parametrize("dtype", ["i1", "u2", "i4", "u8", "i8"])
def test_integers_that_do_not_fit(strategy, op, dtype, size):
    exact, most = NUMPY[op.name].exact, int(np.iinfo(dtype).max)
    rows = np.ones((strategy.size, size), dtype)
    rows[0, 1], rows[-1, 1] = most, 2
    calls = [
        lambda: strategy.reduce(op, rows[strategy.rank]),
        lambda: in_replica(strategy, "reduce_scatter", op, rows[strategy.rank]),
        lambda: strategy.reduce(op, np.array([[most], [2]], dtype), axis=0),
    ]
    for call in calls if strategy.size > 1 else calls[2:]:
        if exact is None:
            call()
            continue
        with pytest.raises(mpidist.ArgumentError, match=r"the \w+ of .*not\s+fit"):
            call()
    rows[0, 1], rows[-1, 1] = most // 2, 1
    if exact and exact(rows[:, 1].tolist()) <= most:
        assert strategy.reduce(op, rows[strategy.rank])[1] == exact(rows[:, 1].tolist())


@pytest.mark.parametrize("value", [3, 2.5, np.float32(3), np.int16(3)])
def test_numbers_give_numbers(strategy, op, value):
    total = strategy.reduce(op, value)
    is_integer = isinstance(value, int | np.integer)
    if NUMPY[op.name].of_integers is None or not is_integer:
        assert type(total) is type(value)
    wanted = NUMPY[op.name].along(np.full(strategy.size, float(value)))
    assert total == pytest.approx(wanted, rel=NUMPY[op.name].ulps * 1e-7, abs=0)


def test_sums_of_parts(strategy, same, op):
    """IndexedSlices and gradient buckets are for sums, others are refused."""
    slices = mpidist.IndexedSlices(np.ones((1, 2)), np.array([strategy.rank]), (9, 2))
    if NUMPY[op.name].adds:
        found = local(strategy, strategy.reduce(op, slices)).values
        each = NUMPY[op.name].along(np.ones(strategy.size)) / strategy.size
        same(found, np.full((strategy.size, 2), each))
        return
    with pytest.raises(mpidist.ArgumentError, match=op.name):
        strategy.reduce(op, slices)
    with pytest.raises(mpidist.ArgumentError, match=op.name):
        strategy.gradient_buckets([np.ones(2)], op)


def test_own_cross_device_ops(make_strategy, same, op):
    strategy = make_strategy(cross_device_ops=mpidist.ReductionToOneDevice())
    parts = [part(r, 5, "i4") for r in range(strategy.size)]
    same(strategy.reduce(op, parts[strategy.rank]), expected(op, parts, "i4"))
