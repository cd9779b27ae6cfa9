"""Private parts of CPython, for which it has nothing public.

Each was tried on CPython 3.11. NumPy's is in `float_errors`.
"""

from __future__ import annotations

import atexit
import sys


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
