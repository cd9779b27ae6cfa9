"""Transformations that make or select elements: `map`, `filter`, `batch`, `unbatch`.

`iterate` is that of parents that can only be read in order; see `IterStep`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpidist.data import sharding
from mpidist.data.elements import (
    as_element,
    batch_of,
    from_lists,
    owned,
    plain_array,
    stack,
)
from mpidist.data.iter_dataset import IterDataset, IterTransformation, count_rows
from mpidist.data.map_dataset import Epoch, MapDataset, MapTransformation
from mpidist.data.ordering import FullBatches
from mpidist.data.shuffling import ChunkShuffle
from mpidist.data.sources import Positions
from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.hdf5.chunks import ChunkLayout
from mpidist.util import nest, validation
from mpidist.util.shares import WHOLE, BatchShare, largest_share
from mpidist.util.threads import call_ahead, call_all


class Map(MapTransformation):
    """A function of each element, in some number of threads."""

    def __init__(self, parent: MapDataset, fn: Callable[..., Any], threads: int = 1):
        super().__init__(parent)
        self._fn = fn
        self._threads = threads
        # Zero elements, stacked: computed once, since this calls the function.
        self._none: Any = None

    @property
    def parallel_calls(self) -> int:
        return max(self._parent.parallel_calls, self._threads)

    @property
    def is_mapped(self) -> bool:
        return True

    @property
    def has_known_spec(self) -> bool:
        return False

    @property
    def captured(self) -> Any:
        """The dataset of another library that the function reads, or None."""
        return getattr(self._fn, "captured", None)

    def describe(self) -> str:
        return f"{self._parent.describe()}.map"

    def _call(self, element: Any) -> Any:
        return call_mapped(self._fn, element)

    @property
    def members(self) -> tuple[Any, ...]:
        return ()  # the function makes other elements

    def chunk_layout(self) -> ChunkLayout | None:
        return self._parent.chunk_layout()

    def _call_by_row(self, batch: Any) -> Any:
        """Call the function with rows; require as many rows in its result."""
        rows = len(_leaves(batch)[0])
        # The leaves' first dimension counts rows; all leaves of a batch have equally
        # many.
        result = self._call(batch)
        for leaf in _leaves(result):
            shape = leaf.shape if type(leaf) is np.ndarray else np.shape(leaf)
            # In a distributed dataset each replica calls the function with its own
            # slice: a result that mixes rows would depend on the number of replicas.
            if shape[:1] != (rows,):
                raise ArgumentError(
                    f"a function mapped over batches got {rows} rows and returned an "
                    f"array of shape {np.shape(leaf)}; in a distributed dataset it "
                    "must return one row for each row"
                )
        return result

    def element(self, epoch: Epoch, i: int) -> Any:
        return self._call(self._parent.element(epoch, i))

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        # The function is not called with nothing; its result for an example shows the
        # dtypes.
        if positions.size == 0:
            if self._none is None:
                example = stack([self.example(epoch)])
                self._none = nest.map_leaves(lambda a: a[:0], example)
            return self._none
        return stack(self.element_list(epoch, positions))

    def element_list(self, epoch: Epoch, positions: Positions) -> list[Any]:
        if positions.size == 0:
            return []
        elements = self._parent.element_list(epoch, positions)
        return call_all(self._call, elements, self._threads)

    def local_batch(self, epoch: Epoch, i: int, share: BatchShare) -> Any:
        return self._map_batch(epoch, self._parent.local_batch(epoch, i, share))

    def local_batches(
        self, epoch: Epoch, steps: range, share: BatchShare
    ) -> Iterator[Any]:
        batches = self._parent.local_batches(epoch, steps, share)
        return (self._map_batch(epoch, batch) for batch in batches)

    def _map_batch(self, epoch: Epoch, batch: Any) -> Any:
        if len(_leaves(batch)[0]) == 0:
            return self.empty_batch(epoch)
        return self._call_by_row(batch)

    def empty_batch(self, epoch: Epoch) -> Any:
        # The function may fail for zero rows: call it with some, and drop the result's
        if self._empty is None:
            result = self._call_by_row(self._parent.example(epoch))
            self._empty = nest.map_leaves(lambda a: plain_array(a)[:0], result)
        return self._empty

    def example(self, epoch: Epoch) -> Any:
        return self._call(self._parent.example(epoch))

    def iterate(self, epoch: Epoch, *parents: Any) -> Iterator[Any]:
        elements = parents[0].iterate(epoch)
        call = functools.partial(call_mapped, self._fn)
        if self._threads > 1:
            yield from call_ahead(call, elements, self._threads)
        else:
            yield from map(call, elements)


class Batch(MapTransformation):
    """Stacks of consecutive elements."""

    def __init__(self, parent: MapDataset, batch_size: int, drop_remainder: bool):
        super().__init__(parent)
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder
        self._is_of_mapped = self._parent.is_mapped

    @property
    def length(self) -> int | None:
        rows = self._parent.length
        if rows is None:
            return None
        return sharding.batch_count(rows, self._batch_size, self._drop_remainder)

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def is_batched(self) -> bool:
        return True

    @property
    def parallel_calls(self) -> int:
        return 1  # the threads share the rows of a batch instead

    @property
    def has_even_batches(self) -> bool:
        return True

    def unbatched(self) -> MapDataset:
        if self._drop_remainder:
            # Rows of dropped batches must not come back: see `FullBatches`.
            return FullBatches(self._parent, self._batch_size)
        return self._parent

    def reserve_cache(self, elements: int) -> None:
        self._parent.reserve_cache(elements * self._batch_size)

    def describe(self) -> str:
        arguments = f"{self._batch_size}, drop_remainder={self._drop_remainder}"
        return f"{self._parent.describe()}.batch({arguments})"

    def rebatch(self, workers: int) -> MapDataset:
        # Rounded up, as TensorFlow's rebatching does: no rank gets batches of 0 rows.
        share = largest_share(self._batch_size, workers)
        return Batch(self._parent, share, self._drop_remainder)

    def element_spec(self) -> Any:
        return batch_of(self._parent.element_spec())

    def chunk_shuffle(self, epoch: Epoch) -> ChunkShuffle | None:
        return self._parent.chunk_shuffle(epoch)

    def element(self, epoch: Epoch, i: int) -> Any:
        return self.local_batch(epoch, i, WHOLE)

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        if positions.size == 0:
            example = self.example(epoch)
            return nest.map_leaves(lambda a: a[None][:0], example)
        return stack(self.element_list(epoch, positions))

    def element_list(self, epoch: Epoch, positions: Positions) -> list[Any]:
        return [self.element(epoch, int(i)) for i in positions]

    def batch_rows(self, epoch: Epoch, i: int) -> int:
        return self._count(self._parent.length, i)

    def _count(self, rows: int | None, i: int) -> int:
        rest = self._batch_size if rows is None else rows - i * self._batch_size
        return min(self._batch_size, rest)

    def local_batch(self, epoch: Epoch, i: int, share: BatchShare) -> Any:
        rows = self.positions(epoch, i, share)
        return self._parent.elements(epoch, np.arange(rows.start, rows.stop))

    def local_batches(
        self, epoch: Epoch, steps: range, share: BatchShare
    ) -> Iterator[Any]:
        if self._is_of_mapped:  # one step at a time, to attribute errors to steps
            return super().local_batches(epoch, steps, share)
        positions, cuts = _positions(
            self._parent.length, self._batch_size, steps, share
        )
        # One read for all steps of the group; the batches are cut out as views.
        rows = self._parent.elements(epoch, positions)
        if type(rows) is np.ndarray:
            return map(rows.__getitem__, cuts)
        leaves = _leaves(rows)
        batches = zip(*[map(leaf.__getitem__, cuts) for leaf in leaves], strict=True)
        if leaves is rows:  # a flat tuple, the usual case
            return batches
        spec = nest.flatten(rows)[1]
        return (nest.unflatten(spec, batch) for batch in batches)

    def positions(self, epoch: Epoch, i: int, share: BatchShare) -> range:
        """Return the positions in the parent of a replica's slice of batch `i`."""
        return self._slice(self._parent.length, i, share)

    def _slice(self, rows: int | None, i: int, share: BatchShare) -> range:
        start = i * self._batch_size
        part = share.of(self._count(rows, i))
        return range(start + part.start, start + part.stop)

    def example(self, epoch: Epoch) -> Any:
        return stack([self._parent.example(epoch)] * self._batch_size)

    def describe_in_order(self) -> str:
        arguments = f"{self._batch_size}, {self._drop_remainder}"
        return f"{self._parent.describe()}.batch({arguments})"

    def iterate(self, epoch: Epoch, *parents: Any) -> Iterator[Any]:
        elements = parents[0].iterate(epoch)
        while rows := list(itertools.islice(elements, self._batch_size)):
            if len(rows) == self._batch_size or not self._drop_remainder:
                yield stack(rows)


