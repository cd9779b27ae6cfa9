"""Reading rows of one dataset of one file, by its index."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpidist.data.hdf5.chunks import decode
from mpidist.data.hdf5.files import RawFile
from mpidist.data.hdf5.index import Column
from mpidist.data.hdf5.row_copy import Map
from mpidist.util.buffers import Buffers

__all__ = ["block_rows", "read_bytes", "read_by_h5py", "read_chunks"]

Rows = npt.NDArray[np.int64]

# A gap between two wanted rows is read too if it is smaller: one call costs more
_GAP_BYTES = 32 << 10


def block_rows(column: Column, block: int) -> range:
    """Return which rows a row of chunks holds."""
    step = column.chunk[0]
    return range(block * step, min((block + 1) * step, column.shape[0]))


def read_bytes(
    column: Column, file: RawFile, rows: Rows, buffers: Buffers, parallel: Map
) -> Any:
    """Return rows that are not filtered, in any order, in native byte order."""
    if column.row_bytes == 0 or rows.size == 0:
        return np.empty((rows.size, *column.row_shape), column.native)
    pieces = _gather(column, file, rows, buffers, parallel)
    pieces = pieces.view(column.dtype).reshape(-1, *column.chunk[1:])
    if column.chunk[1:] == column.row_shape:
        return pieces if column.is_native else pieces.astype(column.native)
    found = buffers.empty((rows.size, *column.row_shape), column.native)
    for number, (place, inside) in enumerate(_places(column)):
        part = pieces[number * rows.size : (number + 1) * rows.size]
        found[place] = part[inside]
    return found


def _gather(
    column: Column, file: RawFile, rows: Rows, buffers: Buffers, parallel: Map
) -> Any:
    """Return the bytes of the rows: their parts in each column of chunks in turn."""
    size_bytes, step = column.chunk_row_bytes, column.chunk[0]
    if not column.is_chunked and not column.fill:
        offset = int(column.offsets[0])
        return file.take(offset, size_bytes, rows, buffers, parallel)
    across = math.prod(column.grid[1:])
    chunks, inside = np.divmod(rows, step)
    numbers = (chunks * across + np.arange(across)[:, np.newaxis]).reshape(-1)
    starts = column.offsets[numbers]
    offsets = starts + np.tile(inside * size_bytes, across)
    if not column.fill:
        return file.gather(offsets, size_bytes, buffers, parallel)
    written = starts >= 0
    fill = column.fill * (size_bytes // len(column.fill))
    pieces = np.full((starts.size, size_bytes), np.frombuffer(fill, np.uint8))
    pieces[written] = file.gather(offsets[written], size_bytes, buffers, parallel)
    return pieces


def _places(column: Column) -> list[tuple[Any, Any]]:
    """Return which part of rows each chunk across them holds, and where it is in it.

    The chunks at the edge reach over it.
    """
    edges = [
        [slice(i * c, min((i + 1) * c, n)) for i in range(count)]
        for n, c, count in zip(
            column.row_shape, column.chunk[1:], column.grid[1:], strict=True
        )
    ]
    return [
        (
            (slice(None), *place),
            (slice(None), *(slice(0, s.stop - s.start) for s in place)),
        )
        for place in itertools.product(*edges)
    ]


def read_chunks(
    column: Column,
    file: RawFile,
    by_h5py: Callable[[tuple[slice, ...]], Any],
    block: int,
) -> Any:
    """Return all rows of a row of chunks, in native byte order.

    Args:
      column: filtered, or not.
      file: that it lies in.
      by_h5py: reads a region of the dataset, for chunks that are not understood.
      block: the number of the row of chunks.
    """
    rows, across = block_rows(column, block), math.prod(column.grid[1:])
    numbers = range(block * across, (block + 1) * across)
    is_whole = column.chunk == (len(rows), *column.row_shape) and column.is_native
    if is_whole and column.offsets[numbers[0]] >= 0:
        chunk = _chunk(column, file, numbers[0])
        return by_h5py((slice(rows.start, rows.stop),)) if chunk is None else chunk
    found = np.empty((len(rows), *column.row_shape), column.native)
    for number, (place, inside) in zip(numbers, _places(column), strict=True):
        if column.offsets[number] < 0:
            found[place] = np.frombuffer(column.fill, column.dtype)[0]
        elif (chunk := _chunk(column, file, number)) is not None:
            found[place] = chunk[: len(rows)][inside]
        else:
            found[place] = by_h5py((slice(rows.start, rows.stop), *place[1:]))
    return found


def _chunk(column: Column, file: RawFile, number: int) -> Any:
    """Return a decoded chunk; None for one that may be stored without its filters.

    HDF5 can be told to do so with the chunks at the edge (H5Pset_chunk_opts), which
    cannot be seen but by their size.
    """
    size_bytes = column.dtype.itemsize * math.prod(column.chunk)
    stored = int(column.sizes[number])
    skipped = int(column.skipped[number]) if column.skipped.size else 0
    is_edge = any(n % c for n, c in zip(column.shape, column.chunk, strict=True))
    if is_edge and stored == size_bytes and not skipped:
        return None

    def read_chunk(data: Any) -> Any:
        decoded = decode(data, column.filters, skipped, size_bytes)
        # The map must not be used when this returns
        is_view = np.may_share_memory(decoded, np.frombuffer(data, np.uint8))
        return decoded.copy() if is_view else decoded

    data = file.read(int(column.offsets[number]), stored, read_chunk)
    return data.view(column.dtype).reshape(column.chunk)


def read_by_h5py(dataset: h5py.Dataset, column: Column, rows: Rows) -> Any:
    """Return rows in native byte order, each read once, in the order of the file."""
    wanted, back = np.unique(rows, return_inverse=True)
    found = np.empty((wanted.size, *column.row_shape), column.native)
    row_bytes = max(1, column.row_bytes)
    gaps = np.flatnonzero((np.diff(wanted) - 1) * row_bytes > _GAP_BYTES) + 1
    for first, last in itertools.pairwise([0, *gaps.tolist(), wanted.size]):
        if first < last:
            start, stop = int(wanted[first]), int(wanted[last - 1]) + 1
            found[first:last] = dataset[start:stop][wanted[first:last] - start]
    return found[back]
