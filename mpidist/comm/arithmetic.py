"""Arithmetic of reductions: dtypes, sums, overflow checks, final division.

Nothing here communicates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpidist.device import arrays
from mpidist.errors import ArgumentError, DTypeError
from mpidist.options import ReduceOp
from mpidist.util.dtypes import (
    accumulator_dtype,
    foreign,
    is_integer,
    mean_dtype,
    traits,
)

# Given a number of elements, another array, and a dtype
Empty = Callable[[int, Any, Any], Any]
# Numbers that are converted or checked at a time, with memory for so many only
_BLOCK = 8192
# SUM and MEAN are absent: they go through `add_in_order`, which can widen.
_COMBINE: dict[ReduceOp, np.ufunc] = {
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def require_reducible(op: ReduceOp, dtype: np.dtype[Any], name: str) -> None:
    """Raise a DTypeError if values of `dtype` cannot be reduced by `op`."""
    accumulator_dtype(dtype, name)
    if traits(dtype).family == "complex" and op in (ReduceOp.MIN, ReduceOp.MAX):
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
    out = [mean_dtype(d) if op is ReduceOp.MEAN else d for d in dtypes]
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
    if op is ReduceOp.MEAN:
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
    out = mean_dtype(dtype) if op is ReduceOp.MEAN else dtype
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
    """Return how many bytes of a page `to_add`'s arrays take, or a few more."""
    width = 8 if op is ReduceOp.MEAN else 4  # a mean of integers is one of float64
    sizes = [a.size * max(a.dtype.itemsize, width) for a in values]
    # Each array of a page begins at a multiple of 16 bytes, hence the rounding up.
    return sum(-(-size // 16) * 16 for size in sizes)


def add_in_order(parts: Sequence[Any], out: Any = None) -> Any:
    """Return the sum of arrays, new or in `out`; a single array is returned itself.

    The sum is formed in the dtype of `out`.
    """
    # One rank: no copy. Callers that hand the result to a user copy it themselves.
    if len(parts) == 1 and out is None:
        return parts[0]
    if out is None:
        total = np.add(parts[0], parts[1])
        if not parts[0].ndim:  # then NumPy returns a scalar, which cannot be changed
            total = np.asarray(total)
    else:
        total = np.add(parts[0], parts[1], out=out, dtype=out.dtype)
    # Left to right, rank 0 first: the last bit of a float total then depends on the
    # order of the ranks alone, and not on packs or on timing.
    for part in parts[2:]:
        np.add(total, part, out=total)
    return total


def combine_in_order(op: ReduceOp, parts: Sequence[Any], out: Any = None) -> Any:
    """Return MIN, MAX or PRODUCT of arrays, new or in `out`.

    A single array is returned itself. A product of integers that overflows is found by
    `check_product` afterwards.
    """
    if len(parts) == 1:
        return parts[0]
    combine = functools.partial(_COMBINE[op], out=out)
    result = functools.reduce(combine, parts)
    return arrays.namespace(parts[0]).asarray(result)  # NumPy's may be a scalar


def check_product(pair: tuple[Any, Sequence[Any]], name: str) -> Any:
    """Return the product of all ranks' arrays; raise if integers have overflowed.

    Arguments and errors: see `check_sum`.
    """
    product, parts = pair
    if not is_integer(product.dtype):
        return product
    # float64 has room for any overflow of 64-bit integers, so comparing magnitudes
    # shows it.
    rough = rough_product([a.astype(np.float64) for a in parts])
    require_fit(product, rough, f"the product of {name} over all replicas")
    return product


def rough_product(parts: Sequence[Any]) -> Any:
    """Return the product of arrays of float64 that stand for integers."""
    return _without_nan(combine_in_order(ReduceOp.PRODUCT, parts))


def _without_nan(rough: Any) -> Any:
    """Return products of integers in float64, with 0 for infinity times 0."""
    # NaN is the only value unequal to itself. infinity * 0 arises where one factor
    # overflowed float64 and another one is 0: the exact product is 0 then.
    return arrays.namespace(rough).where(rough == rough, rough, 0.0)


def is_integer_sum(op: ReduceOp, dtypes: Sequence[np.dtype[Any]]) -> bool:
    """Return whether a reduction to these dtypes may overflow, as integers do."""
    return op is ReduceOp.SUM and any(map(is_integer, dtypes))


def may_not_fit(op: ReduceOp, dtypes: Sequence[np.dtype[Any]]) -> bool:
    """Return whether a reduction of these dtypes may overflow."""
    is_risky = op is ReduceOp.SUM or op is ReduceOp.PRODUCT
    return is_risky and any(map(is_integer, dtypes))


def may_overflow(array: Any, ranks: int) -> bool:
    """Return whether integers are so large that a sum over all ranks may not fit."""
    if not is_integer(array.dtype) or not array.size:
        return False
    # If no rank's element exceeds max / ranks, the total fits whatever the signs are;
    # so most sums need no second check.
    bound = np.iinfo(array.dtype).max // ranks
    return bool(array.max() > bound or array.min() < -bound)


def check_sum(pair: tuple[Any, Sequence[Any]], name: str) -> Any:
    """Return the sum of all ranks' arrays; raise if integers have overflowed.

    Args:
      pair: the sum, and the arrays.
      name: of the value, for messages.

    Raises:
      ArgumentError: see `require_fit`.
    """
    total, parts = pair
    if not is_integer(total.dtype):
        return total
    # One number: Python's integers are exact, and faster than two arrays.
    if total.size == 1 and sum([part.item() for part in parts]) == total.item():
        return total
    rough = add_in_order(parts, np.empty(total.shape, np.float64))
    # Comparing bytes is fastest for small arrays; sums above 2**53 are rounded
    if rough.tobytes() != total.astype(np.float64).tobytes():
        require_fit(total, rough, f"the sum of {name} over all replicas")
    return total


def require_fit(total: Any, rough: Any, what: str) -> None:
    """Raise an ArgumentError if integers have overflowed.

    Args:
      total: integers, modulo 2 to the power of their bits.
      rough: the same in float64, which does not overflow: its error is far below half
        of what an overflow takes away.
      what: what the totals are, for messages.
    """
    dtype = total.dtype
    # An overflow changes a total by a multiple of 2**bits: whole multiples are lost.
    span = 1 << 8 * dtype.itemsize
    lost = arrays.namespace(total).rint((rough - total) / float(span))
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


def sum_over(op: ReduceOp, array: Any, axes: tuple[int, ...]) -> Any:
    """Return this rank's sum over `axes`, wide and in C order.

    Sums of 64-bit integers may have overflowed: see `rough_sum_over`.
    """
    return _sum_in(_wide(op, array.dtype), array, axes)


def rough_sum_over(op: ReduceOp, array: Any, axes: tuple[int, ...]) -> Any:
    """Return the result of `sum_over` in float64 if it may overflow, else None."""
    # Narrower integers are added up in 64 bits, and `narrow` checks the total.
    if op is ReduceOp.SUM and is_integer(array.dtype) and array.dtype.itemsize == 8:
        return _sum_in(np.dtype(np.float64), array, axes)
    return None


def combine_over(op: ReduceOp, array: Any, axes: tuple[int, ...]) -> Any:
    """Return this rank's MIN, MAX or PRODUCT over `axes`, in an axis of its own.

    It comes first, and has length 1; or 0 if there is no MIN or MAX of no elements.
    Products are wide, and those of integers may have overflowed: see
    `rough_product_over`.
    """
    xp = arrays.namespace(array)
    if op is ReduceOp.PRODUCT:
        wide = _wide(ReduceOp.SUM, array.dtype)
        return xp.asarray(array.prod(axis=axes, dtype=wide))[None]
    wide = accumulator_dtype(array.dtype)
    # NumPy raises for MIN of nothing. This rank contributes no row instead, and only if
    # all ranks do is there an error, raised on all of them.
    if any(array.shape[i] == 0 for i in axes):
        shape = [n for i, n in enumerate(array.shape) if i not in axes]
        return xp.empty((0, *shape), wide)
    extreme = array.min(axis=axes) if op is ReduceOp.MIN else array.max(axis=axes)
    return xp.asarray(extreme).astype(wide)[None]


def rough_product_over(op: ReduceOp, array: Any, axes: tuple[int, ...]) -> Any:
    """Return the result of `combine_over` in float64 if it may overflow, else None."""
    if op is not ReduceOp.PRODUCT or not is_integer(array.dtype):
        return None
    product = array.prod(axis=axes, dtype=np.float64)
    return _without_nan(arrays.namespace(array).asarray(product))[None]


def _sum_in(wide: np.dtype[Any], array: Any, axes: tuple[int, ...]) -> Any:
    total = arrays.namespace(array).asarray(array.sum(axis=axes, dtype=wide))
    return contiguous(total, wide)


def _wide(op: ReduceOp, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which sums over an axis are formed.

    It is NumPy's for the mean of 64-bit integers, whose sum need not fit.
    """
    # Sums of 8 to 32 bits cannot overflow 64 bits before 2**31 elements were added.
    if is_integer(dtype) and (op is ReduceOp.SUM or dtype.itemsize < 8):
        return np.dtype(f"{dtype.kind}8")
    return np.result_type(mean_dtype(dtype), np.float64)


def mean_of(total: Any, length: int, dtype: np.dtype[Any]) -> Any:
    """Return a total divided by the number of elements; nan for none."""
    mean = total / np.float64(length)
    return mean.astype(mean_dtype(dtype), copy=False)


def narrow(sums: tuple[Any, Any, np.dtype[Any]], name: str, what: str = "sum") -> Any:
    """Return a total in the dtype of the reduced value; integers must fit.

    Args:
      sums: the total, what it is in float64 where its own dtype may have overflowed
        (see `rough_sum_over`), and the dtype.
      name: of the value, for messages.
      what: the total is.
    """
    total, rough, dtype = sums
    if rough is not None:
        require_fit(total, rough, f"the {what} of {name}")
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
