"""What the parts of the GPU benchmark share: timing on all ranks, and telling of it."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cupy
from mpi4py import MPI

import mpidist

__all__ = ["Calls", "Setting"]

# What is timed, by name
Calls = Mapping[str, Callable[[], Any]]

_MOST_LOOPS = 1000
_LOOP_SECONDS = 0.02
_SLOW_SECONDS = 0.25
_CASE_SECONDS = 4.0
_REPETITIONS = (2, 9)  # at least and at most


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all parts are given.

    Args:
      comm: of all ranks.
      strategy: over them, on GPUs.
      is_quick: whether only to see that all runs.
      records: the file that gets a line of JSON for each finding, from rank 0.
      ends: the time of time.monotonic by which to be done.
    """

    comm: MPI.Intracomm
    strategy: mpidist.MirroredStrategy
    is_quick: bool
    records: Path
    ends: float

    def record(self, kind: str, line: str, **fields: Any) -> None:
        """Keep a finding, so that no later failure loses it; and print a line of it."""
        if self.comm.rank == 0:
            print(line, flush=True)
            with open(self.records, "a") as file:
                file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def has_time_for(self, case: str) -> bool:
        """Return whether there is time; tell what is left out else. Collective."""
        has = self.comm.bcast(time.monotonic() < self.ends)
        if not has:
            self.skip(f"{case}: no time was left")
        return bool(has)

    def skip(self, reason: str) -> None:
        """Tell what was left out."""
        self.record("skipped", f"skipped: {reason}", reason=reason)

    def compare(self, case: str, size_bytes: int, calls: Calls) -> None:
        """Time calls in turn, and record it. Collective.

        Args:
          case: what all of them do.
          size_bytes: of one rank's data.
          calls: by name; the first one is ours.
        """
        seconds = self.time_in_turn(calls)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        first = next(iter(medians))
        words = [f"{name} {short_time(medians[name])}" for name in calls]
        line = f"{case}, {size_bytes:,} bytes, {first} first: {'; '.join(words)}"
        self.record("times", line, case=case, bytes=size_bytes, seconds=seconds)

    def time_in_turn(self, calls: Calls) -> dict[str, list[float]]:
        """Return the seconds of calls, measured several times in turn. Collective."""
        loops, once = {}, 0.0
        for name, call in calls.items():
            seconds = self.time(call, 1)
            if seconds < _SLOW_SECONDS:  # the first call takes longer
                seconds = self.time(call, 1)
            most = 2 if self.is_quick else _MOST_LOOPS
            loops[name] = max(1, min(most, int(_LOOP_SECONDS / seconds)))
            once += loops[name] * seconds
        least, most = (1, 1) if self.is_quick else _REPETITIONS
        repetitions = max(least, min(most, round(_CASE_SECONDS / once)))
        warming_up = 1 if once < _SLOW_SECONDS and not self.is_quick else 0
        measured: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(warming_up + repetitions):
            for name, call in calls.items():
                measured[name].append(self.time(call, loops[name]))
        return {name: times[warming_up:] for name, times in measured.items()}

    def time(self, call: Callable[[], Any], loops: int) -> float:
        """Return the seconds of one of so many calls, on the slowest rank. Collective.

        The GPU is done with what it did before, and in the end with all calls.
        """
        device = cupy.cuda.Device()
        device.synchronize()
        self.comm.Barrier()
        start = time.perf_counter()
        for _ in range(loops):
            call()
        device.synchronize()
        mine = (time.perf_counter() - start) / loops
        slowest: float = self.comm.allreduce(mine, MPI.MAX)
        return slowest

    def numbers(self, shape: int | tuple[int, ...]) -> Any:
        """Return small whole float32 numbers, other ones on each rank, on its GPU.

        Sums of them are exact in any order.
        """
        size = math.prod(shape) if isinstance(shape, tuple) else shape
        values = cupy.arange(size, dtype="f4") % 1000 + self.comm.rank
        return values.reshape(shape)

    def sum_of_numbers(self, shape: int | tuple[int, ...]) -> Any:
        """Return the sum over all ranks of what `numbers` gives."""
        ranks = self.comm.size
        first = self.numbers(shape) - self.comm.rank
        return first * ranks + ranks * (ranks - 1) / 2


def short_time(seconds: float) -> str:
    """Return a time with its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
