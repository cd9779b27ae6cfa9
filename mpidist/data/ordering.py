"""Transformations that select, repeat or permute elements.

They map the index of an element to an index of the parent; random orders are computed
by `sharding.Permutation`, without a table.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpidist.data import sharding
from mpidist.data.elements import (
    as_element,
    concatenate,
    merge,
    require_like,
    require_like_members,
    spec_of,
)
from mpidist.data.iter_dataset import IterDataset
from mpidist.data.map_dataset import Epoch, MapDataset, MapTransformation, walk
from mpidist.data.shuffling import ChunkShuffle, Seed, divide_block
from mpidist.data.sources import Positions
from mpidist.errors import ArgumentError, DataError
from mpidist.hdf5.chunks import ChunkLayout
from mpidist.util import nest
from mpidist.util.shares import BatchShare

# Distance of the first epoch numbers of successive endless repetitions
_ENDLESS = 1 << 40


class Shuffle(MapTransformation):
    """All elements in a random order, without a buffer.

    Elements in chunks that are costly to decode are in the order of a `ChunkShuffle`.
    """

    seed: Seed

    def __init__(
        self,
        parent: MapDataset,
        buffer_size: int | None,
        seed: int | None,
        reshuffle: bool,
        window_chunks: int | None = None,
    ):
        super().__init__(parent)
        self.seed = Seed(seed, is_fixed=not reshuffle)
        self.reshuffle = reshuffle
        self._buffer_size = buffer_size  # for elements in order
        self._window_chunks = window_chunks
        # An epoch, and the stripes that were read in it
        self._read: tuple[Any, frozenset[int]] = None, frozenset()

    def describe(self) -> str:
        arguments = f"{self.seed}, {self.reshuffle}, {self._window_chunks}"
        is_share = any(step.is_share for step in walk(self))  # with a layout of its own
        if not is_share and (block := self._block()) is not None:
            # A state does not fit another order
            stripes, chunks = divide_block(*block)
            arguments += f", {stripes} stripes of {chunks} chunks"
        return f"{self._parent.describe()}.shuffle({arguments})"

    def locate(self, epoch: Epoch, positions: Positions) -> Positions:
        length = self.length
        if length is None:
            raise ArgumentError("an infinite dataset cannot be shuffled; shuffle first")
        key = self._key(epoch)
        self.seed.is_used |= key[0] == self.seed.number
        if (block := self._block()) is None:
            # `near`: batches ask for neighbouring positions, whose blocks are cached.
            return sharding.Permutation(length, *key).near(positions)
        mixed = _chunk_shuffle(*block, *key)
        # Rows of one window come in any order, so a whole window must stay decoded.
        before, stripes = self._read
        stripes = stripes if before == key else frozenset()
        stripes |= mixed.stripes_of(positions)
        self._read = key, stripes
        self._parent.reserve_cache(len(stripes) * mixed.block_rows)
        return mixed(positions)

    def chunk_shuffle(self, epoch: Epoch) -> ChunkShuffle | None:
        block = self._block()
        return None if block is None else _chunk_shuffle(*block, *self._key(epoch))

    def _block(self) -> tuple[ChunkLayout, int] | None:
        """Return how rows are stored, and how many chunks to mix; None for exact."""
        # 0 asks for an exact permutation, however costly it is to decode
        layout = None if self._window_chunks == 0 else self._parent.chunk_layout()
        if layout is None or not (layout.is_costly or self._window_chunks):
            return None
        # A user's own window size comes before that of the layout.
        return layout, self._window_chunks or layout.default_block_chunks

    def _key(self, epoch: Epoch) -> tuple[int, int]:
        seed = epoch.seeds.get(self.seed, self.seed.number)
        # Without reshuffling every epoch has the order of epoch 0.
        return seed, epoch.number if self.reshuffle else 0

    def describe_in_order(self) -> str:
        arguments = f"{self._buffer_size}, {self.seed}, {self.reshuffle}"
        return f"{self._parent.describe()}.shuffle({arguments})"

    def iterate(self, epoch: Epoch, *parents: Any) -> Iterator[Any]:
        seed, number = self._key(epoch)
        self.seed.is_used |= seed == self.seed.number
        # Numbered by epoch: the same epoch gives the same order after a restart.
        random = np.random.default_rng([sharding.to_word(seed), number])
        elements = parents[0].iterate(epoch)
        buffer = list(itertools.islice(elements, self._buffer_size))
        # Draw from a full buffer, and put the next element in its place
        for element in elements:
            i = int(random.integers(len(buffer)))
            drawn, buffer[i] = buffer[i], element
            yield drawn
        # Draw from the rest; swapping with the last element makes removal O(1)
        while buffer:
            i = int(random.integers(len(buffer)))
            buffer[i], buffer[-1] = buffer[-1], buffer[i]
            yield buffer.pop()


_chunk_shuffle = functools.lru_cache(maxsize=8)(ChunkShuffle)


class Window(MapTransformation):
    """A slice of the elements, by `take` and `skip`."""

    def __init__(self, parent: MapDataset, start: int, count: int | None):
        super().__init__(parent)
        self._start = start
        self._count = count

    @property
    def length(self) -> int | None:
        whole = self._parent.length
        rest = None if whole is None else max(0, whole - self._start)
        if self._count is None:
            return rest
        return self._count if rest is None else min(self._count, rest)

    def describe(self) -> str:
        return f"{self._parent.describe()}.window({self._start}, {self._count})"

    @property
    def has_even_batches(self) -> bool:
        return self._parent.has_even_batches

    def unbatched(self) -> MapDataset | None:
        rows, size = self._parent.unbatched(), self.batch_size
        if rows is None or size is None or not self._parent.has_even_batches:
            return None
        # A slice of batches is a slice of rows only if all batches are full.
        count = None if self._count is None else self._count * size
        return Window(rows, self._start * size, count)

    def chunk_layout(self) -> ChunkLayout | None:
        if (layout := self._parent.chunk_layout()) is None or self.length is None:
            return None
        # Chunks outside become empty, the ones at the edges shorter.
        edges = np.cumsum([0, *layout.lengths]).clip(
            self._start, self._start + self.length
        )
        return dataclasses.replace(layout, lengths=tuple(np.diff(edges).tolist()))

    def locate(self, epoch: Epoch, positions: Positions) -> Positions:
        return positions + self._start

    def local_batches(
        self, epoch: Epoch, steps: range, share: BatchShare
    ) -> Iterator[Any]:
        steps = range(steps.start + self._start, steps.stop + self._start)
        return self._parent.local_batches(epoch, steps, share)

    def iterate(self, epoch: Epoch, *parents: Any) -> Iterator[Any]:
        stop = None if self._count is None else self._start + self._count
        return itertools.islice(parents[0].iterate(epoch), self._start, stop)


class FullBatches(Window):
    """The rows in full batches, for `unbatch` after a batch with `drop_remainder`.

    Args:
      parent: the rows.
      batch_size: of the full batches, in elements.
      element_rows: the rows of an element; the last may have fewer.
    """

    def __init__(self, parent: MapDataset, batch_size: int, element_rows: int = 1):
        super().__init__(parent, 0, None)
        self._rows = batch_size
        self._element_rows = element_rows

    @property
    def length(self) -> int | None:
        if (whole := self._parent.length) is None:
            return None
        # A short last batch was dropped, so its rows must not come back.
        elements = -(-whole // self._element_rows)
        return min(whole, (elements - elements % self._rows) * self._element_rows)

    def describe(self) -> str:
        arguments = f"{self._rows}"
        if self._element_rows > 1:
            arguments += f", {self._element_rows}"
        return f"{self._parent.describe()}.full_batches({arguments})"

    def unbatched(self) -> MapDataset | None:
        rows, size = self._parent.unbatched(), self.batch_size
        if rows is None or size is None or not self._parent.has_even_batches:
            return None
        return FullBatches(rows, self._rows, self._element_rows * size)


class Shard(MapTransformation):
    """Every n-th element."""

    def __init__(self, parent: MapDataset, num_shards: int, index: int):
        super().__init__(parent)
        self._num_shards = num_shards
        self._index = index

    @property
    def length(self) -> int | None:
        whole = self._parent.length
        if whole is None:
            return None
        return max(0, -(-(whole - self._index) // self._num_shards))

    def describe(self) -> str:
        return f"{self._parent.describe()}.shard({self._num_shards}, {self._index})"

    def locate(self, epoch: Epoch, positions: Positions) -> Positions:
        return positions * self._num_shards + self._index

    def iterate(self, epoch: Epoch, *parents: Any) -> Iterator[Any]:
        elements = parents[0].iterate(epoch)
        return itertools.islice(elements, self._index, None, self._num_shards)


class Repeat(MapTransformation):
    """The elements repeated, perhaps endlessly; each repetition is an epoch."""

    def __init__(self, parent: MapDataset, count: int | None):
        super().__init__(parent)
        self.count = count

    @property
    def length(self) -> int | None:
        whole = self._parent.length
        # Repeating nothing for ever is empty, too, rather than endless.
        if whole == 0 or self.count == 0:
            return 0
        return None if self.count is None or whole is None else whole * self.count

    def describe(self) -> str:
        return f"{self._parent.describe()}.repeat({self.count})"

    def unbatched(self) -> MapDataset | None:
        rows = self._parent.unbatched()
        return rows and Repeat(rows, self.count)

    def locate_one(self, epoch: Epoch, i: int) -> tuple[Epoch, int]:
        whole = self._parent.length
        repetition, i = (0, i) if whole is None else divmod(i, whole)
        return epoch_of_repetition(epoch, self.count, repetition), i

    def local_batches(
        self, epoch: Epoch, steps: range, share: BatchShare
    ) -> Iterator[Any]:
        # Steps of a group may lie in two repetitions, which have different orders.
        (first_epoch, first), (last_epoch, last) = (
            self.locate_one(epoch, i) for i in (steps[0], steps[-1])
        )
        if first_epoch != last_epoch:
            return super().local_batches(epoch, steps, share)
        return self._parent.local_batches(first_epoch, range(first, last + 1), share)

    def _parts(
        self, epoch: Epoch, positions: Positions
    ) -> tuple[list[tuple[Epoch, Positions]], Positions]:
        """Return what to read of each repetition, and each position's part."""
        whole = self._parent.length
        # Without rows there is nothing to divide; the parent shows the dtypes.
        if whole is None or positions.size == 0:
            first = epoch_of_repetition(epoch, self.count, 0)
            return [(first, positions)], np.zeros(positions.size, np.int64)
        repetitions, positions = np.divmod(positions, whole)
        if (repetitions == repetitions[0]).all():  # as in most batches
            only = epoch_of_repetition(epoch, self.count, int(repetitions[0]))
            return [(only, positions)], np.zeros_like(repetitions)
        distinct, origins = np.unique(repetitions, return_inverse=True)
        epochs = [
            epoch_of_repetition(epoch, self.count, repetition)
            for repetition in distinct.tolist()
        ]
        return [
            (part, positions[origins == i]) for i, part in enumerate(epochs)
        ], origins

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        parts, origins = self._parts(epoch, positions)
        return _interleave([self._parent.elements(*p) for p in parts], origins)

    def element_list(self, epoch: Epoch, positions: Positions) -> list[Any]:
        parts, origins = self._parts(epoch, positions)
        return merge([self._parent.element_list(*p) for p in parts], origins)

    def iterate(self, epoch: Epoch, *parents: Any) -> Iterator[Any]:
        count = self.count
        for repetition in itertools.count() if count is None else range(count):
            is_empty = True
            again = epoch_of_repetition(epoch, count, repetition)
            for element in parents[0].iterate(again):
                is_empty = False
                yield element
            if is_empty and count is None:
                return  # repeating an empty dataset endlessly would never return


