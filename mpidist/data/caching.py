"""Caches of elements in the memory of this process.

Transformations before a cache always run as in the first epoch. Nothing here
communicates.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.data.elements import TensorSpec, is_plain, one_dtype, split, stack
from mpidist.data.iter_dataset import IterDataset, IterTransformation
from mpidist.data.map_dataset import Epoch, MapDataset, MapTransformation, drawn_seeds
from mpidist.data.shuffling import Seed
from mpidist.data.sources import Positions, take_rows
from mpidist.errors import ArgumentError, MpidistError
from mpidist.hdf5.chunks import ChunkLayout
from mpidist.util import nest
from mpidist.util.buffers import Buffers, Field, Storage, make_arrays
from mpidist.util.dtypes import traits
from mpidist.util.shares import BatchShare


class CachedEpoch:
    """The elements of one epoch before a cache that this process keeps."""

    def __init__(self, epoch: Epoch):
        self.epoch = epoch
        self.table: RowTable | ElementCells | None = None
        # Threads that read ahead store rows at the same time.
        self._lock = threading.Lock()

    def contains(self, numbers: Positions) -> Any:
        """Return which elements are cached."""
        # Read once: another thread may replace the table by cells meanwhile.
        table = self.table
        return (
            np.zeros(numbers.size, bool) if table is None else table.contains(numbers)
        )

    def store(
        self, example: Any, rows: int | None, store: Callable[[Any], Any]
    ) -> None:
        """Call `store(table)`; if the rows do not fit a table, change to cells.

        Args:
          example: stacked rows, like which the table is made at the first call.
          rows: capacity of the table; None for elements that are not rows.
          store: stores rows in the table; returns the reason if they do not fit.
        """
        # The table is replaced under the lock, so no thread stores in the old one.
        with self._lock:
            if self.table is None:
                self.table = _make_table(example, rows)
            # The element has another shape or dtype: cells hold any.
            if store(self.table) is not None:
                self.table = _as_cells(self.table, rows or 0)
                store(self.table)

    def store_each(
        self, numbers: Positions, elements: Sequence[Any], rows: int
    ) -> None:
        """Store elements that fit no table of `rows` rows."""
        with self._lock:
            if not isinstance(self.table, ElementCells):
                table = self.table
                self.table = ElementCells() if table is None else _as_cells(table, rows)
            for number, element in zip(numbers.tolist(), elements, strict=True):
                self.table.store_element(number, element)


class CacheMemory:
    """The memory of a cache in this process, shared by all datasets made from it.

    It holds one epoch; an epoch with another seed replaces it.
    """

    def __init__(self) -> None:
        self.kept: CachedEpoch | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheMemory, ()  # a copy starts empty

    def of(self, epoch: Epoch) -> CachedEpoch:
        """Return the cached elements of an epoch, initially none."""
        with self._lock:
            # Another order means other elements under the same numbers: forget the old
            # epoch.
            if self.kept is None or self.kept.epoch != epoch:
                self.kept = CachedEpoch(epoch)
            return self.kept


def first_epoch(seeds: Iterable[Seed], epoch: Epoch) -> Epoch:
    """Return the epoch in which transformations before a cache run: the first.

    Args:
      seeds: those that shuffles before the cache have drawn.
      epoch: the caller's, which may have other seeds as well.
    """
    return Epoch(0, {seed: epoch.number_of(seed) for seed in seeds})


def _make_table(example: Any, rows: int | None) -> RowTable | ElementCells:
    if rows is None or why_not_storable(example) is not None:
        return ElementCells()
    spec = row_spec(example)
    try:
        arrays = make_arrays(fields_of(spec, rows))
    except MemoryError:  # cells take memory only for rows that are used
        return ElementCells()
    return RowTable(Storage(arrays), spec)


def _as_cells(table: RowTable | ElementCells, rows: int) -> ElementCells:
    """Return the elements of a table as cells, which may differ in shape and dtype."""
    cells, numbers = ElementCells(), np.arange(rows)
    # Rows that were never stored must not be read as zeros.
    there = numbers[table.contains(numbers)]
    cells.store_rows(there, table.rows(there))
    return cells


class CacheBase(MapTransformation):
    """The base of caches, which keep the order of elements."""

    keeps_first_epoch = True

    def __init__(self, parent: MapDataset):
        super().__init__(parent)
        self._seeds = tuple(drawn_seeds(parent))

    def first_epoch(self, epoch: Epoch) -> Epoch:
        """Return the epoch in which earlier transformations run: the first."""
        return first_epoch(self._seeds, epoch)

    def describe(self) -> str:
        return f"{self._parent.describe()}.cache"

    def chunk_layout(self) -> ChunkLayout | None:
        return self._parent.chunk_layout()

    def batch_rows(self, epoch: Epoch, i: int) -> int:
        return self._parent.batch_rows(self.first_epoch(epoch), i)

    @property
    def parent(self) -> MapDataset:
        """The dataset that is cached."""
        return self._parent


class Cache(CacheBase):
    """The elements, kept in the memory of this process."""

    def __init__(self, parent: MapDataset):
        super().__init__(parent)
        self.memory = CacheMemory()

    def replace_parents(self, change: Callable[[Any], Any]) -> MapDataset:
        return Cache(change(self._parent))  # with memory of its own

    @property
    def has_even_batches(self) -> bool:
        return self._parent.has_even_batches

    def unbatched(self) -> MapDataset | None:
        rows = self._parent.unbatched()
        # `rows and`: None, an unknown number of rows, stays None.
        return rows and Cache(rows)

    def require_end(self) -> None:
        """Raise if the dataset is endless."""
        if self._parent.length is None:
            raise ArgumentError(
                "an infinite dataset cannot be cached; call cache() before repeat()"
            )

    def element(self, epoch: Epoch, i: int) -> Any:
        kept, number = self._kept(epoch), np.array([i])
        if kept.table is not None and kept.contains(number)[0]:
            return kept.table.element(i)
        element = self._parent.element(kept.epoch, i)
        example = nest.map_leaves(_one_row, element)
        kept.store(example, self._rows(), lambda table: table.store_element(i, element))
        return element

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        kept = self._kept(epoch)
        if positions.size == 0:
            return self._parent.elements(kept.epoch, positions)
        missing, read = self._fill(kept, positions)
        # Return what was read instead of copying it out of the table again.
        if read is not None and missing == positions.size:
            return read
        assert kept.table is not None
        return kept.table.rows(positions)

    def element_list(self, epoch: Epoch, positions: Positions) -> list[Any]:
        kept = self._kept(epoch)
        if positions.size == 0:
            return []
        self._fill(kept, positions)
        assert kept.table is not None
        return kept.table.element_list(positions)

    def _fill(self, kept: CachedEpoch, positions: Positions) -> tuple[int, Any]:
        """Read the elements that this process has not read before, and store them.

        Returns:
          Their number, and the elements, stacked; None if they cannot be stacked.
        """
        missing = positions[~kept.contains(positions)]
        if missing.size == 0:
            return 0, None
        if not self._parent.is_mapped:
            read = self._parent.elements(kept.epoch, missing)
        else:
            elements = self._parent.element_list(kept.epoch, missing)
            try:
                with one_dtype():
                    read = stack(elements)
            except MpidistError:  # raised by `batch`, unless a map comes before it
                kept.store_each(missing, elements, self._rows() or 0)
                return missing.size, None
        kept.store(read, self._rows(), lambda table: table.store_rows(missing, read))
        return missing.size, read

    def local_batch(self, epoch: Epoch, i: int, share: BatchShare) -> Any:
        part = share.of(self.batch_rows(epoch, i))
        return nest.map_leaves(lambda a: a[part], self.element(epoch, i))

    def example(self, epoch: Epoch) -> Any:
        epoch, kept = self.first_epoch(epoch), self.memory.kept
        # The caller may not know the seeds yet; do not replace a cached epoch
        if kept is None or kept.epoch != epoch or not self.length:
            return self._parent.example(epoch)
        return self.element(epoch, 0)

    def _kept(self, epoch: Epoch) -> CachedEpoch:
        self.require_end()
        return self.memory.of(self.first_epoch(epoch))

    def _rows(self) -> int | None:
        """Return the capacity of a table; None for batches, which become cells."""
        return None if self.is_batched else self.length


class IterCache(IterTransformation):
    """The elements, kept in the memory of this process after one complete epoch."""

    keeps_first_epoch = True

    def __init__(self, parent: IterDataset):
        super().__init__(parent)
        self._kept: tuple[Epoch, list[Any]] | None = None

    @property
    def parent(self) -> IterDataset:
        """The dataset that is cached."""
        return self._parent

    def describe(self) -> str:
        return f"{self._parent.describe()}.cache"

    def replace_parents(self, change: Callable[[Any], Any]) -> IterDataset:
        return IterCache(change(self._parent))

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        kept, epoch = self._kept, first_epoch(drawn_seeds(self._parent), epoch)
        if kept is not None and kept[0] == epoch:
            yield from map(copied, kept[1])
            return
        elements = []
        for element in self._parent.iterate(epoch):
            # A copy, as the user may change what is yielded.
            elements.append(copied(element))
            yield element
        # Only a complete epoch is kept: a loop that breaks off does not come here
        self._kept = epoch, elements


def replace_caches(steps: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a dataset with each of its caches replaced by `change(cache, parent)`.

    Args:
      steps: a MapDataset or an IterDataset.
      change: called with a Cache or IterCache, and its parent, in which earlier caches
        have been replaced; returns the replacement.
    """

    def again(parent: Any) -> Any:
        return replace_caches(parent, change)

    if isinstance(steps, Cache | IterCache):
        return change(steps, again(steps.parent))
    return steps.replace_parents(again)


