"""The steps of a dataset: each answers "element i of epoch e" without counting.

So any replica can read just its rows of any batch. Steps are immutable, and nothing
here communicates. The steps that change the order are in `ordering`.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from mpidist.data.shuffling import BlockOrder, Blocks
from mpidist.data.sources import (
    BlockSource,
    BufferedSource,
    FileSource,
    Positions,
    RowSource,
    is_in_blocks,
)
from mpidist.data.spec import spec_of
from mpidist.errors import ArgumentError
from mpidist.util import nest

__all__ = ["INFINITE_CARDINALITY", "Epoch", "Pipeline", "Reading", "Rows", "Step"]


INFINITE_CARDINALITY = -1


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One epoch: a complete iteration over a dataset.

    Args:
      number: of epochs before this one; shuffles permute each epoch differently.
      entropy: seed of all shuffles without a seed of their own.
    """

    number: int = 0
    entropy: int = 0


class Pipeline:
    """One step and all before it. Elements are nests of arrays."""

    _empty: Any = None

    @property
    def length(self) -> int | None:
        """The number of elements, None for no end."""
        raise NotImplementedError  # pragma: no cover

    @property
    def batch_size(self) -> int | None:
        """How many rows an element has, at most; None if it is not a batch."""
        raise NotImplementedError  # pragma: no cover

    @property
    def cardinality(self) -> int:
        """The number of elements, INFINITE_CARDINALITY (-1) for no end."""
        return INFINITE_CARDINALITY if self.length is None else self.length

    @property
    def is_batched(self) -> bool:
        """Whether the elements are batches."""
        return self.batch_size is not None

    @property
    def parallel_calls(self) -> int:
        """How many threads elements should be asked for in, at the same time."""
        return 1

    @property
    def is_mapped(self) -> bool:
        """Whether functions of the user are called."""
        return False

    @property
    def file_count(self) -> int:
        """How many files the rows come from; 0 for rows that are not in files."""
        raise NotImplementedError  # pragma: no cover

    @property
    def needs_entropy(self) -> bool:
        """Whether the order depends on `Epoch.entropy`."""
        raise NotImplementedError  # pragma: no cover

    @property
    def has_known_spec(self) -> bool:
        """Whether `element_spec` needs neither a file nor a function of the user."""
        return False

    @property
    def has_even_batches(self) -> bool:
        """Whether all batches but the last have `batch_size` rows."""
        return False

    def unbatched(self) -> Pipeline | None:
        """Return the rows of the batches; None if their number is not known."""
        return None

    @property
    def sources(self) -> list[RowSource]:
        """Where the rows come from."""
        raise NotImplementedError  # pragma: no cover

    @property
    def row_bytes(self) -> int | None:
        """The bytes of a row as it is read; None if that is not known."""
        return None

    def blocks(self) -> Blocks | None:
        """Return how the elements lie in chunks; None where that does not matter."""
        return None

    def block_order(self, epoch: Epoch) -> BlockOrder | None:
        """Return in which order of chunks a shuffle gives the rows; None for none."""
        return None

    def keep(self, elements: int) -> None:
        """Make room for the chunks of so many elements that are read in any order."""

    def for_batches(self, batch_size: int) -> Pipeline:
        """Return the same steps, to be followed by batches of so many elements."""
        return self

    def describe(self) -> str:
        """Return what must be the same on every replica, as text."""
        raise NotImplementedError  # pragma: no cover

    def describe_source(self) -> str:
        """Return the part of `describe` that says where the rows come from."""
        raise NotImplementedError  # pragma: no cover

    def shard_files(self, workers: int, worker: int) -> Pipeline:
        """Return the same steps of the rows of one worker's files."""
        raise NotImplementedError  # pragma: no cover

    def over(self, change: Callable[[Pipeline], Pipeline]) -> Pipeline:
        """Return the same step after `change(parent)` instead of its parent."""
        raise NotImplementedError  # pragma: no cover

    def rebatch(self, workers: int) -> Pipeline:
        """Return the same steps with one worker's share of the batch size."""
        raise NotImplementedError  # pragma: no cover

    def element_spec(self) -> Any:
        """Return the nest of TensorSpec of the elements; reads a row for it."""
        return spec_of(self.example(Epoch()), self.is_batched)

    def element(self, epoch: Epoch, i: int) -> Any:
        """Return element `i`."""
        return nest.map_leaves(lambda a: a[0], self.elements(epoch, np.array([i])))

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        """Return several elements, stacked along a new first dimension."""
        raise NotImplementedError  # pragma: no cover

    def rows_in(self, epoch: Epoch, i: int) -> int:
        """Return how many rows batch `i` has."""
        raise ArgumentError("the dataset is not batched; call batch() on it first")

    def part(self, epoch: Epoch, i: int, replicas: int, replica: int) -> Any:
        """Return one replica's slice of batch `i`."""
        raise ArgumentError("the dataset is not batched; call batch() on it first")

    def parts(
        self, epoch: Epoch, steps: range, replicas: int, replica: int
    ) -> Iterator[Any]:
        """Return one replica's slices of batches that follow each other.

        What the call itself raises may be due to any of the batches; what the iterator
        raises is due to the batch whose turn it is.
        """
        return (self.part(epoch, i, replicas, replica) for i in steps)

    def example(self, epoch: Epoch) -> Any:
        """Return some element: the first, or one of zeros where there is none."""
        raise NotImplementedError  # pragma: no cover

    def empty_part(self, epoch: Epoch) -> Any:
        """Return a batch of no rows; reads a row when it is first called."""
        if self._empty is None:
            example = self.example(epoch)
            self._empty = nest.map_leaves(lambda a: np.asarray(a)[:0], example)
        return self._empty


