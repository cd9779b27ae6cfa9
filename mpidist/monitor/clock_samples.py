"""Clock comparisons, and interpolation between them."""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

__all__ = ["ClockSample", "drift_ppm", "error_ns", "offset_at"]


class ClockSample(NamedTuple):
    """The result of a clock comparison.

    Args:
      local_ns: the time of the comparison, on this rank's clock.
      offset_ns: this rank's clock minus rank 0's.
      error_ns: the maximum error of the offset.
    """

    local_ns: int
    offset_ns: int
    error_ns: int


def offset_at(samples: list[ClockSample], local_ns: float) -> float:
    """Return the offset at a time, by linear interpolation between samples."""
    after = bisect.bisect(samples, (local_ns, math.inf))
    if after == 0:
        return samples[0].offset_ns
    time, offset, _ = samples[after - 1]
    if after == len(samples):
        return offset + drift_ppm(samples) * 1e-6 * (local_ns - time)
    share = (local_ns - time) / (samples[after].local_ns - time)
    return offset + (samples[after].offset_ns - offset) * share


def drift_ppm(samples: list[ClockSample]) -> float:
    """Return the drift from rank 0's clock, in microseconds per second."""
    first, last = samples[0], samples[-1]
    took = last.local_ns - first.local_ns
    return 1e6 * (last.offset_ns - first.offset_ns) / took if took else 0.0


def error_ns(samples: list[ClockSample]) -> int:
    """Return the maximum error of the samples."""
    return max(sample.error_ns for sample in samples)
