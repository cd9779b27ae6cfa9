"""Which rank writes which part of large arrays. Integers only."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SMALLEST_SHARD_BYTES", "cut", "shard_count"]

SMALLEST_SHARD_BYTES = 1 << 20
# A cut this close to the edge of an array is moved there
_SNAP_BYTES = 64 << 10


def shard_count(total_bytes: int, shard_bytes: int, ranks: int) -> int:
    """Return how many shards so many bytes are divided into; 1 for no division."""
    smallest = max(shard_bytes, SMALLEST_SHARD_BYTES)
    return max(1, min(ranks, total_bytes // smallest))


def is_divisible(size_bytes: int) -> bool:
    """Return whether an array is worth being divided."""
    return size_bytes >= SMALLEST_SHARD_BYTES


def cut(sizes: Sequence[tuple[int, int]], shards: int) -> list[list[int]]:
    """Return where arrays that lie one behind the other are cut, into equal shards.

    Args:
      sizes: each array's number of elements, and the bytes of an element.
      shards: how many.

    Returns:
      For each array `shards + 1` numbers of elements, ascending: shard s has those from
      the s-th to the one after it.
    """
    total = sum(count * item for count, item in sizes)
    cuts = []
    start = 0
    for count, item in sizes:
        edges = [
            _snap(total * s // shards - start, count * item) for s in range(shards)
        ]
        cuts.append([*(edge // item for edge in edges), count])
        start += count * item
    return cuts


def _snap(edge: int, size: int) -> int:
    if edge < _SNAP_BYTES:
        return 0
    return size if edge > size - _SNAP_BYTES else edge
