"""How the rows of several files follow each other, and which chunks they need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpidist.block_order import Blocks
from mpidist.data.hdf5.index import Column, FileIndex
from mpidist.errors import DataError

__all__ = ["KEPT_BYTES", "Layout", "Part"]

RowNumbers = npt.NDArray[np.int64]

# Decoded chunks are kept up to so many bytes, or as `Layout.bytes_to_keep` says
KEPT_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20  # of rows that are not in chunks


class Part(NamedTuple):
    """The wanted rows of one file, and their places among all that are wanted."""

    file: int
    rows: RowNumbers
    places: Any


class Layout(NamedTuple):
    """What was found in the files, which must not change while they are read.

    Args:
      files: at least one.
      starts: the number of each file's first row, and of all rows.
      rows: the number of all rows.
      blocks: how the rows lie in chunks.
    """

    files: list[FileIndex]
    starts: RowNumbers
    rows: int
    blocks: Blocks

    @classmethod
    def of(cls, files: Sequence[FileIndex]) -> Layout:
        """Return the layout of files that follow each other.

        Raises:
          DataError: the files do not fit together.
        """
        for file in files[1:]:
            _require_like(file, files[0])
        starts = np.cumsum([0, *(file.rows for file in files)])
        return cls(list(files), starts, int(starts[-1]), _blocks_of(files))

    def cut(self, rows: RowNumbers) -> Iterator[Part]:
        """Cut wanted rows by file; there is at least one part."""
        starts = self.starts
        if len(starts) == 2 or not rows.size:
            yield Part(0, rows, slice(None))
            return
        files = np.searchsorted(starts, rows, "right") - 1
        for file in np.unique(files).tolist():
            places = np.flatnonzero(files == file)
            yield Part(file, rows[places] - starts[file], places)

    def blocks_in(self, parts: Iterable[Part]) -> Iterator[tuple[int, ...]]:
        """Yield the chunks that must be decoded: file, field and number."""
        for part in parts:
            for field, column in enumerate(self.files[part.file].columns):
                if column.is_in_blocks and part.rows.size:
                    for block in np.unique(part.rows // column.chunk[0]).tolist():
                        yield part.file, field, block

    def bytes_to_keep(self, rows: int) -> int:
        """Return what to keep of decoded chunks to read so many rows in any order."""
        # Half as many again, for the windows that begin before others have ended
        return sum(
            (rows + rows // 2 + 2 * column.chunk[0]) * column.row_bytes
            for column in self.files[0].columns
            if column.is_in_blocks
        )


def _require_like(file: FileIndex, first: FileIndex) -> None:
    """Raise a DataError if the rows of two files differ in dtype or shape."""
    for column, other in zip(file.columns, first.columns, strict=True):
        if (column.native, column.row_shape) != (other.native, other.row_shape):
            raise DataError(
                f"{file.path}: rows of dataset {column.name!r} are {column.native} "
                f"{column.row_shape}, but {other.native} {other.row_shape} in "
                f"{first.path}"
            )


def _blocks_of(files: Sequence[FileIndex]) -> Blocks:
    """Return how the rows of all files lie in chunks: those of the largest."""
    columns = [column for file in files for column in file.columns]
    costly = [column for column in columns if column.is_in_blocks]
    _, rows = max(map(_block_size, costly or columns))
    return Blocks(
        tuple(file.rows for file in files),
        rows,
        sum(column.row_bytes for column in files[0].columns),
        is_costly=sum(c.row_bytes * c.shape[0] for c in costly) > KEPT_BYTES,
    )


def _block_size(column: Column) -> tuple[int, int]:
    """Return the bytes and the rows of a chunk, or of what counts as one."""
    row_bytes = max(1, column.row_bytes)
    if column.is_chunked:
        return row_bytes * column.chunk[0], column.chunk[0]
    return row_bytes, max(1, _BLOCK_BYTES // row_bytes)
