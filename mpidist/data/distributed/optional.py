"""A batch, or none."""

from __future__ import annotations

from typing import Any

from mpidist.errors import ArgumentError

__all__ = ["Optional"]


class Optional:
    """A batch, or none: what `DistributedIterator.get_next_as_optional` returns.

    Example:
      >>> rows = mpidist.Dataset.range(4).batch(4)
      >>> iterator = iter(strategy.experimental_distribute_dataset(rows))
      >>> batch = iterator.get_next_as_optional()
      >>> while batch.has_value():
      ...     print(strategy.gather(batch.get_value(), axis=0))
      ...     batch = iterator.get_next_as_optional()
      [0 1 2 3]
    """

    def __init__(self, *values: Any):
        self._values = values

    def has_value(self) -> bool:
        """Return whether there is a batch; the same on all replicas."""
        return bool(self._values)

    def get_value(self) -> Any:
        """Return the batch.

        Raises:
          ArgumentError: there is none.
        """
        if not self._values:
            raise ArgumentError("the Optional has no value; ask has_value() first")
        return self._values[0]

    def __repr__(self) -> str:
        return f"Optional({', '.join(map(repr, self._values))})"
