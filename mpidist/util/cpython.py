"""Private parts of CPython, for which it has nothing public.

Each was tried on CPython 3.11. NumPy's is in `float_errors`.
"""

from __future__ import annotations

import atexit
import sys
import threading
from concurrent.futures.thread import _WorkItem

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
