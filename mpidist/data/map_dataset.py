"""Map-style datasets: random access to element `i` of any epoch, in O(1).

So each replica reads only its own rows of a batch. Datasets are immutable, and nothing
here communicates. `batching`, `ordering`, `combining` and `caching` have the
transformations.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from mpidist.data.elements import plain_array, spec_of, split
from mpidist.data.shuffling import ChunkShuffle, Seed
from mpidist.data.sources import (
    BufferedSource,
    ChunkedSource,
    FileSource,
    Positions,
    RowSource,
    has_chunks,
)
from mpidist.errors import ArgumentError
from mpidist.hdf5.chunks import ChunkLayout
from mpidist.util import nest, validation
from mpidist.util.shares import BatchShare

INFINITE_CARDINALITY = -1


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One epoch: a complete iteration over a dataset.

    Args:
      number: of epochs before this one; shuffles permute each epoch differently.
      seeds: numbers in place of those of seeds that were drawn.
    """

    number: int = 0
    seeds: Mapping[Seed, int] = dataclasses.field(default_factory=dict, hash=False)

    def number_of(self, seed: Seed) -> int:
        """Return the number of a seed."""
        return self.seeds.get(seed, seed.number)


class Steps(abc.ABC):
    """A source with its transformations. Elements are nests of arrays."""

    # Of a shuffle
    seed: Seed | None = None
    # Whether all epochs have the elements of the first one
    keeps_first_epoch = False
    # Whether these are the rows of this replica's files
    is_share = False

    @property
    @abc.abstractmethod
    def batch_size(self) -> int | None:
        """The largest number of rows of an element; None if that is unknown."""

    @property
    def is_batched(self) -> bool:
        """Whether the elements are batches."""
        return self.batch_size is not None

    @property
    def parents(self) -> tuple[Any, ...]:
        """The datasets that this one transforms; a source has none."""
        return ()

    @property
    def last(self) -> Any:
        """The last transformation, which an `IterStep` wraps."""
        return self

    @property
    def file_count(self) -> int:
        """The number of files with the rows; 0 for rows that are not in files."""
        return min((parent.file_count for parent in self.parents), default=0)

    @abc.abstractmethod
    def describe(self) -> str:
        """Return text that must be equal on all replicas, and in restored states."""

    def describe_source(self) -> str:
        """Return the part of `describe` about the sources."""
        return ", ".join(parent.describe_source() for parent in self.parents)

    @abc.abstractmethod
    def replace_parents(self, change: Callable[[Any], Any]) -> Any:
        """Return the same transformation of `change(parent)`."""

    def shard_files(self, workers: int, worker: int) -> Any:
        """Return this dataset over the files of one worker; `file_count` is not 0."""
        return self.replace_parents(lambda parent: parent.shard_files(workers, worker))

    def rebatch(self, workers: int) -> Any:
        """Return this dataset with one worker's share of the batch size."""
        return self.replace_parents(lambda parent: parent.rebatch(workers))

    @abc.abstractmethod
    def example(self, epoch: Epoch) -> Any:
        """Return the first element, or zeros if the dataset is known to be empty.

        Raises:
          DataError: a generator yields no element.
        """

    def element_spec(self) -> Any:
        """Return the nest of TensorSpec of the elements; may read a row."""
        return spec_of(self.example(Epoch()), self.is_batched)


class Transformation(Steps):
    """A transformation of one parent."""

    def __init__(self, parent: Any):
        self._parent = parent

    @property
    def batch_size(self) -> int | None:
        size: int | None = self._parent.batch_size
        return size

    @property
    def is_batched(self) -> bool:
        return bool(self._parent.is_batched)

    @property
    def parents(self) -> tuple[Any, ...]:
        return (self._parent,)

    def replace_parents(self, change: Callable[[Any], Any]) -> Any:
        again = copy.copy(self)
        again._parent = change(self._parent)
        return again

    def example(self, epoch: Epoch) -> Any:
        return self._parent.example(epoch)


