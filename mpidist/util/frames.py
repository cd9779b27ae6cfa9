"""The frames that all threads of this process run."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

__all__ = ["ThreadFrames"]

_lock = threading.Lock()


class ThreadFrames(dict[int, FrameType]):
    """By thread, the innermost frame; a context manager.

    The frames are forgotten at its end: one of them refers to them, so they would keep
    the objects of all callers until a garbage collection.
    """

    def __init__(self) -> None:
        super().__init__(_list_frames())

    def __enter__(self) -> ThreadFrames:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def _list_frames() -> dict[int, FrameType]:
    """Return `sys._current_frames()`, without a garbage collection meanwhile.

    Until Python 3.12 that would wait for a thread that starts or ends, which waits for
    this one (CPython's issue 106883).
    """
    with _lock:
        is_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if is_enabled:
                gc.enable()
