"""Dataset, the public class; it wraps a `MapDataset` or an `IterDataset`."""

from __future__ import annotations

import copy
import functools
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from mpidist.data.elements import as_element, stack
from mpidist.data.hdf5.names import check_names, list_files
from mpidist.data.hdf5.rows import Hdf5Rows
from mpidist.data.iter_dataset import UNKNOWN_CARDINALITY, GeneratorDataset, IterDataset
from mpidist.data.iterator import (
    DatasetIterator,
    concatenate,
    is_sharded,
    warn_undistributed,
    zip_together,
)
from mpidist.data.iterator_state import EpochCounter
from mpidist.data.map_dataset import INFINITE_CARDINALITY, MapDataset, SourceMapDataset
from mpidist.data.sources import ArrayRows, RangeRows
from mpidist.data.transformations import Transformations, check_name
from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.options import MOST_BUFFERED, AutoShardPolicy, Options
from mpidist.util import near_misses, nest, validation
from mpidist.util.representation import counted, one_line
from mpidist.util.tracebacks import fold
from mpidist.values import DistributedValues

__all__ = [
    "Dataset",
    "DatasetLike",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "as_dataset",
    "require_end",
    "require_length",
    "rows_are_known",
    "summarize",
]


class _DatasetType(type):
    """The metaclass of `Dataset`; names unknown attributes in errors."""

    if not TYPE_CHECKING:  # or every name would be one

        def __getattr__(cls, name: str) -> NoReturn:
            near_misses.refuse(cls, name, near_misses.DATASET)


