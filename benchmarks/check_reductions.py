"""Compare collectives with NumPy: every operation, dtype, layout, size and path.

    mpirun -n 3 python benchmarks/check_reductions.py [--tiny] [PATH ...]

All values are small whole numbers, so sums are exact in each dtype, and results must
equal NumPy's in every bit (compressed means: to 1 percent). An array has the same
memory layout on all ranks, and then another one on each. Prints the number of checks of
each path. Each rank prints the disagreements it finds; one makes the exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

# A rank that fails alone leaves the others waiting: that is a disagreement, too
os.environ.setdefault("MPIDIST_HANG_SECONDS", "60")

import ml_dtypes
import numpy as np
from mpi4py import MPI

import mpidist

WORLD = MPI.COMM_WORLD
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BOOL = np.dtype("?")
DTYPES = [BOOL, *map(np.dtype, "bhilBHIL"), np.dtype("f2"), BFLOAT16]
DTYPES += map(np.dtype, ["f4", "f8", "g", "c8", "c16"])
NARROW = (np.dtype("f2"), BFLOAT16)
LARGE_BYTES = (1 << 20) + 40_000  # more than one block of any transport
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (5,), (2, 3), (2, 3, 4)]
SHAPES += [(700,), (90, 40)]  # one pack, and more than one page
OPS = ["SUM", "MEAN"]
SHOWN = 10  # disagreements of each rank and path


def part(rank: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return whole numbers from 0 to 4, which differ between ranks."""
    numbers = (np.arange(math.prod(shape)) * (2 * rank + 1) + rank) % 5
    unit = 1 + 2j if dtype.kind == "c" else 1
    return (numbers * unit).astype(dtype).reshape(shape)


def sliced(array: Any) -> Any:
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def misaligned(array: Any) -> Any:
    """As what is read from a file behind a header of one byte."""
    data = b"\0" + array.tobytes()
    return np.frombuffer(data, np.uint8)[1:].view(array.dtype).reshape(array.shape)


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "C": lambda array: array,
    "F": lambda array: np.array(array, order="F"),
    "sliced": sliced,
    "rotated": lambda a: np.moveaxis(np.moveaxis(a, 0, -1).copy(), -1, 0),
    "backwards": lambda array: np.flip(np.flip(array).copy()),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "byte-swapped": lambda array: array.astype(array.dtype.newbyteorder()),
    "misaligned": misaligned,
    # All rows are the first
    "broadcast": lambda array: np.broadcast_to(array[:1], array.shape),
}


def lay_out(layout: str, array: Any) -> Any:
    """Return the array in a layout, or as it is where it cannot lie so."""
    is_flat = layout in ("sliced", "rotated", "broadcast") and not array.ndim
    is_narrow = layout == "byte-swapped" and array.dtype == BFLOAT16
    return array if is_flat or is_narrow else LAYOUTS[layout](array)


def native(array: Any) -> Any:
    """Return a copy as NumPy would make a new array."""
    return np.array(array, np.asarray(array).dtype.newbyteorder("="), order="C")


def expected_reduction(op: str, parts: Sequence[Any], axis: Any) -> Any:
    """Return NumPy's sum or mean over the ranks, or over `axis` of all parts.

    An integer sum that does not fit its dtype is the exception that is to be raised.
    """
    dtype = parts[0].dtype
    is_whole = dtype.kind in "iu"
    result_dtype = np.dtype("f8") if is_whole and op == "MEAN" else dtype
    if axis is None:
        wide = np.dtype("f4") if dtype in NARROW else result_dtype
        total = reduce(np.add, [part.astype(wide) for part in parts])
        total = total / wide.type(len(parts)) if op == "MEAN" else total
        return np.asarray(total).astype(result_dtype)
    first = axis[0] if isinstance(axis, tuple) else axis
    rows = np.concatenate(parts, first)
    wide = {"c": np.dtype("c16"), "f": np.dtype("f8")}.get(dtype.kind, np.dtype("f8"))
    wide = dtype if dtype.char == "g" else np.dtype("i8") if is_whole else wide
    total = rows.astype(wide).sum(axis=axis)
    if op == "SUM":
        if is_whole and (np.abs(total) > np.iinfo(dtype).max).any():
            return mpidist.ArgumentError
        return np.asarray(total).astype(dtype)
    count = rows.size // max(1, total.size) if rows.size else 0
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total / np.float64(count)).astype(result_dtype)


