"""Detect processes that were forked from a rank, and keep them from communicating.

`multiprocessing` forks by default until Python 3.14. A forked process has a copy of all
objects of the rank, and shares the rank's connections, its memory shared with other
ranks, and MPI's state. If it communicated, other ranks would take it for its parent.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from mpi4py import MPI

from mpidist.util.cpython import run_exit_functions

FORKED = (
    "this process was forked from a rank and is not part of the MPI job; communicate "
    "in the rank itself, or use threads"
)
_is_forked = False
_last_error: Any = None
_status: Any = None


class _Exit(SystemExit):
    """What `sys.exit` raises: notes the status if Python itself asks for it.

    Python does so when no frame is left that could handle the exception.
    """

    def __init__(self, status: Any):
        super().__init__(status)
        self._code = status

    @property
    def code(self) -> Any:  # type: ignore[override]  # an attribute there
        global _status
        if sys._getframe().f_back is None:
            _status = self._code
        return self._code


def is_forked() -> bool:
    """Return whether this process was forked from one that had started MPI."""
    return _is_forked


def call_in_child(fn: Callable[[], None]) -> None:
    """Call `fn` in each process that is forked from now on."""
    os.register_at_fork(after_in_child=fn)


def _begin() -> None:
    global _is_forked, _last_error
    if MPI.Is_initialized() and not MPI.Is_finalized() and not _is_forked:
        _is_forked = True
        _last_error = getattr(sys, "last_value", None)
        sys.exit = _exit
        vars(builtins).update(exit=_exit, quit=_exit)
        atexit.register(_end)


def _exit(status: Any = None, /) -> NoReturn:
    """Do what `sys.exit` does, and let `_end` know the status."""
    raise _Exit(status)


def _end() -> None:
    """End a forked process before mpi4py's exit handler calls MPI_Finalize.

    MPI_Finalize would wait for the other ranks for ever, or finalize the parent's MPI.
    (The status of a SystemExit that was raised without `sys.exit` or `exit` is lost:
    the process ends with 0.)
    """
    atexit.unregister(_end)
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    error = getattr(sys, "last_value", None)
    has_failed = error is not _last_error
    if has_failed and isinstance(error, KeyboardInterrupt):  # as Python itself ends
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    if isinstance(_status, int) or _status is None:
        os._exit(1 if has_failed else (_status or 0) & 0xFF)
    os._exit(1)


call_in_child(_begin)
