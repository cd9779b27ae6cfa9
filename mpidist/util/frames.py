"""The frames that all threads of this process run."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["thread_frames"]

_lock = threading.RLock()


@contextlib.contextmanager
def thread_frames() -> Iterator[dict[int, FrameType]]:
    """Give the innermost frame of each thread, without a garbage collection meanwhile.

    Until Python 3.12 `sys._current_frames` would let it wait for a thread that starts
    or ends, which waits for this one (CPython's issue 106883). And a destructor that it
    ran within `f_back` could let another thread end the function whose frame `f_back`
    is about to return; that frame then shows whatever lies there later.

    The frames are forgotten at the end of the block: one of them refers to them, so
    they would keep the objects of all callers until a garbage collection.
    """
    with _lock:
        is_enabled = gc.isenabled()
        gc.disable()
        frames = {}
        try:
            frames = sys._current_frames()
            yield frames
        finally:
            frames.clear()
            if is_enabled:
                gc.enable()
