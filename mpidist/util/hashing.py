"""Hashes that are stable across processes and versions."""

from __future__ import annotations

import hashlib


def hash62(text: str | bytes) -> int:
    """Return a 62-bit hash of `text`: the sum of two fits into an int64.

    Checkpoints of iterators contain such hashes, so the function must not change.
    """
    data = text.encode() if isinstance(text, str) else text
    hashed = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(hashed, "big") >> 2
