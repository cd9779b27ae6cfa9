"""Memory that is used again once nobody needs what it held."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Allocate", "Buffers"]

# Returns at least so many bytes of memory
Allocate = Callable[[int], npt.NDArray[np.uint8]]

# What Python counts for a buffer that only the list, a variable and the count refer to
_FREE = 3


class Buffers:
    """Arrays whose memory is used again once nobody refers to them.

    New memory costs as much time as copying rows into it. An array that NumPy makes of
    another one, however, refers to the one that has the memory; so when the count of
    references to that one falls back, neither the user nor a library has a view of it.
    (Python without a global lock cannot tell this: there every array is new.) Copies,
    and those in a forked process, begin without memory.

    Args:
      count: how many arrays may have memory that is used again.
    """

    def __init__(self, count: int = 8) -> None:
        self._count = count
        self._can_count = getattr(sys, "_is_gil_enabled", lambda: True)()
        self._start()

    def _start(self) -> None:
        """Begin without memory."""
        self._owner = os.getpid()
        self._buffers: list[npt.NDArray[np.uint8]] = []
        self._allocate: Allocate | None = None
        # The garbage collector may call `clear` in the middle of another method
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Buffers, (self._count,)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an array with any contents."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or not self._can_count or not size_bytes:
            return np.empty(shape, dtype)
        buffer = self._take(size_bytes)
        return buffer[:size_bytes].view(dtype).reshape(shape)

    def allocate_by(self, allocate: Allocate) -> None:
        """Take memory from `allocate` from now on; it may raise MemoryError."""
        with self._lock:
            if self._allocate is None:
                self._buffers = []  # they are of other memory
            self._allocate = allocate

    def clear(self) -> None:
        """Forget all buffers."""
        self._buffers = []

    def _take(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        if self._owner != os.getpid():  # a device's memory is not for forks
            self._start()
        with self._lock:
            buffers = self._buffers
            for i in range(len(buffers)):
                buffer = buffers[i]
                is_fit = size_bytes <= buffer.size <= 2 * size_bytes
                if is_fit and sys.getrefcount(buffer) == _FREE:
                    return buffer
            allocate = self._allocate or _allocate
        buffer = allocate(size_bytes)
        with self._lock:
            self._buffers.append(buffer)
            del self._buffers[: -self._count]
        return buffer


def _allocate(size_bytes: int) -> npt.NDArray[np.uint8]:
    return np.empty(size_bytes, np.uint8)
