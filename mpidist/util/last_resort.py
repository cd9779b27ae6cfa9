"""Memory and stack that are kept for the way out, and for small results.

A rank that has too little memory, or too deep a recursion, must still exchange that
with the others: this takes more of both than the call that failed.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# Small results of all ranks (see `packing.LARGE_BYTES`) and Python's arenas of 1 MiB
_SPARE_BYTES = 8 << 20
_FRAMES = 1000  # an exchange of errors takes about 60
_FEW_FRAMES = 50


class _Spare:
    """Address space that is given back when memory is short: none of it is used."""

    def __init__(self) -> None:
        self.memory: mmap.mmap | None = None
        self.restore()

    def restore(self) -> None:
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


def add_frames(error: BaseException | None) -> int:
    """Allow a few frames more after a RecursionError, to get to `MoreStack`.

    Returns the limit to restore, by `sys.setrecursionlimit`; 0 after other errors.
    """
    if not isinstance(error, RecursionError):
        return 0
    limit = sys.getrecursionlimit()
    limit = MoreStack.limit if limit == MoreStack.set_here else limit
    MoreStack.limit, MoreStack.set_here = limit, limit + _FEW_FRAMES
    sys.setrecursionlimit(MoreStack.set_here)
    return limit


class MoreStack:
    """A context in which recursion may be deeper, in all threads, for an exchange."""

    _lock = threading.Lock()
    _users = 0
    limit = 0  # the program's
    set_here = 0  # the last one that was set here

    def __enter__(self) -> None:
        cls = MoreStack
        with cls._lock:
            if not cls._users:
                limit = sys.getrecursionlimit()
                cls.limit = cls.limit if limit == cls.set_here else limit
                cls.set_here = cls.limit + _FRAMES
                sys.setrecursionlimit(cls.set_here)
            cls._users += 1

    def __exit__(self, *_: object) -> None:
        cls = MoreStack
        with cls._lock:
            cls._users -= 1
            if not cls._users:
                try:
                    sys.setrecursionlimit(cls.limit)
                except RecursionError:  # these frames are beyond it: next time
                    cls.set_here = cls.limit + _FEW_FRAMES
                    sys.setrecursionlimit(cls.set_here)
