"""A cache that the ranks of a node share. Nothing here communicates."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist import nest, sharding
from mpidist.data.caching import AnyCache, frozen
from mpidist.data.pipeline import Pass, Pipeline
from mpidist.data.sources import Positions, stack
from mpidist.data.tables import RowTable
from mpidist.errors import ArgumentError
from mpidist.memory.storage import Storage

__all__ = ["NodeCache"]


class NodeCache(AnyCache):
    """The elements as rows of a table, which all ranks of a node fill and read.

    Row j of batch i has the number i * batch size + j, so that each replica reads and
    keeps its own rows of a batch; without batches, rows are elements.

    Args:
      storage: its note is the pass over the parent, and a nest of the rows' TensorSpec.
      owner: of the storage.
      slices: in how many parts batches are read.
    """

    def __init__(self, parent: Pipeline, storage: Storage, owner: object, slices: int):
        super().__init__(parent)
        self._owner = owner
        self._slices = slices
        self.hold(storage)

    def hold(self, storage: Storage) -> None:
        """Keep rows in another storage."""
        self.storage = storage
        order, self._spec = storage.note
        self._held = order, RowTable(storage, self._spec)

    def element(self, order: Pass, i: int) -> Any:
        if self.is_batched:
            return self.part(order, i, 1, 0)
        return Pipeline.element(self, order, i)

    def elements(self, order: Pass, positions: Positions) -> Any:
        if self.is_batched:
            return self._stacked_batches(order, positions)
        held, table = self._held
        order = frozen(self._parent, order)
        if order != held:  # of an iterator from before another one's set_state
            return self._parent.elements(order, positions)
        missing = positions[~table.have(positions)]
        if missing.size:
            found = self._parent.elements(order, missing)
            _fill(table, missing, found)
            if missing.size == positions.size:
                return found
        return table.rows(positions)

    def part(self, order: Pass, i: int, replicas: int, replica: int) -> Any:
        held, table = self._held
        order = frozen(self._parent, order)
        size, rows = self.batch_size or 1, self.rows_in(order, i)
        mine = sharding.replica_slice(rows, replicas, replica)
        numbers = np.arange(i * size + mine.start, i * size + mine.stop)
        if numbers.size == 0:
            return self.empty_part(order)
        if order == held and table.have(numbers).all():
            return table.rows(numbers)
        # Nobody reads a part of it: those that find some of its rows read it too
        found = self._parent.part(order, i, replicas, replica)
        if order == held:
            _fill(table, numbers, found)
        return found

    def example(self, order: Pass) -> Any:
        size, order = self.batch_size, self._held[0]
        if self.length == 0:
            return self._zeros() if size is None else self._zeros(size)
        if size is None:
            return self.element(order, 0)
        rows = self.part(order, 0, self._slices, 0)
        return nest.map_leaves(lambda a: np.repeat(a[:1], size, axis=0), rows)

    def empty_part(self, order: Pass) -> Any:
        return self._zeros(0)

    def fill(self, rows: Any) -> None:
        """Keep the first rows, which were read before."""
        count = len(nest.flatten(rows)[0][0])
        _fill(self._held[1], np.arange(count), rows)

    def _stacked_batches(self, order: Pass, positions: Positions) -> Any:
        if positions.size == 0:
            return nest.map_leaves(lambda a: a[None][:0], self.example(order))
        return stack([self.element(order, int(i)) for i in positions])

    def _zeros(self, *first: int) -> Any:
        return nest.map_leaves(
            lambda spec: np.zeros((*first, *spec.shape), spec.dtype), self._spec
        )


def _fill(table: RowTable, numbers: Positions, rows: Any) -> None:
    reason = table.keep_rows(numbers, rows)
    if reason is not None:
        raise ArgumentError(
            "cache() of a distributed dataset needs rows of one shape and dtype, but "
            f"{reason}"
        )
