"""Private parts of CPython, for which it has nothing public.

Each was tried on CPython 3.11. What is private in NumPy is in
`comm.consensus.thread_order`.
"""

from __future__ import annotations

import atexit
import gc
import sys
import threading
from concurrent.futures.thread import _WorkItem
from types import FrameType

# The code by which the main thread waits for others at the end of the program, and by
# which a thread of an executor runs a function; `self` of it has the `future`
SHUTDOWN_CODE = threading._shutdown.__code__  # type: ignore[attr-defined]
WORK_CODE = _WorkItem.run.__code__


def run_exit_functions() -> None:
    """Call the functions of `atexit` now; they are not called again."""
    atexit._run_exitfuncs()


def is_starting_worker() -> bool:
    """Return whether `multiprocessing` is starting this process, without a fork.

    It imports the main module of its parent then.
    """
    multiprocessing = sys.modules.get("multiprocessing.process")
    process = multiprocessing and multiprocessing.current_process()
    return getattr(process, "_inheriting", False)


_frames_lock = threading.RLock()


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
        _frames_lock.acquire()
        self._is_enabled = gc.isenabled()
        gc.disable()
        self._frames = sys._current_frames()
        return self._frames

    def __exit__(self, *_: object) -> None:
        self._frames.clear()
        if self._is_enabled:
            gc.enable()
        _frames_lock.release()