class Concatenate(MapDataset):
    """The elements of one dataset, then those of another."""

    def __init__(self, first: MapDataset, second: MapDataset):
        self._first = first
        self._second = second
        self._is_checked = False
        # Arrays can be compared now, without opening files; others at the first read.
        if self.has_known_spec:
            self._require_like()

    def _require_like(self) -> None:
        """Raise if the elements of both differ; called before anything else is read."""
        if not self._is_checked:
            require_like(self._first.element_spec(), self._second.element_spec())
            require_like_members(self._first.members, self._second.members)
            self._is_checked = True

    @property
    def length(self) -> int | None:
        first, second = self._first.length, self._second.length
        return None if first is None or second is None else first + second

    @property
    def batch_size(self) -> int | None:
        first, second = self._first.batch_size, self._second.batch_size
        # Of unlike batch sizes the larger one counts: it bounds memory.
        return first if first is None or second is None else max(first, second)

    @property
    def parents(self) -> tuple[MapDataset, ...]:
        return self._first, self._second

    @property
    def members(self) -> tuple[Any, ...]:
        return self._first.members

    def unbatched(self) -> MapDataset | None:
        first, second = self._first.unbatched(), self._second.unbatched()
        return first and second and Concatenate(first, second)

    def chunk_layout(self) -> ChunkLayout | None:
        first, second = self._first.chunk_layout(), self._second.chunk_layout()
        # Mixed storage: the order of one cannot follow the chunks of the other.
        if first is None or second is None:
            return None
        return dataclasses.replace(
            max(first, second, key=lambda layout: layout.rows * layout.row_bytes),
            lengths=first.lengths + second.lengths,
            is_costly=first.is_costly or second.is_costly,
        )

    @property
    def row_bytes(self) -> int | None:
        first, second = self._first.row_bytes, self._second.row_bytes
        return None if first is None or second is None else max(first, second)

    def describe(self) -> str:
        return f"{self._first.describe()}.concatenate({self._second.describe()})"

    def replace_parents(self, change: Callable[[MapDataset], MapDataset]) -> MapDataset:
        return Concatenate(change(self._first), change(self._second))

    def find(self, i: int) -> tuple[MapDataset, int]:
        """Return the dataset with element `i`, and the index in that dataset."""
        before = self._first.length
        if before is None or i < before:
            return self._first, i
        return self._second, i - before

    def element(self, epoch: Epoch, i: int) -> Any:
        self._require_like()
        pipeline, i = self.find(i)
        return pipeline.element(epoch, i)

    def _parts(
        self, positions: Positions
    ) -> tuple[list[tuple[MapDataset, Positions]], Positions]:
        """Return what to read of the datasets, and each position's part."""
        self._require_like()
        before = self._first.length
        if before is None or positions.size == 0 or positions.max() < before:
            return [(self._first, positions)], np.zeros(positions.size, np.int64)
        in_second = positions >= before
        second = self._second, positions[in_second] - before
        if in_second.all():
            return [second], np.zeros(positions.size, np.int64)
        return [(self._first, positions[~in_second]), second], in_second.astype(int)

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        parts, origins = self._parts(positions)
        columns = [part.elements(epoch, rows) for part, rows in parts]
        return _interleave(columns, origins)

    def element_list(self, epoch: Epoch, positions: Positions) -> list[Any]:
        parts, origins = self._parts(positions)
        return merge([part.element_list(epoch, rows) for part, rows in parts], origins)

    def batch_rows(self, epoch: Epoch, i: int) -> int:
        pipeline, i = self.find(i)
        return pipeline.batch_rows(epoch, i)

    def local_batch(self, epoch: Epoch, i: int, share: BatchShare) -> Any:
        self._require_like()
        pipeline, i = self.find(i)
        return pipeline.local_batch(epoch, i, share)

    def example(self, epoch: Epoch) -> Any:
        self._require_like()
        return self._first.example(epoch)


