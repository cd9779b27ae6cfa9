"""The flight recorder: the last collectives of each rank, even after a kill.

Each communicator has a ring buffer of the last 1,000 calls, of five words each. If
MPIDIST_DUMPS names a folder, the ring buffer is a memory-mapped file there, which
survives any end of the process; a second file describes the calls in JSON lines. Both
are removed when the program ends normally. `python -m mpidist diff` compares those of
all ranks.

Calls of one kind differ only in their step. Memory and file keep only the kinds in the
ring buffer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from mpi4py import MPI

from mpidist.comm.consensus.comparison import Comparison
from mpidist.comm.consensus.flight_files import (
    BEGUN,
    CALLS,
    ENDED,
    FORMAT,
    KIND,
    NUMBER,
    RING_BYTES,
    WORDS,
    FlightFiles,
)
from mpidist.comm.consensus.signatures import CallSignature, is_own_code
from mpidist.util import tracing
from mpidist.util.counters import Counters, Operation
from mpidist.util.forks import call_in_child
from mpidist.util.logs import warn
from mpidist.util.settings import DUMPS

_MOST_KINDS = 4096  # as many as `calls.digest` caches
# Shorter waits are not attributed to a rank
_WAITED_NS = 20_000
_now = time.monotonic_ns
_getframe = sys._getframe
_PACK_INTO = struct.Struct(f"{WORDS}q").pack_into


class Entry(NamedTuple):
    """One call.

    Args:
      number: counted from 1, the same on all ranks.
      operation: the user's call.
      site: its file and line.
      begun: start, in seconds on time.monotonic's clock.
      ended: end; None while it is running.
    """

    number: int
    operation: str
    site: str
    begun: float
    ended: float | None


class Recorder:
    """The last calls on one communicator. One thread at a time writes, any may read.

    If the folder cannot be written, now or later, there is a RuntimeWarning and no
    file. A forked child has a copy of the calls so far, and no files.

    Args:
      channel: the number of the communicator, the same on all ranks.
      comm: the communicator.
      job: a number that is the same on all ranks, and another one in other jobs.
    """

    def __init__(self, channel: int, comm: MPI.Intracomm, job: int):
        self.channel, self._rank, self.job = channel, comm.Get_rank(), job
        self.counters = Counters()
        self._kinds: dict[Any, tuple[int, Operation]] = {}
        self._made = 0  # kinds, of which the last are known
        self._texts: dict[int, tuple[str, str]] = {}
        self._codes: dict[int, Any] = {}
        self._depths: dict[int, int] = {}
        self._place = -WORDS
        # Of the call that this rank is in; it may consist of several
        self._opened = self._begun = self._moved = 0
        self._before = 0, 0  # what had been counted when it began
        self._late = -1
        self._transport = ""
        self._operation = Operation("")
        self._files: FlightFiles | None = None
        self._buffer: Any = bytearray(RING_BYTES)
        folder = DUMPS.read()
        if comm.Get_size() > 1 and folder is not None:
            try:
                self._files = self._open(folder, comm)
                self._buffer = self._files.ring
            except (OSError, ValueError) as error:
                self._warn(error)
        self._words = memoryview(self._buffer).cast("q")
        _recorders.add(self)

    def _open(self, folder: Path, comm: MPI.Intracomm) -> FlightFiles:
        world = comm.group.Translate_ranks(None, MPI.COMM_WORLD.group)
        header = {
            "format": FORMAT,
            "job": self.job,
            "channel": self.channel,
            "rank": self._rank,
            "members": list(world),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "monotonic_ns": time.monotonic_ns(),
            "time": time.time(),
        }
        rank = MPI.COMM_WORLD.Get_rank()
        return FlightFiles(folder, self.job, self.channel, rank, header)

    def _warn(self, error: Exception) -> None:
        warn(
            f"the calls of rank {self._rank} are not recorded in {DUMPS.name}: {error}",
            stacklevel=2,
        )

    def begin(self, number: int, call: CallSignature, digest: int) -> None:
        """Record the begin of a call.

        Args:
          number: counted from 1, the same on all ranks.
          call: its signature.
          digest: of the call without its step.
        """
        begun = _now()
        try:
            frame = _getframe(self._depths[digest])  # the user's, where it was before
            kind, operation = self._kinds[digest, id(frame.f_code), frame.f_lasti]
        except (KeyError, ValueError):
            kind, operation = self._note(call, digest)
        place = self._place + WORDS
        place = 0 if place == WORDS * CALLS else place
        _PACK_INTO(self._buffer, 8 * place, number, kind, begun, 0, call.step)
        self._place = place  # not before: other threads look there
        self._begun = begun
        if not self._opened:
            self._opened = begun
            self._operation = operation
            if tracing.active is not None:
                self._before = self.counters.waiting, self._moved
                self._late = -1

    def note_arrivals(self, is_agreed: bool, comparison: Comparison) -> bool:
        """Record that all ranks have arrived in the last call.

        Args:
          is_agreed: returned unchanged.
          comparison: the comparison in which they arrived.
        """
        waited = _now() - self._begun
        counters = self.counters
        counters.waiting += waited
        self._operation.waiting_ns += waited
        if waited > _WAITED_NS:
            late = self._late = comparison.last_rank()
            if late >= 0:
                waiting_for = counters.waiting_for
                waiting_for[late] = waiting_for.get(late, 0) + waited
        return is_agreed

    def count(self, transport: str, size_bytes: int) -> None:
        """Record the bytes that a transport moves in the current call."""
        self._moved += size_bytes
        self._transport = transport
        transports = self._operation.transports
        transports[transport] = transports.get(transport, 0) + size_bytes

    def end(self) -> None:
        """Record the end of the call."""
        opened = self._opened
        if not opened:
            return
        self._opened = 0
        now = _now()
        self._words[self._place + ENDED] = now
        operation = self._operation
        operation.calls += 1
        operation.seconds_ns += now - opened
        self.counters.communication += now - opened
        trace = tracing.active
        if trace is not None:
            waiting, moved = self._before
            waiting, moved = self.counters.waiting - waiting, self._moved - moved
            transport = self._transport if moved else ""
            trace.collective(
                operation.name, opened, now, waiting, self._late, moved, transport
            )

    def _note(self, call: CallSignature, digest: int) -> tuple[int, Operation]:
        depth, frame = 2, _getframe(2)
        while frame.f_back is not None and is_own_code(frame.f_code):
            depth, frame = depth + 1, frame.f_back
        if len(self._texts) >= _MOST_KINDS:
            self._forget_kinds()
        self._depths[digest] = depth - 1  # as `begin` counts
        key = digest, id(frame.f_code), frame.f_lasti
        known = self._kinds.get(key)
        if known is not None:
            return known
        kind = self._made
        noted = self._kinds[key] = kind, self.counters.operation(call.operation)
        self._made += 1
        site = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self._texts[kind] = call.operation, site
        self._codes[id(frame.f_code)] = frame.f_code  # so that its id stays its own
        if self._files is not None:
            try:
                agreed = call.without_step().describe()
                self._files.add(kind, call.operation, site, agreed, digest)
            except Exception as error:  # `str` of a user's object may raise anything
                self._stop(error)
        return noted

    def _forget_kinds(self) -> None:
        """Remove all kinds of calls that are not in the ring buffer."""
        self._kinds.clear()
        self._depths.clear()
        self._codes.clear()
        kept = set(self._words[KIND::WORDS])
        self._texts = {k: text for k, text in self._texts.items() if k in kept}
        if self._files is not None:
            try:
                self._files.keep(kept)
            except Exception as error:  # a file that somebody has changed, too
                self._stop(error)

    def _stop(self, error: Exception) -> None:
        """Continue without files: incomplete ones would mislead."""
        files, self._files = self._files, None
        self._take_buffer()
        assert files is not None
        files.close(is_kept=False)
        self._warn(error)

    def _take_buffer(self) -> None:
        """Keep the ring buffer in this process's memory only."""
        self._buffer = bytearray(self._buffer)
        self._words = memoryview(self._buffer).cast("q")

    def leave_to_parent(self) -> None:
        """Leave ring buffer and files to the parent process."""
        if self._files is not None:
            self._files.detach()
            self._files = None
            self._take_buffer()

    def last(self) -> Entry | None:
        """Return the last call, if there was one."""
        place = self._place
        return None if place < 0 else self._entry(place)

    def before_last(self) -> Entry | None:
        """Return the call before the last one."""
        place = (self._place - WORDS) % (WORDS * CALLS)
        return self._entry(place) if self._words[place + NUMBER] else None

    def _entry(self, place: int) -> Entry:
        words = self._words[place : place + WORDS]
        operation, site = self._texts[words[KIND]]
        ended = words[ENDED]
        return Entry(
            words[NUMBER],
            operation,
            site,
            words[BEGUN] / 1e9,
            ended / 1e9 if ended else None,
        )

    def close(self, is_kept: bool) -> None:
        """Close the files; remove them unless they are to be kept."""
        if self._files is not None:
            self._files.close(is_kept)
            self._files = None


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for recorder in list(_recorders):
        with contextlib.suppress(Exception):
            recorder.leave_to_parent()


call_in_child(_leave_to_parent)
