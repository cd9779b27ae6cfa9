"""The steps of a dataset: each answers "element i of epoch e" without counting.

So any replica can read just its rows of any batch. Steps are immutable, and nothing
here communicates. The steps that change the order are in `ordering`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist import nest, sharding
from mpidist.data.sources import Positions, RowSource, from_lists
from mpidist.errors import ArgumentError, ArgumentTypeError, DataError

__all__ = [
    "Batch",
    "Map",
    "Pass",
    "Pipeline",
    "Rows",
    "Step",
]


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass over a dataset.

    Args:
      epoch: how many passes came before; a shuffle gives another order in each.
      entropy: the seed of shuffles that were given none.
    """

    epoch: int = 0
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
        """How many rows an element has; None if it is not a batch."""
        raise NotImplementedError  # pragma: no cover

    @property
    def needs_entropy(self) -> bool:
        """Whether the order depends on `Pass.entropy`."""
        raise NotImplementedError  # pragma: no cover

    def describe(self) -> str:
        """Return what must be the same on every replica, as text."""
        raise NotImplementedError  # pragma: no cover

    def element(self, order: Pass, i: int) -> Any:
        """Return element `i`."""
        return nest.map_leaves(lambda a: a[0], self.elements(order, np.array([i])))

    def elements(self, order: Pass, positions: Positions) -> Any:
        """Return several elements, stacked along a new first dimension."""
        raise NotImplementedError  # pragma: no cover

    def part(self, order: Pass, i: int, replicas: int, replica: int) -> Any:
        """Return one replica's slice of batch `i`."""
        raise ArgumentError("the dataset is not batched; call batch() on it first")

    def example(self, order: Pass) -> Any:
        """Return some element: the first, or one of zeros where there is none."""
        raise NotImplementedError  # pragma: no cover

    def empty_part(self, order: Pass) -> Any:
        """Return a batch of no rows; reads a row when it is first called."""
        if self._empty is None:
            example = self.example(order)
            self._empty = nest.map_leaves(lambda a: np.asarray(a)[:0], example)
        return self._empty


class Rows(Pipeline):
    """The rows of a source, in their own order."""

    def __init__(self, source: RowSource):
        self._source = source

    @property
    def length(self) -> int:
        return len(self._source)

    @property
    def batch_size(self) -> None:
        return None

    @property
    def needs_entropy(self) -> bool:
        return False

    def describe(self) -> str:
        return self._source.describe()

    def elements(self, order: Pass, positions: Positions) -> Any:
        return self._source.read(positions)

    def example(self, order: Pass) -> Any:
        if self.length:
            return self.element(order, 0)
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

    def locate(self, order: Pass, positions: Positions) -> Positions:
        """Return the parent's numbers of the elements at `positions`."""
        raise NotImplementedError  # pragma: no cover

    def locate_one(self, order: Pass, i: int) -> tuple[Pass, int]:
        """Return the parent's pass and number of element `i`."""
        return order, int(self.locate(order, np.array([i]))[0])

    def element(self, order: Pass, i: int) -> Any:
        return self._parent.element(*self.locate_one(order, i))

    def elements(self, order: Pass, positions: Positions) -> Any:
        return self._parent.elements(order, self.locate(order, positions))

    def part(self, order: Pass, i: int, replicas: int, replica: int) -> Any:
        order, i = self.locate_one(order, i)
        return self._parent.part(order, i, replicas, replica)

    def example(self, order: Pass) -> Any:
        return self._parent.example(order)


class Map(Step):
    """A function of each element."""

    def __init__(self, parent: Pipeline, fn: Callable[..., Any]):
        super().__init__(parent)
        if not callable(fn):
            raise ArgumentTypeError(f"map_func must be callable, not {fn!r}")
        self._fn = fn
        self._none: Any = None

    def describe(self) -> str:
        return f"{self._parent.describe()}.map"

    def _call(self, element: Any) -> Any:
        arguments = element if type(element) is tuple else (element,)
        try:
            return from_lists(self._fn(*arguments))
        except StopIteration as error:  # it would end an iteration, silently
            raise RuntimeError("a mapped function raised StopIteration") from error

    def _call_by_row(self, batch: Any) -> Any:
        """Return the function of some rows, which must give as many rows."""
        rows = len(nest.flatten(batch)[0][0])
        result = self._call(batch)
        for leaf in nest.flatten(result)[0]:
            if np.shape(leaf)[:1] != (rows,):
                raise ArgumentError(
                    f"a function mapped over batches got {rows} rows and returned an "
                    f"array of shape {np.shape(leaf)}; in a distributed dataset "
                    "it must return one row per row"
                )
        return result

    def element(self, order: Pass, i: int) -> Any:
        return self._call(self._parent.element(order, i))

    def elements(self, order: Pass, positions: Positions) -> Any:
        if positions.size == 0:
            if self._none is None:
                example = self.example(order)
                self._none = nest.map_leaves(lambda a: np.stack([a])[:0], example)
            return self._none
        inputs, spec = nest.flatten(self._parent.elements(order, positions))
        rows = zip(*inputs, strict=True)
        return _stack([self._call(nest.unflatten(spec, row)) for row in rows])

    def part(self, order: Pass, i: int, replicas: int, replica: int) -> Any:
        given = self._parent.part(order, i, replicas, replica)
        if len(nest.flatten(given)[0][0]) == 0:
            return self.empty_part(order)
        return self._call_by_row(given)

    def empty_part(self, order: Pass) -> Any:
        # The function may not know what to do with no rows, so it gets some
        if self._empty is None:
            result = self._call_by_row(self._parent.example(order))
            self._empty = nest.map_leaves(lambda a: np.asarray(a)[:0], result)
        return self._empty

    def example(self, order: Pass) -> Any:
        return self._call(self._parent.example(order))


class Batch(Step):
    """Runs of elements, stacked."""

    def __init__(self, parent: Pipeline, batch_size: int, drop_remainder: bool):
        super().__init__(parent)
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder

    @property
    def length(self) -> int | None:
        rows = self._parent.length
        if rows is None:
            return None
        return sharding.batch_count(rows, self._batch_size, self._drop_remainder)

    @property
    def batch_size(self) -> int:
        return self._batch_size

    def describe(self) -> str:
        arguments = f"{self._batch_size}, drop_remainder={self._drop_remainder}"
        return f"{self._parent.describe()}.batch({arguments})"

    def element(self, order: Pass, i: int) -> Any:
        return self.part(order, i, 1, 0)

    def elements(self, order: Pass, positions: Positions) -> Any:
        if positions.size == 0:
            example = self.example(order)
            return nest.map_leaves(lambda a: a[None][:0], example)
        return _stack([self.element(order, int(i)) for i in positions])

    def part(self, order: Pass, i: int, replicas: int, replica: int) -> Any:
        start, stop = i * self._batch_size, (i + 1) * self._batch_size
        if (rows := self._parent.length) is not None:
            stop = min(stop, rows)
        mine = sharding.replica_slice(stop - start, replicas, replica)
        positions = np.arange(start + mine.start, start + mine.stop)
        return self._parent.elements(order, positions)

    def example(self, order: Pass) -> Any:
        row = self._parent.example(order)
        return nest.map_leaves(lambda a: np.stack([a] * self._batch_size), row)


def _stack(elements: Sequence[Any]) -> Any:
    """Return a nest of arrays that hold the elements along a new first dimension."""
    try:
        return nest.map_leaves(lambda *xs: np.stack(xs), *elements)
    except ValueError as error:
        raise DataError(f"elements that differ cannot make a batch: {error}") from error
