"""Distributed datasets whose batches are this replica's arrays, perhaps converted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mpidist.data.distributed.datasets import DistributedDataset
from mpidist.errors import ArgumentTypeError
from mpidist.util import validation
from mpidist.util.representation import one_line
from mpidist.values import select_replica


class ConvertedIterator:
    """Converted batches of this replica. `next` is collective.

    Its position can be saved and restored in a `Checkpoint`, or by `get_state` and
    `set_state`.

    Args:
      iterator: of a distributed dataset.
      convert: takes a nest of this replica's arrays, and returns the batch.
    """

    def __init__(self, iterator: Any, convert: Callable[[Any], Any]):
        self._iterator = iterator
        self._convert = convert
        # A Checkpoint finds the strategy there
        self._plan = getattr(iterator, "_plan", None)

    def __iter__(self) -> ConvertedIterator:
        return self

    def __next__(self) -> Any:
        """Return this replica's rows of the next batch. Collective.

        Raises, on all replicas: see `DistributedIterator`.
        """
        return self._convert(select_replica(next(self._iterator)))

    def __repr__(self) -> str:
        return one_line(self, lambda: f"of {self._iterator!r}")

    def get_state(self) -> dict[str, int]:
        """Return the position; see `DistributedIterator.get_state`."""
        return self._iterator.get_state()  # type: ignore[no-any-return] # of any kind

    def set_state(self, state: Mapping[str, int]) -> None:
        """Resume from a position. Collective; see `DistributedIterator.set_state`."""
        self._iterator.set_state(state)

    def close(self) -> None:
        """Stop the prefetch threads."""
        self._iterator.close()


class ConvertedDataset:
    """A distributed dataset with converted batches. Iterating over it is collective."""

    _iterator_type: Callable[[Any], ConvertedIterator]

    def __init__(self, dataset: Iterable[Any]):
        self._dataset: Any = dataset
        self._plan = getattr(dataset, "_plan", None)  # `progress` finds the replicas

    def __iter__(self) -> ConvertedIterator:
        """Return an iterator over the next epoch. Collective."""
        return type(self)._iterator_type(iter(self._dataset))

    def __len__(self) -> int:
        """Return the number of steps, if known."""
        return len(self._dataset)

    def __repr__(self) -> str:
        return one_line(self, lambda: f"of {self._dataset!r}")

    @property
    def cardinality(self) -> int:
        """The number of steps, equal on all replicas; -1 if endless, -2 if unknown."""
        return self._dataset.cardinality  # type: ignore[no-any-return] # of any kind


class ArrayIterator(ConvertedIterator):
    """Gives this replica's arrays; a `Checkpoint` saves it like an iterator."""

    def __init__(self, iterator: Any):
        super().__init__(iterator, lambda batch: batch)


class ArrayDataset(ConvertedDataset):
    """The result of `as_arrays`. Iterating over it is collective."""

    _iterator_type = ArrayIterator


def as_arrays(dataset: Any) -> ArrayDataset:
    """Return a distributed dataset whose batches are this replica's rows, as arrays.

    For a loop of one's own, without `strategy.run`. Iterating over the result is
    collective; the last replicas may have fewer rows of a batch, or none.

    Args:
      dataset: what `strategy.experimental_distribute_dataset` returns.

    Raises:
      ArgumentTypeError: it is something else.

    Example:
      >>> rows = mpidist.Dataset.range(6).batch(4)
      >>> train = strategy.experimental_distribute_dataset(rows)
      >>> [x.tolist() for x in mpidist.as_arrays(train)]  # on replica 0
      [[0, 1], [4]]
    """
    if not isinstance(dataset, DistributedDataset):
        raise ArgumentTypeError(
            "as_arrays needs what strategy.experimental_distribute_dataset returns, "
            f"not {validation.shown(dataset)}"
        )
    return ArrayDataset(dataset)
