"""Memory and stack that are kept for the way out, and for small results.

A rank that has too little memory, or too deep a recursion, must still exchange that
with the others: this takes more of both than the call that failed.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
# Small results of all ranks (see `packing.LARGE_BYTES`) and Python's arenas of 1 MiB
_SPARE_BYTES = 8 << 20
_FRAMES = 1000  # an exchange of errors takes about 60


class _Spare:
    """Address space that is given back when memory is short: none of it is used."""

    def __init__(self) -> None:
        self.memory: mmap.mmap | None = None
        self.restore()

    def restore(self) -> None:
        """Reserve it again, if there is memory."""
        if self.memory is None:
            with contextlib.suppress(OSError, MemoryError):
                self.memory = mmap.mmap(-1, _SPARE_BYTES)

    def release(self) -> bool:
        """Give it back; return whether there was any."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()
        return memory is not None

    def release_after(self, error: BaseException) -> None:
        """Give it back if an error is one of memory."""
        if isinstance(error, MemoryError):
            self.release()


spare = _Spare()


def with_spare(fn: Callable[..., T], *args: object) -> T:
    """Return `fn(*args)`; if memory is short, once more with what was kept.

    Args:
      fn: can be called again after a MemoryError.
      *args: its arguments.
    """
    try:
        return fn(*args)
    except MemoryError:
        if not spare.release():
            raise
    return fn(*args)


_lock = threading.Lock()
_users = 0
_former_limit = 0


@contextlib.contextmanager
def more_stack() -> Iterator[None]:
    """Allow a deeper recursion, in all threads, for the time of an exchange."""
    global _users, _former_limit
    with _lock:
        _users += 1
        if _users == 1:
            _former_limit = sys.getrecursionlimit()
            sys.setrecursionlimit(_former_limit + _FRAMES)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                sys.setrecursionlimit(_former_limit)
