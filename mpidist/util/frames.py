"""The frames that all threads of this process run."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

__all__ = ["current_frames"]

_lock = threading.Lock()


def current_frames() -> dict[int, FrameType]:
    """Return `sys._current_frames()`: by thread, the innermost frame.

    Without a garbage collection meanwhile: until Python 3.12 it would wait for a thread
    that starts or ends, which waits for this one (CPython's issue 106883).
    """
    with _lock:
        is_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if is_enabled:
                gc.enable()
