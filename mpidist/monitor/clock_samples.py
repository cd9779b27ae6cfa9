"""What comparisons of clocks have found, and times between them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["ClockSample", "drift_ppm", "error_ns", "offset_at"]


class ClockSample(NamedTuple):
    """What a comparison has found.

    Args:
      local_ns: when it was, on this rank's clock.
      offset_ns: what this rank's clock shows more than that of rank 0.
      error_ns: how much the offset is off by, at most.
    """

    local_ns: int
    offset_ns: int
    error_ns: int


def offset_at(samples: list[ClockSample], local_ns: float) -> float:
    """Return the offset at a time, between samples by a straight line."""
    times = [sample.local_ns for sample in samples]
    found = np.interp(local_ns, times, [sample.offset_ns for sample in samples])
    if len(samples) > 1 and local_ns > times[-1]:
        found += drift_ppm(samples) * 1e-6 * (local_ns - times[-1])
    return float(found)


def drift_ppm(samples: list[ClockSample]) -> float:
    """Return how many microseconds a second this rank's clock gains on rank 0's."""
    first, last = samples[0], samples[-1]
    took = last.local_ns - first.local_ns
    return 1e6 * (last.offset_ns - first.offset_ns) / took if took else 0.0


def error_ns(samples: list[ClockSample]) -> int:
    """Return how much times are off by, at most, at the samples."""
    return max(sample.error_ns for sample in samples)
