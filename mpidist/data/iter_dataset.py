"""Iterable datasets, whose elements can only be read in order: base and sources.

Each transformation stands beside that of map-style datasets. Nothing communicates.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Set
from typing import Any

from mpidist.data.elements import as_element, spec_of, take_element
from mpidist.data.map_dataset import (
    Epoch,
    MapDataset,
    OpenSources,
    Steps,
    Transformation,
)
from mpidist.errors import ArgumentError, ArgumentTypeError, DataError
from mpidist.util import nest, validation
from mpidist.util.threads import call_ahead
from mpidist.values import DistributedValues

UNKNOWN_CARDINALITY = -2
_END = object()


class IterDataset(Steps):
    """A dataset whose elements can only be read in order."""

    cardinality = UNKNOWN_CARDINALITY
    may_be_scalars = False  # v1 iterators accept scalars in place of batches
    is_mapped = False  # what matters for rows with numbers only

    @property
    def members(self) -> tuple[Any, ...]:
        """The members of enums, as of a `MapDataset`; empty if unknown."""
        return self.parents[0].members if len(self.parents) == 1 else ()

    @abc.abstractmethod
    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        """Yield all elements."""

    def element_spec(self) -> Any:
        return spec_of(as_element(self.example(Epoch())), self.is_batched)


class IterStep(IterDataset):
    """A transformation of map-style datasets, of parents that are iterable."""

    def __init__(self, step: MapDataset):
        self._step = step
        self.seed, self.keeps_first_epoch = step.seed, step.keeps_first_epoch

    @property
    def batch_size(self) -> int | None:
        return self._step.batch_size

    @property
    def is_batched(self) -> bool:
        return self._step.is_batched

    @property
    def parents(self) -> tuple[Any, ...]:
        return self._step.parents

    @property
    def last(self) -> MapDataset:
        return self._step

    @property
    def file_count(self) -> int:
        return self._step.file_count

    @property
    def members(self) -> tuple[Any, ...]:
        return self._step.members if len(self.parents) == 1 else ()

    def describe(self) -> str:
        return self._step.describe_in_order()

    def replace_parents(self, change: Callable[[Any], Any]) -> IterDataset:
        return IterStep(self._step.replace_parents(change))

    def rebatch(self, workers: int) -> IterDataset:
        return IterStep(self._step.rebatch(workers))

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        return self._step.iterate(epoch, *self.parents)

    def example(self, epoch: Epoch) -> Any:
        return self._step.example(epoch)

    def element_spec(self) -> Any:
        return self._step.element_spec()


class GeneratorDataset(IterDataset):
    """The elements of an iterable, or of the iterable that a function returns.

    Args:
      generator: an iterable that can be iterated over repeatedly, or a function that
        returns an iterable.
      is_batched: whether it yields batches.
      may_be_scalars: whether it may yield scalars in place of batches.
    """

    def __init__(
        self,
        generator: Callable[[], Iterable[Any]] | Iterable[Any],
        is_batched: bool,
        may_be_scalars: bool = False,
    ):
        _require_source(generator)
        self.may_be_scalars = may_be_scalars
        self._generator = generator
        self._is_batched = is_batched
        # To recognise a function that returns the same, partly consumed iterator twice.
        self._last: Iterator[Any] | None = None

    @property
    def batch_size(self) -> None:
        return None

    @property
    def is_batched(self) -> bool:
        return self._is_batched

    def describe(self) -> str:
        return "from_generator"

    def replace_parents(self, change: Callable[[Any], Any]) -> IterDataset:
        return self

    def describe_source(self) -> str:
        return self.describe()

    def iterate(self, epoch: Epoch) -> Generator[Any, None, None]:
        elements = self._start()
        try:
            # Only `holder` refers to the element, so that `take_element` can count
            # references: arrays that nothing else refers to need no copy
            while (holder := [next(elements, _END)])[0] is not _END:
                yield take_element(holder)
        finally:
            # Closed now rather than by the collector: it may hold a file open.
            if isinstance(elements, types.GeneratorType):
                elements.close()

    def example(self, epoch: Epoch) -> Any:
        # `closing`, because only its first element is wanted.
        with contextlib.closing(self.iterate(epoch)) as elements:
            for element in elements:
                return element
        raise DataError(
            "the generator yields no element, so the spec of its elements is unknown"
        )

    def _start(self) -> Iterator[Any]:
        source = self._generator
        elements = iter(source() if callable(source) else source)
        if elements is self._last:
            raise ArgumentError(
                f"the function {source!r} returned the same iterator as before, so "
                "elements would be lost; return a new one each time"
            )
        self._last = elements
        return elements


class MapToIterDataset(IterDataset):
    """The elements of a map-style dataset, in order."""

    def __init__(self, pipeline: MapDataset):
        self._pipeline = pipeline

    @property
    def batch_size(self) -> int | None:
        return self._pipeline.batch_size

    @property
    def parents(self) -> tuple[MapDataset]:
        return (self._pipeline,)

    def describe(self) -> str:
        return self._pipeline.describe()

    def replace_parents(self, change: Callable[[Any], Any]) -> IterDataset:
        return MapToIterDataset(change(self._pipeline))

    def iterate(self, epoch: Epoch, start: int = 0) -> Iterator[Any]:
        """Yield all elements from index `start` on."""
        length = self._pipeline.length
        numbers = itertools.count(start) if length is None else range(start, length)
        open_sources, threads = (
            OpenSources(self._pipeline),
            self._pipeline.parallel_calls,
        )

        def read(i: int) -> Any:
            return open_sources.run(lambda: self._pipeline.element(epoch, i))

        try:
            if threads > 1:
                yield from call_ahead(read, numbers, threads)
            else:
                yield from map(read, numbers)
        except BaseException:  # including GeneratorExit
            open_sources.close()
            raise
        open_sources.end()

    def example(self, epoch: Epoch) -> Any:
        return self._pipeline.example(epoch)


class IterTransformation(Transformation, IterDataset):
    """A transformation of elements that come in order."""

    _parent: IterDataset


def count_rows(batch: Any, call: str = "") -> int:
    """Return the number of rows of a batch: the first dimension of its arrays.

    Raises:
      DataError: these differ, or an array has none; names `call` if that is given.
    """
    shapes = [leaf.shape for leaf in nest.flatten(batch)[0]]
    if not shapes or any(s[:1] != shapes[0][:1] or not s for s in shapes):
        raise DataError(
            f"{call and f'{call}: '}a batch needs arrays of equal first dimension, not "
            f"of shapes {', '.join(map(str, shapes)) or 'none'}; if the generator "
            "yields single elements, use Dataset.from_generator(...).batch(...)"
        )
    return int(shapes[0][0])


def _require_source(generator: Any) -> None:
    if callable(generator):
        return
    # The iteration order of a set differs between ranks
    wrong = str, bytes, Mapping, Set, DistributedValues
    is_many = isinstance(generator, Iterable) and getattr(generator, "ndim", 1) > 0
    if not is_many or isinstance(generator, wrong):
        raise ArgumentTypeError(
            "generator must be a function that returns an iterable, not "
            f"{validation.shown(generator)}"
        )
    if isinstance(generator, Iterator):
        raise ArgumentError(
            f"{generator!r} can be iterated over only once; pass the function that "
            "creates it, so that every epoch gets a new one"
        )
