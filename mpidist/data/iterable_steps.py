"""The steps of a dataset whose elements can only be had one after the other.

They have the names and arguments of the steps in `batching` and `ordering`, which give
any element at once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpidist.data import sharding
from mpidist.data.batching import call_mapped
from mpidist.data.iterable import Step, Stream
from mpidist.data.map_dataset import Pass
from mpidist.data.ordering import lap_pass
from mpidist.data.sources import as_element, stack
from mpidist.data.spec import batch_of, require_like, spec_of
from mpidist.errors import ArgumentError, DataError
from mpidist.util.threads import call_ahead

__all__ = ["Batch", "Concatenate", "Map", "Repeat", "Shard", "Shuffle", "Window"]


class Map(Step):
    """A function of each element, in some number of threads."""

    def __init__(self, parent: Stream, fn: Callable[..., Any], threads: int = 1):
        super().__init__(parent)
        self._fn = fn
        self._threads = threads

    def describe(self) -> str:
        return f"{self._parent.describe()}.map"

    def iterate(self, order: Pass) -> Iterator[Any]:
        elements = self._parent.iterate(order)
        call = functools.partial(call_mapped, self._fn)
        if self._threads > 1:
            yield from call_ahead(call, elements, self._threads)
        else:
            yield from map(call, elements)

    def example(self) -> Any:
        return call_mapped(self._fn, self._parent.example())


class Batch(Step):
    """Runs of elements, stacked."""

    def __init__(self, parent: Stream, batch_size: int, drop_remainder: bool):
        super().__init__(parent)
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def is_batched(self) -> bool:
        return True

    def rebatch(self, workers: int) -> Stream:
        share = -(-self._batch_size // workers)
        return Batch(self._parent, share, self._drop_remainder)

    def iterate(self, order: Pass) -> Iterator[Any]:
        elements = self._parent.iterate(order)
        while rows := list(itertools.islice(elements, self._batch_size)):
            if len(rows) == self._batch_size or not self._drop_remainder:
                yield stack(rows)

    def example(self) -> Any:
        return stack([self._parent.example()] * self._batch_size)

    def element_spec(self) -> Any:
        return batch_of(self._parent.element_spec())


class Shuffle(Step):
    """All elements, each drawn at random from a buffer of the next ones."""

    def __init__(
        self,
        parent: Stream,
        buffer_size: int | None,
        seed: int | None,
        reshuffle: bool,
        window_chunks: int | None = None,
    ):
        super().__init__(parent)
        if buffer_size is None:
            raise ArgumentError(
                "shuffle needs a buffer_size here: the elements of a generator can "
                "only be had one after the other"
            )
        self._buffer_size = buffer_size
        self._seed = seed
        self._reshuffle = reshuffle

    @property
    def needs_entropy(self) -> bool:
        return self._seed is None or self._parent.needs_entropy

    def iterate(self, order: Pass) -> Iterator[Any]:
        seed = order.entropy if self._seed is None else self._seed
        epoch = order.epoch if self._reshuffle else 0
        random = np.random.default_rng([sharding.to_word(seed), epoch])
        elements = self._parent.iterate(order)
        buffer = list(itertools.islice(elements, self._buffer_size))
        for element in elements:
            i = int(random.integers(len(buffer)))
            drawn, buffer[i] = buffer[i], element
            yield drawn
        while buffer:
            i = int(random.integers(len(buffer)))
            buffer[i], buffer[-1] = buffer[-1], buffer[i]
            yield buffer.pop()


class Window(Step):
    """A run of elements: take and skip."""

    def __init__(self, parent: Stream, start: int, count: int | None):
        super().__init__(parent)
        self._start = start
        self._count = count

    def iterate(self, order: Pass) -> Iterator[Any]:
        stop = None if self._count is None else self._start + self._count
        return itertools.islice(self._parent.iterate(order), self._start, stop)


class Shard(Step):
    """Every n-th element."""

    def __init__(self, parent: Stream, num_shards: int, index: int):
        super().__init__(parent)
        self._num_shards = num_shards
        self._index = index

    def iterate(self, order: Pass) -> Iterator[Any]:
        elements = self._parent.iterate(order)
        return itertools.islice(elements, self._index, None, self._num_shards)


class Repeat(Step):
    """The elements several times, or without end; each lap is an epoch of its own."""

    def __init__(self, parent: Stream, count: int | None):
        super().__init__(parent)
        self._count = count

    def iterate(self, order: Pass) -> Iterator[Any]:
        laps = itertools.count() if self._count is None else range(self._count)
        for lap in laps:
            is_empty = True
            for element in self._parent.iterate(lap_pass(order, self._count, lap)):
                is_empty = False
                yield element
            if is_empty and self._count is None:
                return  # an endless repetition of nothing


class Concatenate(Stream):
    """The elements of one stream, then those of another."""

    def __init__(self, first: Stream, second: Stream):
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

    def describe(self) -> str:
        return f"{self._first.describe()}.concatenate({self._second.describe()})"

    def over(self, change: Callable[[Any], Any]) -> Stream:
        return Concatenate(change(self._first), change(self._second))

    def describe_source(self) -> str:
        return f"{self._first.describe_source()}, {self._second.describe_source()}"

    def rebatch(self, workers: int) -> Stream:
        return Concatenate(self._first.rebatch(workers), self._second.rebatch(workers))

    def iterate(self, order: Pass) -> Iterator[Any]:
        spec = None
        first, second = self._first.iterate(order), self._second.iterate(order)
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