class Dataset(Transformations, metaclass=_DatasetType):
    """Elements to iterate over: nests of arrays. Created by the `from_...` functions.

    Each method returns a new dataset and leaves its own unchanged. Reading starts when
    the dataset is iterated over. No method communicates.

    Iterating over a dataset gives all its elements in this process; give it to
    `Strategy.experimental_distribute_dataset` to divide them over the replicas. (In a
    job of several ranks, iterating over an undivided dataset warns once, unless it has
    the option AutoShardPolicy.OFF or was divided by `shard`.)

    Example:
      >>> rows = mpidist.Dataset.from_tensor_slices((np.arange(5), np.ones(5)))
      >>> for x, y in rows.map(lambda x, y: (2 * x, y)).batch(2):
      ...     print(x, y)
      [0 2] [1. 1.]
      [4 6] [1. 1.]
      [8] [1.]
    """

    def __init__(
        self,
        pipeline: MapDataset | IterDataset,
        options: Options | None = None,
        read_ahead: int = 0,
    ):
        self._pipeline = pipeline
        self._options = options or Options()
        self._read_ahead = read_ahead
        # Without use for entropy, draw none: states are equal in all processes then
        self._epochs = EpochCounter(
            secrets.randbits(62) if pipeline.needs_entropy else 0
        )
        self._spec: Any = None

    def __repr__(self) -> str:
        return one_line(self, lambda: summarize(self._pipeline))

    def _repr_html_(self) -> str:
        from mpidist.util.html_tables import html_table

        return html_table(type(self).__name__, [("", summarize(self._pipeline))])

    @property
    def pipeline(self) -> MapDataset | IterDataset:
        """The `MapDataset` or `IterDataset` of this dataset."""
        return self._pipeline

    @property
    def element_spec(self) -> Any:
        """A nest of `TensorSpec` like the elements; None is the number of rows.

        The first access reads an element (the first element of a generator).
        """
        if self._spec is None:
            self._spec = self._pipeline.element_spec()
        return self._spec

    @staticmethod
    def from_tensors(tensors: Any, name: str | None = None) -> Dataset:
        """Return a dataset of one element: a copy of an array, or of a nest of arrays.

        Tuples and dicts are structure.
        """
        check_name(name)
        rows = stack([as_element(tensors)])
        return Dataset(SourceMapDataset(ArrayRows(rows, "from_tensors")))

    @staticmethod
    def range(*args: int, output_type: npt.DTypeLike = np.int64) -> Dataset:
        """Return a dataset of the integers of Python's `range(*args)`.

        Args:
          *args: `stop`; or `start, stop`; or `start, stop, step`.
          output_type: the dtype of the numbers.

        Raises:
          ArgumentError: a step of 0, or numbers that `output_type` does not hold.
          ArgumentTypeError: `args` is not one to three integers, or `output_type` not a
            dtype.
        """
        dtype = validation.dtype("output_type", output_type)
        return Dataset(SourceMapDataset(RangeRows.of(args, dtype)))

    @staticmethod
    def from_generator(
        generator: Callable[[], Iterable[Any]] | Iterable[Any],
    ) -> Dataset:
        """Return a dataset of the elements of an iterable, of unknown length.

        Args:
          generator: a function that returns an iterable, called for each iteration; or
            an iterable that starts again each time, such as a list. It yields nests of
            arrays and numbers; tuples and dicts are structure, lists are arrays. It may
            reuse the arrays that it yields: elements are copied.

        If the dataset is divided over replicas, each replica iterates over the whole
        generator, so it must yield the same elements on all of them.

        Raises:
          ArgumentError: an iterator, which can be used only once.
          ArgumentTypeError: `generator` is not iterable or callable.
        """
        return Dataset(GeneratorDataset(generator, is_batched=False))

    @staticmethod
    def from_tensor_slices(tensors: Any, name: str | None = None) -> Dataset:
        """Return a dataset of the rows of an array, or of a tuple or dict of arrays.

        Args:
          tensors: arrays (or lists of numbers) with equal first dimensions
            `(rows, *shape)`; tuples and dicts are structure. Every rank passes all
            rows. Arrays are not copied, unlike in TensorFlow: do not change them while
            the dataset is in use.
          name: accepted for TensorFlow compatibility.

        Raises:
          ArgumentError: unequal numbers of rows, or a scalar; a masked array, a sparse
            matrix, a ragged list, or Python objects.
        Raises on all replicas, when it is distributed:
          MismatchError: the ranks' arrays differ. All bytes are compared, or, of more
            than 2 GiB, 4,096 rows of each array.
        """
        check_name(name)
        return Dataset(SourceMapDataset(ArrayRows(tensors)))

    @staticmethod
    def from_hdf5(
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        datasets: str | Sequence[str] | Mapping[str, str],
        *,
        allow_short_external: bool = False,
    ) -> Dataset:
        """Return a dataset of the rows of HDF5 datasets, file after file.

        Args:
          files: a path, a glob pattern, or several paths, read in the given order (for
            a pattern: in sorted order).
          datasets: the name of an HDF5 dataset `(rows, *shape)` gives arrays; a list of
            names gives tuples, a dict of names gives dicts. The datasets of a file have
            the same number of rows; dtypes and row shapes are equal in all files.
          allow_short_external: whether raw files of external storage may end before
            their rows, which are then zeros; otherwise that is an error.

        Rows of chunks that were never written have the fill value, as in HDF5.

        Raises, when the dataset is first used:
          DataError: a file or a dataset is missing, cannot be read, or does not match
            the other files.
        """
        allow = validation.switch("allow_short_external", allow_short_external)
        rows = Hdf5Rows(list_files(files), check_names(datasets), allow)
        return Dataset(SourceMapDataset(rows))

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> Dataset:
        """Return a dataset of elements of several datasets side by side.

        It ends with the shortest. It has random access if all of them have; with a
        generator's dataset it can only be read in order. Earlier shuffles without a
        seed use a different order in each dataset. AutoShardPolicy.FILE is refused,
        because a row can come from several files.

        Args:
          *args: datasets; or one structure of datasets: tuples and dicts.
          datasets: the structure, as a keyword argument.
          name: accepted for TensorFlow compatibility.

        The result has the options of the datasets.

        Raises:
          ArgumentError: no dataset; the datasets' options have different policies.
          ArgumentTypeError: a leaf that is not a dataset; a list.
        Raises on all replicas, when batches are divided over them:
          ArgumentError: the last batches have different numbers of rows.

        Example:
          >>> x = mpidist.Dataset.from_tensor_slices([1.0, 2.0, 3.0])
          >>> for batch in mpidist.Dataset.zip(x, mpidist.Dataset.range(10)).batch(2):
          ...     print(*batch)
          [1. 2.] [0 1]
          [3.] [2]
        """
        check_name(name)
        leaves, spec = nest.flatten(_structure(args, datasets))
        return Dataset(
            zip_together([dataset._pipeline for dataset in leaves], spec),
            _common_options(leaves),
        )

    def reduce(
        self,
        initial_state: Any,
        reduce_func: Callable[[Any, Any], Any],
        name: str | None = None,
    ) -> Any:
        """Return the state after one pass: `state = reduce_func(state, element)`.

        Args:
          initial_state: the first state; returned if there are no elements.
          reduce_func: called with the state and an element; returns the next state.
          name: accepted for TensorFlow compatibility.

        Raises:
          ArgumentError: the dataset has no end.
          What `reduce_func` and iterating raise.

        Example:
          >>> mpidist.Dataset.range(5).reduce(0, lambda state, x: state + int(x))
          10
        """
        check_name(name)
        function = validation.function("reduce_func", reduce_func)
        require_end(self.cardinality(), "Dataset.reduce")
        elements = self._iterate()
        try:
            return functools.reduce(function, elements, initial_state)
        except BaseException as error:
            fold(error)
            raise
        finally:
            elements.close()

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """Return a dataset of the elements of this one, then those of `dataset`.

        Raises:
          ArgumentError: only one of the two is batched.
          ArgumentTypeError: their structures or dtypes differ. If a file or a function
            must be read to know them, this is raised at the first use.
        """
        check_name(name)
        first, second = self._pipeline, as_dataset(dataset, "concatenate")._pipeline
        if first.is_batched != second.is_batched:
            raise ArgumentError(
                "concatenate needs two datasets of batches, or two of single elements"
            )
        return Dataset(concatenate(first, second), self._options)

    def prefetch(self, buffer_size: int, name: str | None = None) -> Dataset:
        """Return a dataset that prefetches `buffer_size` elements in a thread.

        Use it as the last transformation: later ones disable it. Distributed datasets
        prefetch by their `InputOptions` instead. -1 (TensorFlow's AUTOTUNE) lets
        mpidist choose.
        """
        check_name(name)
        ahead = validation.integer("buffer_size", buffer_size)
        if ahead == -1:
            ahead = 2
        ahead = validation.integer("buffer_size", ahead, 0, " or -1", MOST_BUFFERED)
        return Dataset(self._pipeline, self._options, ahead)

    def with_options(self, options: Options, name: str | None = None) -> Dataset:
        """Return this dataset with `options`, which later transformations keep."""
        check_name(name)
        options = validation.instance("options", options, Options)
        return Dataset(self._pipeline, copy.copy(options), self._read_ahead)

    def options(self) -> Options:
        """Return a copy of the options of this dataset."""
        return copy.copy(self._options)

    def cardinality(self) -> int:
        """Return the number of elements.

        INFINITE_CARDINALITY (-1) if endless, UNKNOWN_CARDINALITY (-2) for a generator.
        """
        return self._pipeline.cardinality

    def __len__(self) -> int:
        return require_length(self.cardinality())

    def __iter__(self) -> DatasetIterator:
        return self._iterate()

    def _iterate(self) -> DatasetIterator:
        is_meant = self._options.auto_shard_policy is AutoShardPolicy.OFF
        if not (is_meant or is_sharded(self._pipeline)):
            warn_undistributed()
        return DatasetIterator(self._pipeline, self._epochs, self._read_ahead)

    if not TYPE_CHECKING:  # or every name would be one

        def __getattr__(self, name: str) -> NoReturn:
            near_misses.refuse(self, name, near_misses.DATASET)

    def _with_pipeline(self, pipeline: MapDataset | IterDataset) -> Dataset:
        return Dataset(pipeline, self._options)


