"""Rows of HDF5 files that are not read: what reading them would take is counted."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mpidist.data.hdf5 import rows as hdf5_rows
from mpidist.data.hdf5.dataset_reader import BlockCache, block_rows
from mpidist.data.hdf5.index import DatasetIndex, FileIndex, ReadMethod
from mpidist.data.hdf5.rows import FileMap, Hdf5Rows
from mpidist.data.shuffling import Blocks

__all__ = ["DryRows", "stored_bytes"]

Rows = npt.NDArray[np.int64]


class _Block(NamedTuple):
    """A chunk that was not decoded; the cache asks for its size only."""

    nbytes: int


class DryRows:
    """The rows of `Hdf5Rows` by their numbers; they are where those rows would be.

    So the steps of a dataset over them give the numbers of the rows that the same steps
    would read. Meanwhile is counted what these take, with the same cache of chunks.

    Args:
      rows: which would be read.
      files: where the rows of its files lie, by path; None reads that from them.
    """

    def __init__(self, rows: Hdf5Rows, files: Mapping[Path, FileIndex] | None = None):
        self._rows = rows
        if files is not None:
            rows.adopt([files[path] for path in rows.paths])
        self._layout = rows.file_map()
        self._files = files or {file.path: file for file in self._layout.files}
        self.restart()

    def restart(self) -> None:
        """Begin to count again, with no chunks kept."""
        self._cache = BlockCache(1, hdf5_rows.KEPT_BYTES)
        self._opened: set[int] = set()
        self.read_bytes = 0
        self.decoded_chunks = 0

    @property
    def opened_files(self) -> int:
        """From how many files rows were asked for."""
        return len(self._opened)

    @property
    def layout(self) -> FileMap:
        """Where the rows lie."""
        return self._layout

    @functools.cached_property
    def columns_in_blocks(self) -> list[DatasetIndex]:
        """The datasets of all files of which chunks are read whole."""
        columns = (column for file in self._layout.files for column in file.datasets)
        return [column for column in columns if column.is_in_blocks]

    @functools.cached_property
    def filled_files(self) -> int:
        """How many of the files have rows."""
        return sum(file.rows > 0 for file in self._layout.files)

    @functools.cached_property
    def memory_bytes_in_blocks(self) -> int:
        """The bytes that these have in memory."""
        return sum(c.row_bytes * c.shape[0] for c in self.columns_in_blocks)

    @functools.cached_property
    def fixed_row_bytes(self) -> int | None:
        """What reading any one row takes; None where that depends on the row."""
        sizes = {
            tuple(_fixed_bytes(column) for column in file.datasets)
            for file in self._layout.files
        }
        found = sizes.pop()
        return None if sizes or None in found else sum(filter(None, found))

    @property
    def file_count(self) -> int:
        """The number of files."""
        return self._rows.file_count

    def __len__(self) -> int:
        return len(self._rows)

    def describe(self) -> str:
        """See `RowSource.describe`."""
        return self._rows.describe()

    def shard_files(self, workers: int, worker: int) -> DryRows:
        """See `FileSource.shard_files`."""
        return DryRows(self._rows.shard_files(workers, worker), self._files)

    def blocks(self) -> Blocks:
        """See `BlockSource.blocks`."""
        return self._rows.blocks()

    def keep(self, rows: int) -> None:
        """See `BlockSource.keep`."""
        self._cache.capacity_bytes = self._layout.bytes_to_keep(rows)

    def retain(self) -> None:
        """See `BlockSource.retain`; there is nothing to be closed."""

    def release(self, keep_files: bool = False) -> None:
        """See `BlockSource.release`."""

    def read(self, rows: Rows) -> Rows:
        """Return the numbers of the rows, and count what reading them would take."""
        parts = list(self._layout.cut(rows))
        if needed := list(self._layout.blocks_in(parts)):
            self._cache.get(needed, self._decode)
        for part in parts if rows.size else []:
            self._opened.add(part.file)
            for column in self._layout.files[part.file].datasets:
                if not column.is_in_blocks:
                    self.read_bytes += _row_bytes(column, part.rows)
        return rows

    def _decode(self, key: tuple[int, ...]) -> _Block:
        file, field, block = key
        column = self._layout.files[file].datasets[field]
        decoded_bytes = len(block_rows(column, block)) * column.row_bytes
        self.decoded_chunks += 1
        if column.method is ReadMethod.CHUNKS:
            across = math.prod(column.grid[1:])
            sizes = column.sizes[block * across : (block + 1) * across]
            self.read_bytes += int(sizes.sum())
        else:
            self.read_bytes += decoded_bytes
        return _Block(decoded_bytes)


def stored_bytes(column: DatasetIndex) -> int:
    """Return the bytes of all rows in the file; in memory where h5py reads them."""
    if column.method is ReadMethod.CHUNKS:
        return int(column.sizes.sum())
    if column.method is not ReadMethod.BYTES:
        return column.row_bytes * column.shape[0]
    written = int((column.offsets >= 0).sum())
    return column.dtype.itemsize * math.prod(column.chunk) * written


def _fixed_bytes(column: DatasetIndex) -> int | None:
    """Return what reading any one row takes; None where that depends on the row."""
    if column.is_in_blocks or column.fill:
        return None
    if column.method is ReadMethod.H5PY:
        return column.row_bytes
    return math.prod(column.grid[1:]) * column.chunk_row_bytes


def _row_bytes(column: DatasetIndex, rows: Rows) -> int:
    """Return the bytes in the file of some rows that do not lie in filtered chunks."""
    if (each := _fixed_bytes(column)) is not None or column.row_bytes == 0:
        return rows.size * (each or 0)
    offsets = column.offsets.reshape(-1, math.prod(column.grid[1:]))
    is_written = offsets[rows // column.chunk[0]] >= 0
    return int(is_written.sum()) * column.chunk_row_bytes