def axes_of(ndim: int) -> list[int | tuple[int, ...]]:
    """Return single axes, and several in any order."""
    single = [0, -1][:ndim] + ([1] if ndim > 1 else [])
    return [*single, *([(0, 1), (-1, 0)] if ndim > 1 else [])]


class Checks:
    """Calls that are compared with what NumPy gives; counts them by path."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.disagreements: dict[str, int] = {}
        self.path = ""

    def start(self, path: str) -> None:
        """Count for this path from now on."""
        self.path = path
        self.counts[path] = self.disagreements[path] = 0

    def check(
        self,
        what: str,
        call: Callable[[], Any],
        expected: Any,
        tolerance: float = 0.0,
    ) -> None:
        """Count a call; `expected` is an array, or the type of an exception."""
        self.counts[self.path] += 1
        how = difference(call, expected, tolerance)
        if not how:
            return
        self.disagreements[self.path] += 1
        if self.disagreements[self.path] <= SHOWN:
            sys.stderr.write(f"rank {WORLD.rank}: {self.path}: {what}: {how}\n")
            sys.stderr.flush()


def difference(call: Callable[[], Any], expected: Any, tolerance: float) -> str:
    """Return how what a call gives differs from an array, or type of exception."""
    is_error = isinstance(expected, type)
    try:
        array = np.asarray(call())
    except Exception as error:
        is_right = is_error and isinstance(error, expected)
        return "" if is_right else f"{type(error).__name__}: {error}"
    if is_error:
        return f"no {expected.__name__}"
    if (array.dtype, array.shape) != (expected.dtype, expected.shape):
        return f"{array.dtype} {array.shape}, not {expected.dtype} {expected.shape}"
    if is_same(array, expected, tolerance):
        return ""
    found, wanted = array.ravel(), expected.ravel()
    differs = np.flatnonzero(found != wanted)
    at = differs[0] if len(differs) else 0
    return (
        f"{len(differs)} of {array.size} differ, at {at} {found[at]!r}, "
        f"not {wanted[at]!r}"
    )


def is_same(found: Any, expected: Any, tolerance: float) -> bool:
    is_nan = found != found  # NumPy's own functions do not know bfloat16's
    if not np.array_equal(is_nan, expected != expected):
        return False
    found, expected = found[~is_nan], expected[~is_nan]
    if not tolerance or expected.dtype.kind in "biu":
        return bool(np.array_equal(found, expected))
    wide = "c16" if expected.dtype.kind == "c" else "f8"
    return bool(np.allclose(found.astype(wide), expected.astype(wide), tolerance, 0))


def cases(is_tiny: bool) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield a name, this rank's array, and the arrays of all ranks as NumPy has them.

    One layout on all ranks, and another one on each.
    """
    names = ["C", "backwards", "byte-swapped", "misaligned"] if is_tiny else [*LAYOUTS]
    dtypes = [BOOL, np.dtype("i4"), BFLOAT16, np.dtype("f8")] if is_tiny else DTYPES
    for dtype, start in itertools.product(dtypes, range(len(names))):
        large = (LARGE_BYTES // dtype.itemsize,)
        shapes = [(), (5,), (2, 3), (90, 40)] if is_tiny else [*SHAPES, large]
        for shape, step in itertools.product(shapes, (0, 1)):
            if step and (WORLD.size == 1 or shape == large):
                continue
            chosen = [names[(start + step * r) % len(names)] for r in range(WORLD.size)]
            values = [
                lay_out(layout, part(rank, shape, dtype))
                for rank, layout in enumerate(chosen)
            ]
            name = f"{dtype} {shape} {chosen[0] if not step else chosen}"
            yield name, values[WORLD.rank], [native(value) for value in values]


Options = mpidist.CommunicationOptions
Strategy = mpidist.MirroredStrategy


def in_replica(strategy: Strategy, name: str, *arguments: Any) -> Callable[[], Any]:
    """Return a function that calls a method of the replica context."""

    def run() -> Any:
        return getattr(mpidist.get_replica_context(), name)(*arguments)

    return lambda: strategy.experimental_local_results(strategy.run(run))[0]


def check_calls(
    checks: Checks, strategy: Strategy, options: Options | None, is_tiny: bool
) -> None:
    """Check what takes options; without any, what takes none, too."""
    extended = strategy.extended
    is_compressed = options is not None and options.compression is not None
    for name, mine, parts in cases(is_tiny):
        is_bool = mine.dtype == BOOL
        totals = {op: expected_reduction(op, parts, None) for op in OPS}
        if is_bool:
            totals = dict.fromkeys(OPS, mpidist.DTypeError)
        for op, total in totals.items():
            # A compressed mean may be divided in float32
            near = 1e-2 if is_compressed and op == "MEAN" else 0.0
            all_reduce = in_replica(strategy, "all_reduce", op, mine, options)
            checks.check(f"all_reduce {op} {name}", all_reduce, total, near)
            reduce_to = partial(extended.reduce_to, op, mine, "CPU:0", options)
            checks.check(f"reduce_to {op} {name}", reduce_to, total, near)
            for axis in [None, *axes_of(mine.ndim)] if options is None else []:
                wanted = total if is_bool else expected_reduction(op, parts, axis)
                call = partial(strategy.reduce, op, mine, axis=axis)
                checks.check(f"reduce {op} axis={axis} {name}", call, wanted)
        if not is_bool:
            pairs = [(mine, "CPU:0")] * 2
            batch = partial(extended.batch_reduce_to, "SUM", pairs, options)
            both = np.stack([totals["SUM"]] * 2)
            checks.check(
                f"batch_reduce_to SUM {name}",
                lambda batch=batch: np.stack([np.asarray(a) for a in batch()]),
                both,
            )
        for axis in range(-mine.ndim, mine.ndim):
            joined = np.concatenate(parts, axis)
            all_gather = in_replica(strategy, "all_gather", mine, axis, options)
            checks.check(f"all_gather axis={axis} {name}", all_gather, joined)
            if options is None:
                gather = partial(strategy.gather, mine, axis)
                checks.check(f"gather axis={axis} {name}", gather, joined)
        if options is None:
            broadcast = partial(extended.broadcast_to, mine, "CPU:0")
            checks.check(f"broadcast_to {name}", broadcast, parts[0])


def check_symmetric(checks: Checks, strategy: Strategy, is_tiny: bool) -> None:
    """Check arrays in memory that ranks share, whole and in part."""
    views = {"whole": lambda a: a, "tail": lambda a: a[1:]}
    for dtype in DTYPES[1 :: 5 if is_tiny else 1]:
        for shape in [*SHAPES, (LARGE_BYTES // dtype.itemsize,)]:
            parts = [part(rank, shape, dtype) for rank in range(WORLD.size)]
            mine = strategy.symmetric_like(parts[0])
            mine[...] = parts[WORLD.rank]
            for (view, take), op in itertools.product(views.items(), OPS):
                if view != "whole" and not shape:
                    continue
                total = expected_reduction(op, [take(p) for p in parts], None)
                what = f"{op} {dtype} {shape} {view}"
                all_reduce = in_replica(strategy, "all_reduce", op, take(mine))
                for _ in range(2):  # the second time, it is known
                    checks.check(f"all_reduce {what}", all_reduce, total)
                    call = partial(strategy.reduce, op, take(mine))
                    checks.check(f"reduce {what}", call, total)


def check_buckets(checks: Checks, strategy: Strategy, is_tiny: bool) -> None:
    """Check gradients of all layouts and shapes, put in another order on each rank."""
    for dtype, op in itertools.product(DTYPES[1 :: 5 if is_tiny else 1], OPS):
        shapes = [*SHAPES, (LARGE_BYTES // dtype.itemsize,)]
        keys = [*itertools.product(LAYOUTS, shapes)]
        ranks = range(WORLD.size)
        parts = {
            key: [lay_out(key[0], part(rank, key[1], dtype)) for rank in ranks]
            for key in keys
        }
        likes = {key: native(parts[key][0]) for key in keys}
        options = Options(bytes_per_pack=1 << 16)
        buckets = strategy.gradient_buckets(likes, op, options)
        for _ in range(2):
            with buckets:
                for key in np.random.default_rng(WORLD.rank).permutation(len(keys)):
                    buckets.put(keys[key], parts[keys[key]][WORLD.rank])
            for key in keys:
                total = expected_reduction(op, [native(p) for p in parts[key]], None)
                result = partial(buckets.result.get, key)
                checks.check(f"{op} {dtype} {key}", result, total)
        buckets.close()


@contextlib.contextmanager
def strategy_of(ranks_per_node: int | None) -> Iterator[Strategy]:
    """Make a strategy, on nodes that are pretended to have so many ranks."""
    if ranks_per_node is not None:
        os.environ["MPIDIST_RANKS_PER_NODE"] = str(ranks_per_node)
    strategy = Strategy()
    os.environ.pop("MPIDIST_RANKS_PER_NODE", None)
    yield strategy
    strategy.experimental_finalize()


PATHS: dict[str, tuple[int | None, Callable[..., None]]] = {
    "shared memory": (None, partial(check_calls, options=None)),
    "one rank per node": (1, partial(check_calls, options=None)),
    "two ranks per node": (2, partial(check_calls, options=None)),
    **{
        name: (None, partial(check_calls, options=options))
        for name, options in {
            "MPI": Options(implementation="MPI"),
            "reproducible": Options(reproducible=True),
            "reproducible, MPI": Options(implementation="MPI", reproducible=True),
            "packs of 64 bytes": Options(bytes_per_pack=64),
            "compressed to float16": Options(compression="float16"),
            "compressed to bfloat16": Options(compression="bfloat16"),
        }.items()
    },
    "symmetric_like": (None, check_symmetric),
    "symmetric_like, two ranks per node": (2, check_symmetric),
    "gradient_buckets": (None, check_buckets),
    "gradient_buckets, one rank per node": (1, check_buckets),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="PATH", default=[*PATHS])
    parser.add_argument("--tiny", action="store_true", help="some dtypes and sizes")
    options = parser.parse_args(arguments)
    unknown = sorted({*options.paths} - {*PATHS})
    if unknown:
        parser.error(f"PATH must be one of {', '.join(PATHS)}, not {unknown[0]!r}")

    np.seterr(over="ignore")  # float16 ends at 65504
    checks = Checks()
    for path in options.paths:
        started = time.perf_counter()
        ranks_per_node, check = PATHS[path]
        checks.start(path)
        with strategy_of(ranks_per_node) as strategy:
            check(checks, strategy, is_tiny=options.tiny)
        wrong = WORLD.allreduce(checks.disagreements[path])
        if WORLD.rank == 0:
            seconds = time.perf_counter() - started
            print(
                f"{path:36} {checks.counts[path]:7,} checks on each of {WORLD.size} "
                f"ranks, {wrong} disagreements, {seconds:.1f} s",
                flush=True,
            )
    wrong = WORLD.allreduce(sum(checks.disagreements.values()))
    if WORLD.rank == 0:
        print(f"all: {sum(checks.counts.values()):,} checks, {wrong} disagreements")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
