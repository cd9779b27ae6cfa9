"""Where HDF5 has put the chunks of a dataset, and which filters it applied."""

from __future__ import annotations

import functools
import io
import math
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from mpidist.data.hdf5.codec import Filter, can_decode

__all__ = [
    "UNWRITTEN",
    "ChunkTable",
    "filter_names",
    "filters_of",
    "skips_user_block",
    "table_of",
]

Numbers = npt.NDArray[np.int64]

UNWRITTEN = -1
_FAR_AWAY = 1 << 60
# No table is made for a dataset with so many times more chunks than were written
_SPARSE = 1000


class ChunkTable(NamedTuple):
    """Of each chunk, in C order of the chunks.

    Args:
      offsets: where it starts in the file, UNWRITTEN for one that never was.
      sizes: its bytes in the file.
      skipped: a bit mask of the filters that it was stored without.
    """

    offsets: Numbers
    sizes: Numbers
    skipped: Numbers


def filters_of(dataset: h5py.Dataset) -> tuple[Filter, ...] | None:
    """Return the filters, None if they cannot be undone without HDF5."""
    properties = dataset.id.get_create_plist()
    filters = []
    for i in range(properties.get_nfilters()):
        code, _, parameters, _ = properties.get_filter(i)
        filters.append((code, tuple(parameters)))
    return tuple(filters) if can_decode(filters) else None


def filter_names(dataset: h5py.Dataset) -> list[str]:
    """Return what the filters of a dataset call themselves."""
    properties = dataset.id.get_create_plist()
    found = [properties.get_filter(i) for i in range(properties.get_nfilters())]
    return [name.decode(errors="replace") or str(code) for code, _, _, name in found]


def skips_user_block(file: h5py.File) -> bool:
    """Return whether HDF5 gives chunks of `file` offsets without its user block.

    HDF5 1.14.0 to 1.14.3 do so. Which HDF5 h5py runs with, and with which patches, is
    known at run time only.
    """
    return file.userblock_size > 0 and not _offsets_include_user_block()


@functools.cache
def _offsets_include_user_block() -> bool:
    """Return whether a chunk after a user block is where HDF5 says that it is."""
    image, data = io.BytesIO(), np.arange(1, 17, dtype=np.uint8)
    found: list[int] = []
    with h5py.File(image, "w", userblock_size=512) as file:
        dataset = file.create_dataset("x", data=data, chunks=data.shape)
        file.flush()
        dataset.id.chunk_iter(lambda chunk: found.append(chunk.byte_offset))
    (offset,) = found
    return image.getvalue()[offset : offset + data.size] == data.tobytes()


def table_of(dataset: h5py.Dataset) -> ChunkTable | None:
    """Return the chunks of a dataset, None where HDF5 does not tell them rightly."""
    grid = [-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True)]
    count = math.prod(grid)
    is_sparse = count > _SPARSE * (dataset.id.get_num_chunks() + _SPARSE)
    if is_sparse or _is_confused(dataset):
        return None
    stored = _stored(dataset) if count else np.empty((0, dataset.ndim + 3), np.int64)
    places = stored[:, : dataset.ndim] // dataset.chunks
    if (places >= grid).any():
        return None
    numbers = np.ravel_multi_index(tuple(places.T), grid)
    if np.unique(numbers).size < numbers.size:
        return None
    size_bytes = dataset.dtype.itemsize * math.prod(dataset.chunks)
    is_damaged = stored[:, dataset.ndim + 1] != size_bytes
    if not dataset.id.get_create_plist().get_nfilters():
        stored[is_damaged, dataset.ndim] = _FAR_AWAY
    table = ChunkTable(
        np.full(count, UNWRITTEN), np.zeros(count, np.int64), np.zeros(count, np.int64)
    )
    for column, values in zip(table, stored[:, dataset.ndim :].T, strict=True):
        column[numbers] = values
    return table


def _stored(dataset: h5py.Dataset) -> Numbers:
    """Return place, offset, size and skipped filters of each chunk that there is."""
    rows: list[tuple[int, ...]] = []

    def add(chunk: Any) -> None:
        # A damaged offset may be any; what lies so far away is noticed when read
        offset = min(chunk.byte_offset, _FAR_AWAY)
        where = offset, chunk.size, chunk.filter_mask
        rows.append((*chunk.chunk_offset, *where))

    dataset.id.chunk_iter(add)
    return np.array(rows, np.int64).reshape(-1, dataset.ndim + 3)


def _is_confused(dataset: h5py.Dataset) -> bool:
    """Return whether HDF5 gives chunks wrong places.

    It does (2.0.0) where only one dimension may grow for ever, and is not the first:
    its index then has that dimension first, but tells places as if it had not.
    """
    is_endless = [limit is None for limit in dataset.maxshape]
    return sum(is_endless) == 1 and not is_endless[0]
