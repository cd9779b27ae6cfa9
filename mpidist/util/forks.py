"""Processes that are forked from a rank: they are none, and own nothing of it.

`multiprocessing` forks by default until Python 3.14. A forked process has a copy of all
objects of the rank, and shares its memory with other ranks, its connections, and MPI's
state: what it did in a collective, it would do in its parent's place.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from mpi4py import MPI

__all__ = ["FORKED", "call_in_child", "is_forked"]

FORKED = (
    "this process was forked from a rank of the job, and is none itself; communicate "
    "in the rank, or use threads"
)
_is_forked = False
_last_error: Any = None
_status: Any = None


def is_forked() -> bool:
    """Return whether this process was forked from one that had started MPI."""
    return _is_forked


def call_in_child(fn: Callable[[], None]) -> None:
    """Call a function in each process that is forked from now on."""
    os.register_at_fork(after_in_child=fn)


def _begin() -> None:
    """Begin as a forked process."""
    global _is_forked, _last_error
    if MPI.Is_initialized() and not MPI.Is_finalized() and not _is_forked:
        _is_forked = True
        _last_error = getattr(sys, "last_value", None)
        sys.exit = _exit
        atexit.register(_end)


def _exit(status: Any = None, /) -> NoReturn:
    """Do what `sys.exit` does, and note the status, which `_end` cannot ask for."""
    global _status
    _status = status
    raise SystemExit(status)


def _end() -> None:
    """End a forked process here, before mpi4py calls MPI_Finalize.

    That would wait for the other ranks for ever, or end MPI under the parent. (A
    status that was not given to `sys.exit` or `os._exit` but raised as a SystemExit
    is lost: the process ends with 0.)
    """
    atexit.unregister(_end)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    has_failed = getattr(sys, "last_value", None) is not _last_error
    if isinstance(_status, int) or _status is None:
        os._exit(1 if has_failed else (_status or 0) & 0xFF)
    os._exit(1)


call_in_child(_begin)
