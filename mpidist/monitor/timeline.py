"""Timelines: traces of all ranks, in files of a folder.

Twice a second, a thread of each rank writes the events that `util.tracing` has
collected, and the progress of the job, for `python -m mpidist report`. If it cannot
write, there is a RuntimeWarning, and the timeline of that rank ends; the job continues.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.signatures import Tag
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.monitor.statistics import statistics
from mpidist.monitor.traces import (
    ClockSample,
    TraceFile,
    drift_ppm,
    error_ns,
    status_path,
    trace_path,
)
from mpidist.util import tracing, validation
from mpidist.util.files import replace_file
from mpidist.util.logs import warn
from mpidist.util.representation import one_line

_CALL = "Strategy.timeline"
_FLUSH_SECONDS = 0.5
# Size limits of the files of all ranks together, and of one rank
_MOST_BYTES = 256 << 20
_MOST_RANK_BYTES = 10 << 20
_LEAST_RANK_BYTES = 1 << 20
# The first quarter has all steps; each further 1/32 half as many as before, so that no
# job is long enough to reach the limit
_WHOLE_PART, _NEXT_PART = 4, 32
_STATUS_RANKS = 16  # all ranks together write this many statuses per second
_FIRST_RUNS = 500  # clocks are compared after this many, twice as many, ... runs
_END_SECONDS = 5.0
_CLOCK_CALL = "comparing clocks"
_FIRST_ROUNDS = 8  # MPI opens connections in the first rounds
_ROUNDS = 24
_MANY_RANKS = 64
_MOST_COMMAND = 400  # characters
_now = time.monotonic_ns
F = TypeVar("F", bound=Callable[..., Any])

_current: Timeline | None = None


def stride_at(size_bytes: int, most_bytes: int) -> int:
    """Return one of how many steps is recorded when a file has so many bytes."""
    after = size_bytes - most_bytes // _WHOLE_PART
    return 1 if after < 0 else 2 << (after // (most_bytes // _NEXT_PART))


def _script() -> str:
    path = Path(sys.argv[0] if sys.argv else "")
    is_package = path.name == "__main__.py"  # python -m
    name = path.parent.name if is_package else path.name
    return "" if name.startswith("-") else name


def _command() -> str:
    """Return this program's command line, without the folder of Python, on one line."""
    python, *arguments = sys.orig_argv or [""]
    text = " ".join(shlex.join([Path(python).name, *arguments]).split())
    return text if len(text) <= _MOST_COMMAND else f"{text[:_MOST_COMMAND]} ..."


