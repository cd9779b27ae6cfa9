"""Tracebacks without the inner frames of this package."""

from __future__ import annotations

import concurrent.futures
import os
from pathlib import Path
from types import TracebackType

from mpidist.errors import MpidistError, RemoteError
from mpidist.util.settings import FULL_TRACEBACKS

__all__ = ["fold"]

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# Errors of other threads pass through these frames, too
_FUTURES = str(Path(concurrent.futures.__file__).parent) + os.sep


def fold(error: BaseException) -> None:
    """Leave one of this package's frames before those of the user's function.

    To be called where an error is caught that leaves a public function, before it is
    raised again, and where an error of this package ends the program. Of frames of this
    package that follow each other, the first one stays: the function that the user
    called. Frames of other code always stay.

    An error that this package has not raised on purpose keeps the frames in which it
    came up. With MPIDIST_FULL_TRACEBACKS=1 nothing is changed.
    """
    if error.__traceback__ is None or FULL_TRACEBACKS.read_or_default():
        return
    kept = error.__traceback__
    is_meant = isinstance(error, MpidistError) or isinstance(
        error.__cause__, RemoteError
    )
    for trace in _later(kept, is_meant):
        # In place: Python 3.10 raises again with the traceback that it caught
        kept.tb_next = trace
        kept = trace
    kept.tb_next = None


def _later(first: TracebackType, is_meant: bool) -> list[TracebackType]:
    """Return the entries to keep after `first`, which stays."""
    entries = []
    trace = first.tb_next
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    last = [i for i, trace in enumerate(entries) if not _is_own(trace)]
    # Where an error came up in this package by mistake, all of it is needed
    end = len(entries) if is_meant or not entries else (last[-1] + 1 if last else 0)
    kept, after_own = [], _is_own(first)
    for trace in entries[:end]:
        is_own = _is_own(trace)
        if not (is_own and after_own):
            kept.append(trace)
        after_own = is_own
    return kept + entries[end:]


def _is_own(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith((_PACKAGE, _FUTURES))