def epoch_of_repetition(epoch: Epoch, count: int | None, repetition: int) -> Epoch:
    """Return the epoch of one repetition out of `count`, None for no end."""
    # Repetition r of epoch e is epoch e * count + r of the parent: no two are alike.
    repetitions = _ENDLESS if count is None else count
    return dataclasses.replace(epoch, number=epoch.number * repetitions + repetition)


def _interleave(parts: list[Any], origins: Any) -> Any:
    """Merge the rows of `parts`; `origins` has the part of each row of the result."""
    if len(parts) == 1:
        return parts[0]
    # The inverse of the stable sort that would group the rows by part
    back = np.argsort(np.argsort(origins, kind="stable"))
    return nest.map_leaves(lambda a: a[back], concatenate(parts))


class IterConcatenate(IterDataset):
    """The elements of one dataset, then those of another."""

    def __init__(self, first: IterDataset, second: IterDataset):
        self._first = first
        self._second = second

    @property
    def batch_size(self) -> int | None:
        return self._first.batch_size

    @property
    def is_batched(self) -> bool:
        return self._first.is_batched

    @property
    def parents(self) -> tuple[IterDataset, ...]:
        return self._first, self._second

    def describe(self) -> str:
        return f"{self._first.describe()}.concatenate({self._second.describe()})"

    def replace_parents(self, change: Callable[[Any], Any]) -> IterDataset:
        return IterConcatenate(change(self._first), change(self._second))

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        spec = None
        first, second = self._first.iterate(epoch), self._second.iterate(epoch)
        # The first element of each shows the spec; the rest is passed on unchecked.
        for element in itertools.islice(first, 1):
            spec = self._spec_of(element)
            yield element
        yield from first
        require_like_members(self._first.members, self._second.members)
        for element in itertools.islice(second, 1):
            if spec is not None:
                require_like(spec, self._spec_of(element))
            yield element
        yield from second

    def _spec_of(self, element: Any) -> Any:
        return spec_of(as_element(element), self.is_batched)

    def example(self, epoch: Epoch) -> Any:
        try:
            return self._first.example(epoch)
        except DataError:
            return self._second.example(epoch)


def is_reshuffled(dataset: MapDataset | IterDataset) -> bool:
    """Return whether the order of the rows may be another one in each epoch."""
    if dataset.keeps_first_epoch:
        return False
    if isinstance(dataset.last, Shuffle) and dataset.last.reshuffle:
        return True
    return any(map(is_reshuffled, dataset.parents))
