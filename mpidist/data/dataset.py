"""Dataset: what users build input from; `pipeline` does the work."""

from __future__ import annotations

import copy
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from mpidist.data.hdf5.names import check_names, list_files
from mpidist.data.hdf5.rows import Hdf5Rows
from mpidist.data.iterable import UNKNOWN_CARDINALITY, Generated, Stream
from mpidist.data.iterator import DatasetIterator, concatenate, is_sharded, steps_of
from mpidist.data.iterator_state import Passes
from mpidist.data.map_dataset import INFINITE_CARDINALITY, Pipeline, Rows
from mpidist.data.sources import ArrayRows, RangeRows, as_element, from_lists
from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.options import MOST_BUFFERED, AutoShardPolicy, Options
from mpidist.util import near_misses, nest, validation
from mpidist.util.notices import warn
from mpidist.util.threads import count_threads
from mpidist.values import DistributedValues

__all__ = [
    "Dataset",
    "DatasetLike",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "as_dataset",
    "require_end",
    "require_length",
    "warn_undistributed",
]


_LARGEST_SEED = 1 << 256


class _DatasetType(type):
    """The class of `Dataset`, which has no attributes but those that exist."""

    if not TYPE_CHECKING:  # or every name would be one

        def __getattr__(cls, name: str) -> NoReturn:
            near_misses.refuse(cls, name, near_misses.DATASET)


