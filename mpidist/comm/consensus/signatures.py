"""Signatures of calls, which ranks compare, and how they differ; tags of messages."""

from __future__ import annotations

import enum
import functools
import os
import pickle
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.errors import CollectiveError, RemoteError
from mpidist.util import nest
from mpidist.util.serialization import hash62

_BITS = (1 << 62) - 1
_ODD = 0x1E3779B97F4A7C15  # multiplication by it permutes the numbers of 62 bits
_folders = [str(Path(__file__).parents[2]) + os.sep]
END = "the end of the program"
# Where and how the program has called `sys.exit`, if it has
exits: list[str] = []


class CallSignature(NamedTuple):
    """What must be equal on all ranks that make a call; hashable.

    Args:
      operation: the collective, as the user called it.
      options: pairs of an argument's name and its value.
      spec: the structure of the value, or None.
      leaves: what must agree for each leaf, usually its dtype and shape.
      step: the step of a loop, which must agree too; -1 if none. Calls that differ
        only in the step are of one kind.
    """

    operation: str
    options: tuple[tuple[str, Any], ...] = ()
    spec: nest.Spec | None = None
    leaves: tuple[Any, ...] = ()
    step: int = -1

    def without_step(self) -> CallSignature:
        """Return the call without its step."""
        return self if self.step < 0 else self._replace(step=-1)

    def step_digest(self) -> int:
        """Return 62 bits that differ for different steps; 0 without one."""
        return (self.step + 1) * _ODD & _BITS

    def describe(self) -> dict[str, str]:
        """Return each thing that must agree by its name."""
        lines = {name: str(value) for name, value in self.options}
        if self.step >= 0:
            lines["step"] = str(self.step)
        if self.spec is not None:
            lines["the structure of value"] = str(self.spec)
            names = nest.leaf_names(self.spec, "value")
            lines.update(zip(names, map(_text, self.leaves), strict=True))
        return lines


def _text(leaf: Any) -> str:
    return " ".join(map(str, leaf)) if isinstance(leaf, tuple) else str(leaf)


@functools.lru_cache(maxsize=4096)
def digest(call: CallSignature) -> int:
    """Return 62 bits, the same in every process for the same call without its step."""
    return hash62(repr((call.operation, call.options, str(call.spec), call.leaves)))


class CallReport(NamedTuple):
    """The record that each rank sends after a mismatch or failure."""

    operation: str
    lines: dict[str, str]
    site: str
    error: bytes | None
    report: str
    origin: int  # the rank on which the error came up first
    depth: int  # how many collective scopes the rank is in
    thread: str  # which of the rank's threads makes the call
    others: frozenset[str]  # threads that may call as well
    may_start_more: bool  # whether these may start threads
    is_late: bool = False  # see `Consensus.require_same`

    def can_run(self, thread: str) -> bool:
        """Return whether a thread of the rank calls, or may call later."""
        is_later = thread in self.others or (thread != "" and self.may_start_more)
        return thread == self.thread or is_later


def dump_error(error: Exception | None) -> bytes | None:
    """Return `error` pickled, or a RemoteError with its text if that fails."""
    if error is None:
        return None
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # an exception class may fail in any way here
        return pickle.dumps(
            RemoteError(f"{type(error).__qualname__}: {said_by(error)}")
        )
    return data


def load_error(data: bytes, origin: int) -> Exception:
    """Return the error that `dump_error` pickled on rank `origin`."""
    try:
        error = pickle.loads(data)
    except Exception as caught:  # a class that exists only on the other rank
        said = f"{type(caught).__qualname__}: {said_by(caught)}"
        error = RemoteError(f"rank {origin} failed; its error cannot be read: {said}")
    is_error = isinstance(error, Exception)
    return error if is_error else RemoteError(f"rank {origin} failed: {said_by(error)}")


def said_by(error: Any) -> str:
    """Return the text of an error, whose class may fail to give it."""
    try:
        return str(error)
    except Exception as caught:
        return f"<its text cannot be had: {type(caught).__qualname__}>"


def origin_of(error: Any, rank: int) -> int:
    """Return the rank on which an error came up first, by default `rank`."""
    try:
        origin = error.origin_rank
    except Exception:  # an attribute's code may fail in any way
        return rank
    return origin if type(origin) is int else rank


def report_error(error: Exception | None) -> str:
    """Return the traceback of `error` as text."""
    if error is None:
        return ""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return f"{type(error).__qualname__}: {said_by(error)}\n"


def is_own_code(code: Any) -> bool:
    """Return whether code belongs to this package, or to a `skip_folder`."""
    return bool(code.co_filename.startswith(tuple(_folders)))


def skip_folder(path: str) -> None:
    """Skip a library's frames, so that messages name the user's call."""
    if path not in _folders:
        _folders.append(path)


def user_frame() -> Any:
    """Return the innermost frame outside this package."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and is_own_code(frame.f_code):
        frame = frame.f_back
    return frame


def call_site() -> str:
    """Return file and line of the innermost frame outside this package.

    Without one the program has ended: then how it has, if that is known.
    """
    frame = user_frame()
    if is_own_code(frame.f_code):
        path = getattr(sys.modules["__main__"], "__file__", None)
        return exits[-1] if exits else f"the end of {path or 'its text'}"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def differences(records: Sequence[CallReport]) -> str:
    """Describe the first difference, with the value on each rank."""
    names = {name: None for record in records for name in record.lines}
    for name in names:
        texts = [record.lines.get(name, "nothing") for record in records]
        if len(set(texts)) > 1:
            return f"{name} is {group_by_rank(texts)}"
    sites = group_by_rank([record.site for record in records])
    raise CollectiveError(f"equal descriptions of different calls: {sites}")


def group_by_rank(texts: Sequence[str]) -> str:
    """Return each distinct text with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on {name_ranks(rs)}" for text, rs in ranks.items())


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 2"; lists only the first of many."""
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


@enum.unique
class Tag(enum.IntEnum):
    """The tags of this library's messages: each is for one purpose.

    A rank that looks for messages with one tag must not receive others: most of these
    share the communicator of a strategy.
    """

    ANNOUNCEMENT = 1  # `consensus.waiting`: where a rank waits
    DEPARTURE = 2  # the same: why a rank has left
    PROBE = 3  # `resilience.watchdog`
    BLOCK_PART = 4  # `transports.blocks`
    BLOCK_TOTAL = 5
    RING = 6  # `transports.ring`, between nodes
    RING_IN_NODE = 7
    PIECE = 9  # `transports.mpi`: of large arrays, from each rank to each
    MEETING = 8  # `consensus.waiting`: at the end of the program
    CLOCK = 10  # `monitor.timeline`
