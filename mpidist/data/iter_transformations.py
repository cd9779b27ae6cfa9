"""Transformations of iterable datasets, whose elements can only be read in order.

They have the names and arguments of those of map-style datasets.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.data import sharding
from mpidist.data.batching import call_function, call_mapped
from mpidist.data.combining import epoch_of_component
from mpidist.data.elements import as_element, stack
from mpidist.data.iter_dataset import (
    IterDataset,
    IterTransformation,
    MapToIterDataset,
    count_rows,
)
from mpidist.data.map_dataset import Epoch, MapDataset
from mpidist.data.ordering import epoch_of_repetition
from mpidist.data.spec import batch_of, require_like, spec_of
from mpidist.errors import ArgumentError, ArgumentTypeError, DataError
from mpidist.util import nest, validation
from mpidist.util.threads import call_ahead, read_ahead

if TYPE_CHECKING:
    from mpidist.data.dataset import Dataset

__all__ = [
    "Batch",
    "Concatenate",
    "Enumerate",
    "Filter",
    "Interleave",
    "Map",
    "Repeat",
    "Shard",
    "Shuffle",
    "Unbatch",
    "Window",
    "Zip",
]


class Map(IterTransformation):
    """A function of each element, in some number of threads."""

    def __init__(self, parent: IterDataset, fn: Callable[..., Any], threads: int = 1):
        super().__init__(parent)
        self._fn = fn
        self._threads = threads

    def describe(self) -> str:
        return f"{self._parent.describe()}.map"

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        elements = self._parent.iterate(epoch)
        call = functools.partial(call_mapped, self._fn)
        if self._threads > 1:
            yield from call_ahead(call, elements, self._threads)
        else:
            yield from map(call, elements)

    def example(self) -> Any:
        return call_mapped(self._fn, self._parent.example())


class Batch(IterTransformation):
    """Runs of elements, stacked."""

    def __init__(self, parent: IterDataset, batch_size: int, drop_remainder: bool):
        super().__init__(parent)
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def is_batched(self) -> bool:
        return True

    def rebatch(self, workers: int) -> IterDataset:
        share = -(-self._batch_size // workers)
        return Batch(self._parent, share, self._drop_remainder)

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        elements = self._parent.iterate(epoch)
        # An iterator, not a list: only one batch of elements is in memory.
        while rows := list(itertools.islice(elements, self._batch_size)):
            if len(rows) == self._batch_size or not self._drop_remainder:
                yield stack(rows)

    def example(self) -> Any:
        return stack([self._parent.example()] * self._batch_size)

    def element_spec(self) -> Any:
        return batch_of(self._parent.element_spec())


class Shuffle(IterTransformation):
    """All elements, each drawn at random from a buffer of the next ones."""

    def __init__(
        self,
        parent: IterDataset,
        buffer_size: int | None,
        seed: int | None,
        reshuffle: bool,
        window_chunks: int | None = None,
    ):
        super().__init__(parent)
        if buffer_size is None:
            raise ArgumentError(
                "shuffle of a generator's dataset needs a buffer_size: its elements "
                "can only be read in order"
            )
        self._buffer_size = buffer_size
        self._seed = seed
        self._reshuffle = reshuffle

    @property
    def needs_entropy(self) -> bool:
        return self._seed is None or self._parent.needs_entropy

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        seed = epoch.entropy if self._seed is None else self._seed
        number = epoch.number if self._reshuffle else 0
        # Numbered by epoch: the same epoch gives the same order after a restart.
        random = np.random.default_rng([sharding.to_word(seed), number])
        elements = self._parent.iterate(epoch)
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


class Window(IterTransformation):
    """A run of elements: take and skip."""

    def __init__(self, parent: IterDataset, start: int, count: int | None):
        super().__init__(parent)
        self._start = start
        self._count = count

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        stop = None if self._count is None else self._start + self._count
        return itertools.islice(self._parent.iterate(epoch), self._start, stop)


class Shard(IterTransformation):
    """Every n-th element."""

    def __init__(self, parent: IterDataset, num_shards: int, index: int):
        super().__init__(parent)
        self._num_shards = num_shards
        self._index = index

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        elements = self._parent.iterate(epoch)
        return itertools.islice(elements, self._index, None, self._num_shards)


class Repeat(IterTransformation):
    """The elements repeated, perhaps endlessly; each repetition is an epoch."""

    def __init__(self, parent: IterDataset, count: int | None):
        super().__init__(parent)
        self._count = count

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        repetitions = itertools.count() if self._count is None else range(self._count)
        for repetition in repetitions:
            is_empty = True
            for element in self._parent.iterate(
                epoch_of_repetition(epoch, self._count, repetition)
            ):
                is_empty = False
                yield element
            if is_empty and self._count is None:
                return  # repeating an empty dataset endlessly would never return


class Concatenate(IterDataset):
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
    def needs_entropy(self) -> bool:
        return self._first.needs_entropy or self._second.needs_entropy

    @property
    def file_count(self) -> int:
        return min(self._first.file_count, self._second.file_count)

    def describe(self) -> str:
        return f"{self._first.describe()}.concatenate({self._second.describe()})"

    def replace_parents(self, change: Callable[[Any], Any]) -> IterDataset:
        return Concatenate(change(self._first), change(self._second))

    def describe_source(self) -> str:
        return f"{self._first.describe_source()}, {self._second.describe_source()}"

    def rebatch(self, workers: int) -> IterDataset:
        return Concatenate(self._first.rebatch(workers), self._second.rebatch(workers))

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        spec = None
        first, second = self._first.iterate(epoch), self._second.iterate(epoch)
        # The first element of each shows the spec; the rest is passed on unchecked.
        for element in itertools.islice(first, 1):
            spec = self._spec_of(element)
            yield element
        yield from first
        for element in itertools.islice(second, 1):
            if spec is not None:
                require_like(spec, self._spec_of(element))
            yield element
        yield from second

    def _spec_of(self, element: Any) -> Any:
        return spec_of(as_element(element), self.is_batched)

    def example(self) -> Any:
        try:
            return self._first.example()
        except DataError:
            return self._second.example()


class Zip(IterDataset):
    """Elements of several datasets, in a structure, up to the end of the shortest."""

    def __init__(self, components: Sequence[IterDataset], spec: nest.Spec):
        self._components = tuple(components)
        self._spec = spec

    @property
    def later_components(self) -> tuple[IterDataset, ...]:
        """All components but the first; see `epoch_of_component`."""
        return self._components[1:]

    @property
    def batch_size(self) -> int | None:
        sizes = {component.batch_size for component in self._components}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def is_batched(self) -> bool:
        sizes = {
            component.batch_size
            for component in self._components
            if component.batch_size
        }
        return len(sizes) <= 1 and all(
            component.is_batched for component in self._components
        )

    @property
    def needs_entropy(self) -> bool:
        return any(component.needs_entropy for component in self._components)

    def describe(self) -> str:
        return f"zip({self._spec}, {', '.join(p.describe() for p in self._components)})"

    def describe_source(self) -> str:
        return ", ".join(component.describe_source() for component in self._components)

    def replace_parents(self, change: Callable[[Any], Any]) -> IterDataset:
        return Zip([change(component) for component in self._components], self._spec)

    def rebatch(self, workers: int) -> IterDataset:
        return self.replace_parents(lambda component: component.rebatch(workers))

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        iterators = [
            component.iterate(epoch_of_component(epoch, i))
            for i, component in enumerate(self._components)
        ]
        return (nest.unflatten(self._spec, elements) for elements in zip(*iterators))

    def example(self) -> Any:
        return nest.unflatten(
            self._spec, [component.example() for component in self._components]
        )


class Enumerate(IterTransformation):
    """Pairs of a number, counted from `start`, and an element."""

    def __init__(self, parent: IterDataset, start: int):
        super().__init__(parent)
        self._start = start

    @property
    def batch_size(self) -> None:
        return None

    @property
    def is_batched(self) -> bool:
        return False  # a number has no rows

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        numbered = enumerate(self._parent.iterate(epoch), self._start)
        return ((np.int64(i), element) for i, element in numbered)

    def example(self) -> Any:
        return np.int64(self._start), self._parent.example()


class Unbatch(IterTransformation):
    """The rows of each element."""

    @property
    def batch_size(self) -> None:
        return None

    @property
    def is_batched(self) -> bool:
        return False

    def rebatch(self, workers: int) -> IterDataset:
        return self  # earlier batches are not the global batches to divide

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        for batch in map(as_element, self._parent.iterate(epoch)):
            leaves, spec = nest.flatten(batch)
            for i in range(count_rows(batch, "unbatch")):
                yield nest.unflatten(spec, [leaf[i] for leaf in leaves])

    def example(self) -> Any:
        def first(a: Any) -> Any:
            return a[0] if len(a) else np.zeros(a.shape[1:], a.dtype)

        batch = as_element(self._parent.example())
        count_rows(batch, "unbatch")
        return nest.map_leaves(first, batch)


class Filter(IterTransformation):
    """The elements for which a predicate is True."""

    def __init__(self, parent: IterDataset, predicate: Callable[..., Any]):
        super().__init__(parent)
        self._predicate = predicate

    def describe(self) -> str:
        return f"{self._parent.describe()}.filter"

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        return filter(self._is_wanted, self._parent.iterate(epoch))

    def _is_wanted(self, element: Any) -> bool:
        result = call_function(self._predicate, element)
        is_bool = isinstance(result, bool) or getattr(result, "dtype", None) == np.bool_
        if not is_bool or np.ndim(result):
            raise ArgumentTypeError(
                f"predicate must return one bool, not {validation.shown(result)}"
            )
        return bool(result)


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

    @property
    def batch_size(self) -> int | None:
        return self._example_dataset().batch_size

    @property
    def is_batched(self) -> bool:
        return self._example_dataset().is_batched

    @property
    def needs_entropy(self) -> bool:
        return True  # datasets of later elements may be shuffled

    # map_func is left out: functions cannot be compared between processes.
    def describe(self) -> str:
        arguments = f"{self._cycle_length}, {self._block_length}"
        return f"{self._parent.describe()}.interleave({arguments})"

    def rebatch(self, workers: int) -> IterDataset:
        return Interleave(
            self._parent,
            self._map_func,
            self._cycle_length,
            self._block_length,
            self._is_threaded,
            self._workers * workers,
        )

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
        dataset = self._make(element)
        elements = dataset.iterate(epoch_of_component(epoch, number + 1))
        return (
            read_ahead(elements, self._block_length) if self._is_threaded else elements
        )

    def _make(self, element: Any) -> IterDataset:
        made = call_function(self._map_func, element)
        dataset = getattr(made, "pipeline", None)
        if isinstance(dataset, MapDataset):
            dataset = MapToIterDataset(dataset)
        if not isinstance(dataset, IterDataset):
            raise ArgumentTypeError(
                "map_func of interleave must return a mpidist.Dataset, not "
                f"{validation.shown(made)}"
            )
        return dataset.rebatch(self._workers) if self._workers > 1 else dataset

    def _example_dataset(self) -> IterDataset:
        """Return the dataset of the first element; calls the function only once."""
        if self._first is None:
            self._first = self._make(self._parent.example())
        return self._first

    def example(self) -> Any:
        return self._example_dataset().example()
