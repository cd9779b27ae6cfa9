"""Memory that is reused after the last reference to its contents was dropped."""

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
from mpidist.util.available_memory import LINE_BYTES

# Allocates at least the given number of bytes
Allocate = Callable[[int], npt.NDArray[np.uint8]]


class _Buffer:
    """Memory, and a weak reference to the last array that was made of it.

    Every view of that array, by NumPy or another library, holds a reference to the
    array. So the memory is free when the weak reference is dead: there is no reference
    count to maintain, and no lock.
    """

    __slots__ = ("lent", "memory", "size")

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        # The base of a view of a view is the array that owns the memory. A memoryview
        # in between stops NumPy from looking further, so the base is the lent array
        self.memory = memory.data
        self.size = memory.size

    def lend(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        array = np.frombuffer(self.memory, dtype, count)
        self.lent = weakref.ref(array)
        return array


class Buffers:
    """Allocates arrays, reusing the memory of those without references.

    The page faults of new memory cost as much time as copying rows into it. A copy of
    this object, and its copy in a forked process, start without memory.

    Args:
      count: the number of arrays whose memory is kept for reuse.
    """

    def __init__(self, count: int = 8) -> None:
        self._count = count
        self._start()

    def _start(self) -> None:
        self._owner = os.getpid()
        self._buffers: list[_Buffer] = []
        self._allocate: Allocate | None = None
        # Reentrant: a signal handler or finalizer may run in the middle of a method
        self._lock = threading.RLock()
        self._is_searching = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Buffers, (self._count,)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised array."""
        count = math.prod(shape)
        if dtype.hasobject or not count * dtype.itemsize:
            return np.empty(shape, dtype)
        if self._owner != os.getpid():  # page-locked memory is not valid after a fork
            self._start()
        with self._lock:
            array = None if self._is_searching else self._find(dtype, count)
            allocate = self._allocate or _allocate
        if array is None:
            buffer = _Buffer(allocate(count * dtype.itemsize))
            array = buffer.lend(dtype, count)
            with self._lock:
                self._buffers.append(buffer)
                del self._buffers[: -self._count]
        return array.reshape(shape)

    def allocate_by(self, allocate: Allocate) -> None:
        """Allocate memory by `allocate` from now on; it may raise MemoryError."""
        with self._lock:
            if self._allocate is None:
                self._buffers = []  # memory of another kind
            self._allocate = allocate

    def clear(self) -> None:
        """Release all buffers."""
        self._buffers = []

    def _find(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any] | None:
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
    """Allocate memory aligned to a cache line: JAX would copy it otherwise."""
    memory = np.empty(size_bytes + LINE_BYTES - 1, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + size_bytes]


class Field(NamedTuple):
    """The shape and dtype of one array of a `Storage`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Storage:
    """The arrays of a cache, shared by threads; closing waits for those that use it.

    Args:
      arrays: the first has a flag for each row of the others, initially 0.
      fence: a memory fence, if other processes share the arrays.
      note: any object of the creator.
    """

    def __init__(
        self,
        arrays: Sequence[npt.NDArray[Any]],
        fence: Callable[[], None] | None = None,
        note: Any = None,
    ):
        self._arrays = arrays
        self.fence = fence
        self.note = note
        self._state = threading.Condition()
        self._users = 0
        self._is_closed = False
        self._flags = threading.Lock()

    @contextlib.contextmanager
    def use(self) -> Iterator[Sequence[npt.NDArray[Any]]]:
        """Return a context manager for the arrays, which stay open within its block.

        Raises:
          ContextError: the storage was closed.
        """
        with self._state:
            if self._is_closed:
                raise ContextError(
                    "the cache of a dataset was freed: its strategy was finalized, or "
                    "set_state of another iterator changed the order of the "
                    "transformations before cache()"
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
        """Return a context manager that puts a memory fence before and after its block.

        Flags are set in the block, so a thread or process that sees a flag also sees
        the row.
        """
        with self._flags:
            if self.fence is not None:
                self.fence()
            yield
            if self.fence is not None:
                self.fence()

    def count_missing_bytes(self) -> int:
        """Return the number of bytes of rows that were not written yet."""
        with self.use() as (flags, *columns):
            row_bytes = sum(column[:1].nbytes for column in columns)
            return int(flags.size - np.count_nonzero(flags)) * row_bytes

    def clear(self) -> None:
        """Set the flags of all rows to 0."""
        with self.use() as (flags, *_):
            flags[...] = 0

    def close(self) -> Sequence[npt.NDArray[Any]]:
        """Wait until no thread uses the arrays; release and return them."""
        with self._state:
            self._is_closed = True
            self._state.wait_for(lambda: self._users == 0)
        arrays, self._arrays = self._arrays, ()
        return arrays


def make_arrays(fields: Sequence[Field]) -> list[npt.NDArray[Any]]:
    """Allocate the arrays of a `Storage` for this process alone."""
    flags, *columns = fields
    return [np.zeros(*flags), *(np.empty(*column) for column in columns)]