class MapDataset(Steps):
    """A dataset whose elements have numbers, by which they are read."""

    _empty: Any = None

    @property
    @abc.abstractmethod
    def length(self) -> int | None:
        """The number of elements; None for an endless dataset."""

    @property
    def cardinality(self) -> int:
        """The number of elements; INFINITE_CARDINALITY (-1) for an endless dataset."""
        return INFINITE_CARDINALITY if self.length is None else self.length

    @property
    def parallel_calls(self) -> int:
        """The number of threads in which elements should be computed."""
        return max((parent.parallel_calls for parent in self.parents), default=1)

    @property
    def is_mapped(self) -> bool:
        """Whether reading calls user functions."""
        return any(parent.is_mapped for parent in self.parents)

    @property
    def has_known_spec(self) -> bool:
        """Whether `element_spec` neither opens a file nor calls a user function."""
        return all(parent.has_known_spec for parent in self.parents)

    @property
    def has_even_batches(self) -> bool:
        """Whether all batches but the last have `batch_size` rows."""
        return False

    def unbatched(self) -> MapDataset | None:
        """Return the dataset of the batches' rows; None if their number is unknown."""
        return None

    @property
    def sources(self) -> list[RowSource]:
        """The sources of the rows."""
        return [source for parent in self.parents for source in parent.sources]

    @property
    def row_bytes(self) -> int | None:
        """The bytes of a row before mapped functions; None if unknown."""
        return None

    def chunk_layout(self) -> ChunkLayout | None:
        """Return how the elements are stored in chunks; None if that is irrelevant."""
        return None

    def chunk_shuffle(self, epoch: Epoch) -> ChunkShuffle | None:
        """Return the order of a shuffle that mixes few chunks at a time, if any."""
        return None

    def reserve_cache(self, elements: int) -> None:
        """Size the cache of decoded chunks for random reads among so many elements."""
        for parent in self.parents:
            parent.reserve_cache(elements)

    def iterate(self, epoch: Epoch, *parents: Any) -> Iterator[Any]:
        """Yield the elements, of parents that can only be read in order."""
        raise NotImplementedError

    def describe_in_order(self) -> str:
        """Return what `describe` does, of parents that can only be read in order."""
        return self.describe()

    @property
    def members(self) -> tuple[Any, ...]:
        """The members of enums of each leaf, or of parents; empty if unknown."""
        members = tuple(parent.members for parent in self.parents)
        return members[0] if len(members) == 1 else members

    def element(self, epoch: Epoch, i: int) -> Any:
        """Return element `i`."""
        return nest.map_leaves(lambda a: a[0], self.elements(epoch, np.array([i])))

    @abc.abstractmethod
    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        """Return several elements, stacked along a new first dimension.

        For `batch` and `cache`, where rows of sources come as whole blocks.
        """

    def element_list(self, epoch: Epoch, positions: Positions) -> list[Any]:
        """Return several elements, each as the last transformation returned it."""
        return split(self.elements(epoch, positions))

    def batch_rows(self, epoch: Epoch, i: int) -> int:
        """Return the number of rows of batch `i`."""
        raise ArgumentError("the dataset is not batched; call batch() on it first")

    def local_batch(self, epoch: Epoch, i: int, share: BatchShare) -> Any:
        """Return one replica's slice of batch `i`."""
        raise ArgumentError("the dataset is not batched; call batch() on it first")

    def local_batches(
        self, epoch: Epoch, steps: range, share: BatchShare
    ) -> Iterator[Any]:
        """Return one replica's slices of consecutive batches.

        An error of the call itself may concern any of the batches, an error of the
        iterator the batch that would be next.
        """
        return (self.local_batch(epoch, i, share) for i in steps)

    def empty_batch(self, epoch: Epoch) -> Any:
        """Return a batch without rows; the first call may read a row."""
        if self._empty is None:
            example = self.example(epoch)
            self._empty = nest.map_leaves(lambda a: plain_array(a)[:0], example)
        return self._empty


class SourceMapDataset(MapDataset):
    """The rows of a source, in their own order."""

    def __init__(self, source: RowSource):
        self.source = source
        # Checking a protocol at each read would be slow
        self._chunked = source if has_chunks(source) else None

    @property
    def length(self) -> int:
        return len(self.source)

    @property
    def batch_size(self) -> None:
        return None

    @property
    def file_count(self) -> int:
        return self.source.file_count if isinstance(self.source, FileSource) else 0

    @property
    def has_known_spec(self) -> bool:
        # Arrays show their dtypes; a file would have to be opened.
        return self.file_count == 0

    @property
    def sources(self) -> list[RowSource]:
        return [self.source]

    @property
    def row_bytes(self) -> int | None:
        if self._chunked:
            return self._chunked.chunk_layout().row_bytes
        # A source of a user's own may not say how large rows are.
        return getattr(self.source, "row_bytes", None)

    def chunk_layout(self) -> ChunkLayout | None:
        return self._chunked.chunk_layout() if self._chunked else None

    @property
    def members(self) -> tuple[Any, ...]:
        dtypes = getattr(self.source, "dtypes", ())
        return tuple(dict(validation.members_of(dtype)) for dtype in dtypes)

    def reserve_cache(self, elements: int) -> None:
        if self._chunked:
            self._chunked.reserve_cache(elements)

    def describe(self) -> str:
        return self.source.describe()

    def describe_source(self) -> str:
        return f"{self.length} rows of {self.source.describe()}"

    def shard_files(self, workers: int, worker: int) -> MapDataset:
        assert isinstance(self.source, FileSource)
        share = SourceMapDataset(self.source.shard_files(workers, worker))
        share.is_share = True
        return share

    def replace_parents(self, change: Callable[[MapDataset], MapDataset]) -> MapDataset:
        return self

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        return self.source.read(positions)

    def example(self, epoch: Epoch) -> Any:
        if self.length:
            return self.element(epoch, 0)
        # Reading no rows gives the dtypes, and opens a file at most
        return nest.map_leaves(
            lambda a: np.zeros(a.shape[1:], a.dtype), self.source.read(np.arange(0))
        )


