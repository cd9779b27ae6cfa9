"""The frames that all threads of this process run."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_lock = threading.RLock()


class ThreadFrames:
    """A context manager that gives the innermost frame of each thread, by its number.

    There is no garbage collection within its block. Until Python 3.12 one within
    `sys._current_frames` waits for a thread that starts or ends, which waits for this
    one (CPython's issue 106883). And a destructor that runs within `f_back` may let
    another thread end the function whose frame `f_back` is about to return; that frame
    then shows whatever lies there later.

    The frames are forgotten at the end: one of them refers to them, so they would keep
    the objects of all callers until a garbage collection.
    """

    # Not a generator: as the innermost frame of this thread, it would have no caller
    def __enter__(self) -> dict[int, FrameType]:
        _lock.acquire()
        self._is_enabled = gc.isenabled()
        gc.disable()
        self._frames = sys._current_frames()
        return self._frames

    def __exit__(self, *_: object) -> None:
        self._frames.clear()
        if self._is_enabled:
            gc.enable()
        _lock.release()
