"""The methods of `Dataset` that make one dataset of another."""

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
          deterministic: accepted; the order always stays.
          synchronous: accepted; `num_parallel_calls` tells.
          use_unbounded_threadpool: accepted; likewise.
          name: see `Dataset`.
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
          name: see `Dataset`.
          window_chunks: how many chunks are mixed at a time, over all replicas; at
            least one for each 16 to 32 rows of a batch are. 0 always permutes exactly;
            None mixes 64 chunks (fewer if these have more than 256 MiB) where chunks
            are compressed, and else permutes exactly. A number mixes that many
            everywhere; uncompressed rows count as chunks of 1 MiB if they have none.
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

        Args:
          batch_size: rows per batch; the last batch of an epoch may have fewer.
          drop_remainder: leave that last, smaller batch out.
          num_parallel_calls: accepted; the rows of a batch are read in threads anyway.
          deterministic: accepted; the order always stays.
          name: see `Dataset`.
        """
        check_name(name)
        size = validation.integer("batch_size", batch_size, 1)
        drop_remainder = validation.switch("drop_remainder", drop_remainder)
        return self._append(
            transformations_for(self._pipeline).batch, size, drop_remainder
        )

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """Return a dataset that goes through this one `count` times, None for ever.

        Shuffles before it give another order each time.
        """
        check_name(name)
        count = validation.optional_integer("count", count)
        if count == -1:  # TensorFlow's other word for it
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
        """Return a dataset of all elements but the first `count`."""
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

        Earlier transformations run once, in the order of the first epoch; so shuffle
        afterwards. A generator is cached after one complete epoch. Datasets made from
        this one share the cache, unless their order depends on a seed that each of them
        draws (by an earlier shuffle without a seed).

        In a distributed dataset the ranks of a node share one copy of the rows, in an
        MPI window, which is freed when no rank has the dataset and the next is made, or
        with the strategy. (Where each replica has data of its own, by
        `distribute_datasets_from_function` or AutoShardPolicy.FILE, it keeps its own.)

        Args:
          filename: "" for memory; TensorFlow's cache in a file there is not.
          name: see `Dataset`.

        Raises:
          UnsupportedError: a `filename`.
        Raises, when it is first used, or distributed, then on all ranks:
          ArgumentError: it has no end (call `repeat` afterwards); or it is distributed,
            and a generator's, or rows are no numbers, bools or strings of one fixed
            size, or a node has too little memory left for all of them.
        """
        check_name(name)
        if filename != "":
            raise UnsupportedError(
                f"cache keeps elements in memory, not in {validation.shown(filename)}; "
                "write the file by Hdf5Writer, and read it by Dataset.from_hdf5"
            )
        return self._append(transformations_for(self._pipeline).cache)

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Return a dataset of pairs: the number of an element, from `start` on, and it.

        The numbers are int64. Elements keep them in whatever order later steps bring
        them; those of an epoch begin with `start` again. A number has no rows: of
        batches, enumerate the rows before `batch`.

        Args:
          start: the first number.
          name: see `Dataset`.

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

        After `batch` (and repeat, take, skip, cache and concatenate of batches) any row
        can be read at once, so what follows is as quick as without both. Elsewhere,
        after functions of batches say, the number of rows is not known: the result is
        like a generator's dataset, whose elements can only be had one after the other.
        There `shuffle` needs a buffer_size, there is no length, and divided over
        replicas every replica goes through all of it.

        Raises, when it is iterated over there:
          DataError: an element whose arrays have unlike first dimensions, or none.

        Example:
          >>> batches = mpidist.Dataset.range(5).batch(2)
          >>> len(batches), len(batches.unbatch())
          (3, 5)
        """
        check_name(name)
        return self._with_pipeline(unbatch(self._pipeline))

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """Return a dataset of the elements for which `predicate(element)` is True.

        How many these are is not known: the result is like a generator's dataset, whose
        elements can only be had one after the other. `shuffle` behind it needs a
        buffer_size (so shuffle before), and it has no length. Divided over replicas
        every replica goes through all of it, so the predicate must say the same on
        each; with AutoShardPolicy.FILE, through its own files.

        Args:
          predicate: of an element; a tuple is passed as arguments. It returns one bool.
          name: see `Dataset`.

        Raises, when it is iterated over:
          ArgumentTypeError: `predicate` returned something else.
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
        """Return elements of the datasets `map_func(element)`, by turns.

        So rows of several files come mixed, of which only some are open at a time. The
        result is like a generator's dataset, whose elements can only be had one after
        the other. `shuffle` behind it needs a buffer_size, and it has no length.
        Divided over replicas every replica goes through all of it. (Files in one
        `Dataset.from_hdf5` have none of these limits: each replica reads its own rows,
        and `shuffle` mixes all of them.)

        Args:
          map_func: of an element, such as the name of a file; a tuple is passed as
            arguments. It returns a Dataset.
          cycle_length: how many of these datasets take turns; one that ends is replaced
            by the next. None takes 8 (TensorFlow: by the number of cores, so that the
            order would depend on the machine).
          block_length: how many elements follow each other of one; None takes 1.
          num_parallel_calls: None reads in the thread that iterates. A number, or -1
            (TensorFlow's AUTOTUNE), has a thread for each of the datasets that take
            turns, which reads a block ahead.
          deterministic: accepted: the order is always the same.
          name: see `Dataset`.

        Raises, when it is iterated over:
          ArgumentTypeError: `map_func` returned no Dataset.
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
