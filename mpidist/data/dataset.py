"""Dataset, the public class; it wraps a `MapDataset` or an `IterDataset`."""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpidist.data import batching, caching, combining, ordering
from mpidist.data.array_files import ArrayFiles
from mpidist.data.elements import as_element, stack
from mpidist.data.iter_dataset import UNKNOWN_CARDINALITY, GeneratorDataset, IterDataset
from mpidist.data.iterator import (
    DatasetIterator,
    EpochCounter,
    concatenate,
    draw_numbers,
    is_sharded,
    to_iter_dataset,
    transform,
    unbatch,
    warn_undistributed,
    zip_together,
)
from mpidist.data.map_dataset import (
    INFINITE_CARDINALITY,
    MapDataset,
    SourceMapDataset,
    drawn_seeds,
)
from mpidist.data.sources import ArrayRows, IndexedSource, RangeRows
from mpidist.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from mpidist.hdf5.files import check_names, is_one_path, list_files
from mpidist.hdf5.read import Hdf5Rows
from mpidist.options import MOST_BUFFERED, AutoShardPolicy, Options
from mpidist.util import near_misses, nest, validation
from mpidist.util.representation import counted, html_table, one_line
from mpidist.util.threads import count_threads
from mpidist.util.tracebacks import hide_internal_frames
from mpidist.values import DistributedValues

_LARGEST_SEED = 1 << 256
_CYCLE_LENGTH = 8


def check_name(name: str | None) -> None:
    """Raise an ArgumentTypeError if the `name` of a transformation is not a name."""
    if not (name is None or isinstance(name, str)):
        raise ArgumentTypeError(
            f"name must be a str or None, not {validation.shown(name)}"
        )


class _DatasetType(type):
    """The metaclass of `Dataset`; names unknown attributes in errors."""

    if not TYPE_CHECKING:  # or every name would be one
        __getattr__ = near_misses.attribute_hint("dataset")


