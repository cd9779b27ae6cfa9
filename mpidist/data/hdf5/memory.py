"""Memory for rows: buffers that are used again, copies from many arrays at once."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Buffers", "pick_rows"]

Numbers = npt.NDArray[np.int64]

# Longer rows take longer than Python needs for each array
_SHORT_BYTES = 16 << 10

_BUFFERS = 8
# What Python counts for a buffer that only the list, a variable and the count refer to
_FREE = 3


class Buffers:
    """Arrays whose memory is used again once nobody refers to them.

    New memory costs as much time as copying rows into it. An array that NumPy makes of
    another one, however, refers to the one that has the memory; so when the count of
    references to that one falls back, neither the user nor a library has a view of it.
    (Python without a global lock cannot tell this: there every array is new.)
    """

    def __init__(self) -> None:
        self._buffers: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()
        self._can_count = getattr(sys, "_is_gil_enabled", lambda: True)()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an array with any contents."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or not self._can_count or not size_bytes:
            return np.empty(shape, dtype)
        buffer = self._take(size_bytes)
        return buffer[:size_bytes].view(dtype).reshape(shape)

    def clear(self) -> None:
        """Forget all buffers."""
        with self._lock:
            self._buffers.clear()

    def _take(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        with self._lock:
            for i in range(len(self._buffers)):
                buffer = self._buffers[i]
                is_fit = size_bytes <= buffer.size <= 2 * size_bytes
                if is_fit and sys.getrefcount(buffer) == _FREE:
                    return buffer
            buffer = np.empty(size_bytes, np.uint8)
            self._buffers.append(buffer)
            del self._buffers[:-_BUFFERS]
            return buffer


def pick_rows(arrays: Sequence[Any], which: Numbers, rows: Numbers) -> Any:
    """Return row `rows[i]` of `arrays[which[i]]` for each i, as a new array.

    Args:
      arrays: at least one, all `(rows, *shape)` with the same shape of a row and the
        same dtype, contiguous in memory.
      which: the number of the array that each wanted row is in.
      rows: its number there, which must exist.
    """
    first = arrays[0]
    row_bytes = first[:1].nbytes
    if 0 < row_bytes <= _SHORT_BYTES and not first.dtype.hasobject:
        found = _pick_short(arrays, row_bytes, which, rows)
        return found.view(first.dtype).reshape(-1, *first.shape[1:])
    result = np.empty((which.size, *first.shape[1:]), first.dtype)
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
    arrays: Sequence[Any], row_bytes: int, which: Numbers, rows: Numbers
) -> npt.NDArray[np.void]:
    """Return the bytes of the rows by their addresses: one call for all arrays."""
    starts = np.array([a.__array_interface__["data"][0] for a in arrays], np.int64)
    stop = max(s + a.nbytes for s, a in zip(starts.tolist(), arrays, strict=True))
    start = int(starts.min())
    memory = np.asarray(_Memory(start, stop, row_bytes))
    found: npt.NDArray[np.void] = memory[starts[which] - start + rows * row_bytes]
    return found