class Dataset(metaclass=_DatasetType):
    """Elements to iterate over: nests of arrays. Made by the `from_...` functions.

    Each method returns a new dataset and leaves its own as it was. Nothing is read
    before it is iterated over, and nothing here communicates.

    Iterating over a dataset gives all its elements in this process; give it to
    `Strategy.experimental_distribute_dataset` to divide them over the replicas. (In a
    job of several ranks a warning says so once, unless the dataset has the option
    AutoShardPolicy.OFF, or was divided by `shard`.)

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
        pipeline: Pipeline | Stream,
        options: Options | None = None,
        read_ahead: int = 0,
    ):
        self._pipeline = pipeline
        self._steps = steps_of(pipeline)
        self._options = options or Options()
        self._read_ahead = read_ahead
        # Without a seed to be drawn, states are alike in every process
        self._passes = Passes(secrets.randbits(62) if pipeline.needs_entropy else 0)
        self._spec: Any = None

    @property
    def pipeline(self) -> Pipeline | Stream:
        """The steps of this dataset, for what is built on it."""
        return self._pipeline

    @property
    def element_spec(self) -> Any:
        """A nest of `TensorSpec` like the elements; None is the number of rows.

        Reads an element when it is first asked for; of a generator, the first.
        """
        if self._spec is None:
            self._spec = self._pipeline.element_spec()
        return self._spec

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """Return a dataset of one element: an array, or a tuple or dict of arrays."""
        rows = nest.map_leaves(lambda a: a[None], as_element(tensors))
        return Dataset(Rows(ArrayRows(rows, "from_tensors")))

    @staticmethod
    def range(*args: int, output_type: npt.DTypeLike = np.int64) -> Dataset:
        """Return a dataset of the numbers of Python's `range(*args)`.

        Args:
          *args: `stop`; or `start, stop`; or `start, stop, step`.
          output_type: the dtype of the numbers.

        Raises:
          ArgumentError: a step of 0.
          ArgumentTypeError: no integers, or not one to three; no dtype.
        """
        dtype = validation.dtype("output_type", output_type)
        return Dataset(Rows(RangeRows.of(args, dtype)))

    @staticmethod
    def from_generator(
        generator: Callable[[], Iterable[Any]] | Iterable[Any],
    ) -> Dataset:
        """Return a dataset of what an iterable yields, of unknown length.

        Args:
          generator: a function that returns an iterable, called for each iteration; or
            an iterable that starts again each time, such as a list. It yields nests of
            arrays and numbers; tuples and dicts are structure, lists are arrays. It
            may fill and yield the same array again: elements are copied.

        Divided over replicas, every replica goes through all of it, so it must yield
        the same on each.

        Raises:
          ArgumentError: an iterator, which can be used only once.
          ArgumentTypeError: nothing that can be iterated over.
        """
        return Dataset(Generated(generator, is_batched=False))

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
        return Dataset(Rows(Hdf5Rows(list_files(files), check_names(datasets))))

    def map(
        self, map_func: Callable[..., Any], num_parallel_calls: int | None = None
    ) -> Dataset:
        """Return a dataset of `map_func(element)`; a tuple is passed as arguments.

        Before `batch` the function sees one row at a time. After `batch` it sees the
        rows of a batch; in a distributed dataset those are this replica's rows, so
        there it must treat each row by itself and return as many rows as it got. (Of
        a generator's dataset it sees whole batches, on every replica.)

        Args:
          map_func: of an element. It may fill and return the same array again.
          num_parallel_calls: in how many threads it is called at the same time; -1
            (TensorFlow's AUTOTUNE) for one per core; None for one by one. The order
            stays. The rows of a batch are spread over the threads; single elements,
            and batches, are computed ahead. This helps where `map_func` waits, or is
            in functions that let other threads run, as many of NumPy are.
        """
        function = validation.function("map_func", map_func)
        return self._then(self._steps.map, function, count_threads(num_parallel_calls))

    def shuffle(
        self,
        buffer_size: int | None = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
        *,
        window_chunks: int | None = None,
    ) -> Dataset:
        """Return a dataset of the same elements in a random order.

        The order is a permutation of all elements, whatever `buffer_size` says: rows
        need not pass through a buffer here. It is a function of the seed and the epoch,
        the same for any number of replicas. (Only the elements of a generator pass
        through a buffer of `buffer_size`, from which they are drawn.)

        All permutations are alike to come up but for rows of HDF5 files in compressed
        chunks, where each row would cost the decoding of a chunk. There the chunks come
        in a random order, and the rows of several are mixed, of `window_chunks`; which
        rows meet in a batch then also depends on the batch size. (Compressed datasets
        that have at most 64 MiB in all are kept decoded, and shuffled exactly.)

        Args:
          buffer_size: None or >= 1; needed for a generator.
          seed: an integer of up to 256 bits. None draws one, which all replicas share.
          reshuffle_each_iteration: whether each epoch has another order.
          window_chunks: how many chunks are mixed at a time, over all replicas; at
            least one for each 16 to 32 rows of a batch are. 0 always permutes exactly;
            None mixes 64 chunks (fewer if these have more than 256 MiB) where chunks
            are compressed, and else permutes exactly. A number mixes that many
            everywhere; uncompressed rows count as chunks of 1 MiB if they have none.
        """
        size = validation.optional_integer("buffer_size", buffer_size, 1)
        most = _LARGEST_SEED
        seed = validation.optional_integer("seed", seed, -most, " or None", most)
        chunks = validation.optional_integer("window_chunks", window_chunks, 0, "")
        reshuffle = validation.switch(
            "reshuffle_each_iteration", reshuffle_each_iteration
        )
        return self._then(self._steps.shuffle, size, seed, reshuffle, chunks)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Return a dataset of batches: arrays `(batch_size, *shape)`.

        Args:
          batch_size: rows per batch; the last batch of an epoch may have fewer.
          drop_remainder: leave that last, smaller batch out.
        """
        size = validation.integer("batch_size", batch_size, 1)
        drop_remainder = validation.switch("drop_remainder", drop_remainder)
        return self._then(self._steps.batch, size, drop_remainder)

    def repeat(self, count: int | None = None) -> Dataset:
        """Return a dataset that goes through this one `count` times, None for ever.

        Shuffles before it give another order each time.
        """
        count = validation.optional_integer("count", count)
        if count == -1:  # TensorFlow's other word for it
            count = None
        count = validation.optional_integer("count", count, 0, ", or None")
        return self._then(self._steps.repeat, count)

    def take(self, count: int) -> Dataset:
        """Return a dataset of the first `count` elements; -1 takes all."""
        if validation.integer("count", count) == -1:
            return self._then(self._steps.window, 0, None)
        count = validation.integer("count", count, 0, ", or -1 for all")
        return self._then(self._steps.window, 0, count)

    def skip(self, count: int) -> Dataset:
        """Return a dataset of all elements but the first `count`."""
        start = validation.integer("count", count, 0)
        return self._then(self._steps.window, start, None)

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Return a dataset of every `num_shards`-th element, from `index` on."""
        num_shards = validation.integer("num_shards", num_shards, 1)
        index = validation.integer("index", index, 0)
        if index >= num_shards:
            raise ArgumentError(f"index must be in 0..{num_shards - 1}, not {index}")
        return self._then(self._steps.shard, num_shards, index)

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Return a dataset of the elements of this one, then those of `dataset`.

        Raises:
          ArgumentError: one is batched and the other is not.
          ArgumentTypeError: their elements have unlike structures or dtypes; where
            files or functions must be asked for them, when the result is first used.
        """
        first, second = self._pipeline, as_dataset(dataset, "concatenate")._pipeline
        if first.is_batched != second.is_batched:
            raise ArgumentError(
                "concatenate needs two datasets of batches, or two of single elements"
            )
        return Dataset(concatenate(first, second), self._options)

    def cache(self) -> Dataset:
        """Return a dataset that keeps its elements in memory once they were read.

        What comes before is done once, and stays in the order of the first epoch; so
        shuffle afterwards. Of a generator only a complete pass is kept. Datasets made
        of this one share what is kept, unless each draws an order of its own (by a
        shuffle before, without a seed).

        In a distributed dataset the ranks of a node share one copy of the rows, in an
        MPI window, which is freed when no rank has the dataset and the next is made, or
        with the strategy. (Where each replica has data of its own, by
        `distribute_datasets_from_function` or AutoShardPolicy.FILE, it keeps its own.)

        Raises, when it is first used, or distributed, then on all ranks:
          ArgumentError: it has no end (call `repeat` afterwards); or it is distributed,
            and a generator's, or rows are no numbers, bools or strings of one fixed
            size, or a node has too little memory left for all of them.
        """
        return self._then(self._steps.cache)

    def prefetch(self, buffer_size: int) -> Dataset:
        """Return a dataset that reads `buffer_size` elements ahead, in a thread.

        Steps after it undo it, and distributed datasets read ahead as their
        `InputOptions` say. -1 (TensorFlow's AUTOTUNE) lets mpidist choose.
        """
        ahead = validation.integer("buffer_size", buffer_size)
        if ahead == -1:
            ahead = 2
        ahead = validation.integer("buffer_size", ahead, 0, " or -1", MOST_BUFFERED)
        return Dataset(self._pipeline, self._options, ahead)

    def with_options(self, options: Options) -> Dataset:
        """Return this dataset with `options`, which steps after it keep."""
        options = validation.instance("options", options, Options)
        return Dataset(self._pipeline, copy.copy(options), self._read_ahead)

    def options(self) -> Options:
        """Return the options of this dataset: a copy, which may be changed."""
        return copy.copy(self._options)

    def cardinality(self) -> int:
        """Return the number of elements.

        INFINITE_CARDINALITY (-1) for no end, UNKNOWN_CARDINALITY (-2) for a generator.
        """
        return self._pipeline.cardinality

    def __len__(self) -> int:
        return require_length(self.cardinality())

    def __iter__(self) -> DatasetIterator:
        is_meant = self._options.auto_shard_policy is AutoShardPolicy.OFF
        if not (is_meant or is_sharded(self._pipeline)):
            warn_undistributed()
        return DatasetIterator(self._pipeline, self._passes, self._read_ahead)

    if not TYPE_CHECKING:  # or every name would be one

        def __getattr__(self, name: str) -> NoReturn:
            near_misses.refuse(self, name, near_misses.DATASET)

    def _then(self, step: Callable[..., Any], *arguments: Any) -> Dataset:
        return Dataset(step(self._pipeline, *arguments), self._options)


DatasetLike = Dataset | Iterable[Any] | Callable[[], Iterable[Any]]


def as_dataset(value: Any, call: str) -> Dataset:
    """Return `value`, a dataset, or an iterable of batches or a function of one.

    Raises:
      ArgumentTypeError: it is none of these.
      ArgumentError: an iterator, which can be used only once.
    """
    if isinstance(value, Dataset):
        return value
    elements = str, bytes, tuple, Mapping, Set, DistributedValues
    is_element = isinstance(value, elements) or hasattr(value, "shape")
    if is_element or not (callable(value) or isinstance(value, Iterable)):
        raise ArgumentTypeError(
            f"{call} needs a mpidist.Dataset, an iterable of batches, or a function "
            f"that returns one, not {validation.shown(value)}"
        )
    return Dataset(Generated(value, is_batched=True))


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


# Functions that these call may iterate over datasets: a generator's function, or the
# one given to distribute_datasets_from_function, or to Strategy.run
_CALLERS = ("mpidist.data.", "mpidist.strategy.extended")

_has_warned = False


def warn_undistributed() -> None:
    """Warn once in a job that all ranks read all rows; to be called by `__iter__`.

    Rank 1 does: what rank 0 does alone, such as an evaluation, is done on purpose.
    """
    global _has_warned
    MPI = sys.modules.get("mpi4py.MPI")  # noqa: N806  # commands run without MPI, too
    if _has_warned or MPI is None or not MPI.Is_initialized() or MPI.Is_finalized():
        return
    if MPI.COMM_WORLD.Get_rank() != 1 or _is_called_by_library(sys._getframe(2)):
        return
    _has_warned = True
    warn(
        "a dataset is iterated over without being distributed: each of the "
        f"{MPI.COMM_WORLD.Get_size()} ranks of this job reads all of its rows, in "
        "another order after a shuffle without a seed. Divide it by "
        "strategy.experimental_distribute_dataset(dataset); if each rank is to read "
        "everything, say so by dataset.with_options(mpidist.Options("
        "mpidist.AutoShardPolicy.OFF)). (Rank 1 says this, once)",
        stacklevel=3,
    )


def _is_called_by_library(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_CALLERS):
            return True
        frame = frame.f_back
    return False
