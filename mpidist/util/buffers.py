"""Memory that is used again once nobody needs what it held."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpidist.errors import ContextError

__all__ = ["Allocate", "Buffers", "Field", "Storage", "make_arrays"]


_LINE_BYTES = 64
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
    """Return memory that begins with a cache line: else JAX would copy it."""
    memory = np.empty(size_bytes + _LINE_BYTES - 1, np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return memory[start : start + size_bytes]


class Field(NamedTuple):
    """The shape and dtype of one array of a storage."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Storage:
    """Arrays that may be used by several threads, and closed when nobody does.

    Args:
      arrays: the first has a flag for each row of the others, zeros to begin with.
      fence: orders the reads and writes before and after it, for other processes.
      note: what whoever made it wants to remember.
    """

    def __init__(
        self,
        arrays: Sequence[npt.NDArray[Any]],
        fence: Callable[[], None] | None = None,
        note: Any = None,
    ):
        self._arrays = arrays
        self._fence = fence
        self.note = note
        self._state = threading.Condition()
        self._users = 0
        self._is_closed = False
        self._flags = threading.Lock()

    @contextlib.contextmanager
    def use(self) -> Iterator[Sequence[npt.NDArray[Any]]]:
        """Give the arrays, which stay until the block is left.

        Raises:
          ContextError: they are gone.
        """
        with self._state:
            if self._is_closed:
                raise ContextError(
                    "the cache of a dataset is gone: its strategy was finalized, or "
                    "another iterator's set_state changed the order of what comes "
                    "before it"
                )
            self._users += 1
        try:
            yield self._arrays
        finally:
            with self._state:
                self._users -= 1
                self._state.notify_all()

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """Order what is done in the block, to the flags, after all that came before.

        And before all that comes after. So whoever sees a flag finds the row there.
        """
        with self._flags:
            if self._fence is not None:
                self._fence()
            yield
            if self._fence is not None:
                self._fence()

    def count_missing_bytes(self) -> int:
        """Return how many bytes of the rows were not written yet."""
        with self.use() as (flags, *columns):
            row_bytes = sum(column[:1].nbytes for column in columns)
            return int(flags.size - np.count_nonzero(flags)) * row_bytes

    def close(self) -> Sequence[npt.NDArray[Any]]:
        """Let go of the arrays, after those that use them have left; return them."""
        with self._state:
            self._is_closed = True
            self._state.wait_for(lambda: self._users == 0)
        arrays, self._arrays = self._arrays, ()
        return arrays


def make_arrays(fields: Sequence[Field]) -> list[npt.NDArray[Any]]:
    """Return arrays of this process, the first of zeros."""
    flags, *columns = fields
    return [np.zeros(*flags), *(np.empty(*column) for column in columns)]