def _one_row(leaf: Any) -> Any:
    return np.asarray(leaf)[None] if is_plain(leaf) else leaf


_FEW_LOOKS = 100  # bytes are compared that many times as fast as rows are looked up


class RowTable:
    """Rows in a storage, with a flag for each; `spec` is the nest of their TensorSpec.

    The flag of a row is set after its data was written, and read before.
    """

    def __init__(self, storage: Storage, spec: Any):
        self._storage = storage
        self._leaf_specs, self._structure = nest.flatten(spec)
        # The usual structure, a flat tuple, is made without optree.
        is_flat = type(spec) is tuple and self._structure.num_nodes == 1 + len(spec)
        self._make: Callable[[Any], Any] = (
            tuple if is_flat else functools.partial(nest.unflatten, self._structure)
        )
        self._buffers = Buffers()
        self.is_full = False  # whether all rows were seen to be stored

    def contains(self, numbers: Positions) -> npt.NDArray[np.bool_]:
        """Return which rows are stored."""
        if self.is_full:
            return np.ones(numbers.size, bool)
        with self._storage.use() as (flags, *_), self._storage.ordered():
            # The flag first, then the data: another rank of the node stores in the
            # opposite order.
            there: npt.NDArray[np.bool_] = flags[numbers] != 0
            # Checking all flags must be cheap compared with checking the requested ones
            if numbers.size >= flags.size // _FEW_LOOKS:
                self.is_full = bool(flags.all())
            return there

    def rows(self, numbers: Positions) -> Any:
        """Return copies of stored rows."""
        with self._storage.use() as (_, *columns):
            leaves = [take_rows(column, numbers, self._buffers) for column in columns]
        return self._make(leaves)

    def element_list(self, numbers: Positions) -> list[Any]:
        """Return copies of stored rows, one by one."""
        return split(self.rows(numbers))

    def element(self, number: int) -> Any:
        """Return a copy of a stored row."""
        return nest.map_leaves(lambda a: a[0], self.rows(np.array([number])))

    def store_rows(self, numbers: Positions, rows: Any) -> str | None:
        """Store copies of rows, or none; return the reason if they do not fit."""
        leaves, structure = nest.flatten(rows)
        # Nothing is stored if a leaf misfits: a row is whole, or missing.
        reason = self._misfit(leaves, structure, numbers.size)
        if reason is None:
            # Data before the flag, with a memory barrier between: a reader in another
            # process that sees the flag sees the data.
            with self._storage.use() as (flags, *columns):
                for column, leaf in zip(columns, leaves, strict=True):
                    column[numbers] = leaf
                with self._storage.ordered():
                    flags[numbers] = 1
        return reason

    def store_element(self, number: int, element: Any) -> str | None:
        """Store a copy of an element; return the reason if it does not fit."""
        leaves, structure = nest.flatten(element)
        if not all(map(is_plain, leaves)):
            return "some leaves are not NumPy arrays"
        row = nest.unflatten(structure, [np.asarray(leaf)[None] for leaf in leaves])
        return self.store_rows(np.array([number]), row)

    def _misfit(self, leaves: list[Any], structure: Any, rows: int) -> str | None:
        if structure != self._structure:
            return f"the structure is {structure}, but it was {self._structure} before"
        names = nest.leaf_names(structure, "element")
        for name, leaf, spec in zip(names, leaves, self._leaf_specs, strict=True):
            if not is_plain(leaf):
                return f"{name} is not a NumPy array but {_type_name(leaf)}"
            if leaf.shape[:1] != (rows,):
                return f"{name} has shape {leaf.shape} instead of {rows} rows"
            if (leaf.shape[1:], leaf.dtype) != (spec.shape, spec.dtype):
                return (
                    f"rows of {name} are {leaf.dtype} {leaf.shape[1:]}, but they were "
                    f"{spec.dtype} {spec.shape} before"
                )
        return None