DatasetLike = Dataset | Iterable[Any] | Callable[[], Iterable[Any]]


def _structure(args: tuple[Any, ...], datasets: Any) -> Any:
    """Return the structure of datasets passed to `Dataset.zip`."""
    if args and datasets is not None:
        raise ArgumentTypeError("zip takes its datasets in order or by name, not both")
    if args:
        datasets = args[0] if len(args) == 1 else args
    leaves, _ = nest.flatten(() if datasets is None else datasets)
    if not leaves:
        raise ArgumentError("zip needs at least one dataset")
    for leaf in leaves:
        if not isinstance(leaf, Dataset):
            raise ArgumentTypeError(
                f"zip needs tuples and dicts of datasets, not {validation.shown(leaf)}"
            )
    _refuse_lists(datasets)
    return datasets


def _refuse_lists(datasets: Any) -> None:
    if isinstance(datasets, list):
        raise ArgumentTypeError(
            "zip needs tuples and dicts of datasets, not a list; convert it to a tuple"
        )
    parts = datasets.values() if isinstance(datasets, Mapping) else datasets
    for part in parts if not isinstance(datasets, Dataset) else ():
        _refuse_lists(part)


def _common_options(datasets: Sequence[Dataset]) -> Options:
    """Return the options of datasets that are read together."""
    policies = {dataset._options.auto_shard_policy for dataset in datasets}
    if len(asked := policies - {AutoShardPolicy.AUTO}) > 1:
        names = " and ".join(sorted(policy.name for policy in asked))
        raise ArgumentError(
            f"zip: the datasets have different options: auto_shard_policy {names}"
        )
    return Options(*asked)


