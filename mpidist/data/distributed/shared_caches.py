"""Caches of distributed datasets: rows in memory that the ranks of a node share."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.data.caching import (
    Cache,
    CacheBase,
    IterCache,
    RowTable,
    fields_of,
    first_epoch,
    replace_caches,
    row_spec,
    why_not_storable,
)
from mpidist.data.elements import one_dtype, split, stack
from mpidist.data.iter_dataset import IterDataset
from mpidist.data.map_dataset import Epoch, MapDataset, OpenSources, drawn_seeds, walk
from mpidist.data.sources import Positions
from mpidist.errors import ArgumentError
from mpidist.util import nest
from mpidist.util.buffers import Storage
from mpidist.util.shares import WHOLE, BatchShare

if TYPE_CHECKING:
    from mpidist.comm.replica_group import ReplicaGroup

_CALL = "cache"


def require_shareable(steps: MapDataset | IterDataset) -> None:
    """Raise if a cache cannot be shared.

    Raises:
      ArgumentError: its number of elements is unknown.
    """
    for step in walk(steps):
        if isinstance(step, IterCache):
            raise ArgumentError(
                "cache() of a generator's dataset cannot be divided over replicas, "
                "because the number of its elements is unknown; use a dataset of "
                "arrays or files, or cache in distribute_datasets_from_function"
            )
        if isinstance(step, Cache):
            step.require_end()


def share(
    extended: ReplicaGroup,
    steps: MapDataset | IterDataset,
    epoch: Epoch,
    first: BatchShare,
) -> MapDataset | IterDataset:
    """Return the dataset with caches that the ranks of a node share. Collective.

    A cache that was distributed by the same strategy before keeps its rows, unless
    their order has changed since.

    Args:
      extended: of the strategy.
      steps: the dataset; shareable, and equal on all ranks.
      epoch: of which the first is cached.
      first: the share of replica 0, in whose slices batches are read.

    Raises, on all ranks:
      ArgumentError: rows have no fixed size, or memory does not suffice.
      Any error of reading the first row.
    """

    def change(cache: Cache, parent: MapDataset) -> NodeCache:
        owner, cached = cache.memory, first_epoch(drawn_seeds(parent), epoch)
        # The newest storage of this owner, if all ranks still have it.
        storage = extended.node_memory.find(owner)
        if storage is None or storage.note[0] != cached:
            return _make(extended, parent, cached, owner, first)
        return NodeCache(parent, storage, owner, first)

    shared: MapDataset | IterDataset = replace_caches(steps, change)
    return shared


def reorder(
    extended: ReplicaGroup, steps: MapDataset | IterDataset, epoch: Epoch
) -> None:
    """Empty the shared caches whose rows have another order now. Collective.

    Args:
      extended: of the strategy.
      steps: dataset returned by `share`.
      epoch: from which iterators will continue.
    """
    for cache in _shared_caches(steps):
        changed = cache.first_epoch(epoch)
        before, spec = cache.storage.note
        # All ranks see the same state, so all empty the same caches.
        if before != changed:
            # Another dataset of this cache, or one beside it in a zip, may have emptied
            # it before
            newest = extended.node_memory.find(cache.owner) or cache.storage
            if newest.note[0] != changed:
                newest = extended.node_memory.empty(newest, (changed, spec))
            cache.hold(newest)


def has_caches(steps: MapDataset | IterDataset) -> bool:
    """Return whether a dataset that `share` returned has any."""
    return bool(_shared_caches(steps))


def _shared_caches(steps: MapDataset | IterDataset) -> list[NodeCache]:
    return [step for step in walk(steps) if isinstance(step, NodeCache)]


def _make(
    extended: ReplicaGroup,
    parent: MapDataset,
    epoch: Epoch,
    owner: object,
    first: BatchShare,
) -> NodeCache:
    """Return a new cache of an epoch, filled with the first rows. Collective."""
    consensus = extended.consensus
    # Rows that were read to learn their spec are stored, not read again.
    first_rows: list[Any] = []

    def read_spec() -> Any:
        first_rows.append(_first_rows(parent, epoch, first))
        return row_spec(first_rows[0])

    def make() -> NodeCache:
        # Rank 0 reads rows and sends their spec: the others may not see the file yet.
        # All ranks read if it cannot be pickled.
        pickled = consensus.root_only(_CALL, lambda: _pickle(read_spec()))
        spec = pickle.loads(pickled) if pickled else read_spec()
        assert parent.length is not None
        # Room for whole batches: row j of batch i lies at i * batch_size + j
        fields = fields_of(spec, parent.length * (parent.batch_size or 1))
        storage = extended.node_memory.allocate(owner, fields, (epoch, spec))
        cache = NodeCache(parent, storage, owner, first)
        for rows in first_rows[:1]:  # on the ranks that have read them
            cache.fill(rows)
        return cache

    # Ranks agree once rows are filled in, so that none reads these again
    return consensus.run(_CALL, make)


def _first_rows(parent: MapDataset, epoch: Epoch, first: BatchShare) -> Any:

    def read() -> Any:
        # What replica 0 reads first, which shows dtypes and shapes of all rows.
        length = parent.length or 0
        if not parent.is_batched:
            return parent.elements(epoch, np.arange(min(1, length)))
        return (
            parent.local_batch(epoch, 0, first) if length else parent.empty_batch(epoch)
        )

    open_sources = OpenSources(parent)
    try:
        with one_dtype():
            rows = open_sources.run(read)
    finally:
        open_sources.close()
    reason = why_not_storable(rows)
    if reason is not None:
        raise ArgumentError(
            "cache() of a distributed dataset needs numbers, bools or strings of "
            f"fixed length in its elements, but {reason}; convert it with map(), or "
            "omit cache()"
        )
    return rows


def _pickle(spec: Any) -> bytes | None:
    try:
        pickled = pickle.dumps(spec)
        pickle.loads(pickled)
    except Exception:  # say, a local class, or whatever a class raises
        return None
    return pickled


class NodeCache(CacheBase):
    """Elements as rows of a table that all ranks of a node fill and read.

    Row j of batch i has the index i * batch size + j, so that each replica reads and
    stores its own rows of a batch. Without batches, rows are elements.

    Args:
      storage: its note is the parent's epoch, and a nest of the rows' TensorSpec.
      owner: the storage is freed after this object.
      first: the share of replica 0, in whose slices batches are read.
    """

    def __init__(
        self, parent: MapDataset, storage: Storage, owner: object, first: BatchShare
    ):
        super().__init__(parent)
        self.owner = owner
        self._first = first
        self.hold(storage)

    def hold(self, storage: Storage) -> None:
        """Use another storage."""
        self.storage = storage
        epoch, self._spec = storage.note
        self._held = epoch, RowTable(storage, self._spec)

    def element(self, epoch: Epoch, i: int) -> Any:
        if self.is_batched:
            return self.local_batch(epoch, i, WHOLE)
        return MapDataset.element(self, epoch, i)

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        if self.is_batched:
            return self._stacked_batches(epoch, positions)
        # The held epoch may change by set_state in another iterator: take both at once.
        held, table = self._held
        epoch = self.first_epoch(epoch)
        if epoch != held:  # set_state of another iterator has changed the cached epoch
            return self._parent.elements(epoch, positions)
        if table.is_full:
            return table.rows(positions)
        missing = positions[~table.contains(positions)]
        if missing.size:
            read = self._parent.elements(epoch, missing)
            _fill(table, missing, read)
            if missing.size == positions.size:
                return read
        return table.rows(positions)

    def element_list(self, epoch: Epoch, positions: Positions) -> list[Any]:
        return split(self.elements(epoch, positions))

    def local_batch(self, epoch: Epoch, i: int, share: BatchShare) -> Any:
        held, table = self._held
        epoch = self.first_epoch(epoch)
        # `batch_size` for all batches, also the short last one, so that places are
        # fixed.
        size, rows = self.batch_size or 1, self.batch_rows(epoch, i)
        part = share.of(rows)
        numbers = np.arange(i * size + part.start, i * size + part.stop)
        if numbers.size == 0:
            return self.empty_batch(epoch)
        # Another epoch was cached by now: read without storing.
        if epoch == held and table.contains(numbers).all():
            return table.rows(numbers)
        # Slices are read whole, even if some of their rows are stored
        read = self._parent.local_batch(epoch, i, share)
        if epoch == held:
            _fill(table, numbers, read)
        return read

    def example(self, epoch: Epoch) -> Any:
        size, epoch = self.batch_size, self._held[0]
        if self.length == 0:
            return self._zeros() if size is None else self._zeros(size)
        if size is None:
            return self.element(epoch, 0)
        rows = self.local_batch(epoch, 0, self._first)
        return nest.map_leaves(lambda a: np.repeat(a[:1], size, axis=0), rows)

    def empty_batch(self, epoch: Epoch) -> Any:
        return self._zeros(0)

    def fill(self, rows: Any) -> None:
        """Store the first rows, which were already read."""
        count = len(nest.flatten(rows)[0][0])
        _fill(self._held[1], np.arange(count), rows)

    def _stacked_batches(self, epoch: Epoch, positions: Positions) -> Any:
        if positions.size == 0:
            return nest.map_leaves(lambda a: a[None][:0], self.example(epoch))
        return stack([self.element(epoch, int(i)) for i in positions])

    def _zeros(self, *first: int) -> Any:
        return nest.map_leaves(
            lambda spec: np.zeros((*first, *spec.shape), spec.dtype), self._spec
        )


def _fill(table: RowTable, numbers: Positions, rows: Any) -> None:
    reason = table.store_rows(numbers, rows)
    if reason is not None:
        raise ArgumentError(
            "cache() of a distributed dataset needs rows of one shape and dtype, but "
            f"{reason}"
        )
