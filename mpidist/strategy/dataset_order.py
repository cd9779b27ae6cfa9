"""Rows that replicas append for each batch, in the order of the dataset."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpidist.data.batching import Batch, Map
from mpidist.data.caching import CacheBase
from mpidist.data.combining import Zip
from mpidist.data.distributed.reader import ReadPlan
from mpidist.data.elements import plain_array
from mpidist.data.iter_dataset import IterDataset
from mpidist.data.map_dataset import Epoch, MapDataset, MapTransformation, walk
from mpidist.data.ordering import (
    Concatenate,
    Repeat,
    Shuffle,
    Window,
)
from mpidist.data.sources import Positions
from mpidist.errors import ArgumentError, DataError
from mpidist.hdf5.read import Hdf5Rows
from mpidist.hdf5.shard_writer import FieldSpec, ShardWriter, with_wider_text
from mpidist.strategy.extended import StrategyExtended
from mpidist.util import nest, validation
from mpidist.util.dtypes import digits
from mpidist.util.shares import WHOLE, BatchShare

# Rows that a rank receives at a time
_ROUND_BYTES = 16 << 20

_Iteration = tuple[int, int]  # the dataset, in the order of first use, and the epoch


class _Batch(NamedTuple):
    """A replica's part of a batch of a distributed dataset.

    Args:
      iteration: the same on all replicas.
      plan: of the dataset.
      epoch: of the iteration.
      step: the batch.
      rows: of this replica.
      skipped: whether rows of an earlier batch of this iteration were not appended.
    """

    iteration: _Iteration
    plan: ReadPlan
    epoch: Epoch
    step: int
    rows: int
    skipped: bool = False


class DatasetOrder:
    """Knows where the rows appended for each batch belong, and brings them there.

    Batches are those of one distributed dataset of the strategy, as its iterators
    return them. Rows whose numbers in the dataset are not known keep the order of the
    batches.

    Args:
      extended: of the strategy.
      path: of the index, for messages.
      fill_value: of rows that were not appended; None if there must be none.
    """

    def __init__(self, extended: StrategyExtended, path: Path, fill_value: Any):
        self._extended = extended
        self._path = path
        self._fill_value = fill_value
        self._batch: _Batch | None = None  # that rows were appended for
        # By their ids; kept, or a later one could have the id of an earlier one
        self._plans: dict[int, tuple[int, ReadPlan]] = {}
        # Of each iteration, the batch that nothing was appended for
        self._last: dict[_Iteration, _Batch] = {}
        self._numbers: list[Positions] = []  # in the dataset, of each appended batch
        # Or the iteration, step and rows of each
        self._steps: list[tuple[_Iteration, int, int]] = []
        # The step that comes next, unless an iterator was set to another one
        self._next: dict[_Iteration, int] = {}
        self._gaps: set[_Iteration] = set()  # iterations that were not read in order
        self._ended: set[_Iteration] = set()
        extended.batch_watchers.add(self)

    def close(self) -> None:
        """Watch no batches any more."""
        self._extended.batch_watchers.discard(self)

    def watch(self, plan: ReadPlan, epoch: Epoch, step: int, batch: Any) -> None:
        """Note the batch that an iterator returns."""
        lengths = [len(leaf) for leaf in nest.flatten(batch)[0] if np.ndim(leaf)]
        key = self._iteration(plan, epoch)
        noted = _Batch(key, plan, epoch, step, max(lengths, default=0))
        if (former := self._last.get(key)) is not None:
            noted = noted._replace(skipped=former.skipped or former.rows > 0)
        self._last[key] = noted
        if step != self._next.get(key, 0):
            self._gaps.add(key)
        self._next[key] = step + 1
        if step + 1 == plan.cardinality:
            self._ended.add(key)

    def end(self, plan: ReadPlan, epoch: Epoch) -> None:
        """Note that an iteration has returned all batches."""
        self._ended.add(self._iteration(plan, epoch))

    def _iteration(self, plan: ReadPlan, epoch: Epoch) -> _Iteration:
        number, _ = self._plans.setdefault(id(plan), (len(self._plans), plan))
        return number, epoch.number

    def _last_batch(self) -> _Batch:
        before = self._batch
        if before is not None and before.iteration in self._last:  # it goes on
            return self._last[before.iteration]
        batches = list(self._last.values())
        if len(batches) > 1:  # of which some were read for another purpose
            batches = [batch for batch in batches if not batch.skipped]
        if len(batches) == 1:
            return batches[0]
        raise ArgumentError(
            "append: with order='dataset', append the rows of each batch of one "
            "distributed dataset of this strategy, once, before the next batch is "
            f"taken; since the last append, {len(self._last) or 'no'} iterations over "
            "distributed datasets have returned batches"
        )

    def locate(self, rows: int) -> Any:
        """Return where rows for the last batch belong; pass it to `keep`.

        Raises:
          ArgumentError: it is not one row for each row of that batch; or the order of
            the dataset is not known.
        """
        if rows == 0 and not self._last:
            return None  # they define the datasets
        batch = self._last_batch()
        if batch.skipped:
            raise ArgumentError(
                "append: with order='dataset', append the rows of each batch before "
                "the next one is taken; several were taken since the last append"
            )
        if rows != batch.rows:
            raise ArgumentError(
                f"append got {rows} rows for a batch with {batch.rows} rows on this "
                "replica; with order='dataset', append one row for each row"
            )
        if not batch.plan.is_global:
            raise ArgumentError(
                "append: order='dataset' needs batches that the replicas divide; here "
                "each replica reads a dataset of its own"
            )
        self._require_one_dataset(batch)
        pipeline, share = batch.plan.pipeline, batch.plan.share
        try:
            numbers = _numbers_of_batch(pipeline, batch.epoch, batch.step, share)
        except _UnknownRowsError:
            if _is_shuffled(pipeline):
                raise ArgumentError(
                    "append: order='dataset' does not know the rows of this dataset, "
                    "which is shuffled before filter, unbatch, zip or interleave, or "
                    "in a generator's order; shuffle rows with known numbers"
                ) from None
            self._require_all_before(batch)
            return batch, (batch.iteration, batch.step, rows)
        return batch, numbers

    def _require_one_dataset(self, batch: _Batch) -> None:
        before = self._batch
        if before is not None and before.plan.origin != batch.plan.origin:
            raise ArgumentError(
                "append: with order='dataset', a file has the rows of one dataset, but "
                "these are of another one than the rows before"
            )

    def _require_all_before(self, batch: _Batch) -> None:
        """Raise unless all batches of the iteration, up to this one, were returned."""
        if batch.iteration in self._gaps:
            raise ArgumentError(
                "append: order='dataset' does not know which rows these are: batches "
                "of the epoch were read elsewhere, such as before the job resumed, and "
                "after filter, unbatch or in a generator their rows are not numbered. "
                "Iterate over the whole epoch"
            )

    def keep(self, located: Any) -> None:
        """Record that the rows were appended; see `locate`."""
        if located is None:
            return
        self._batch, where = located
        self._last.clear()
        (self._steps if isinstance(where, tuple) else self._numbers).append(where)

    def require_fill(self, fields: Sequence[FieldSpec]) -> None:
        """Raise an ArgumentError if `fill_value` cannot be a value of some dataset."""
        if self._fill_value is None:
            return
        for field in self.with_fill(fields):
            try:
                value = plain_array(self._fill_value)
                with np.errstate(all="ignore"):
                    filled = value.astype(field.dtype)
                fits = value.ndim == 0 and np.array_equal(
                    filled, value, equal_nan=digits(value.dtype) > 0
                )
            except (DataError, TypeError, ValueError, OverflowError):
                fits = False
            if not fits:
                raise ArgumentError(
                    f"append: fill_value={validation.shown(self._fill_value)} cannot "
                    f"be a value of dataset {field.name!r}, which is {field.dtype}"
                )

    def with_fill(self, fields: Sequence[FieldSpec]) -> tuple[FieldSpec, ...]:
        """Return fields whose text is wide enough for `fill_value`."""
        if not isinstance(self._fill_value, bytes):
            return tuple(fields)
        dtype = np.asarray(self._fill_value).dtype
        filled = [dataclasses.replace(field, dtype=dtype) for field in fields]
        return with_wider_text(filled, fields)

    def _count_rows(self) -> int:
        batch = self._batch
        if batch is None or not self._numbers:
            return 0
        return _numbers_in_all(batch.plan.pipeline) or 0

    def rearrange(
        self, call: str, spilled: Path, fields: Sequence[FieldSpec], to: ShardWriter
    ) -> None:
        """Write the rows of all ranks in order: to each rank's file, the next rows.

        Collective.

        Args:
          call: the public call, for messages.
          spilled: the file with this rank's rows, as appended.
          fields: the datasets.
          to: this rank's new file.

        Raises, on some rank:
          ArgumentError: rows were appended twice.
          DataError: rows are missing, or cannot be read.
        """
        extended = self._extended
        numbers = self._numbers_of_rows(call)
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
        end = max(int(numbers.max(initial=-1)) + 1, self._count_rows())
        total = max(extended.consensus.gather_objects(call, lambda: end))
        ranks, rank = extended.num_replicas, extended.replica_id
        edges = [total * r // ranks for r in range(ranks + 1)]
        most = max(b - a for a, b in itertools.pairwise(edges))
        step = max(1, _ROUND_BYTES // max(1, sum(f.row_bytes for f in fields)))
        source = Hdf5Rows([spilled], tuple(f.name for f in fields), threads=1)
        source.retain()
        try:
            for start in range(0, most, step):
                windows = [
                    (min(a + start, b), min(a + start + step, b))
                    for a, b in itertools.pairwise(edges)
                ]
                cuts = np.searchsorted(numbers, windows)
                mine = np.concatenate([np.arange(*cut) for cut in cuts])
                # A file without rows has no datasets
                columns = [np.empty((0, *f.row_shape), f.dtype) for f in fields]
                if mine.size:
                    columns = source.read(order[mine])
                sent = [numbers[mine], *map(_as_bytes, columns, fields)]
                lengths = np.diff(cuts)[:, 0].tolist()
                received = extended.collectives.all_to_all(call, sent, 0, lengths, None)
                to.append(self._place(received, windows[rank], fields))
        finally:
            source.release()

    def _numbers_of_rows(self, call: str) -> Positions:
        """Return the number of each row that this rank appended. Collective."""
        missed = {k for k, last in self._last.items() if last.skipped or last.rows}
        mine = self._steps, missed, len(self._numbers)
        everyone = self._extended.consensus.gather_objects(call, lambda: mine)
        if not any(steps for steps, _, _ in everyone):
            return np.concatenate([np.arange(0), *self._numbers])
        self._require_one_epoch(everyone)
        # In the order of the batches; of each, those of rank 0 come first
        sizes = [
            (step, rank, rows)
            for rank, (steps, _, _) in enumerate(everyone)
            for _, step, rows in steps
        ]
        starts: dict[int, int] = {}
        end = 0
        for step, rank, rows in sorted(sizes):
            if rank == self._extended.replica_id:
                starts[step] = end
            end += rows
        return np.concatenate(
            [np.arange(0)] + [np.arange(n) + starts[step] for _, step, n in self._steps]
        )

    def _require_one_epoch(self, everyone: Sequence[Any]) -> None:
        """Raise, on all ranks, unless rows without numbers are those of one epoch.

        Args:
          everyone: of each rank, the appended steps, the iterations with rows that were
            not appended, and how many batches have numbers.
        """
        appended = {key for steps, _, _ in everyone for key, _, _ in steps}
        if len(appended) > 1 or any(numbered for _, _, numbered in everyone):
            raise ArgumentError(
                f"{self._path}: rows of several iterations were appended; with "
                "order='dataset', a file has one epoch"
            )
        is_missed = any(appended & missed for _, missed, _ in everyone)
        if is_missed or not appended <= self._ended:
            raise DataError(
                f"{self._path}: a batch of the dataset was not appended"
                if is_missed
                else f"{self._path}: the last batches of the dataset were not read and "
                "appended: iterate until it ends. (After filter, unbatch or in a "
                "generator rows are not numbered, so no fill_value can replace them)"
            )

    def _place(
        self,
        received: Sequence[Any],
        window: tuple[int, int],
        fields: Sequence[FieldSpec],
    ) -> dict[str, Any]:
        start, stop = window
        numbers, *columns = received
        counts = np.bincount(numbers - start, minlength=stop - start)
        if counts.max(initial=0) > 1:
            raise ArgumentError(
                f"{self._path}: row {start + int(counts.argmax())} of the dataset was "
                "appended more than once; with order='dataset', a file has one epoch"
            )
        missing = np.flatnonzero(counts == 0)
        if missing.size and self._fill_value is None:
            raise DataError(
                f"{self._path}: row {start + int(missing[0])} of the dataset was not "
                f"appended, nor {missing.size - 1} others: drop_remainder, take after "
                "shuffle, or the end of a loop has left them out. Iterate over all of "
                "it, or pass a fill_value"
            )
        placed = {}
        for field, column in zip(fields, columns, strict=True):
            rows = np.empty((stop - start, *field.row_shape), field.dtype)
            if missing.size:
                rows[missing] = self._fill_value
            if field.row_bytes:
                values = column.view(field.dtype)
                rows[numbers - start] = values.reshape(-1, *field.row_shape)
            placed[field.name] = rows
        return placed


def _as_bytes(rows: Any, field: FieldSpec) -> Any:
    """Return rows as arrays of bytes: `all_to_all` takes numbers alone."""
    return np.frombuffer(rows.tobytes(), np.uint8).reshape(len(rows), field.row_bytes)


class _UnknownRowsError(Exception):
    """It is not known where the rows of a batch come from."""


def _is_shuffled(dataset: MapDataset | IterDataset) -> bool:
    """Return whether a dataset has a shuffle somewhere."""
    return any(isinstance(part, Shuffle) for part in walk(dataset))


def _numbers_of_batch(
    dataset: Any, epoch: Epoch, step: int, share: BatchShare
) -> Positions:
    """Return the numbers of a replica's rows of batch `step`.

    Row n is the n-th of the dataset without its shuffles. What comes after a shuffle
    does not renumber the rows: those that `take` leaves out are missing.

    Args:
      dataset: of batches.
      epoch: the iteration.
      step: the number of the batch in it.
      share: the replica's part of each batch.

    Raises:
      _UnknownRowsError: the batches are not slices of rows with numbers.
    """
    if isinstance(dataset, Batch):
        rows = dataset.positions(epoch, step, share)
        return _of_rows(dataset.parents[0], epoch, np.arange(rows.start, rows.stop))
    if isinstance(dataset, Concatenate):
        part, i = dataset.find(step)
        before = 0 if i == step else _known(_numbers_in_all(dataset.parents[0]))
        return before + _numbers_of_batch(part, epoch, i, share)
    if isinstance(dataset, Zip) and not _is_shuffled(dataset):
        return _numbers_of_batch(dataset.parents[0], epoch, step, share)
    if isinstance(dataset, CacheBase):
        epoch = dataset.first_epoch(epoch)
    elif isinstance(dataset, Repeat):
        inner, i = dataset.locate_one(epoch, step)
        before = _known(_numbers_in_all(dataset.parents[0])) if i != step else 0
        repetition = (step - i) // (dataset.parents[0].length or 1)
        return repetition * before + _numbers_of_batch(
            dataset.parents[0], inner, i, share
        )
    elif isinstance(dataset, Window) and not _is_shuffled(dataset):
        start = dataset.locate_one(epoch, 0)[1]
        first = _numbers_of_batch(dataset.parents[0], epoch, start, WHOLE)[:1].sum()
        numbers: Positions = _numbers_of_batch(
            dataset.parents[0], epoch, start + step, share
        )
        numbers -= first
        return numbers
    elif not isinstance(dataset, Map | Shuffle | Window):
        raise _UnknownRowsError
    epoch, step = dataset.locate_one(epoch, step)
    return _numbers_of_batch(dataset.parents[0], epoch, step, share)


def _numbers_in_all(dataset: Any) -> int | None:
    """Return how many numbers the rows of a dataset of batches have, if that is known.

    Those that are left out, as by `take` after a shuffle, count.
    """
    if isinstance(dataset, Batch):
        return _count_numbers(dataset.parents[0])
    if isinstance(dataset, Repeat | Concatenate):
        return _count_sections(dataset, _numbers_in_all)
    if isinstance(dataset, Map | Shuffle | CacheBase):
        return _numbers_in_all(dataset.parents[0])
    if isinstance(dataset, Window) and _is_shuffled(dataset):
        return _numbers_in_all(dataset.parents[0])
    if isinstance(dataset, Window | Zip) and dataset.length:
        last = dataset.batch_rows(Epoch(), dataset.length - 1)
        numbers = _numbers_of_batch(dataset, Epoch(), dataset.length - 1, WHOLE)
        return int(numbers[0]) + last
    return None


def _count_numbers(dataset: MapDataset) -> int | None:
    """Like `_numbers_in_all`, of a dataset of rows."""
    if not _is_shuffled(dataset):
        return dataset.length
    if isinstance(dataset, Repeat | Concatenate):
        return _count_sections(dataset, _count_numbers)
    if isinstance(dataset, MapTransformation):
        return _count_numbers(dataset.parents[0])
    return None


def _count_sections(
    dataset: Repeat | Concatenate, counted: Callable[[Any], int | None]
) -> int | None:
    counts = [counted(parent) for parent in dataset.parents]
    if isinstance(dataset, Repeat):
        counts *= dataset.count or 0
    known = [n for n in counts if n is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _of_rows(dataset: MapDataset, epoch: Epoch, positions: Positions) -> Positions:
    """Return the numbers of the rows at some positions."""
    if not _is_shuffled(dataset):
        return positions
    if isinstance(dataset, Repeat | Concatenate):
        return _of_sections(dataset, epoch, positions)
    if isinstance(dataset, CacheBase):
        epoch = dataset.first_epoch(epoch)
    elif not isinstance(dataset, MapTransformation) or isinstance(dataset, Batch):
        raise _UnknownRowsError
    return _of_rows(dataset.parents[0], epoch, dataset.locate(epoch, positions))


def _of_sections(
    dataset: Repeat | Concatenate, epoch: Epoch, positions: Positions
) -> Positions:
    """Return numbers of rows of a dataset that consists of others, one by one."""
    first, *others = dataset.parents
    rows = first.length
    if rows is None:
        return _of_rows(first, epoch, positions)
    sections = positions // max(rows, 1)
    if others:
        sections = np.minimum(sections, 1)
    numbers = np.empty_like(positions)
    for section in np.unique(sections).tolist():
        here, start = sections == section, section * rows
        before = section * _known(_count_numbers(first)) if section else 0
        part, within = first, epoch
        if isinstance(dataset, Repeat):
            within, _ = dataset.locate_one(epoch, start)
        elif section:
            part = others[0]
        numbers[here] = before + _of_rows(part, within, positions[here] - start)
    return numbers


def _known(rows: int | None) -> int:
    """Return a number of rows, or raise an _UnknownRowsError if it is None."""
    if rows is None:
        raise _UnknownRowsError
    return rows
