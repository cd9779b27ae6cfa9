"""Memory that is used again once nobody needs what it held."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Allocate", "Buffers"]

# Returns at least so many bytes of memory
Allocate = Callable[[int], npt.NDArray[np.uint8]]


class _Buffer:
    """Memory, and a weak reference to the array that it was last lent as.

    Every view of that array, and all that a library makes of it, refers to the array.
    So the memory is free when the weak reference is dead; no references are counted,
    and no global lock is needed.
    """

    __slots__ = ("lent", "memory", "size")

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        # Views of a view refer to the array that has the memory; past a memoryview,
        # however, NumPy does not look
        self.memory = memory.data
        self.size = memory.size

    def lend(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        """Return the memory as an array of one dimension."""
        array = np.frombuffer(self.memory, dtype, count)
        self.lent = weakref.ref(array)
        return array


class Buffers:
    """Arrays whose memory is used again once nobody refers to them.

    New memory costs as much time as copying rows into it. Copies, and those in a forked
    process, begin without memory.

    Args:
      count: how many arrays may have memory that is used again.
    """

    def __init__(self, count: int = 8) -> None:
        self._count = count
        self._start()

    def _start(self) -> None:
        """Begin without memory."""
        self._owner = os.getpid()
        self._buffers: list[_Buffer] = []
        self._allocate: Allocate | None = None
        # A signal handler or finalizer may call a method in the middle of another one
        self._lock = threading.RLock()
        self._is_searching = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Buffers, (self._count,)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an array with any contents."""
        count = math.prod(shape)
        if dtype.hasobject or not count * dtype.itemsize:
            return np.empty(shape, dtype)
        return self._take(dtype, count).reshape(shape)

    def allocate_by(self, allocate: Allocate) -> None:
        """Take memory from `allocate` from now on; it may raise MemoryError."""
        with self._lock:
            if self._allocate is None:
                self._buffers = []  # they are of other memory
            self._allocate = allocate

    def clear(self) -> None:
        """Forget all buffers."""
        self._buffers = []

    def _take(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        if self._owner != os.getpid():  # a device's memory is not for forks
            self._start()
        with self._lock:
            array = None if self._is_searching else self._find(dtype, count)
            allocate = self._allocate or _allocate
        if array is not None:
            return array
        buffer = _Buffer(allocate(count * dtype.itemsize))
        array = buffer.lend(dtype, count)
        with self._lock:
            self._buffers.append(buffer)
            del self._buffers[: -self._count]
        return array

    def _find(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any] | None:
        """Return an array in a buffer that is free, if there is one that fits."""
        size_bytes = count * dtype.itemsize
        self._is_searching = True
        try:
            for buffer in self._buffers:
                is_fit = size_bytes <= buffer.size <= 2 * size_bytes
                if is_fit and buffer.lent() is None:
                    return buffer.lend(dtype, count)
        finally:
            self._is_searching = False
        return None


def _allocate(size_bytes: int) -> npt.NDArray[np.uint8]:
    return np.empty(size_bytes, np.uint8)