class Rows(Pipeline):
    """The rows of a source, in their own order."""

    def __init__(self, source: RowSource):
        self._source = source
        # Protocols are slow to compare with
        self._in_blocks = source if is_in_blocks(source) else None

    @property
    def length(self) -> int:
        return len(self._source)

    @property
    def batch_size(self) -> None:
        return None

    @property
    def needs_entropy(self) -> bool:
        return False

    @property
    def file_count(self) -> int:
        return self._source.file_count if isinstance(self._source, FileSource) else 0

    @property
    def has_known_spec(self) -> bool:
        return self.file_count == 0

    @property
    def sources(self) -> list[RowSource]:
        return [self._source]

    @property
    def row_bytes(self) -> int | None:
        if self._in_blocks:
            return self._in_blocks.blocks().row_bytes
        return getattr(self._source, "row_bytes", None)

    def blocks(self) -> Blocks | None:
        return self._in_blocks.blocks() if self._in_blocks else None

    def keep(self, elements: int) -> None:
        if self._in_blocks:
            self._in_blocks.keep(elements)

    def describe(self) -> str:
        return self._source.describe()

    def describe_source(self) -> str:
        return f"{self.length} rows of {self._source.describe()}"

    def shard_files(self, workers: int, worker: int) -> Pipeline:
        assert isinstance(self._source, FileSource)
        return Rows(self._source.shard_files(workers, worker))

    def over(self, change: Callable[[Pipeline], Pipeline]) -> Pipeline:
        return self

    def rebatch(self, workers: int) -> Pipeline:
        return self

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        return self._source.read(positions)

    def example(self, epoch: Epoch) -> Any:
        if self.length:
            return self.element(epoch, 0)
        return nest.map_leaves(
            lambda a: np.zeros(a.shape[1:], a.dtype), self._source.read(np.arange(0))
        )