class ElementCells:
    """Elements of any kind by index, in the memory of this process."""

    def __init__(self) -> None:
        self._elements: dict[int, Any] = {}

    def contains(self, numbers: Positions) -> npt.NDArray[np.bool_]:
        """Return which elements are stored."""
        return np.array([i in self._elements for i in numbers.tolist()], bool)

    def rows(self, numbers: Positions) -> Any:
        """Return copies of stored elements, stacked."""
        return stack([self._elements[i] for i in numbers.tolist()])

    def element_list(self, numbers: Positions) -> list[Any]:
        """Return copies of stored elements."""
        return [self.element(i) for i in numbers.tolist()]

    def element(self, number: int) -> Any:
        """Return a copy of a stored element."""
        return copied(self._elements[number])

    def store_rows(self, numbers: Positions, rows: Any) -> None:
        """Store copies of stacked elements."""
        leaves, structure = nest.flatten(rows)
        for i, *row in zip(numbers.tolist(), *leaves, strict=True):
            self.store_element(i, nest.unflatten(structure, row))

    def store_element(self, number: int, element: Any) -> None:
        """Store a copy of an element."""
        self._elements[number] = copied(element)


def copied(element: Any) -> Any:
    """Return an element with copies of its NumPy arrays."""
    return nest.map_leaves(
        lambda a: a.copy() if isinstance(a, np.ndarray) else a, element
    )


def row_spec(rows: Any) -> Any:
    """Return the nest of TensorSpec of a row of some stacked rows."""
    return nest.map_leaves(lambda a: TensorSpec(a.shape[1:], a.dtype), rows)


def fields_of(spec: Any, rows: int) -> list[Field]:
    """Return the fields of a storage for `rows` rows like `spec`: flags and leaves."""
    # One byte per flag: bits could not be set by several processes at once.
    leaves, _ = nest.flatten(spec)
    return [
        Field((rows,), np.dtype(np.uint8)),
        *(Field((rows, *leaf.shape), leaf.dtype) for leaf in leaves),
    ]


def why_not_storable(rows: Any) -> str | None:
    """Return the reason why a table cannot hold such rows; None if it can."""
    leaves, structure = nest.flatten(rows)
    if not leaves:
        return "it contains no array"
    for name, leaf in zip(nest.leaf_names(structure, "element"), leaves, strict=True):
        if not is_plain(leaf):
            return f"{name} is not a NumPy array but {_type_name(leaf)}"
        if not traits(leaf.dtype).is_sent:
            return f"{name} has dtype {leaf.dtype}, which has no fixed size"
    return None


def _type_name(leaf: Any) -> str:
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"
