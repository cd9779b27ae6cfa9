"""Which rows of a batch belong to which replica: the one formula for all rooms."""

from __future__ import annotations

from typing import NamedTuple


class BatchShare(NamedTuple):
    """Which rows of each batch belong to a replica.

    The slices of all replicas are disjoint, in order, and cover all rows.

    Args:
      replicas: the number of those that share the batch.
      replica: the one in question.
      is_balanced: whether numbers of rows differ by one at most. Else they are
        ceil(rows / replicas), TensorFlow's rule, and the last replicas have fewer, or
        none.
    """

    replicas: int
    replica: int
    is_balanced: bool = False

    def of(self, rows: int) -> slice:
        """Return the replica's slice of `rows` rows."""
        replicas, replica, is_balanced = self
        if is_balanced:
            share, rest = divmod(rows, replicas)
            start = replica * share + min(replica, rest)
            return slice(start, start + share + (replica < rest))
        share = largest_share(rows, replicas)
        return slice(min(replica * share, rows), min((replica + 1) * share, rows))


WHOLE = BatchShare(1, 0)


def largest_share(rows: int, replicas: int) -> int:
    """Return the rows of the first replica's slice; no other slice has more."""
    return -(-rows // replicas)


def even_sizes(batch_size: int, replicas: int) -> list[int]:
    """Return the nearest batch sizes that divide evenly among the replicas."""
    below = batch_size // replicas * replicas
    sizes = [below] if below == batch_size else [below, below + replicas]
    return [size for size in sizes if size]  # 0 rows is no batch
