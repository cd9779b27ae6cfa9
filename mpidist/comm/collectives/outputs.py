"""Memory for the results of collectives."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist.device import arrays
from mpidist.util.available_memory import round_up
from mpidist.util.buffers import Buffers

# From this size on, searching for free memory is cheaper than allocating
_LARGE_BYTES = 128 << 10
_BUFFERS = 4


class Results:
    """Allocates arrays; large ones may reuse the memory of earlier results."""

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
    """Allocates the results of one step in one block of memory.

    The system uses large pages for large blocks, which makes access faster.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rest: Any = np.empty(0, np.uint8)

    def begin(self, size_bytes: int, like: Any) -> None:
        """Begin a step whose results have about `size_bytes` bytes.

        On a GPU, the memory is the current stream's.

        Args:
          size_bytes: of all results.
          like: an array on the device of the results.
        """
        self._rest = Results.empty(self, size_bytes, like, np.uint8)

    def empty(self, size: int, like: Any, dtype: Any = None) -> Any:
        """See `Results.empty`."""
        dtype = like.dtype if dtype is None else np.dtype(dtype)
        size_bytes = size * dtype.itemsize
        is_here = isinstance(like, np.ndarray) == isinstance(self._rest, np.ndarray)
        # More than `begin` reserved, or on another device: separate memory.
        if size_bytes > self._rest.size or not is_here:
            return super().empty(size, like, dtype)
        taken = self._rest[:size_bytes]
        # The next result begins at a cache line.
        self._rest = self._rest[round_up(size_bytes) :]
        return taken.view(dtype)

    def end(self) -> None:
        """Release the memory: it is freed with its results."""
        # A view of it keeps the memory of the step alive, hence none.
        self._rest = np.empty(0, np.uint8)
