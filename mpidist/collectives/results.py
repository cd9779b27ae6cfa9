"""Memory for what collectives return."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.memory.buffers import Buffers

__all__ = ["Results"]

# New memory of so many bytes costs more than to look for some that is free
_LARGE_BYTES = 128 << 10
_BUFFERS = 4


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
        if is_large and isinstance(like, np.ndarray):
            return self._buffers.empty((size,), dtype)
        return arrays.namespace(like).empty(size, dtype)
