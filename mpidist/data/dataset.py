"""Dataset: what users build input from; `pipeline` does the work."""

from __future__ import annotations

import itertools
import operator
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpidist.data.hdf5 import Hdf5Rows, list_files
from mpidist.data.ordering import Repeat, Shard, Shuffle, Window
from mpidist.data.pipeline import Batch, Map, Pass, Pipeline, Rows
from mpidist.data.sources import ArrayRows, from_lists
from mpidist.errors import ArgumentError, ArgumentTypeError

__all__ = ["INFINITE_CARDINALITY", "Dataset"]

INFINITE_CARDINALITY = -1


class Dataset:
    """Elements to iterate over: nests of arrays. Made by the `from_...` functions.

    Each method returns a new dataset and leaves its own as it was. Nothing is read
    before it is iterated over, and nothing here communicates.

    Iterating over a dataset gives all its elements in this process; give it to
    `Strategy.experimental_distribute_dataset` to divide them over the replicas.
    """

    def __init__(self, pipeline: Pipeline):
        self._pipeline = pipeline
        self._passes = itertools.count()
        self._entropy = secrets.randbits(62)

    @property
    def pipeline(self) -> Pipeline:
        """The steps of this dataset, for what is built on it."""
        return self._pipeline

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """Return a dataset of the rows of an array, or of a tuple or dict of arrays.

        Args:
          tensors: arrays (or lists of numbers) with equal first dimensions `(rows,
            *shape)`; tuples and dicts are structure. Every rank passes all rows.

        Raises:
          ArgumentError: unequal numbers of rows, or a scalar.
        """
        return Dataset(Rows(ArrayRows(from_lists(tensors))))

    @staticmethod
    def from_hdf5(
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        datasets: str | Sequence[str] | Mapping[str, str],
    ) -> Dataset:
        """Return a dataset of the rows of HDF5 datasets, file after file.

        Args:
          files: a path, a glob pattern, or several paths, which are read in the given
            order (a pattern: in sorted order).
          datasets: the name of an HDF5 dataset `(rows, *shape)` gives arrays; a list of
            names gives tuples, a dict of names dicts. Within a file all have the same
            number of rows; from file to file dtypes and row shapes are equal.

        Raises (when it is first used):
          DataError: a file or a dataset is missing, cannot be read, or does not fit the
            others.
        """
        names = dict(datasets) if isinstance(datasets, Mapping) else datasets
        if isinstance(names, Sequence) and not isinstance(names, str):
            names = tuple(names)
        _require_names(names)
        return Dataset(Rows(Hdf5Rows(list_files(files), names)))

    def map(self, map_func: Callable[..., Any]) -> Dataset:
        """Return a dataset of `map_func(element)`; a tuple is passed as arguments.

        Before `batch` the function sees one row at a time. After `batch` it sees the
        rows of a batch; in a distributed dataset those are this replica's rows, so
        there it must treat each row by itself and return as many rows as it got.
        """
        return Dataset(Map(self._pipeline, map_func))

    def shuffle(
        self,
        buffer_size: int | None = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
    ) -> Dataset:
        """Return a dataset of the same elements in a random order.

        The order is a permutation of all elements, whatever `buffer_size` says: rows
        need not pass through a buffer here. It is a function of the seed and the epoch
        alone, the same for any number of replicas.

        Args:
          buffer_size: accepted for TensorFlow's sake; None or >= 1.
          seed: any integer. None draws one, which all replicas share.
          reshuffle_each_iteration: whether each epoch has another order.
        """
        seed = None if seed is None else operator.index(seed)
        if buffer_size is not None and buffer_size < 1:
            raise ArgumentError(f"buffer_size must be >= 1 or None, not {buffer_size}")
        return Dataset(Shuffle(self._pipeline, seed, reshuffle_each_iteration))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Return a dataset of batches: arrays `(batch_size, *shape)`.

        Args:
          batch_size: rows per batch; the last batch of an epoch may have fewer.
          drop_remainder: leave that last, smaller batch out.
        """
        if operator.index(batch_size) < 1:
            raise ArgumentError(f"batch_size must be >= 1, not {batch_size}")
        return Dataset(Batch(self._pipeline, batch_size, drop_remainder))

    def repeat(self, count: int | None = None) -> Dataset:
        """Return a dataset that goes through this one `count` times, None for ever.

        Shuffles before it give another order each time.
        """
        if count == -1:  # TensorFlow's other word for it
            count = None
        if count is not None and count < 0:
            raise ArgumentError(f"count must be >= 0, or None, not {count}")
        return Dataset(Repeat(self._pipeline, count))

    def take(self, count: int) -> Dataset:
        """Return a dataset of the first `count` elements; -1 takes all."""
        if operator.index(count) < -1:
            raise ArgumentError(f"count must be >= 0, or -1 for all, not {count}")
        return Dataset(Window(self._pipeline, 0, None if count == -1 else count))

    def skip(self, count: int) -> Dataset:
        """Return a dataset of all elements but the first `count`."""
        if operator.index(count) < 0:
            raise ArgumentError(f"count must be >= 0, not {count}")
        return Dataset(Window(self._pipeline, count, None))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Return a dataset of every `num_shards`-th element, from `index` on."""
        if not 0 <= index < num_shards:
            raise ArgumentError(f"index must be in 0..{num_shards - 1}, not {index}")
        return Dataset(Shard(self._pipeline, num_shards, index))

    def cardinality(self) -> int:
        """Return the number of elements; INFINITE_CARDINALITY (-1) for no end."""
        length = self._pipeline.length
        return INFINITE_CARDINALITY if length is None else length

    def __len__(self) -> int:
        length = self._pipeline.length
        if length is None:
            raise TypeError("an infinite dataset has no length")
        return length

    def __iter__(self) -> Iterator[Any]:
        order = Pass(next(self._passes), self._entropy)
        length = self._pipeline.length
        numbers = itertools.count() if length is None else range(length)
        return (self._pipeline.element(order, i) for i in numbers)


def _require_names(names: Any) -> None:
    several = names.values() if isinstance(names, dict) else names
    several = [names] if isinstance(names, str) else list(several)
    if not several:
        raise ArgumentError("datasets must name at least one HDF5 dataset")
    for name in several:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"datasets must hold names, not {name!r}")
