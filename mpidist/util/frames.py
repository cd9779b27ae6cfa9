"""The frames that all threads of this process run."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["current_frames"]

_lock = threading.Lock()


@contextlib.contextmanager
def current_frames() -> Iterator[dict[int, FrameType]]:
    """Give the innermost frame of each thread in a block.

    The frames are forgotten at its end: one of them refers to them, so they would keep
    the objects of all callers until a garbage collection.

    No garbage is collected while they are listed: until Python 3.12 that would wait for
    a thread that starts or ends, which waits for this one (CPython's issue 106883).
    """
    with _lock:
        is_enabled = gc.isenabled()
        gc.disable()
        try:
            frames = sys._current_frames()
        finally:
            if is_enabled:
                gc.enable()
    try:
        yield frames
    finally:
        frames.clear()
