"""Caches: elements that stay in memory once they were read.

`Cache` and `StreamCache` keep them in this process, `NodeCache` in rows that the ranks
of a node share. What comes before a cache always runs in the order of the first epoch.
Nothing here communicates.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpidist import nest, sharding
from mpidist.data import stream
from mpidist.data.pipeline import Pass, Pipeline, Step
from mpidist.data.sources import Positions, stack
from mpidist.data.stream import Stream
from mpidist.data.tables import (
    Cells,
    RowTable,
    copied,
    fields_of,
    row_spec,
    unkeepable,
)
from mpidist.errors import ArgumentError
from mpidist.storage import Storage, make_arrays

__all__ = ["Cache", "Memory", "NodeCache", "StreamCache", "rebuild"]


class Memory:
    """What this process keeps for a cache; copies of the cache share it.

    Args:
      order: the pass over what comes before; None takes that of the first use.
    """

    def __init__(self, order: Pass | None = None):
        self.order = order
        self.table: RowTable | Cells | None = None
        self._lock = threading.Lock()

    def freeze(self, order: Pass) -> Pass:
        """Return the pass that was used first, in the order of epoch 0."""
        with self._lock:
            if self.order is None:
                self.order = dataclasses.replace(order, epoch=0)
            return self.order

    def have(self, numbers: Positions) -> Any:
        """Return which elements are there."""
        table = self.table
        return np.zeros(numbers.size, bool) if table is None else table.have(numbers)

    def keep(self, example: Any, rows: int | None, keep: Callable[[Any], Any]) -> None:
        """Call `keep(table)`, with cells instead if it returns that rows do not fit.

        Args:
          example: stacked rows; a table for rows like these is made if there is none.
          rows: how many there can be; None for elements that are no rows.
          keep: keeps something in a table, and returns why it does not fit, if so.
        """
        with self._lock:
            if self.table is None:
                self.table = _make_table(example, rows)
            if keep(self.table) is not None:
                self.table = _as_cells(self.table, rows or 0)
                keep(self.table)


def _make_table(example: Any, rows: int | None) -> RowTable | Cells:
    if rows is None or unkeepable(example) is not None:
        return Cells()
    spec = row_spec(example)
    return RowTable(Storage(make_arrays(fields_of(spec, rows))), spec)


def _as_cells(table: RowTable | Cells, rows: int) -> Cells:
    """Return the elements of a table as cells, which may differ in shape and dtype."""
    cells, numbers = Cells(), np.arange(rows)
    there = numbers[table.have(numbers)]
    cells.keep_rows(there, table.rows(there))
    return cells


class Cache(Step):
    """The elements, kept in the memory of this process."""

    def __init__(self, parent: Pipeline, memory: Memory | None = None):
        super().__init__(parent)
        self.memory = memory or Memory()

    def describe(self) -> str:
        return f"{self._parent.describe()}.cache"

    def _after(self, parent: Pipeline) -> Pipeline:
        return Cache(parent)  # it has other elements

    @property
    def parent(self) -> Pipeline:
        """What is kept."""
        return self._parent

    def require_end(self) -> int:
        """Return the number of elements, or raise if there is no end of them."""
        length = self._parent.length
        if length is None:
            raise ArgumentError(
                "an infinite dataset cannot be cached; call cache() before repeat()"
            )
        return length

    def rows_in(self, order: Pass, i: int) -> int:
        return self._parent.rows_in(self._freeze(order), i)

    def element(self, order: Pass, i: int) -> Any:
        order, memory, number = self._freeze(order), self.memory, np.array([i])
        table = memory.table
        if table is not None and table.have(number)[0]:
            return table.element(i)
        element = self._parent.element(order, i)
        example = nest.map_leaves(_one_row, element)
        memory.keep(example, self._rows(), lambda table: table.keep_element(i, element))
        return element

    def elements(self, order: Pass, positions: Positions) -> Any:
        order, memory = self._freeze(order), self.memory
        missing = positions[~memory.have(positions)]
        if missing.size or not positions.size:
            found = self._parent.elements(order, missing)
            if missing.size:
                memory.keep(
                    found, self._rows(), lambda table: table.keep_rows(missing, found)
                )
            if missing.size == positions.size:
                return found
        assert memory.table is not None
        return memory.table.rows(positions)

    def part(self, order: Pass, i: int, replicas: int, replica: int) -> Any:
        mine = sharding.replica_slice(self.rows_in(order, i), replicas, replica)
        return nest.map_leaves(lambda a: a[mine], self.element(order, i))

    def example(self, order: Pass) -> Any:
        if self.memory.order is None:  # who asks for an example need not iterate
            return self._parent.example(dataclasses.replace(order, epoch=0))
        if self.require_end() == 0:
            return self._parent.example(self.memory.order)
        return self.element(order, 0)

    def _freeze(self, order: Pass) -> Pass:
        self.require_end()
        return self.memory.freeze(order)

    def _rows(self) -> int | None:
        """Return how many rows a table needs; batches are kept as they are."""
        return None if self.is_batched else self.length


class NodeCache(Step):
    """The elements as rows of a table, which all ranks of a node fill and read.

    Row j of batch i has the number i * batch size + j, so that each replica reads and
    keeps its own rows of a batch; without batches, rows are elements.

    Args:
      order: the pass over the parent.
      spec: a nest of the rows' TensorSpec.
      memory: of the cache in whose place this is.
      slices: in how many parts batches are read.
    """

    def __init__(
        self,
        parent: Pipeline,
        storage: Storage,
        order: Pass,
        spec: Any,
        memory: Memory,
        slices: int,
    ):
        super().__init__(parent)
        self._slices = slices
        self._table = RowTable(storage, spec)
        self._order = order
        self._spec = spec
        self._memory = memory  # which the storage lives as long as

    def describe(self) -> str:
        return f"{self._parent.describe()}.cache"

    def rows_in(self, order: Pass, i: int) -> int:
        return self._parent.rows_in(self._order, i)

    def element(self, order: Pass, i: int) -> Any:
        if self.is_batched:
            return self.part(order, i, 1, 0)
        return Pipeline.element(self, order, i)

    def elements(self, order: Pass, positions: Positions) -> Any:
        if not self.is_batched:
            return self._single_rows(positions)
        if positions.size == 0:
            return nest.map_leaves(lambda a: a[None][:0], self.example(order))
        return stack([self.element(order, int(i)) for i in positions])

    def part(self, order: Pass, i: int, replicas: int, replica: int) -> Any:
        size, rows = self.batch_size or 1, self.rows_in(order, i)
        mine = sharding.replica_slice(rows, replicas, replica)
        numbers = np.arange(i * size + mine.start, i * size + mine.stop)
        if numbers.size == 0:
            return self.empty_part(order)
        if self._table.have(numbers).all():
            return self._table.rows(numbers)
        # Nobody reads a part of it: those that find some of its rows read it too
        found = self._parent.part(self._order, i, replicas, replica)
        self.keep(numbers, found)
        return found

    def example(self, order: Pass) -> Any:
        if self.length == 0:
            return self._zeros(self.batch_size)
        if self.batch_size is None:
            return self.element(order, 0)
        size, rows = self.batch_size, self.part(order, 0, self._slices, 0)
        return nest.map_leaves(lambda a: np.repeat(a[:1], size, axis=0), rows)

    def empty_part(self, order: Pass) -> Any:
        return self._zeros(0)

    def keep(self, numbers: Positions, rows: Any) -> None:
        """Keep rows that were read before."""
        reason = self._table.keep_rows(numbers, rows)
        if reason is not None:
            raise ArgumentError(
                "cache() of a distributed dataset needs rows of one shape and dtype, "
                f"but {reason}"
            )

    def _single_rows(self, numbers: Positions) -> Any:
        missing = numbers[~self._table.have(numbers)]
        if missing.size:
            found = self._parent.elements(self._order, missing)
            self.keep(missing, found)
            if missing.size == numbers.size:
                return found
        return self._table.rows(numbers)

    def _zeros(self, rows: int | None) -> Any:
        first = () if rows is None else (rows,)
        return nest.map_leaves(
            lambda spec: np.zeros((*first, *spec.shape), spec.dtype), self._spec
        )


class StreamCache(stream.Step):
    """The elements, kept in the memory of this process after a complete pass."""

    def __init__(self, parent: Stream):
        super().__init__(parent)
        self._kept: list[Any] | None = None

    @property
    def parent(self) -> Stream:
        """What is kept."""
        return self._parent

    def describe(self) -> str:
        return f"{self._parent.describe()}.cache"

    def rebatch(self, workers: int) -> Stream:
        return StreamCache(self._parent.rebatch(workers))

    def iterate(self, order: Pass) -> Iterator[Any]:
        if self._kept is not None:
            yield from map(copied, self._kept)
            return
        kept = []
        for element in self._parent.iterate(dataclasses.replace(order, epoch=0)):
            kept.append(copied(element))
            yield element
        if self._kept is None:
            self._kept = kept


def rebuild(steps: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return the steps of a dataset with other caches.

    Args:
      steps: a Pipeline or a Stream.
      change: called with each Cache and StreamCache and what then comes before it,
        those that come first being called first; returns what takes the cache's place.
    """

    def again(parent: Any) -> Any:
        return rebuild(parent, change)

    if isinstance(steps, Cache | StreamCache):
        return change(steps, again(steps.parent))
    return steps.over(again)


def _one_row(leaf: Any) -> Any:
    return np.asarray(leaf)[None] if isinstance(leaf, np.ndarray | np.generic) else leaf
