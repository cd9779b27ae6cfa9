"""Memory for what collectives return."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist.device import arrays
from mpidist.util.buffers import Buffers

__all__ = ["Results", "StepResults"]

# New memory of so many bytes costs more than to look for some that is free
_LARGE_BYTES = 128 << 10
_BUFFERS = 4
_LINE_BYTES = 64


class Results:
    """Gives arrays, large ones perhaps in the memory of former results."""

    def __init__(self) -> None:
        self._buffers = Buffers(_BUFFERS)

    def empty(self, size: int, like: Any, dtype: Any = None) -> Any:
        """Return an array of one dimension with any contents, on the device of `like`.

        Args:
          size: the number of elements.
          like: another array.
          dtype: None for that of `like`.
        """
        dtype = like.dtype if dtype is None else np.dtype(dtype)
        is_large = size * dtype.itemsize >= _LARGE_BYTES
        # Only large ones, and only on the host: page faults of new memory cost more
        # than the reduction, while CuPy has a pool of its own.
        if is_large and isinstance(like, np.ndarray):
            return self._buffers.empty((size,), dtype)
        return arrays.namespace(like).empty(size, dtype)


class StepResults(Results):
    """Cuts the results of one step out of one piece of memory, one after the other.

    The system gives large pieces in large pages, which take less time to look up.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rest: Any = np.empty(0, np.uint8)

    def begin(self, size_bytes: int, like: Any) -> None:
        """Begin a step whose results have so many bytes, or a few more.

        On a GPU, the memory is the current stream's.

        Args:
          size_bytes: of all results.
          like: an array that lies where they are to lie.
        """
        self._rest = Results.empty(self, size_bytes, like, np.uint8)

    def empty(self, size: int, like: Any, dtype: Any = None) -> Any:
        """See `Results.empty`."""
        dtype = like.dtype if dtype is None else np.dtype(dtype)
        size_bytes = size * dtype.itemsize
        is_here = isinstance(like, np.ndarray) == isinstance(self._rest, np.ndarray)
        # More than `begin` was told, or elsewhere: memory of its own.
        if size_bytes > self._rest.size or not is_here:
            return super().empty(size, like, dtype)
        taken = self._rest[:size_bytes]
        # The next result begins at a cache line.
        self._rest = self._rest[-(-size_bytes // _LINE_BYTES) * _LINE_BYTES :]
        return taken.view(dtype)

    def end(self) -> None:
        """Hold the memory no longer: it is free once its results are."""
        # A view of it keeps the memory of the step alive, hence none.
        self._rest = np.empty(0, np.uint8)
