"""Transformations that combine elements: `zip`, `enumerate` and `interleave`."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.data.batching import call_function
from mpidist.data.elements import require_like_members
from mpidist.data.iter_dataset import IterDataset, IterTransformation, MapToIterDataset
from mpidist.data.map_dataset import Epoch, MapDataset, MapTransformation, drawn_seeds
from mpidist.data.sharding import mix_seed
from mpidist.data.shuffling import Seed, drawing
from mpidist.data.sources import Positions
from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.hdf5.chunks import ChunkLayout
from mpidist.util import nest, validation
from mpidist.util.shares import BatchShare
from mpidist.util.threads import read_ahead

if TYPE_CHECKING:
    from mpidist.data.dataset import Dataset


class Zip(MapDataset):
    """Elements of several datasets, in a structure, up to the end of the shortest.

    Args:
      components: the datasets.
      spec: the structure of which they are the leaves.
    """

    def __init__(self, components: Sequence[MapDataset], spec: nest.Spec):
        self._components = tuple(components)
        self._spec = spec

    @property
    def parents(self) -> tuple[MapDataset, ...]:
        return self._components

    @property
    def length(self) -> int | None:
        lengths = [component.length for component in self._components]
        return min((n for n in lengths if n is not None), default=None)

    @property
    def batch_size(self) -> int | None:
        # Of unlike batch sizes no common one can be divided over replicas.
        sizes = {component.batch_size for component in self._components}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def is_batched(self) -> bool:
        # Generators yield batches of unknown sizes, which may be any
        known = {component.batch_size for component in self._components} - {None}
        return len(known) <= 1 and all(c.is_batched for c in self._components)

    @property
    def file_count(self) -> int:
        return 0  # cannot be sharded by file: a row has parts in several files

    @property
    def row_bytes(self) -> int | None:
        sizes = [component.row_bytes for component in self._components]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def chunk_layout(self) -> ChunkLayout | None:
        length = self.length
        layouts = [c.chunk_layout() for c in self._components]
        chunked = [layout for layout in layouts if layout]
        if not chunked or length is None:
            return None
        # A later shuffle should follow the chunks that are most expensive to decode
        costly = max(chunked, key=lambda c: (c.is_costly, c.rows * c.row_bytes))
        edges = np.cumsum([0, *costly.lengths]).clip(max=length)
        return dataclasses.replace(costly, lengths=tuple(np.diff(edges).tolist()))

    def describe(self) -> str:
        return f"zip({self._spec}, {', '.join(p.describe() for p in self._components)})"

    def replace_parents(self, change: Callable[[MapDataset], MapDataset]) -> MapDataset:
        return Zip([change(component) for component in self._components], self._spec)

    def _join(self, get: Callable[[MapDataset], Any]) -> Any:
        """Return the structure of `get(component)`."""
        return nest.unflatten(self._spec, list(map(get, self._components)))

    def element(self, epoch: Epoch, i: int) -> Any:
        return self._join(lambda component: component.element(epoch, i))

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        return self._join(lambda component: component.elements(epoch, positions))

    def element_list(self, epoch: Epoch, positions: Positions) -> list[Any]:
        columns = [c.element_list(epoch, positions) for c in self._components]
        rows = zip(*columns, strict=True)
        return [nest.unflatten(self._spec, row) for row in rows]

    def batch_rows(self, epoch: Epoch, i: int) -> int:
        rows = [component.batch_rows(epoch, i) for component in self._components]
        if len(set(rows)) > 1:
            raise ArgumentError(
                f"zip: batch {i} has {', '.join(map(str, rows))} rows in the datasets, "
                "so it cannot be divided over replicas; zip() rows, then batch() them"
            )
        return rows[0]

    def local_batch(self, epoch: Epoch, i: int, share: BatchShare) -> Any:
        self.batch_rows(epoch, i)
        return self._join(lambda component: component.local_batch(epoch, i, share))

    def local_batches(
        self, epoch: Epoch, steps: range, share: BatchShare
    ) -> Iterator[Any]:
        for i in steps:
            self.batch_rows(epoch, i)
        batches = [c.local_batches(epoch, steps, share) for c in self._components]
        return (nest.unflatten(self._spec, batch) for batch in zip(*batches))

    def example(self, epoch: Epoch) -> Any:
        return self._join(lambda component: component.example(epoch))

    def empty_batch(self, epoch: Epoch) -> Any:
        return self._join(lambda component: component.empty_batch(epoch))

    def iterate(self, epoch: Epoch, *parents: Any) -> Iterator[Any]:
        rows = zip(*[parent.iterate(epoch) for parent in parents])
        return (nest.unflatten(self._spec, row) for row in rows)


class Enumerate(MapTransformation):
    """Pairs of a number, counted from `start`, and an element."""

    def __init__(self, parent: MapDataset, start: int):
        super().__init__(parent)
        self._start = start

    @property
    def batch_size(self) -> None:
        return None  # a number has no rows

    @property
    def is_batched(self) -> bool:
        return False

    @property
    def row_bytes(self) -> int | None:
        parent = self._parent.row_bytes
        return None if parent is None else parent + np.dtype(np.int64).itemsize

    def describe(self) -> str:
        return f"{self._parent.describe()}.enumerate({self._start})"

    def chunk_layout(self) -> ChunkLayout | None:
        return self._parent.chunk_layout()

    def element(self, epoch: Epoch, i: int) -> Any:
        return np.int64(self._start + i), self._parent.element(epoch, i)

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        return self._numbers(positions), self._parent.elements(epoch, positions)

    def element_list(self, epoch: Epoch, positions: Positions) -> list[Any]:
        elements = self._parent.element_list(epoch, positions)
        return list(zip(self._numbers(positions), elements, strict=True))

    def _numbers(self, positions: Positions) -> Positions:
        if positions.size:
            np.int64(self._start + int(positions.max()))  # OverflowError, not a wrap
        return positions + self._start

    def example(self, epoch: Epoch) -> Any:
        return np.int64(self._start), self._parent.example(epoch)

    def iterate(self, epoch: Epoch, *parents: Any) -> Iterator[Any]:
        numbered = enumerate(parents[0].iterate(epoch), self._start)
        return ((np.int64(i), element) for i, element in numbered)


class Interleave(IterTransformation):
    """Elements of the datasets `map_func(element)`, interleaved.

    Args:
      parent: of the elements.
      map_func: returns a Dataset.
      cycle_length: number of datasets that are interleaved at a time.
      block_length: number of consecutive elements of a dataset.
      is_threaded: whether each of these datasets is prefetched by a thread.
      workers: number of workers among which batch sizes are divided.
    """

    def __init__(
        self,
        parent: IterDataset,
        map_func: Callable[..., Dataset],
        cycle_length: int,
        block_length: int,
        is_threaded: bool,
        workers: int = 1,
    ):
        super().__init__(parent)
        self._map_func = map_func
        self._cycle_length = cycle_length
        self._block_length = block_length
        self._is_threaded = is_threaded
        self._workers = workers
        self._first: IterDataset | None = None
        self._members: tuple[Any, ...] = ()  # of a dataset before
        # Of it and the number of an element follow the seeds that `map_func` draws
        self.seed: Seed = Seed()

    @property
    def members(self) -> tuple[Any, ...]:
        return self._members

    @property
    def batch_size(self) -> int | None:
        return self._example_dataset().batch_size

    @property
    def is_batched(self) -> bool:
        return self._example_dataset().is_batched

    # map_func is left out: functions cannot be compared between processes.
    def describe(self) -> str:
        arguments = f"{self._cycle_length}, {self._block_length}"
        return f"{self._parent.describe()}.interleave({arguments})"

    def rebatch(self, workers: int) -> IterDataset:
        again = copy.copy(self)
        again._workers, again._first = self._workers * workers, None
        return again

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        # As in TensorFlow, the next dataset takes the slot of one that has ended when
        # the cycle reaches that slot again
        sources = enumerate(self._parent.iterate(epoch))
        slots: list[Iterator[Any] | None] = [None] * self._cycle_length
        has_more = True
        for slot in itertools.cycle(range(self._cycle_length)):
            if slots[slot] is None and has_more:
                source = next(sources, None)
                has_more = source is not None
                slots[slot] = source and self._start(epoch, *source)
            elif not has_more and not any(slots):
                return
            if (dataset := slots[slot]) is not None:
                count = 0
                for element in itertools.islice(dataset, self._block_length):
                    count += 1
                    yield element
                if count < self._block_length:
                    slots[slot] = None

    def _start(self, epoch: Epoch, number: int, element: Any) -> Iterator[Any]:
        """Return the elements of the dataset made of one element."""
        dataset = self._make(epoch, number, element)
        require_like_members(self._members, dataset.members)
        self._members = dataset.members
        elements = dataset.iterate(epoch)
        return (
            read_ahead(elements, self._block_length) if self._is_threaded else elements
        )

    def _make(self, epoch: Epoch, number: int, element: Any) -> IterDataset:
        count = itertools.count()

        def draw() -> int:
            return mix_seed(epoch.number_of(self.seed), number, next(count))

        with drawing(draw, self.seed.is_common):
            made = call_function(self._map_func, element)
        dataset = getattr(made, "pipeline", None)
        if isinstance(dataset, MapDataset):
            dataset = MapToIterDataset(dataset)
        if not isinstance(dataset, IterDataset):
            raise ArgumentTypeError(
                "map_func of interleave must return a mpidist.Dataset, not "
                f"{validation.shown(made)}"
            )
        # Other ranks may have drawn other seeds outside of the function
        if self.seed.is_common and not all(s.is_common for s in drawn_seeds(dataset)):
            raise ArgumentError(
                "map_func of interleave uses a dataset that was shuffled without a "
                "seed outside of it, whose order may differ between ranks; give that "
                "shuffle a seed"
            )
        return dataset.rebatch(self._workers) if self._workers > 1 else dataset

    def _example_dataset(self) -> IterDataset:
        """Return the dataset of the first element; calls the function only once."""
        if self._first is None:
            self._first = self._make(Epoch(), 0, self._parent.example(Epoch()))
        return self._first

    def example(self, epoch: Epoch) -> Any:
        return self._example_dataset().example(epoch)