def as_dataset(value: Any, call: str) -> Dataset:
    """Return a dataset, or an iterable of batches or a function of one.

    Raises:
      ArgumentTypeError: it is not one of these.
      ArgumentError: an iterator, which can be used only once.
    """
    if isinstance(value, Dataset):
        return value
    if "torch.utils.data" in sys.modules:
        _check_torch(value, call)
    elements = str, bytes, tuple, Mapping, Set, DistributedValues
    is_element = isinstance(value, elements) or hasattr(value, "shape")
    if is_element or not (callable(value) or isinstance(value, Iterable)):
        raise ArgumentTypeError(
            f"{call} needs a mpidist.Dataset, an iterable of batches, or a function "
            f"that returns one, not {validation.shown(value)}"
        )
    return Dataset(GeneratorDataset(value, is_batched=True))


def _check_torch(value: Any, call: str) -> None:
    """Refuse datasets of PyTorch, and DataLoaders that differ from rank to rank."""
    data = sys.modules["torch.utils.data"]
    instead = "mpidist.torch.from_dataset(dataset).shuffle(seed=0).batch(n)"
    if isinstance(value, data.Dataset):
        raise ArgumentTypeError(f"{call} needs batches: pass {instead}")
    if not isinstance(value, data.DataLoader):
        return
    sampler = getattr(value.batch_sampler or value, "sampler", value.sampler)
    is_iterable = isinstance(value.dataset, data.IterableDataset)
    if not (is_iterable or isinstance(sampler, data.SequentialSampler)):
        what = type(sampler).__name__
        shuffles = " (shuffle=True)" if what == "RandomSampler" else ""
        raise ArgumentError(
            f"{call}: the DataLoader has a {what}{shuffles}, so its batches would "
            f"differ between ranks and rows would be lost; pass {instead}, or a "
            "DataLoader without shuffle and sampler"
        )
    if value.batch_size is None and value.batch_sampler is None and not is_iterable:
        raise ArgumentError(
            f"{call}: the DataLoader has no batch_size; set it to the global batch size"
        )


def require_length(cardinality: int) -> int:
    """Return `cardinality` if it is a number of elements, for `__len__`."""
    if cardinality == INFINITE_CARDINALITY:
        raise TypeError("an infinite dataset has no length")
    if cardinality == UNKNOWN_CARDINALITY:
        raise TypeError("the length of a generator's dataset is not known")
    return cardinality


def require_end(cardinality: int, call: str) -> None:
    """Raise an ArgumentError if a dataset has no end."""
    if cardinality == INFINITE_CARDINALITY:
        raise ArgumentError(
            f"{call} would never return: the dataset has no end; call take(count) first"
        )


def rows_are_known(pipeline: MapDataset | IterDataset) -> bool:
    """Return whether the number of rows is known without opening a file."""
    return isinstance(pipeline, MapDataset) and all(
        source.is_indexed for source in pipeline.sources if isinstance(source, Hdf5Rows)
    )


def summarize(pipeline: MapDataset | IterDataset) -> str:
    """Return the rows, batches and files, as far as known without opening a file."""
    files, parts = pipeline.file_count, []
    if files:
        parts.append(counted(files, "HDF5 file"))
    if rows_are_known(pipeline):
        assert isinstance(pipeline, MapDataset)
        parts.append(counted(sum(map(len, pipeline.sources)), "row"))
        length = pipeline.cardinality
        if length < 0:
            parts.append("without an end")
        elif not pipeline.is_batched:
            parts.append(counted(length, "element"))
    else:
        length = UNKNOWN_CARDINALITY
        parts.append("rows not counted yet")
    if pipeline.is_batched:
        count = counted(length, "batch", "batches") if length >= 0 else "batches"
        size = pipeline.batch_size
        parts.append(count if size is None else f"{count} of {size:,}")
    return ", ".join(parts)