class Timeline:
    """The timeline of this process. Collective to make, over a strategy's ranks.

    Args:
      group: the ranks.
      folder: of the files; the same on all ranks.
    """

    def __init__(self, group: ReplicaGroup, folder: Path):
        self._group, self._folder = group, folder
        self._rank = MPI.COMM_WORLD.Get_rank()
        consensus = group.consensus
        # On rank 0's clock; before all other events, as viewers drop negative times
        self._job, self._began, origin = consensus.root_only(
            _CALL, lambda: (secrets.token_hex(4), time.time(), time.monotonic_ns())
        )
        self._samples = [compare_clocks(consensus)]
        self._runs, self._next_runs = 0, _FIRST_RUNS
        self.has_ended = False  # on this rank
        self._lock = threading.Lock()
        self._lines: list[str] = []  # to be written with the next events
        self._stop = threading.Event()
        self._buffer: tracing.TraceBuffer | None = None
        self._file: TraceFile | None = None
        self._is_full = False
        per_rank = _MOST_BYTES // group.num_replicas
        self._most_bytes = min(max(per_rank, _LEAST_RANK_BYTES), _MOST_RANK_BYTES)
        self._status_seconds = max(1.0, group.num_replicas / _STATUS_RANKS)
        self._status_due = 0.0
        self._thread = threading.Thread(
            target=self._run, name="mpidist-timeline", daemon=True
        )
        try:
            self._open(origin + self._samples[0].offset_ns)
        except Exception as error:
            self._give_up(error)
        group.closing.append(self.stop)

    def _open(self, origin_ns: int) -> None:
        self._folder = self._folder.absolute()  # the program may change its own later
        self._folder.mkdir(parents=True, exist_ok=True)
        about = {
            "format": 1,
            "job": self._job,
            "began": self._began,
            "ranks": self._group.num_replicas,
            "rank": self._group.replica_id,
            "reference_rank": 0,
            "clock_error_us": self._samples[0].error_ns / 1e3,
        }
        path = trace_path(self._folder, self._rank)
        host = socket.gethostname()
        self._file = TraceFile(path, self._rank, host, origin_ns, about)
        self._note_clock(self._samples[0])
        self._buffer = tracing.TraceBuffer()
        self._thread.start()
        tracing.start(self._buffer)

    def _note_clock(self, sample: ClockSample) -> None:
        if self._file is None:
            return
        args = {
            "offset_ns": sample.offset_ns - self._samples[0].offset_ns,
            "error_ns": sample.error_ns,
        }
        self._lines.append(self._file.instant("clock", sample.local_ns, args))

    def compare_clocks_if_due(self) -> None:
        """Count a call of `run`; compare clocks after some calls. Collective.

        Only calls of the thread that created the strategy count: their number is the
        same on all ranks.
        """
        if not self._group.consensus.lock.is_creator():
            return
        self._runs += 1
        if self._runs >= self._next_runs:
            self._next_runs *= 2
            self._samples.append(compare_clocks(self._group.consensus))
            self._note_clock(self._samples[-1])

    def stop(self) -> None:
        """Compare clocks a last time, and close the files. Collective."""
        global _current
        with contextlib.suppress(ValueError):
            self._group.closing.remove(self.stop)
        # These conditions are the same on all ranks, even if the timeline of one ended
        if self._group.timeline is not self:
            return
        self._group.timeline = None
        if _current is self:
            _current = None
        consensus = self._group.consensus
        if consensus.is_usable:
            self._samples.append(compare_clocks(consensus))
            self._note_clock(self._samples[-1])
        self.end()

    def end(self, state: str = "ended") -> None:
        """Close the files, with this state for the report. Not collective."""
        if self.has_ended:
            return
        self.has_ended = True
        if self._buffer is None:
            return
        tracing.stop()
        self._stop.set()
        self._thread.join(_END_SECONDS)  # the disk may not respond
        if self._thread.is_alive():
            return
        with contextlib.suppress(Exception), self._lock:
            self._flush(state)

    def _run(self) -> None:
        while not self._stop.wait(_FLUSH_SECONDS) and self._buffer is not None:
            with self._lock:
                self._flush_or_give_up()

    def _flush_or_give_up(self) -> None:
        try:
            self._flush()
        except Exception as error:  # usually a full disk
            self._give_up(error)

    def _flush(self, end_state: str = "") -> None:
        file, buffer = self._file, self._buffer
        if file is None or buffer is None:
            return
        file.require_own()
        lines, self._lines = self._lines, []
        file.append(buffer.take(), lines)
        self._limit(file, buffer)
        now = time.monotonic()
        if end_state or now >= self._status_due:
            self._status_due = now + self._status_seconds
            self._write_status(end_state or "running")
        if end_state:
            samples = self._samples
            found = {
                "clock_error_us": error_ns(samples) / 1e3,
                "clock_drift_ppm": drift_ppm(samples),
                "one_of_steps": buffer.stride,
                "dropped": buffer.dropped,
            }
            file.close(file.metadata("mpidist_end", found))
            self._file = None

    def _limit(self, file: TraceFile, buffer: tracing.TraceBuffer) -> None:
        """Record fewer steps as the file grows; none when it has reached its limit."""
        if self._is_full:
            return
        if file.size_bytes > self._most_bytes:
            self._is_full = True
            tracing.stop()
            warn(
                f"the timeline of rank {self._rank} in {self._folder} records no more "
                f"events: it has reached its limit of {self._most_bytes / 2**20:.3g} "
                "MiB; the job continues, and so does its progress there"
            )
            return
        stride = stride_at(file.size_bytes, self._most_bytes)
        if stride > buffer.stride:
            buffer.stride = stride
            text = file.instant(
                "fewer steps", time.monotonic_ns(), {"one_of_steps": stride}
            )
            self._lines.append(text)

    def _write_status(self, state: str) -> None:
        assert self._buffer is not None
        found = statistics(self._group) | {
            "job": self._job,
            "state": state,
            "began": self._began,
            "time": time.time(),
            "world_rank": self._rank,
            "pid": os.getpid(),
            "script": _script(),
            "command": _command(),
            "one_of_steps": self._buffer.stride,
        }
        path = status_path(self._folder, self._rank)
        with replace_file(path, is_durable=False) as file:
            file.write(json.dumps(found).encode())

    def _give_up(self, error: Exception) -> None:
        tracing.stop()
        file, self._file, self._buffer = self._file, None, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
        warn(
            f"the timeline of rank {self._rank} in {self._folder} ends here: {error}; "
            "the job continues"
        )


