"""Tracebacks without the inner frames of this package."""

from __future__ import annotations

import concurrent.futures
import os
from pathlib import Path
from types import TracebackType

from mpidist.errors import MpidistError, RemoteError
from mpidist.util.settings import FULL_TRACEBACKS

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# Errors of other threads pass through these frames, too
_FUTURES = str(Path(concurrent.futures.__file__).parent) + os.sep


def hide_internal_frames(error: BaseException) -> None:
    """Remove this package's inner frames from an error's traceback.

    Call it where a public function re-raises an error, and where an error of this
    package ends the program. Of consecutive frames of this package the first one is
    kept: the function that the user called. Frames of other code are always kept.

    An error that this package did not raise on purpose keeps its innermost frames.
    With MPIDIST_FULL_TRACEBACKS=1 nothing is changed.
    """
    if error.__traceback__ is None or FULL_TRACEBACKS.read_or_default():
        return
    kept = error.__traceback__
    is_meant = isinstance(error, MpidistError) or isinstance(
        error.__cause__, RemoteError
    )
    for trace in _later(kept, is_meant):
        # In place: Python 3.10 re-raises with the traceback object that it caught
        kept.tb_next = trace
        kept = trace
    kept.tb_next = None


def _later(first: TracebackType, is_meant: bool) -> list[TracebackType]:
    entries = []
    trace = first.tb_next
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    last = [i for i, trace in enumerate(entries) if not _is_own(trace)]
    # An unexpected error within this package keeps the frames that led to it
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
