"""Arithmetic of reductions: dtypes, sums, overflow checks, final division.

Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpidist.device import arrays
from mpidist.errors import ArgumentError, DTypeError
from mpidist.reductions import ReduceOp
from mpidist.util.dtypes import (
    accumulator_dtype,
    foreign,
    is_integer,
    traits,
)

# Given a number of elements, another array, and a dtype
Empty = Callable[[int, Any, Any], Any]
# Numbers that are converted or checked at a time, with memory for so many only
_BLOCK = 8192


def require_reducible(op: ReduceOp, dtype: np.dtype[Any], name: str) -> None:
    """Raise a DTypeError if values of `dtype` cannot be reduced by `op`."""
    accumulator_dtype(dtype, name)
    if op.rule.orders and traits(dtype).family == "complex":
        raise DTypeError(
            f"{name} has dtype {dtype.name}: complex numbers have no order, so "
            f"{op.name} is not defined; reduce their absolute values, or real and "
            "imaginary parts"
        )


def dtypes_to_add(
    op: ReduceOp, dtypes: Sequence[np.dtype[Any]]
) -> tuple[list[np.dtype[Any]], list[np.dtype[Any]]]:
    """Return the dtypes of the reductions of arrays, and those in which they are added.

    float16 and bfloat16 are added in float32, the mean of integers in float64.
    """
    out = list(map(op.rule.result, dtypes))
    return out, list(map(accumulator_dtype, out))


def to_add(
    op: ReduceOp, values: Sequence[Any]
) -> tuple[list[np.dtype[Any]], list[Any]]:
    """Return the dtypes of the reductions, and the arrays to add for them."""
    out, sends = dtypes_to_add(op, [a.dtype for a in values])
    return out, list(map(contiguous, values, sends))


def finish(
    op: ReduceOp, totals: list[Any], narrow: Sequence[tuple[int, Any]], ranks: int
) -> None:
    """Make totals the reductions of the requested dtypes, in place.

    Args:
      op: SUM or MEAN.
      totals: of all ranks, in arrays of our own.
      narrow: the numbers of those whose result is narrower, and memory for it.
      ranks: how many there are.
    """
    if op.rule.divides:
        # In place: the totals are ours, so a mean costs no second array.
        # CuPy's own kernels take float32 below 1.2e-38 for 0, NumPy does not
        for total in totals:
            total /= ranks
    for j, result in narrow:
        wide, totals[j] = totals[j], result.reshape(totals[j].shape)
        totals[j][...] = wide


def round_to(dtype: np.dtype[Any], array: Any) -> None:
    """Round numbers, in place, to those of a narrower dtype."""
    for part in in_blocks([array]):
        part[0][...] = part[0].astype(dtype)


def in_blocks(parts: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield arrays of one dimension block by block; those on a GPU as they are."""
    size = parts[0].size
    step = max(size, 1) if arrays.is_device_array(parts[0]) else _BLOCK
    for start in range(0, size, step):
        yield [part[start : start + step] for part in parts]


def result_bytes(
    op: ReduceOp, dtype: np.dtype[Any], size: int, compression: str | None
) -> tuple[int, int]:
    """Return the bytes of an array's total, and those that `finish` allocates."""
    out = op.rule.result(dtype)
    # Totals of float16 and bfloat16 are float32, and become narrow in `finish`
    total = accumulator_dtype(wire_dtype(out, compression))
    return size * total.itemsize, 0 if total == out else size * out.itemsize


def wire_dtype(dtype: np.dtype[Any], compression: str | None) -> np.dtype[Any]:
    """Return the dtype in which numbers of `dtype` are sent."""
    if compression is None:
        return accumulator_dtype(dtype)
    if not traits(dtype).is_narrowed:
        return dtype
    return foreign(compression) if compression == "bfloat16" else np.dtype(np.float16)