def compare_clocks(consensus: Consensus) -> ClockSample:
    """Return how this rank's clock differs from rank 0's. Collective.

    Each rank's clock has its own origin and rate. Rank 0 sends a message to each rank
    and receives the rank's time. The fastest of several round trips counts; half of it
    is the maximum error.
    """
    if consensus.size == 1:
        return ClockSample(_now(), 0, 0)
    with consensus.call(_CLOCK_CALL) as call:
        call.agree()
        with Pending(_CLOCK_CALL, consensus.comm):
            return _exchange(consensus)


def _exchange(consensus: Consensus) -> ClockSample:
    comm, size = consensus.comm, consensus.size
    rounds = _FIRST_ROUNDS + (_ROUNDS if size <= _MANY_RANKS else _FIRST_ROUNDS)
    message = np.zeros(3, np.int64)
    if consensus.rank:
        for _ in range(rounds):
            comm.Recv(message, 0, Tag.CLOCK)
            message[0] = _now()
            comm.Send(message, 0, Tag.CLOCK)
        comm.Recv(message, 0, Tag.CLOCK)
        return ClockSample(*message.tolist())
    for rank in range(1, size):
        best = (1 << 62, 0, 0)
        for _ in range(rounds):
            sent = _now()
            comm.Send(message, rank, Tag.CLOCK)
            comm.Recv(message, rank, Tag.CLOCK)
            received, there = _now(), int(message[0])
            # The remote clock was read about half way between sending and receiving
            offset = there - (sent + received) // 2
            best = min(best, (received - sent, there, offset))
        message[:] = best[1], best[2], -(-best[0] // 2)
        comm.Send(message, rank, Tag.CLOCK)
    return ClockSample(_now(), 0, 0)


@contextlib.contextmanager
def timeline(group: ReplicaGroup, folder: Any) -> Iterator[None]:
    """See `Strategy.timeline`. Collective."""
    path = group.consensus.run(
        _CALL, validation.path, "folder", folder, same=lambda path: [("folder", path)]
    )
    made = _start(group, Path(path))
    try:
        yield
    except BaseException:  # perhaps on this rank only
        if made is not None:
            made.end()
        raise
    if made is not None and group.timeline is made:
        group.consensus.require_same(f"the end of {_CALL}")
        made.stop()


def _start(
    group: ReplicaGroup, folder: Path, is_asked_for: bool = True
) -> Timeline | None:
    """Start a timeline unless some rank has one. Collective."""
    global _current
    has_one = _current is not None and not _current.has_ended
    if any(group.consensus.gather_objects(_CALL, lambda: has_one)):
        if group.replica_id == 0 and is_asked_for:
            warn(
                "a timeline is running already; it continues and the new one is ignored"
            )
        return None
    if _current is not None:  # an error ended it, on all ranks
        with contextlib.suppress(ValueError):
            _current._group.closing.remove(_current.stop)
        _current._group.timeline = None
    _current = group.timeline = Timeline(group, folder)
    return _current


def start_by_environment(group: ReplicaGroup) -> None:
    """Start a timeline if MPIDIST_TIMELINE, of any rank, names a folder. Collective."""
    if group.timeline_folder:  # on all ranks
        _start(group, Path(group.timeline_folder), is_asked_for=False)


def end() -> None:
    """End the timeline of this process because of an error. Not collective."""
    if _current is not None:
        _current.end("failed")


def finish() -> None:
    """End the timeline of this process, at the end of the program on all ranks.

    Collective if the strategy can still communicate.
    """
    if _current is not None:
        if _current._group.topology.closed:
            _current.end()
        else:
            _current.stop()


class span:  # noqa: N801 - it is used like a function
    """Name a part of the program in its timeline, if there is one. Not collective.

    A context manager, or a decorator of functions. Without a timeline it costs less
    than a microsecond.

    Args:
      name: any text; use few different names.

    Example:
      >>> with mpidist.span("forward"):
      ...     y = np.ones(3) * 2
      >>> @mpidist.span("backward")
      ... def backward():
      ...     return 1
      >>> backward()
      1
    """

    __slots__ = ("_begun", "_name")

    def __init__(self, name: str):
        self._name = name
        self._begun = 0

    def __repr__(self) -> str:
        return one_line(self, lambda: repr(self._name))

    def __enter__(self) -> span:
        self._begun = time.monotonic_ns() if tracing.active is not None else 0
        return self

    def __exit__(self, *_: object) -> None:
        trace = tracing.active
        if trace is not None and self._begun:
            name = self._name
            trace.span("span", str(name), self._begun, time.monotonic_ns())

    def __call__(self, function: F) -> F:
        """Return a function whose calls are spans."""
        name = self._name

        @functools.wraps(function)
        def spanned(*args: Any, **kwargs: Any) -> Any:
            with span(name):
                return function(*args, **kwargs)

        # It is called like the function
        return spanned  # type: ignore[return-value]