@functools.lru_cache(maxsize=4)  # they are the same in each epoch
def _positions(
    rows: int | None, size: int, steps: range, share: BatchShare
) -> tuple[Positions, list[slice]]:
    """Return a replica's positions among rows, and where those of each batch are."""
    whole = steps.stop if rows is None else min(rows // size, steps.stop)
    whole = max(whole, steps.start)
    part = share.of(size)
    firsts = size * np.arange(steps.start, whole)
    positions = (firsts[:, np.newaxis] + np.arange(part.start, part.stop)).reshape(-1)
    sizes = [part.stop - part.start] * firsts.size
    if whole < steps.stop:  # the last batch is short
        assert rows is not None
        last = share.of(rows - whole * size)
        sizes.append(last.stop - last.start)
        rest = whole * size + np.arange(last.start, last.stop)
        positions = np.concatenate([positions, rest])
    positions.flags.writeable = False
    edges = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return positions, list(itertools.starmap(slice, edges))


def _leaves(value: Any) -> Sequence[Any]:
    """Return the leaves of a nest, with a fast path for arrays and flat tuples."""
    if type(value) is np.ndarray:
        return (value,)
    if type(value) is tuple and {np.ndarray}.issuperset(map(type, value)):
        return value
    return nest.flatten(value)[0]


def call_function(fn: Callable[..., Any], element: Any) -> Any:
    """Return `fn(element)`; a tuple is passed as arguments."""
    try:
        return fn(*element) if type(element) is tuple else fn(element)
    except StopIteration as error:  # would silently end the caller's iteration
        raise RuntimeError("a mapped function raised StopIteration") from error


def call_mapped(fn: Callable[..., Any], element: Any) -> Any:
    """Return `fn(element)`; a tuple is passed as arguments.

    The result has no arrays that other code may change, except for those of `element`.
    """
    arguments = element if type(element) is tuple else (element,)
    holder = [call_function(fn, element)]
    # Lists are arrays and no structure: see `from_lists`.
    if type(holder[0]) is not np.ndarray:
        holder.append(from_lists(holder.pop()))
    return owned(holder, arguments)


class Unbatch(IterTransformation):
    """The rows of each element."""

    @property
    def batch_size(self) -> None:
        return None

    @property
    def is_batched(self) -> bool:
        return False

    def describe(self) -> str:
        return f"{self._parent.describe()}.unbatch()"

    def rebatch(self, workers: int) -> IterDataset:
        return self  # earlier batches are not the global batches to divide

    def iterate(self, epoch: Epoch) -> Iterator[Any]:
        for batch in map(as_element, self._parent.iterate(epoch)):
            leaves, spec = nest.flatten(batch)
            for i in range(count_rows(batch, "unbatch")):
                yield nest.unflatten(spec, [leaf[i] for leaf in leaves])

    def example(self, epoch: Epoch) -> Any:
        def first(a: Any) -> Any:
            return a[0] if len(a) else np.zeros(a.shape[1:], a.dtype)

        batch = as_element(self._parent.example(epoch))
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