class Step(Pipeline):
    """A step that renumbers its parent's elements."""

    def __init__(self, parent: Pipeline):
        self._parent = parent

    @property
    def length(self) -> int | None:
        return self._parent.length

    @property
    def batch_size(self) -> int | None:
        return self._parent.batch_size

    @property
    def needs_entropy(self) -> bool:
        return self._parent.needs_entropy

    @property
    def parallel_calls(self) -> int:
        return self._parent.parallel_calls

    @property
    def is_mapped(self) -> bool:
        return self._parent.is_mapped

    @property
    def file_count(self) -> int:
        return self._parent.file_count

    @property
    def has_known_spec(self) -> bool:
        return self._parent.has_known_spec

    @property
    def sources(self) -> list[RowSource]:
        return self._parent.sources

    @property
    def row_bytes(self) -> int | None:
        return self._parent.row_bytes

    def keep(self, elements: int) -> None:
        self._parent.keep(elements)

    def for_batches(self, batch_size: int) -> Pipeline:
        return self._after(self._parent.for_batches(batch_size))

    def describe_source(self) -> str:
        return self._parent.describe_source()

    def shard_files(self, workers: int, worker: int) -> Pipeline:
        return self._after(self._parent.shard_files(workers, worker))

    def over(self, change: Callable[[Pipeline], Pipeline]) -> Pipeline:
        return self._after(change(self._parent))

    def rebatch(self, workers: int) -> Pipeline:
        return self._after(self._parent.rebatch(workers))

    def _after(self, parent: Pipeline) -> Pipeline:
        """Return the same step after another parent."""
        step = copy.copy(self)
        step._parent = parent
        return step

    def locate(self, epoch: Epoch, positions: Positions) -> Positions:
        """Return the parent's numbers of the elements at `positions`."""
        raise NotImplementedError  # pragma: no cover

    def locate_one(self, epoch: Epoch, i: int) -> tuple[Epoch, int]:
        """Return the parent's epoch and index of element `i`."""
        return epoch, int(self.locate(epoch, np.array([i]))[0])

    def element(self, epoch: Epoch, i: int) -> Any:
        return self._parent.element(*self.locate_one(epoch, i))

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        return self._parent.elements(epoch, self.locate(epoch, positions))

    def rows_in(self, epoch: Epoch, i: int) -> int:
        return self._parent.rows_in(*self.locate_one(epoch, i))

    def part(self, epoch: Epoch, i: int, replicas: int, replica: int) -> Any:
        epoch, i = self.locate_one(epoch, i)
        return self._parent.part(epoch, i, replicas, replica)

    def example(self, epoch: Epoch) -> Any:
        return self._parent.example(epoch)


T = TypeVar("T")


class Reading:
    """Counts the reads that are going on in threads, so that none loses its files.

    Args:
      pipeline: whose sources are used until `end` or `close`.
    """

    def __init__(self, pipeline: Pipeline):
        sources = pipeline.sources
        self._sources = [s for s in sources if is_in_blocks(s)]
        self._buffers = [
            s.buffers
            for s in sources
            if not is_in_blocks(s) and isinstance(s, BufferedSource)
        ]
        self._lock = threading.Lock()
        self._going_on = 0
        self._is_closed = False
        self._left_open: list[BlockSource] = []
        for source in self._sources:
            source.retain()

    def do(self, read: Callable[[], T]) -> T:
        """Return `read()`, which reads the pipeline."""
        with self._lock:
            self._going_on += 1
        try:
            return read()
        finally:
            with self._lock:
                self._going_on -= 1
            self._release(keep_files=False)

    def end(self) -> None:
        """Say that all was read, and will probably be read again: files stay open.

        Unless `close` is called after it.
        """
        self._is_closed = True
        self._release(keep_files=True)

    def close(self) -> None:
        """Close the files, once no read is going on; a second call does nothing."""
        self._is_closed = True
        self._release(keep_files=False)
        while self._left_open:
            source = self._left_open.pop()
            source.retain()
            source.release()

    def _release(self, keep_files: bool) -> None:
        with self._lock:
            if not self._is_closed or self._going_on:
                return
            sources, self._sources = self._sources, []
            if keep_files:
                self._left_open = list(sources)
        for source in sources:
            source.release(keep_files)
        for buffers in self._buffers:
            buffers.clear()
