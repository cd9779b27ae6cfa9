"""Other ways to read the same rows, each as fast as it goes.

Nothing here may import MPI: worker processes of a DataLoader import this file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from input_files import CHUNK_ROWS, NAME, ROW_SHAPE

Epochs = Callable[[], Iterable[Any]]
Indices = npt.NDArray[np.int64]


def open_rows(path: Path, **options: Any) -> h5py.Dataset:
    """Open a file's dataset with plain h5py, without locks."""
    return h5py.File(path, "r", locking=False, **options)[NAME]


def take_from_map(path: Path, batches: Sequence[Indices]) -> Epochs:
    """Return epochs of bare `np.take` from a memory map into one buffer.

    With mode="clip", as otherwise numpy fills a second buffer first.
    """
    dataset = open_rows(path)
    where = {"offset": dataset.id.get_offset(), "shape": dataset.shape}
    rows = np.asarray(np.memmap(path, dataset.dtype, "r", **where))
    buffer = np.empty((max(map(len, batches)), *ROW_SHAPE), dataset.dtype)

    def epoch() -> Iterator[Any]:
        for batch in batches:
            part = buffer[: len(batch)]
            np.take(rows, batch, axis=0, out=part, mode="clip")
            yield part

    return epoch


def fancy(path: Path, batches: Sequence[Indices], **options: Any) -> Epochs:
    """Return epochs of h5py's indexing with each batch's rows, sorted."""
    dataset = open_rows(path, **options)
    in_order = [np.sort(batch) for batch in batches]

    def epoch() -> Iterator[Any]:
        for batch in in_order:
            yield dataset[batch]

    return epoch


def row_by_row(path: Path, batches: Sequence[Indices], **options: Any) -> Epochs:
    """Return epochs of one h5py read per row."""
    dataset = open_rows(path, **options)

    def epoch() -> Iterator[Any]:
        for batch in batches:
            rows = np.empty((len(batch), *ROW_SHAPE), dataset.dtype)
            for i, row in enumerate(batch.tolist()):
                rows[i] = dataset[row]
            yield rows

    return epoch


def sequential(path: Path, rank: int, ranks: int, batch_rows: int) -> Epochs:
    """Return epochs of h5py reads of whole batches in order: one rank's share.

    The shares begin with a chunk, so that no chunk is unpacked by two ranks.
    """
    dataset = open_rows(path)
    chunks = -(-len(dataset) // CHUNK_ROWS)
    first, last = (
        min(chunks * r // ranks * CHUNK_ROWS, len(dataset)) for r in (rank, rank + 1)
    )

    def epoch() -> Iterator[Any]:
        for start in range(first, last, batch_rows):
            yield dataset[start : min(start + batch_rows, last)]

    return epoch


class RowDataset:
    """A map-style dataset for torch: one row per call, the file opened by each worker.

    Args:
      path: the HDF5 file.
      rows: how many rows it has.
    """

    def __init__(self, path: Path, rows: int):
        self._path = path
        self._rows = rows
        self._dataset: h5py.Dataset | None = None

    def __len__(self) -> int:
        return self._rows

    def _open(self) -> h5py.Dataset:
        if self._dataset is None:
            self._dataset = open_rows(self._path)
        return self._dataset

    def __getitem__(self, i: int) -> Any:
        import torch

        return torch.from_numpy(self._open()[i])


class BatchDataset(RowDataset):
    """The same, with a whole batch per call, read by h5py's sorted indexing."""

    def __getitems__(self, rows: Sequence[int]) -> Any:
        """Return a batch; torch calls this where there is such a method."""
        import torch

        return torch.from_numpy(self._open()[np.sort(rows)])


def as_it_is(batch: Any) -> Any:
    """Return a batch that needs no collating."""
    return batch


class Share:
    """A torch sampler: one rank's random share of the rows, another in each epoch."""

    def __init__(self, rows: int, ranks: int, rank: int):
        self._rows = rows
        self._ranks = ranks
        self._rank = rank
        self._epochs = itertools.count()

    def __len__(self) -> int:
        return len(range(self._rank, self._rows, self._ranks))

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(next(self._epochs)).permutation(self._rows)
        return iter(order[self._rank :: self._ranks].tolist())


def loader(dataset: RowDataset, share: Share, batch_rows: int, workers: int) -> Epochs:
    """Return epochs of a torch DataLoader on one rank.

    Its workers stay from epoch to epoch, so an epoch is not charged with their start;
    they are spawned, as a process that uses MPI should not be forked.
    """
    from torch.utils.data import DataLoader

    options: dict[str, Any] = {}
    if workers:
        options = {"multiprocessing_context": "spawn", "persistent_workers": True}
    if isinstance(dataset, BatchDataset):
        options["collate_fn"] = as_it_is
    batches: Any = DataLoader(
        dataset, batch_rows, sampler=share, num_workers=workers, **options
    )
    return lambda: batches
