"""Errors and messages for ranks that make different calls, fail, or do not arrive."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mpidist.comm.consensus.comparison import Proposal
from mpidist.comm.consensus.flight_recorder import Entry
from mpidist.comm.consensus.signatures import (
    CallReport,
    CallSignature,
    call_site,
    differences,
    dump_error,
    group_by_rank,
    load_error,
    name_ranks,
    origin_of,
    report_error,
    said_by,
)
from mpidist.errors import DeadlineError, DivergenceError, MismatchError, RemoteError

_FOLDER = str(Path(__file__).parent) + os.sep


def report_of(
    proposal: Proposal,
    places: dict[str, str],
    rank: int,
    depth: int,
    others: tuple[frozenset[str], bool],
) -> CallReport:
    """Return the record that a rank sends to the others after a mismatch.

    Args:
      proposal: its call or error.
      places: progress counters, which must be equal on all ranks.
      rank: this one.
      depth: the number of scopes it is in.
      others: see `ThreadOrderedLock.others`.
    """
    call, error = proposal.call, proposal.error
    return CallReport(
        call.operation,
        call.describe() | places,
        call_site(),
        dump_error(error),
        report_error(error),
        origin_of(error, rank),
        depth,
        proposal.thread,
        *others,
        proposal.is_late,
    )


def raise_difference(
    records: Sequence[CallReport],
    error: Exception | None,
    rank: int,
    call: int,
    made_at: Mapping[str, str],
) -> NoReturn:
    """Raise the error for ranks whose records differ.

    Args:
      records: of each rank, by rank.
      error: this rank's error, if it has failed.
      rank: this one.
      call: the number of the call.
      made_at: where this rank has made what messages may name.

    Raises:
      The error of a rank that failed: this rank's own, or a copy of the first one's.
      DivergenceError: the operations, or the threads, differ.
      MismatchError: the operations agree, but not the rest of the call.
    """
    # A failure explains the difference: the rank that failed makes another call.
    if any(r.error is not None for r in records):
        _raise_failure(records, error, rank)
    if len({r.thread for r in records}) > 1:
        raise DivergenceError(
            f"the calls are of different threads, and {missing_threads(records)}. "
            "Every replica must make the same calls in threads of the same names"
        )
    if len({r.operation for r in records}) > 1:
        calls = group_by_rank([f"{r.operation} at {r.site}" for r in records])
        raise DivergenceError(
            f"the replicas called different collectives (call {call} of this "
            f"strategy): {calls}. Every replica must make the same calls in the "
            "same order"
        )
    text = differences(records)
    places = [
        f"{name} was made at {site}"
        for name, site in made_at.items()
        if re.search(rf"\b{name}\b", text)
    ]
    raise MismatchError(
        f"{records[0].operation}: the replicas' arguments differ: "
        + "; ".join([text, *places])
    )


def first_thread(records: Sequence[CallReport]) -> str | None:
    """Return the thread that is to call first; None if none can on all ranks."""
    able = (r.thread for r in records if all(o.can_run(r.thread) for o in records))
    return next(able, None)


def missing_threads(records: Sequence[CallReport]) -> str:
    """Say which ranks wait in a thread that did not call on others."""
    texts = []
    for name in dict.fromkeys(r.thread for r in records):
        ranks = [rank for rank, r in enumerate(records) if r.thread != name]
        texts.append(f"{_thread(name)} did not arrive on {name_ranks(ranks)}")
    calls = [f"{r.operation} at {r.site} in {_thread(r.thread)}" for r in records]
    return f"{', '.join(texts)}: {group_by_rank(calls)}"


def _thread(name: str) -> str:
    return f"thread {name!r}" if name else "the thread that created the strategy"


def _raise_failure(
    records: Sequence[CallReport], error: Exception | None, rank: int
) -> NoReturn:
    # A rank that has not failed raises the error of the lowest rank that has.
    first = next(r for r in records if r.error is not None)
    is_copy = error is None
    if error is None:
        # This rank did not fail: it raises a copy, with the other rank's traceback as
        # text.
        assert first.error is not None
        error = load_error(first.error, first.origin)
        cause = RemoteError(f"on rank {first.origin}:\n{first.report}")
        _set(error, "__cause__", cause)
    # Kept if set: the error may come from a third rank.
    if origin_of(error, -1) < 0:
        _set(error, "origin_rank", first.origin if is_copy else rank)
    raise error


def _set(error: Exception, name: str, value: Any) -> None:
    """Set an attribute, without the code of the error's class, which may fail."""
    with contextlib.suppress(Exception):
        Exception.__setattr__(error, name, value)


def left_late(records: Sequence[CallReport]) -> str:
    """Describe that some ranks have failed in calls that others have ended."""
    rank = next(rank for rank, r in enumerate(records) if r.is_late)
    record = records[rank]
    text = record.report.strip().rpartition("\n")[2]
    return f"rank {rank} left {record.operation} (called at {record.site}) by {text}"


def left(rank: int, error: BaseException, last: Entry | None) -> str:
    """Describe how a rank has left its last call by its own error."""
    operation, site = "a collective", call_site()
    if last is not None and last.ended is None:
        operation, site = last.operation, last.site
    said = said_by(error)
    reason = type(error).__name__ + (f": {said}" if said else "")
    return f"rank {rank} left {operation} (called at {site}) by {reason}"


def late_thread(call: CallSignature, rank: int, thread: str) -> DeadlineError:
    """Return the error of a rank on which the thread of the others' call is late."""
    return DeadlineError(
        f"rank {rank} is in {call.operation} at {call_site()}, in thread "
        f"{threading.current_thread().name!r}, and {_thread(thread)} did not arrive "
        "there in time, as on other ranks"
    )


def not_arrived(
    rank: int, operation: str, seconds: float | None, missing: Sequence[int]
) -> str:
    """Return the message that `missing` ranks did not arrive in time."""
    reason = f"{name_ranks(missing)} did not arrive" if missing else "it did not finish"
    return (
        f"rank {rank} waited {seconds:g} s in {operation} (called at {call_site()}), "
        f"but {reason}"
    )


def not_finished(rank: int, operation: str, deadline: float) -> str:
    """Return the message for a timeout whose missing ranks are unknown."""
    seconds = time.monotonic() - deadline
    return (
        f"{operation} (called at {call_site()}) did not finish on rank {rank}, "
        f"{seconds:.1f} s after its deadline"
    )


def forget_locals(error: BaseException) -> None:
    """Clear the variables of this package's frames in the traceback of an error.

    The frames refer to the error, and its traceback refers to the frames. Only the
    garbage collector frees such a cycle, and with it the arrays of the user's function.
    """
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_FOLDER):
            with contextlib.suppress(RuntimeError):  # one that still runs
                trace.tb_frame.clear()
        trace = trace.tb_next
