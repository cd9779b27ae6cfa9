"""The rows that one process writes: an HDF5 file that grows, chunk by chunk."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np

from mpidist import arrays
from mpidist.data.hdf5.layout import (
    BLOCK_BYTES,
    LARGEST_CHUNK_BYTES,
    Field,
    Storage,
    fields_of,
    require_same_fields,
    require_storable,
    to_arrays,
)
from mpidist.data.hdf5.unfinished import Unfinished
from mpidist.errors import DataError

__all__ = ["Shard"]

T = TypeVar("T")


class Shard:
    """One process's HDF5 file of rows, under a temporary name until `publish`.

    Nothing here communicates. Rows are kept until they fill a chunk, or about 1 MiB.

    Args:
      path: the name that the file gets in the end.
      storage: how rows are stored.

    Raises:
      DataError: the file cannot be created.
    """

    def __init__(self, path: Path, storage: Storage):
        self.path = path
        self.rows = 0
        self.fields: tuple[Field, ...] | None = None  # by name, since the first rows
        self._is_whole = True
        self._storage = storage
        self._datasets: list[_Dataset] = []
        self._unfinished = self._checked("created", lambda: Unfinished(path))
        # Each chunk is written once and whole: a cache of chunks would be of no use
        self._hdf5 = h5py.File(self._unfinished, "w", rdcc_nbytes=0)
        # Also at the end of the process, when HDF5 could not write to it any more
        self.discard = weakref.finalize(self, _discard, self._hdf5, self._unfinished)

    @property
    def temporary(self) -> Path:
        """The name of the file until `publish`."""
        return self._unfinished.temporary

    def append(self, rows: Mapping[str, Any]) -> None:
        """Add rows: arrays `(rows, *shape)` by the names of their datasets.

        Raises:
          ArgumentError: the arrays have unequal numbers of rows, or other names, dtypes
            or row shapes than before. Nothing was added.
          ArgumentTypeError: no mapping of names to arrays.
          DTypeError: a dtype that HDF5 does not have.
          DataError: the file cannot be written; it is not complete any more.
        """
        self._require_whole()
        found = to_arrays(rows)
        fields = fields_of(found)
        if self.fields is None:
            require_storable(fields)
            self._datasets = [_Dataset(c, self._storage) for c in fields]
            self.fields = fields
        else:
            require_same_fields(self.fields, fields)
        self._is_whole = False
        for dataset, array in zip(self._datasets, found.values(), strict=True):
            self._write(dataset, functools.partial(dataset.append, self._hdf5, array))
        self._is_whole = True
        self.rows += len(next(iter(found.values())))

    def finish(self) -> None:
        """Write what was kept back, and bring the file to the disk.

        Raises:
          DataError: something could not be written, now or before.
        """
        self._require_whole()
        for dataset in self._datasets:
            self._write(dataset, functools.partial(dataset.finish, self._hdf5))
        self._checked("written", self._hdf5.close)
        self._checked("written", self._unfinished.complete)

    def publish(self) -> None:
        """Give the finished file its name; remove a file without rows.

        Raises:
          DataError: it cannot be renamed.
        """
        if self.rows:
            self._checked("renamed", self._unfinished.publish)
        else:
            self.discard()

    def withdraw(self) -> None:
        """Remove the file if it was published."""
        self._unfinished.withdraw()

    def _require_whole(self) -> None:
        if not self._is_whole:
            raise DataError(
                f"{self.path}: an append failed before, in the middle of its rows"
            )

    def _write(self, dataset: _Dataset, write: Callable[[], None]) -> None:
        def checked() -> None:
            write()
            self._unfinished.require_sound()

        self._checked(f"written (dataset {dataset.field.name!r})", checked)

    def _checked(self, what: str, fn: Callable[[], T]) -> T:
        try:
            return fn()
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"{self.path}: cannot be {what}: {error}") from error


class _Dataset:
    """One growing dataset of a file, to which rows go in blocks of whole chunks."""

    def __init__(self, field: Field, storage: Storage):
        self.field = field
        self._filters = storage.filters if field.row_bytes else {}
        self._chunk_rows = storage.chunk_rows_of(field)
        chunk_bytes = max(1, self._chunk_rows * field.row_bytes)
        block_rows = self._chunk_rows * max(1, BLOCK_BYTES // chunk_bytes)
        self._block = np.empty((block_rows, *field.row_shape), field.dtype)
        self._kept = 0  # rows in the block
        self._written = 0
        self._hdf5: h5py.Dataset | None = None

    def append(self, file: h5py.File, rows: Any) -> None:
        """Write the blocks that the rows fill, and keep the rest."""
        if not self.field.row_bytes:  # only counted: HDF5 has no chunks of no bytes
            self._kept += len(rows)
            return
        start, size = 0, len(self._block)
        while start < len(rows):
            count = min(len(rows) - start, size - self._kept)
            piece = arrays.to_host(rows[start : start + count])
            start += count
            if count < size:
                self._block[self._kept : self._kept + count] = piece
                self._kept += count
                if self._kept < size:
                    return
                piece, self._kept = self._block, 0
            self._write(file, piece)

    def finish(self, file: h5py.File) -> None:
        """Write the rows that are kept."""
        kept, self._kept = self._kept, 0
        if kept and self._hdf5 is None:
            self._hdf5 = self._create_small(file, kept)
        if kept and self.field.row_bytes:
            self._write(file, self._block[:kept])

    def _write(self, file: h5py.File, rows: Any) -> None:
        if self._hdf5 is None:
            self._hdf5 = self._create_growing(file)
        end = self._written + len(rows)
        if end > len(self._hdf5):
            self._hdf5.resize(end, axis=0)
        self._hdf5[self._written : end] = rows
        self._written = end

    def _create_growing(self, file: h5py.File) -> h5py.Dataset:
        field = self.field
        return file.create_dataset(
            field.name,
            (0, *field.row_shape),
            field.dtype,
            maxshape=(None, *field.row_shape),
            chunks=self._chunks(self._chunk_rows),
            **self._filters,
        )

    def _create_small(self, file: h5py.File, rows: int) -> h5py.Dataset:
        """Create a dataset of few rows, for which a whole chunk would be too much."""
        field = self.field
        chunks = self._chunks(min(rows, self._chunk_rows)) if self._filters else None
        shape = (rows, *field.row_shape)
        return file.create_dataset(
            field.name, shape, field.dtype, chunks=chunks, **self._filters
        )

    def _chunks(self, rows: int) -> Any:
        """Return the shape of a chunk; True leaves it to h5py to cut a giant row."""
        if rows * self.field.row_bytes > LARGEST_CHUNK_BYTES:
            return True
        return (rows, *self.field.row_shape)


def _discard(file: h5py.File, unfinished: Unfinished) -> None:
    file.close()
    unfinished.discard()