def bound_bytes(op: ReduceOp, values: Sequence[Any]) -> int:
    """Return how many bytes of a page `to_add`'s arrays take."""
    _, sends = dtypes_to_add(op, [a.dtype for a in values])
    sizes = [a.size * dtype.itemsize for a, dtype in zip(values, sends)]
    # Each array of a page begins at a multiple of 16 bytes, hence the rounding up.
    return sum(-(-size // 16) * 16 for size in sizes)


def combine_in_order(combine: np.ufunc, parts: Sequence[Any], out: Any = None) -> Any:
    """Return the reduction of arrays, new or in `out`, formed in the dtype of that.

    A single array is returned itself if there is no `out`.
    """
    # One rank: no copy. Callers that hand the result to a user copy it themselves.
    if len(parts) == 1:
        if out is None:
            return parts[0]
        out[...] = parts[0]
        return out
    if out is not None:
        total = combine(parts[0], parts[1], out=out, dtype=out.dtype)
    else:
        total = combine(parts[0], parts[1])
        if not parts[0].ndim:  # then NumPy returns a scalar, which cannot be changed
            total = arrays.namespace(parts[0]).asarray(total)
    # Left to right, rank 0 first: the last bit of a float total then depends on the
    # order of the ranks alone, and not on packs or on timing.
    for part in parts[2:]:
        combine(total, part, out=total)
    return total


def add_in_order(parts: Sequence[Any], out: Any = None) -> Any:
    """Return the sum of arrays, see `combine_in_order`."""
    return combine_in_order(np.add, parts, out)


def may_not_fit(op: ReduceOp, dtypes: Sequence[np.dtype[Any]]) -> bool:
    """Return whether a reduction of these dtypes may overflow."""
    return bool(op.rule.overflow) and any(map(is_integer, dtypes))


def may_overflow(op: ReduceOp, array: Any, ranks: int) -> bool:
    """Return whether integers are so large that results of all ranks may not fit."""
    if not is_integer(array.dtype) or not array.size:
        return False
    # So most reductions need no second check
    bound = op.rule.bound(int(np.iinfo(array.dtype).max), ranks)
    return bool(array.max() > bound or array.min() < -bound)


def check(op: ReduceOp, pair: tuple[Any, Sequence[Any]], name: str) -> Any:
    """Return the reduction of all ranks' arrays; raise if integers have overflowed.

    Args:
      op: the reduction.
      pair: its result, and the arrays.
      name: of the value, for messages.

    Raises:
      ArgumentError: see `check_overflow`.
    """
    total, parts = pair
    if op.rule.overflow and is_integer(total.dtype):
        # float64 has room for any overflow of 64-bit integers, so that comparing
        # magnitudes shows it
        estimate = arrays.namespace(total).empty(total.shape, np.float64)
        estimate = _without_nan(combine_in_order(op.rule.combine, parts, estimate))
        check_overflow(
            total, estimate, f"the {op.rule.overflow} of {name} over all replicas"
        )
    return total


def combine_estimates(op: ReduceOp, parts: Sequence[Any]) -> Any:
    """Return the reduction of arrays of float64 that stand for integers."""
    return _without_nan(combine_in_order(op.rule.combine, parts))


def _without_nan(estimate: Any) -> Any:
    """Return reductions of integers in float64, with 0 for infinity times 0."""
    # NaN is the only value unequal to itself. infinity * 0 arises where one factor
    # overflowed float64 and another one is 0: the exact product is 0 then.
    return arrays.namespace(estimate).where(estimate == estimate, estimate, 0.0)


def check_overflow(total: Any, estimate: Any, what: str) -> None:
    """Raise an ArgumentError if integers have overflowed.

    Args:
      total: integers, modulo 2 to the power of their bits.
      estimate: the same in float64, which does not overflow: its error is far below
        half of what an overflow takes away.
      what: what the totals are, for messages.
    """
    dtype = total.dtype
    # An overflow changes a total by a multiple of 2**bits: whole multiples are lost.
    span = 1 << 8 * dtype.itemsize
    lost = arrays.namespace(total).rint((estimate - total) / float(span))
    if not lost.any():
        return
    lost, total = arrays.to_host(lost), arrays.to_host(total)
    index = tuple(int(i) for i in np.argwhere(lost)[0])
    exact: float = lost[index]
    # Exact unless the float64 itself overflowed, in a product.
    if np.isfinite(exact):
        exact = int(total[index]) + int(lost[index]) * span
    place = f" in element {index}" if index else ""
    wider = np.dtype(np.int64 if dtype.itemsize < 8 else np.float64)
    raise ArgumentError(
        f"{what} is {exact}{place}, which does not fit {dtype.name}; use {wider.name}"
    )


def over_axes(op: ReduceOp, array: Any, axes: tuple[int, ...]) -> Any:
    """Return this rank's reduction over `axes`, wide and in C order.

    Those of integers may have overflowed: see `estimate_over_axes`.
    """
    wide = op.rule.wide(array.dtype)
    total = op.rule.along(array, axes, wide)
    return contiguous(arrays.namespace(array).asarray(total), wide)


def estimate_over_axes(op: ReduceOp, array: Any, axes: tuple[int, ...]) -> Any:
    """Return the result of `over_axes` in float64 if it may overflow, else None."""
    rule, dtype = op.rule, array.dtype
    is_risky = rule.overflow and dtype.itemsize >= rule.narrowest and is_integer(dtype)
    if not is_risky:
        return None
    estimate = np.dtype(np.float64)
    total = arrays.namespace(array).asarray(rule.along(array, axes, estimate))
    return contiguous(_without_nan(total), estimate)


def narrow(op: ReduceOp, sums: tuple[Any, Any, np.dtype[Any]], name: str) -> Any:
    """Return a reduction over axes in the dtype of the result; integers must fit.

    Args:
      op: the reduction.
      sums: its wide result, the same in float64 where that may have overflowed (see
        `estimate_over_axes`), and the dtype.
      name: of the value, for messages.
    """
    total, estimate, dtype = sums
    what = op.rule.overflow
    if estimate is not None:
        check_overflow(total, estimate, f"the {what} of {name}")
    # The same check on all ranks: they have the same total, so all raise or none does.
    if is_integer(dtype) and total.size:
        limits = np.iinfo(dtype)
        if total.min() < limits.min or total.max() > limits.max:
            raise ArgumentError(
                f"the {what} of {name} is {total.min()}..{total.max()}, which does not "
                f"fit {dtype.name}; cast it to int64 first"
            )
    return total.astype(dtype, copy=False)


def contiguous(array: Any, dtype: np.dtype[Any]) -> Any:
    """Return `array` in C order, aligned, and in `dtype`; copies only if it must."""
    converted = array.astype(dtype, order="C", copy=False)
    if isinstance(converted, np.ndarray) and not converted.flags.aligned:
        return converted.copy()  # MPI cannot move it in place
    return converted