class Dataset(metaclass=_DatasetType):
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
        seeds = drawn_seeds(pipeline)
        self._epochs = EpochCounter(seeds, draw_numbers(seeds))
        self._spec: Any = None

    def __repr__(self) -> str:
        return one_line(self, lambda: summarize(self._pipeline))

    def _repr_html_(self) -> str:
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

        Of what an `Hdf5Writer` wrote, a pattern or a list must name the index alone or
        all shards. One shard is read alone if `files` is its path.

        Raises, when the dataset is first used:
          DataError: a file or a dataset is missing, cannot be read, or does not match
            the other files; shards of a writer are missing, are there twice or with
            their index, or are of two writes.
        """
        allow = validation.switch("allow_short_external", allow_short_external)
        paths, names = list_files(files), check_names(datasets)
        rows = Hdf5Rows(paths, names, allow, may_be_part=is_one_path(files))
        return Dataset(SourceMapDataset(rows))

    @staticmethod
    def from_files(
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        open_file: Callable[[str], Any],
    ) -> Dataset:
        """Return a dataset of the rows of files of any format, file after file.

        Args:
          files: see `from_hdf5`. A path may be a folder, as that of a Zarr array.
          open_file: called with a path, returns an array `(rows, *shape)`, or a tuple
            or dict of several. They are read later, by slices along the first
            dimension: a memory map of NumPy, or an array of Zarr, netCDF4 or h5py.
            If there is an attribute `chunks`, whole chunks are read, and kept for the
            rows that a shuffled dataset takes next. Called on one rank for each file
            when a dataset is distributed, and on each rank that reads from the file.

        HDF5 is read faster by `from_hdf5`, which also notices more kinds of damage.

        Raises, when the dataset is first used:
          DataError: a file is missing, cannot be opened, has changed since its rows
            were counted, or its arrays do not match each other or those of other
            files. Changes inside of folders, such as those of Zarr, are not noticed.

        Example:
          >>> if strategy.rank == 0:
          ...     np.save("rows.npy", np.arange(6.0).reshape(3, 2))
          >>> strategy.barrier()
          >>> data = mpidist.Dataset.from_files("rows.npy", np.load)
          >>> print(*data.batch(2))
          [[0. 1.]
           [2. 3.]] [[4. 5.]]
        """
        function = validation.function("open_file", open_file)
        return Dataset(SourceMapDataset(ArrayFiles(list_files(files), function)))

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> Dataset:
        """Return a dataset of elements of several datasets side by side.

        It ends with the shortest. It has random access if all of them have; with a
        generator's dataset it can only be read in order. Two shuffles without a seed
        have different orders, but all that is made from one shuffle has its order.
        AutoShardPolicy.FILE is refused, because a row can come from several files.

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

    def _append(self, step: Callable[..., Any], *arguments: Any) -> Dataset:
        return self._with_pipeline(transform(self._pipeline, step, *arguments))

    def _append_iter(self, step: Callable[..., Any], *arguments: Any) -> Dataset:
        return self._with_pipeline(step(to_iter_dataset(self._pipeline), *arguments))

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        synchronous: bool | None = None,
        use_unbounded_threadpool: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Return a dataset of `map_func(element)`; a tuple is passed as arguments.

        Before `batch` the function gets one row at a time, as the function before it
        has returned it (lists become arrays). After `batch` it gets the rows of a
        batch. In a distributed dataset these are only this replica's rows, so
        the function must treat each row separately and return as many rows as it gets.
        (For a generator's dataset it gets whole batches, on every replica.)

        Args:
          map_func: called with an element. It may reuse the array that it returns.
          num_parallel_calls: number of threads that call it; -1 (TensorFlow's
            AUTOTUNE): one per core; None: no threads. The order does not change. The
            rows of a batch are spread over the threads; single elements and batches are
            computed ahead. Threads help if `map_func` waits or releases the GIL, as
            many NumPy functions do.
          deterministic: accepted; the order is always kept.
          synchronous: accepted; only `num_parallel_calls` counts.
          use_unbounded_threadpool: likewise.
          name: accepted for TensorFlow compatibility.
        """
        check_name(name)
        function = validation.function("map_func", map_func)
        return self._append(batching.Map, function, count_threads(num_parallel_calls))

    def shuffle(
        self,
        buffer_size: int | None = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
        name: str | None = None,
        *,
        window_chunks: int | None = None,
    ) -> Dataset:
        """Return a dataset of the same elements in a random order.

        The order is a permutation of all elements; it does not depend on `buffer_size`,
        because no buffer is needed. It is a function of the seed and the epoch, the
        same for any number of replicas. (Only the elements of a generator are drawn
        from a buffer of `buffer_size`.)

        With `reshuffle_each_iteration=False` all datasets that are made from the result
        have one order, with or without a seed: `take(n)` and `skip(n)` have no row in
        common, whatever comes after them.

        All permutations are equally likely, except for HDF5 files with compressed
        chunks, where every row read would decode a chunk. These chunks are read in a
        random order, and the rows of `window_chunks` chunks are mixed, of which each
        run of 32 rows has those of 8 chunks or more. (Compressed datasets of at most 64
        MiB in total are kept decoded and shuffled exactly.)

        Args:
          buffer_size: None or >= 1; needed for a generator.
          seed: an integer of up to 256 bits. None draws a seed, which all replicas
            share once a dataset with it is distributed.
          reshuffle_each_iteration: whether each epoch has a different order.
          name: accepted for TensorFlow compatibility.
          window_chunks: how many chunks are mixed at a time, over all replicas. 0
            always permutes exactly. None mixes 384 chunks (fewer if these exceed 256
            MiB) if chunks are compressed, and permutes exactly otherwise. A number also
            applies to uncompressed rows; without chunks, 1 MiB of rows counts as a
            chunk.

        Raises, on all replicas, when it is distributed:
          ArgumentError: `reshuffle_each_iteration` is False, there is no seed, and a
            rank has read rows before, in an order that is not rank 0's.
        """
        check_name(name)
        size = validation.optional_integer("buffer_size", buffer_size, 1)
        most = _LARGEST_SEED
        seed = validation.optional_integer("seed", seed, -most, " or None", most)
        chunks = validation.optional_integer("window_chunks", window_chunks, 0, "")
        reshuffle = validation.switch(
            "reshuffle_each_iteration", reshuffle_each_iteration
        )
        if size is None and isinstance(self._pipeline, IterDataset):
            raise ArgumentError(
                "shuffle of a generator's dataset needs a buffer_size: its elements "
                "can only be read in order"
            )
        return self._append(ordering.Shuffle, size, seed, reshuffle, chunks)

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Return a dataset of batches: arrays `(batch_size, *shape)`.

        All elements need the same structure, shapes and dtypes; nothing is converted
        with a loss.

        Args:
          batch_size: rows per batch; the last batch of an epoch may have fewer.
          drop_remainder: whether to omit a smaller last batch.
          num_parallel_calls: accepted; the rows of a batch are read in threads anyway.
          deterministic: accepted; the order is always kept.
          name: accepted for TensorFlow compatibility.

        Raises, during iteration:
          DataError: dtypes or shapes differ (numbers of unlike dtypes only warn if the
            dataset is not distributed); masked arrays, other subclasses of NumPy's
            array, Python objects, or text with NULs at its end.
          ArgumentError: structures differ.
        """
        check_name(name)
        size = validation.integer("batch_size", batch_size, 1)
        drop_remainder = validation.switch("drop_remainder", drop_remainder)
        return self._append(batching.Batch, size, drop_remainder)

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """Return a dataset that repeats this one `count` times; None repeats for ever.

        Earlier shuffles give a different order each time.
        """
        check_name(name)
        count = validation.optional_integer("count", count)
        if count == -1:  # TensorFlow's other value for endless
            count = None
        count = validation.optional_integer("count", count, 0, ", or None")
        return self._append(ordering.Repeat, count)

    def take(self, count: int, name: str | None = None) -> Dataset:
        """Return a dataset of the first `count` elements; -1 takes all."""
        check_name(name)
        if validation.integer("count", count) == -1:
            return self._append(ordering.Window, 0, None)
        count = validation.integer("count", count, 0, ", or -1 for all")
        return self._append(ordering.Window, 0, count)

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """Return a dataset without the first `count` elements."""
        check_name(name)
        start = validation.integer("count", count, 0)
        return self._append(ordering.Window, start, None)

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Return a dataset of every `num_shards`-th element, from `index` on."""
        check_name(name)
        num_shards = validation.integer("num_shards", num_shards, 1)
        index = validation.integer("index", index, 0)
        if index >= num_shards:
            raise ArgumentError(f"index must be in 0..{num_shards - 1}, not {index}")
        return self._append(ordering.Shard, num_shards, index)

    def cache(self, filename: str = "", name: str | None = None) -> Dataset:
        """Return a dataset that caches its elements in memory.

        Earlier transformations run once, in the order of the first epoch, so shuffle
        after `cache`. A generator is cached after one complete epoch. Datasets derived
        from this one share the cache.

        In a distributed dataset the ranks of a node share one copy of the rows. It is
        freed with the strategy, or when no rank has the dataset any more. (If each
        replica has its own data, by `distribute_datasets_from_function` or
        AutoShardPolicy.FILE, each has its own cache.)

        Args:
          filename: "" (memory); caching in a file is not supported.
          name: accepted for TensorFlow compatibility.

        Raises:
          UnsupportedError: a `filename`.
        Raises, at the first use or, on all ranks, when it is distributed:
          ArgumentError: the dataset is endless (call `repeat` after `cache`). If it is
            distributed: it is a generator's dataset; rows are not numbers, bools or
            strings of a fixed size; or a node has too little free memory for all rows.
        """
        check_name(name)
        if filename != "":
            raise UnsupportedError(
                f"cache keeps elements in memory, not in {validation.shown(filename)}; "
                "write the file with Hdf5Writer and read it with Dataset.from_hdf5"
            )
        return self._append(caching.Cache)

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Return a dataset of pairs: the number of an element and the element.

        The numbers are int64, from `start` on. Later steps, such as shuffle, keep the
        pairs together. Every epoch begins with `start` again. Call it before `batch`,
        since a number has no rows.

        Args:
          start: the first number.
          name: accepted for TensorFlow compatibility.

        Example:
          >>> rows = mpidist.Dataset.from_tensor_slices([5.0, 6.0])
          >>> [(int(i), float(x)) for i, x in rows.enumerate(start=1)]
          [(1, 5.0), (2, 6.0)]
        """
        check_name(name)
        most = validation.LARGEST
        start = validation.integer("start", start, -most)
        return self._append(combining.Enumerate, start)

    def unbatch(self, name: str | None = None) -> Dataset:
        """Return a dataset of the rows of the elements, one by one.

        After `batch` (and repeat, take, skip, cache and concatenate of batches) the
        result has random access and is as fast as without `batch` and `unbatch`.
        Otherwise, for example after a map over batches, the number of rows is unknown,
        and the result is like a generator's dataset: `shuffle` needs a buffer_size,
        there is no length, and if it is divided over replicas, each replica iterates
        over all of it.

        Raises, during iteration:
          DataError: the arrays of an element have different first dimensions, or none.

        Example:
          >>> batches = mpidist.Dataset.range(5).batch(2)
          >>> len(batches), len(batches.unbatch())
          (3, 5)
        """
        check_name(name)
        return self._with_pipeline(unbatch(self._pipeline))

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """Return a dataset of the elements for which `predicate(element)` is True.

        The number of these elements is unknown, so the result is like a generator's
        dataset: it has no length, and a later `shuffle` needs a buffer_size (so shuffle
        before `filter`). If it is divided over replicas, each replica iterates over all
        of it (with AutoShardPolicy.FILE, over its own files), so the predicate must
        return the same on all replicas.

        Args:
          predicate: called with an element (a tuple is passed as arguments); returns
            one bool.
          name: accepted for TensorFlow compatibility.

        Raises, during iteration:
          ArgumentTypeError: `predicate` did not return a bool.
          What `predicate` raises.

        Example:
          >>> odd = mpidist.Dataset.range(6).filter(lambda x: x % 2 == 1)
          >>> [int(x) for x in odd], odd.cardinality()
          ([1, 3, 5], -2)
        """
        check_name(name)
        function = validation.function("predicate", predicate)
        return self._append_iter(batching.Filter, function)

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Return a dataset that interleaves the datasets `map_func(element)`.

        It mixes rows of many files with only some files open at a time. The result is
        like a generator's dataset: it has no length, a later `shuffle` needs a
        buffer_size, and if it is divided over replicas, each replica iterates over all
        of it. (`Dataset.from_hdf5` with several files has none of these limits: each
        replica reads its own rows, and `shuffle` mixes all rows.)

        Args:
          map_func: called with an element, such as a file name (a tuple is passed as
            arguments); returns a Dataset.
          cycle_length: how many datasets are interleaved; when one ends, the next
            replaces it. None means 8. (TensorFlow uses the number of cores, so its
            order depends on the machine.)
          block_length: how many consecutive elements come from one dataset; None means
            1.
          num_parallel_calls: None reads in the calling thread. A number, or -1
            (TensorFlow's AUTOTUNE), starts a thread for each interleaved dataset, which
            reads a block ahead.
          deterministic: accepted; the order is always kept.
          name: accepted for TensorFlow compatibility.

        Raises, during iteration:
          ArgumentTypeError: `map_func` did not return a Dataset.
          What `map_func` and reading the datasets raise.

        Example:
          >>> tens = mpidist.Dataset.range(0, 30, 10)
          >>> rows = tens.interleave(lambda i: mpidist.Dataset.range(i, i + 3), 2)
          >>> [int(x) for x in rows]
          [0, 10, 1, 11, 2, 12, 20, 21, 22]
        """
        check_name(name)
        function = validation.function("map_func", map_func)
        cycle = validation.optional_integer("cycle_length", cycle_length, 1, most=4096)
        block = validation.optional_integer("block_length", block_length, 1)
        count_threads(num_parallel_calls)
        if deterministic is not None:
            validation.switch("deterministic", deterministic)
        return self._append_iter(
            combining.Interleave,
            function,
            cycle or _CYCLE_LENGTH,
            block or 1,
            num_parallel_calls is not None,
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
            hide_internal_frames(error)
            raise
        finally:
            elements.close()

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """Return a dataset of the elements of this one, then of `dataset`.

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
        __getattr__ = near_misses.attribute_hint("dataset")

    def _with_pipeline(self, pipeline: MapDataset | IterDataset) -> Dataset:
        return Dataset(pipeline, self._options)


DatasetLike = Dataset | Iterable[Any] | Callable[[], Iterable[Any]]


def _structure(args: tuple[Any, ...], datasets: Any) -> Any:
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
        source.is_indexed
        for source in pipeline.sources
        if isinstance(source, IndexedSource)
    )


def summarize(pipeline: MapDataset | IterDataset) -> str:
    """Return the rows, batches and files, as far as known without opening a file."""
    files, parts = pipeline.file_count, []
    if files:
        parts.append(counted(files, "file"))
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
