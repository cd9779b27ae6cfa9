"""The methods of `Dataset` that transform one dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpidist.data import iter_transformations
from mpidist.data.iterator import to_iter_dataset, transformations_for, unbatch
from mpidist.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from mpidist.util import validation
from mpidist.util.threads import count_threads

if TYPE_CHECKING:
    from mpidist.data.dataset import Dataset
    from mpidist.data.iter_dataset import IterDataset
    from mpidist.data.map_dataset import MapDataset

__all__ = ["Transformations", "check_name"]

_LARGEST_SEED = 1 << 256
_CYCLE_LENGTH = 8


def check_name(name: str | None) -> None:
    """Raise an ArgumentTypeError if the `name` of a transformation is not a name."""
    if not (name is None or isinstance(name, str)):
        raise ArgumentTypeError(
            f"name must be a str or None, not {validation.shown(name)}"
        )


class Transformations:
    """The base of `Dataset`: the methods that transform one dataset.

    Each method returns a new dataset and leaves its own unchanged.
    """

    _pipeline: MapDataset | IterDataset

    def _append(self, step: Callable[..., Any], *arguments: Any) -> Dataset:
        """Return the dataset with one more transformation."""
        return self._with_pipeline(step(self._pipeline, *arguments))

    def _append_iter(self, step: Callable[..., Any], *arguments: Any) -> Dataset:
        """Return the dataset with one more transformation of an iterable dataset."""
        return self._with_pipeline(step(to_iter_dataset(self._pipeline), *arguments))

    def _with_pipeline(self, pipeline: MapDataset | IterDataset) -> Dataset:
        raise NotImplementedError  # pragma: no cover

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
        return self._append(
            transformations_for(self._pipeline).map,
            function,
            count_threads(num_parallel_calls),
        )

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

        All permutations are equally likely, except for HDF5 files with compressed
        chunks, where every row read would decode a chunk. These chunks are read in a
        random order, and the rows of `window_chunks` chunks are mixed; the rows of a
        batch then also depend on the batch size. (Compressed datasets of at most 64 MiB
        in total are kept decoded and shuffled exactly.)

        Args:
          buffer_size: None or >= 1; needed for a generator.
          seed: an integer of up to 256 bits. None draws a seed that all replicas share.
          reshuffle_each_iteration: whether each epoch has a different order.
          name: accepted for TensorFlow compatibility.
          window_chunks: how many chunks are mixed at a time, over all replicas (at
            least one for each 16 to 32 rows of a batch). 0 always permutes exactly.
            None mixes 64 chunks (fewer if these exceed 256 MiB) if chunks are
            compressed, and permutes exactly otherwise. A number also applies to
            uncompressed rows; without chunks, 1 MiB of rows counts as a chunk.
        """
        check_name(name)
        size = validation.optional_integer("buffer_size", buffer_size, 1)
        most = _LARGEST_SEED
        seed = validation.optional_integer("seed", seed, -most, " or None", most)
        chunks = validation.optional_integer("window_chunks", window_chunks, 0, "")
        reshuffle = validation.switch(
            "reshuffle_each_iteration", reshuffle_each_iteration
        )
        return self._append(
            transformations_for(self._pipeline).shuffle, size, seed, reshuffle, chunks
        )

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
        return self._append(
            transformations_for(self._pipeline).batch, size, drop_remainder
        )

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """Return a dataset that repeats this one `count` times; None repeats for ever.

        Earlier shuffles give a different order each time.
        """
        check_name(name)
        count = validation.optional_integer("count", count)
        if count == -1:  # TensorFlow's other value for endless
            count = None
        count = validation.optional_integer("count", count, 0, ", or None")
        return self._append(transformations_for(self._pipeline).repeat, count)

    def take(self, count: int, name: str | None = None) -> Dataset:
        """Return a dataset of the first `count` elements; -1 takes all."""
        check_name(name)
        if validation.integer("count", count) == -1:
            return self._append(transformations_for(self._pipeline).window, 0, None)
        count = validation.integer("count", count, 0, ", or -1 for all")
        return self._append(transformations_for(self._pipeline).window, 0, count)

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """Return a dataset without the first `count` elements."""
        check_name(name)
        start = validation.integer("count", count, 0)
        return self._append(transformations_for(self._pipeline).window, start, None)

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Return a dataset of every `num_shards`-th element, from `index` on."""
        check_name(name)
        num_shards = validation.integer("num_shards", num_shards, 1)
        index = validation.integer("index", index, 0)
        if index >= num_shards:
            raise ArgumentError(f"index must be in 0..{num_shards - 1}, not {index}")
        return self._append(
            transformations_for(self._pipeline).shard, num_shards, index
        )

    def cache(self, filename: str = "", name: str | None = None) -> Dataset:
        """Return a dataset that caches its elements in memory.

        Earlier transformations run once, in the order of the first epoch, so shuffle
        after `cache`. A generator is cached after one complete epoch. Datasets derived
        from this one share the cache, unless an earlier shuffle has no seed.

        In a distributed dataset the ranks of a node share one copy of the rows, in an
        MPI window. It is freed with the strategy, or when no rank has the dataset and
        another one is created. (If each replica has its own data, by
        `distribute_datasets_from_function` or AutoShardPolicy.FILE, each has its own
        cache.)

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
        return self._append(transformations_for(self._pipeline).cache)

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
        return self._append(transformations_for(self._pipeline).enumerate, start)

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
        return self._append_iter(iter_transformations.Filter, function)

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
            iter_transformations.Interleave,
            function,
            cycle or _CYCLE_LENGTH,
            block or 1,
            num_parallel_calls is not None,
        )
