"""Arrays that several threads or processes use, and that may be taken away."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpidist.errors import ContextError

__all__ = ["Field", "Storage", "make_arrays"]


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