class MapTransformation(Transformation, MapDataset):
    """A transformation; by default of the order, from which `locate` follows."""

    _parent: MapDataset

    @property
    def length(self) -> int | None:
        return self._parent.length

    @property
    def row_bytes(self) -> int | None:
        return self._parent.row_bytes

    def locate(self, epoch: Epoch, positions: Positions) -> Positions:
        """Return the parent's indices of the elements at `positions`."""
        return positions

    def locate_one(self, epoch: Epoch, i: int) -> tuple[Epoch, int]:
        """Return the parent's epoch and index of element `i`."""
        return epoch, int(self.locate(epoch, np.array([i]))[0])

    def element(self, epoch: Epoch, i: int) -> Any:
        return self._parent.element(*self.locate_one(epoch, i))

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        return self._parent.elements(epoch, self.locate(epoch, positions))

    def element_list(self, epoch: Epoch, positions: Positions) -> list[Any]:
        return self._parent.element_list(epoch, self.locate(epoch, positions))

    def batch_rows(self, epoch: Epoch, i: int) -> int:
        return self._parent.batch_rows(*self.locate_one(epoch, i))

    def local_batch(self, epoch: Epoch, i: int, share: BatchShare) -> Any:
        epoch, i = self.locate_one(epoch, i)
        return self._parent.local_batch(epoch, i, share)


def walk(steps: Any) -> Iterator[Any]:
    """Yield a dataset, and all those before it: MapDataset or IterDataset."""
    yield steps.last
    for parent in steps.parents:
        yield from walk(parent)


def drawn_seeds(steps: Any) -> dict[Seed, bool]:
    """Return the seeds that a dataset's shuffles have drawn, in order.

    With each: whether the dataset has its order in all epochs.
    """
    seeds: dict[Seed, bool] = {}

    def collect(step: Any, is_fixed: bool) -> None:
        if (seed := step.seed) is not None and not seed.is_given:
            seeds[seed] = seeds.get(seed, False) or is_fixed or seed.is_fixed
        # Below a cache all epochs are the first one
        for parent in step.parents:
            collect(parent, is_fixed or step.keeps_first_epoch)

    collect(steps, False)
    return seeds


T = TypeVar("T")


class OpenSources:
    """Keeps the sources of a dataset open until the last concurrent read has ended.

    Args:
      pipeline: the dataset; its sources are retained until `end` or `close`.
    """

    def __init__(self, pipeline: MapDataset):
        sources = pipeline.sources
        self.sources = [s for s in sources if has_chunks(s)]
        self._buffers = [
            s.buffers
            for s in sources
            if not has_chunks(s) and isinstance(s, BufferedSource)
        ]
        # Reads may run in several threads while another one closes.
        self._lock = threading.Lock()
        self._active_reads = 0
        self._is_closed = False
        self._kept_open: list[ChunkedSource] = []
        for source in self.sources:
            # Sources count their users: two iterators share open files.
            source.retain()

    def run(self, read: Callable[[], T]) -> T:
        """Return `read()`, which reads from the dataset."""
        with self._lock:
            self._active_reads += 1
        try:
            return read()
        finally:
            with self._lock:
                self._active_reads -= 1
            # The last read that ends after `close` closes the files.
            if self._is_closed:
                self._release(keep_files=False)

    def end(self) -> None:
        """End the epoch, but keep the files open for the next one, or until `close`."""
        self._is_closed = True
        self._release(keep_files=True)

    def close(self) -> None:
        """Close the files after the last active read; idempotent."""
        self._is_closed = True
        self._release(keep_files=False)
        # Release for good what `end` has left open
        while self._kept_open:
            source = self._kept_open.pop()
            source.retain()
            source.release()

    def _release(self, keep_files: bool) -> None:
        with self._lock:
            if not self._is_closed or self._active_reads:
                return
            sources, self.sources = self.sources, []
            if keep_files:
                self._kept_open = list(sources)
        for source in sources:
            source.release(keep_files)
        for buffers in self._buffers:
            buffers.clear()
