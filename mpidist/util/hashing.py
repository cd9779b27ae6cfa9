"""Hashes that are the same in every process and in every version."""

from __future__ import annotations

import hashlib

__all__ = ["hash62"]


def hash62(text: str) -> int:
    """Return 62 bits of a hash of `text`, so that sums of two fit into an int64.

    Iterators save some of these numbers in checkpoints: they must not change.
    """
    hashed = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "big") >> 2
