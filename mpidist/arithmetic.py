"""Which numbers a reduction adds up, in which dtypes, and what comes of the totals.

Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.errors import ArgumentError
from mpidist.options import ReduceOp

__all__ = [
    "add_in_order",
    "bound_bytes",
    "contiguous",
    "finish",
    "mean_of",
    "narrow",
    "sum_over",
    "to_add",
]


def to_add(
    op: ReduceOp, values: Sequence[Any], compression: str | None = None
) -> tuple[list[np.dtype[Any]], list[Any]]:
    """Return the dtypes of the reductions, and what is to be added up for them.

    With `compression` that is as narrow as it is to be sent.
    """
    is_mean = op is ReduceOp.MEAN
    out = [arrays.mean_dtype(a.dtype) if is_mean else a.dtype for a in values]
    with np.errstate(over="ignore"):  # what is too large for float16 is inf
        return out, [
            contiguous(a, _wire_dtype(dtype, compression))
            for a, dtype in zip(values, out)
        ]


def finish(
    op: ReduceOp, totals: Sequence[Any], out: Sequence[np.dtype[Any]], ranks: int
) -> list[Any]:
    """Return reductions of the wanted dtypes; changes the totals."""
    if op is ReduceOp.MEAN:
        for total in totals:
            total /= ranks
    return [t.astype(dtype, copy=False) for t, dtype in zip(totals, out)]


def _wire_dtype(dtype: np.dtype[Any], compression: str | None) -> np.dtype[Any]:
    """Return the dtype that numbers of `dtype` are sent as."""
    if compression is None:
        return arrays.accumulator_dtype(dtype)
    if dtype.kind != "f" or dtype.itemsize == 2:
        return dtype
    if compression == "bfloat16":
        import ml_dtypes  # optional; options are refused without it

        narrow: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return narrow
    return np.dtype(np.float16)


def bound_bytes(op: ReduceOp, values: Sequence[Any]) -> int:
    """Return how many bytes of a page `to_add`'s arrays take, or a few more."""
    width = 8 if op is ReduceOp.MEAN else 4  # a mean of integers is one of float64
    sizes = [a.size * max(a.dtype.itemsize, width) for a in values]
    return sum(-(-size // 16) * 16 for size in sizes)


def add_in_order(parts: Sequence[Any], out: Any = None) -> Any:
    """Return the sum of at least two arrays, as a new one, or in `out`.

    All is added up in the dtype of `out`.
    """
    if out is None:
        total = np.add(parts[0], parts[1])
        if not parts[0].ndim:  # then NumPy returns a scalar, which cannot be changed
            total = np.asarray(total)
    else:
        total = np.add(parts[0], parts[1], out=out, dtype=out.dtype)
    for part in parts[2:]:
        np.add(total, part, out=total)
    return total


def sum_over(array: Any, axes: tuple[int, ...]) -> Any:
    """Return this rank's sum over `axes`, wide and in C order."""
    wide = _wide(array.dtype)
    total = arrays.namespace(array).asarray(array.sum(axis=axes, dtype=wide))
    return contiguous(total, wide)


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which sums over an axis are formed."""
    if dtype.kind in "iu":
        return np.dtype(f"{dtype.kind}8")
    return np.result_type(arrays.accumulator_dtype(dtype), np.float64)


def mean_of(total: Any, length: int, dtype: np.dtype[Any]) -> Any:
    """Return a total by how many were added up; nan for none."""
    with np.errstate(invalid="ignore"):
        mean = total / np.float64(length)
    return mean.astype(arrays.mean_dtype(dtype), copy=False)


def narrow(pair: tuple[Any, np.dtype[Any]], name: str) -> Any:
    """Return a total in the dtype of what was summed; integers must fit."""
    total, dtype = pair
    if dtype.kind in "iu" and total.size:
        limits = np.iinfo(dtype)
        if total.min() < limits.min or total.max() > limits.max:
            raise ArgumentError(
                f"the sum of {name} is {total.min()}..{total.max()}, which does not "
                f"fit {dtype.name}; cast it to int64 first"
            )
    return total.astype(dtype, copy=False)


def contiguous(array: Any, dtype: np.dtype[Any]) -> Any:
    """Return `array` in C order, aligned, and in `dtype`; copies only if it must."""
    found = array.astype(dtype, order="C", copy=False)
    if isinstance(found, np.ndarray) and not found.flags.aligned:
        return found.copy()  # MPI cannot move it where it lies
    return found
