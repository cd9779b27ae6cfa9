"""Counters of a job's time by activity, cheap enough to be always on.

All times are nanoseconds of time.monotonic. Nothing here communicates: the counters are
of one rank.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpidist.util import tracing

# What ends a step: the highest of these that the program does
BACKWARD, NEXT, RUN = 1, 2, 3

_MOST_OPERATIONS = 100
_MOST_UNCOUNTED = 512
_PER_OCTAVE_BITS = 2  # four buckets for each factor of two
_BUCKETS = 64 << _PER_OCTAVE_BITS
_now = time.monotonic_ns


def count_buckets(nanoseconds: np.ndarray) -> np.ndarray:
    """Return the number of durations in each bucket."""
    mantissas, lengths = np.frexp(nanoseconds)  # in bits
    rest = np.floor(mantissas * (2 << _PER_OCTAVE_BITS)).astype(int) & 3
    buckets = (lengths << _PER_OCTAVE_BITS) | rest
    buckets = np.where(lengths > _PER_OCTAVE_BITS, np.minimum(buckets, _BUCKETS - 1), 0)
    return np.bincount(buckets, minlength=_BUCKETS)


def bucket_seconds(bucket: int) -> tuple[float, float]:
    """Return the lower and the upper limit of a bucket."""
    length, rest = bucket >> _PER_OCTAVE_BITS, bucket & 3
    unit = 2.0 ** (length - 1) / 1e9
    return unit * (1 + rest / 4), unit * (1 + (rest + 1) / 4)


class Durations:
    """Minimum, maximum and histogram of durations. One thread adds, any may read."""

    def __init__(self) -> None:
        # The statistics, and durations that they do not include yet, as adding one must
        # be quick. Both are replaced at once, so that readers count none twice
        self._state = (0, 0, np.zeros(_BUCKETS, np.int64)), list[int]()

    def add(self, nanoseconds: int) -> None:
        """Add a duration."""
        rest = self._state[1]
        rest.append(nanoseconds)
        if len(rest) == _MOST_UNCOUNTED:
            self._state = self.describe(), []

    def describe(self) -> tuple[int, int, np.ndarray]:
        """Return the minimum, the maximum (0 if there is none) and the histogram."""
        (least, most, counts), rest = self._state
        if rest:
            added = np.array(rest)
            first, last = int(added.min()), int(added.max())
            least, most = min(least, first) if most else first, max(most, last)
            counts = counts + count_buckets(added)
        return least, most, counts


class Operation:
    """Counters of one kind of collective."""

    __slots__ = ("calls", "name", "seconds_ns", "transports", "waiting_ns")

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.seconds_ns = 0
        self.waiting_ns = 0
        self.transports: dict[str, int] = {}  # bytes by the name of a transport


class Counters:
    """Counters of one communicator. The communicating thread writes, any may read.

    Attributes:
      communication: time in collectives, of which `waiting` until all ranks arrived.
      waiting_for: the waiting time by the rank that arrived last, where it is known.
      input: time in `next` of distributed datasets, without its collectives.
      checkpoint: time of saving and restoring, including its collectives.
      operations: counters by operation.
      steps: the number of completed steps, including the first one.
    """

    def __init__(self) -> None:
        self.made = _now()
        self.communication = self.waiting = self.input = self.checkpoint = 0
        self.waiting_for: dict[int, int] = {}
        self.operations: dict[str, Operation] = {}
        self.steps = 0
        self.epochs = 0  # completed epochs of distributed datasets
        self.has_cache = True  # whether the dataset of the last epoch has one
        self.first_ns = 0
        self._durations = Durations()  # of all steps but the first
        # The time and the counters at the end of the first step and of the last one
        self.first_mark = self.last_mark = (0, 0, 0, 0, 0)
        self.has_begun = False
        self._kind = 0  # what ends steps: see `mark`
        self._is_paused = False
        self._in_checkpoint = False

    def begin(self) -> None:
        """Record the start of the first step."""
        if not self.has_begun:
            self.has_begun = True
            self.last_mark = self._totals(_now())

    def mark(self, kind: int) -> None:
        """Record the end of a step, which is the start of the next one.

        Args:
          kind: BACKWARD, the end of a backward pass; NEXT, a call of `next`; or RUN,
            the end of `Strategy.run`. Only the highest kind that was seen ends steps.
        """
        if kind < self._kind:
            return
        if not self.has_begun:
            self.begin()
            return
        if kind > self._kind:
            self._kind, self.steps, self._is_paused = kind, 0, False
            self._durations = Durations()
        if self._is_paused:
            self._is_paused = False
            return
        now, before = _now(), self.last_mark
        totals = now, self.input, self.communication, self.waiting, self.checkpoint
        self.last_mark = totals
        self.steps += 1
        if self.steps > 1:
            self._durations.add(now - before[0])
        else:
            self.first_ns, self.first_mark = now - before[0], totals
        trace = tracing.always
        if trace is not None:
            trace.step(self.steps, before, totals)

    def end_epoch(self, has_cache: bool) -> None:
        """Record the end of an epoch: the following `next` does not end a step."""
        self.epochs += 1
        self.has_cache = has_cache
        self._is_paused = self._kind < RUN

    def _totals(self, now: int) -> tuple[int, int, int, int, int]:
        return now, self.input, self.communication, self.waiting, self.checkpoint

    def end_input(self, begun: int, communication: int) -> None:
        """Record the end of a call of `next`.

        Args:
          begun: when it started.
          communication: the value of `communication` at that time.
        """
        now = _now()
        # Another thread may have communicated meanwhile
        self.input += max(0, now - begun - (self.communication - communication))
        if (trace := tracing.active) is not None:
            trace.span("input", "next", begun, now)

    def end_exposed(self, begun: int) -> None:
        """Record that this thread waited for the communicating one since `begun`."""
        self.communication += _now() - begun

    @contextlib.contextmanager
    def checkpointing(self, name: str) -> Iterator[None]:
        """Return a context manager whose time counts as `checkpoint` alone.

        Args:
          name: the name of the span in the timeline.
        """
        if self._in_checkpoint:
            yield
            return
        begun = _now()
        communication, waiting = self.communication, self.waiting
        waiting_for = dict(self.waiting_for)
        self._in_checkpoint = True
        try:
            yield
        finally:
            self._in_checkpoint = False
            ended = _now()
            self.checkpoint += ended - begun
            self.communication, self.waiting = communication, waiting
            self.waiting_for = waiting_for
            if (trace := tracing.always) is not None:
                trace.span("checkpoint", name, begun, ended)

    def operation(self, name: str) -> Operation:
        """Return the counters of an operation.

        Words with digits are removed from its name, as there may be many of them.
        """
        words = [word for word in name.split() if not any(map(str.isdecimal, word))]
        name = " ".join(words)
        if name not in self.operations:
            if len(self.operations) >= _MOST_OPERATIONS:
                name = "other operations"
            self.operations.setdefault(name, Operation(name))
        return self.operations[name]

    def snapshot(self) -> dict[str, Any]:
        """Return all counters as JSON-compatible objects."""
        least, most, histogram = self._durations.describe()
        return {
            "seconds_ns": _now() - self.made,
            "steps": self.steps,
            "first_ns": self.first_ns,
            "least_ns": least,
            "most_ns": most,
            "first_mark": self.first_mark,
            "last_mark": self.last_mark,
            "totals": self._totals(_now()),
            "waiting_for": sorted(self.waiting_for.items()),
            "histogram": [
                [*bucket_seconds(i), n] for i, n in enumerate(histogram.tolist()) if n
            ],
            "operations": [
                [o.name, o.calls, o.seconds_ns, o.waiting_ns, dict(o.transports)]
                for o in list(self.operations.values())
            ],
        }
