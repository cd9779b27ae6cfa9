"""What to raise where ranks do different things, or one of them has failed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mpidist.agreement.calls import (
    Call,
    Record,
    call_site,
    differences,
    group_by_rank,
    load_error,
)
from mpidist.errors import DivergenceError, MismatchError, RemoteError

__all__ = ["forget_locals", "no_such_thread", "raise_by"]

_FOLDER = str(Path(__file__).parent) + os.sep


def raise_by(
    records: Sequence[Record], error: Exception | None, rank: int, call: int
) -> NoReturn:
    """Raise what keeps the ranks apart.

    Args:
      records: what each rank has told, by rank.
      error: this rank's own, if it has failed.
      rank: this one.
      call: the number of the call.

    Raises:
      The error of a rank that failed: this rank's own, or a copy of the first one's.
      DivergenceError: the operations differ.
      MismatchError: the operations agree, but not the rest of the call.
    """
    if any(r.error is not None for r in records):
        _raise_failure(records, error, rank)
    if len({r.operation for r in records}) > 1:
        calls = group_by_rank([f"{r.operation} at {r.site}" for r in records])
        raise DivergenceError(
            f"the replicas called different collectives (call {call} of this "
            f"strategy): {calls}. Every replica must make the same calls in the "
            "same order"
        )
    raise MismatchError(
        f"{records[0].operation}: the replicas' arguments differ: "
        f"{differences(records)}"
    )


def _raise_failure(
    records: Sequence[Record], error: Exception | None, rank: int
) -> NoReturn:
    first = next(r for r in records if r.error is not None)
    is_copy = error is None
    if error is None:
        assert first.error is not None
        error = load_error(first.error, first.origin)
        error.__cause__ = RemoteError(f"on rank {first.origin}:\n{first.report}")
    if not hasattr(error, "origin_rank"):
        with contextlib.suppress(AttributeError):
            origin = first.origin if is_copy else rank
            error.origin_rank = origin  # type: ignore[attr-defined]
    raise error


def no_such_thread(call: Call, rank: int, thread: str) -> DivergenceError:
    """Return the error of a rank without the thread that calls on other ranks."""
    name = f"thread {thread!r}" if thread else "the thread that made the strategy"
    return DivergenceError(
        f"rank {rank} is in {call.operation} at {call_site()}, and has no other thread "
        f"that could join the call that other ranks make in {name}"
    )


def forget_locals(error: BaseException) -> None:
    """Let the functions here that an error has left forget their variables.

    They know the error, and it knows them by its traceback. Such a circle is freed by
    the garbage collector only, and with it all that the user's function had when it
    failed.
    """
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_FOLDER):
            with contextlib.suppress(RuntimeError):  # one that still runs
                trace.tb_frame.clear()
        trace = trace.tb_next
