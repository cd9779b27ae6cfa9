"""Copies of rows from many arrays at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.memory.buffers import Buffers

__all__ = ["pick_rows"]

Numbers = npt.NDArray[np.int64]

# Longer rows take longer than Python needs for each array
_SHORT_BYTES = 16 << 10
_GATHER_BYTES = 1 << 20  # NumPy collects rows elsewhere first; so much is in a cache


def pick_rows(
    arrays: Sequence[Any], which: Numbers, rows: Numbers, buffers: Buffers
) -> Any:
    """Return row `rows[i]` of `arrays[which[i]]` for each i, in one of `buffers`.

    Args:
      arrays: at least one, all `(rows, *shape)` with the same shape of a row and the
        same dtype, contiguous in memory.
      which: the number of the array that each wanted row is in.
      rows: its number there, which must exist.
      buffers: where the rows are copied to.
    """
    first = arrays[0]
    row_bytes = first[:1].nbytes
    result = buffers.empty((which.size, *first.shape[1:]), first.dtype)
    if 0 < row_bytes <= _SHORT_BYTES and not first.dtype.hasobject:
        _pick_short(arrays, which, rows, result)
        return result
    for number, array in enumerate(arrays):
        here = np.flatnonzero(which == number)
        result[here] = array[rows[here]]
    return result


class _Memory:
    """Bytes of this process from an address on, as items that start at each byte."""

    def __init__(self, start: int, stop: int, item_bytes: int):
        self.__array_interface__ = {
            "version": 3,
            "data": (start, True),
            "shape": (stop - start - item_bytes + 1,),
            "strides": (1,),
            "typestr": f"|V{item_bytes}",
        }


def _pick_short(
    arrays: Sequence[Any], which: Numbers, rows: Numbers, result: Any
) -> None:
    """Copy the bytes of the rows by their addresses: one call for all arrays."""
    starts = np.array([a.__array_interface__["data"][0] for a in arrays], np.int64)
    stop = max(s + a.nbytes for s, a in zip(starts.tolist(), arrays, strict=True))
    start, row_bytes = int(starts.min()), arrays[0][:1].nbytes
    memory = np.asarray(_Memory(start, stop, row_bytes))
    found = result.reshape(-1).view(memory.dtype)
    places, step = starts[which] - start + rows * row_bytes, _GATHER_BYTES // row_bytes
    for first in range(0, len(places), step):
        found[first : first + step] = memory[places[first : first + step]]
