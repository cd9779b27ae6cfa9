"""Durations as text, and the buckets of their histogram."""

from __future__ import annotations

import numpy as np

_PER_OCTAVE_BITS = 2  # four buckets for each factor of two
BUCKETS = 64 << _PER_OCTAVE_BITS


def count_buckets(nanoseconds: np.ndarray) -> np.ndarray:
    """Return the number of durations in each bucket."""
    mantissas, lengths = np.frexp(nanoseconds)  # in bits
    rest = np.floor(mantissas * (2 << _PER_OCTAVE_BITS)).astype(int) & 3
    buckets = (lengths << _PER_OCTAVE_BITS) | rest
    buckets = np.where(lengths > _PER_OCTAVE_BITS, np.minimum(buckets, BUCKETS - 1), 0)
    return np.bincount(buckets, minlength=BUCKETS)


def bucket_seconds(bucket: int) -> tuple[float, float]:
    """Return the lower and the upper limit of a bucket."""
    length, rest = bucket >> _PER_OCTAVE_BITS, bucket & 3
    unit = 2.0 ** (length - 1) / 1e9
    return unit * (1 + rest / 4), unit * (1 + (rest + 1) / 4)


def duration(seconds: float) -> str:
    """Return a duration as text with three digits and a unit, such as "1.25 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
