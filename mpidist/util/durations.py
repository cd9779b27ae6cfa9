"""Durations: buckets of a histogram, and text."""

from __future__ import annotations

__all__ = ["BUCKETS", "bucket_of", "bucket_seconds", "duration"]

_PER_OCTAVE_BITS = 2  # four buckets for each factor of two
BUCKETS = 64 << _PER_OCTAVE_BITS


def bucket_of(nanoseconds: int) -> int:
    """Return the bucket of the histogram for a duration."""
    length = nanoseconds.bit_length()
    if length <= _PER_OCTAVE_BITS:
        return 0
    rest = (nanoseconds >> (length - 1 - _PER_OCTAVE_BITS)) & 3
    return min(length << _PER_OCTAVE_BITS | rest, BUCKETS - 1)


def bucket_seconds(bucket: int) -> tuple[float, float]:
    """Return from which duration to which a bucket is."""
    length, rest = bucket >> _PER_OCTAVE_BITS, bucket & 3
    unit = 2.0 ** (length - 1) / 1e9
    return unit * (1 + rest / 4), unit * (1 + (rest + 1) / 4)


def duration(seconds: float) -> str:
    """Return text with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
