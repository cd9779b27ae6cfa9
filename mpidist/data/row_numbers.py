"""The numbers of the rows of a batch in a dataset, as it is without its shuffles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpidist.data.batching import Batch, Map
from mpidist.data.caching import CacheBase
from mpidist.data.combining import Zip
from mpidist.data.iter_dataset import IterDataset
from mpidist.data.map_dataset import Epoch, MapDataset, MapTransformation, walk
from mpidist.data.ordering import (
    Concatenate,
    Repeat,
    Shuffle,
    Window,
)
from mpidist.data.sources import Positions
from mpidist.util.shares import WHOLE, BatchShare


class UnknownRowsError(Exception):
    """It is not known where the rows of a batch come from."""


def is_shuffled(dataset: MapDataset | IterDataset) -> bool:
    """Return whether a dataset has a shuffle somewhere."""
    return any(isinstance(part, Shuffle) for part in walk(dataset))


def is_reshuffled(dataset: MapDataset | IterDataset) -> bool:
    """Return whether the order of the rows may be another one in each epoch."""
    if dataset.keeps_first_epoch:
        return False
    if isinstance(dataset.last, Shuffle) and dataset.last.reshuffle:
        return True
    return any(map(is_reshuffled, dataset.parents))


def of_batch(dataset: Any, epoch: Epoch, step: int, share: BatchShare) -> Positions:
    """Return the numbers of a replica's rows of batch `step`.

    Row n is the n-th of the dataset without its shuffles. What comes after a shuffle
    does not renumber the rows: those that `take` leaves out are missing.

    Args:
      dataset: of batches.
      epoch: the iteration.
      step: the number of the batch in it.
      share: the replica's part of each batch.

    Raises:
      UnknownRowsError: the batches are not slices of rows with numbers.
    """
    if isinstance(dataset, Batch):
        rows = dataset.positions(epoch, step, share)
        return _of_rows(dataset.parents[0], epoch, np.arange(rows.start, rows.stop))
    if isinstance(dataset, Concatenate):
        part, i = dataset.find(step)
        before = 0 if i == step else _known(count(dataset.parents[0]))
        return before + of_batch(part, epoch, i, share)
    if isinstance(dataset, Zip) and not is_shuffled(dataset):
        return of_batch(dataset.parents[0], epoch, step, share)
    if isinstance(dataset, CacheBase):
        epoch = dataset.first_epoch(epoch)
    elif isinstance(dataset, Repeat):
        inner, i = dataset.locate_one(epoch, step)
        before = _known(count(dataset.parents[0])) if i != step else 0
        repetition = (step - i) // (dataset.parents[0].length or 1)
        return repetition * before + of_batch(dataset.parents[0], inner, i, share)
    elif isinstance(dataset, Window) and not is_shuffled(dataset):
        start = dataset.locate_one(epoch, 0)[1]
        first = of_batch(dataset.parents[0], epoch, start, WHOLE)[:1].sum()
        numbers: Positions = of_batch(dataset.parents[0], epoch, start + step, share)
        numbers -= first
        return numbers
    elif not isinstance(dataset, Map | Shuffle | Window):
        raise UnknownRowsError
    epoch, step = dataset.locate_one(epoch, step)
    return of_batch(dataset.parents[0], epoch, step, share)


def count(dataset: Any) -> int | None:
    """Return how many numbers the rows of a dataset of batches have, if that is known.

    Those that are left out, as by `take` after a shuffle, count.
    """
    if isinstance(dataset, Batch):
        return _count_numbers(dataset.parents[0])
    if isinstance(dataset, Repeat | Concatenate):
        return _count_sections(dataset, count)
    if isinstance(dataset, Map | Shuffle | CacheBase):
        return count(dataset.parents[0])
    if isinstance(dataset, Window) and is_shuffled(dataset):
        return count(dataset.parents[0])
    if isinstance(dataset, Window | Zip) and dataset.length:
        last = dataset.batch_rows(Epoch(), dataset.length - 1)
        numbers = of_batch(dataset, Epoch(), dataset.length - 1, WHOLE)
        return int(numbers[0]) + last
    return None


def _count_numbers(dataset: MapDataset) -> int | None:
    if not is_shuffled(dataset):
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
    if not is_shuffled(dataset):
        return positions
    if isinstance(dataset, Repeat | Concatenate):
        return _of_sections(dataset, epoch, positions)
    if isinstance(dataset, CacheBase):
        epoch = dataset.first_epoch(epoch)
    elif not isinstance(dataset, MapTransformation) or isinstance(dataset, Batch):
        raise UnknownRowsError
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
    if rows is None:
        raise UnknownRowsError
    return rows
