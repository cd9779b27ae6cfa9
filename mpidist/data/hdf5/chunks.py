"""Undoing HDF5's filters: deflate, shuffle and fletcher32.

The formats are those of the HDF5 library's H5Zdeflate.c, H5Zshuffle.c and
H5Zfletcher32.c. Inflating is libdeflate's (the package `deflate`), of those on PyPI the
fastest or nearly so (benchmarks/bench_inflate.py); it releases the GIL, so threads do
it side by side.
"""

from __future__ import annotations

import functools
import io
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import deflate
import h5py
import numpy as np
import numpy.typing as npt

__all__ = [
    "ChunkTable",
    "Filter",
    "UNWRITTEN",
    "can_decode",
    "decode",
    "filter_name",
    "filter_names",
    "filters_of",
    "skips_user_block",
    "table_of",
]


Bytes = npt.NDArray[np.uint8]
Filter = tuple[int, tuple[int, ...]]  # HDF5's number of the filter, its parameters

_DEFLATE, _SHUFFLE, _FLETCHER32 = 1, 2, 3
_KNOWN = {_DEFLATE: "gzip", _SHUFFLE: "shuffle", _FLETCHER32: "fletcher32"}

_CHECKSUM_BYTES = 4
_MODULUS = 65535
_SUM_WORDS = 256  # sums of so many weighted words are exact in float64
_SUM_WEIGHTS = np.stack([np.ones(_SUM_WORDS), np.arange(_SUM_WORDS, 0.0, -1)], axis=1)


def can_decode(filters: Sequence[Filter]) -> bool:
    """Return whether `decode` undoes these filters."""
    codes = [code for code, _ in filters]
    # What was deflated twice was in between of a size that is not known
    return _KNOWN.keys() >= set(codes) and codes.count(_DEFLATE) <= 1


def filter_name(code: int) -> str:
    """Return what h5py calls a filter that `decode` undoes."""
    return _KNOWN[code]


def decode(
    stored: Any, filters: Sequence[Filter], skipped: int, size_bytes: int
) -> Bytes:
    """Return the `size_bytes` bytes of a chunk.

    Args:
      stored: the chunk as it lies in the file, a buffer.
      filters: those of the dataset, in the order in which they were applied.
      skipped: a bit mask of the filters that were left out for this chunk.
      size_bytes: the size of the chunk before filtering.

    Raises:
      ValueError: the bytes are no such chunk, or do not have their checksum.
    """
    applied = [f for i, f in enumerate(filters) if not skipped >> i & 1]
    sizes = [size_bytes]  # before each filter
    for code, _ in applied:
        sizes.append(sizes[-1] + (_CHECKSUM_BYTES if code == _FLETCHER32 else 0))
    data = np.frombuffer(stored, np.uint8)
    for (code, parameters), size in zip(applied[::-1], sizes[-2::-1], strict=True):
        if code == _DEFLATE:
            data = _inflate(data, size)
        elif code == _SHUFFLE:
            data = _unshuffle(data, *parameters[:1])
        else:
            data = _without_checksum(data)
    if data.size != size_bytes:
        raise ValueError(f"a chunk has {data.size} bytes instead of {size_bytes}")
    return data


def _inflate(data: Bytes, size: int) -> Bytes:
    try:
        return np.frombuffer(deflate.zlib_decompress(data, size), np.uint8)
    except deflate.DeflateError:
        return _inflate_any(data)[:size]


def _inflate_any(data: Bytes) -> Bytes:
    """Return what was deflated, which may be more than a chunk."""
    try:
        return np.frombuffer(zlib.decompress(data.data), np.uint8)
    except zlib.error as error:
        raise ValueError(
            f"a chunk of {data.size} bytes cannot be inflated: {error}"
        ) from error


def _unshuffle(data: Bytes, item: int = 1) -> Bytes:
    """Return values of `item` bytes from all their first bytes, all their second..."""
    count = data.size // item
    if item == 1 or count <= 1:
        return data
    planes = data[: count * item].reshape(item, count)
    values = np.empty(data.size, np.uint8)
    body = values[: count * item]
    if item in (2, 4, 8):  # shifting whole words is faster than scattering bytes
        _join(planes, body.view(f"<u{item}"))
    else:
        body.reshape(count, item)[:] = planes.T
    values[count * item :] = data[count * item :]
    return values


def _join(planes: Bytes, words: Any) -> None:
    """Make little-endian words of their bytes: planes[0] holds the lowest ones."""
    words[:] = planes[-1]
    for plane in planes[-2::-1]:
        words <<= 8
        words |= plane


def _without_checksum(data: Bytes) -> Bytes:
    """Return the data without the checksum after it, which must be theirs."""
    body, tail = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if data.size < _CHECKSUM_BYTES:
        raise ValueError(f"a chunk of {data.size} bytes is too short for a checksum")
    stored, found = int(tail.view("<u4")[0]), _fletcher32(body)
    # HDF5 before 1.6.3 swapped the bytes of both halves on some machines
    swapped = (found & 0x00FF00FF) << 8 | (found & 0xFF00FF00) >> 8
    if stored not in (found, swapped):
        raise ValueError(f"a chunk has the checksum {found:#x} instead of {stored:#x}")
    return body


def _fletcher32(data: Bytes) -> int:
    """Return the checksum of n 16-bit words w_i: the sums of w_i and of (n - i) w_i.

    Both are modulo 65535, where a sum that is not zero is never reduced to zero.
    """
    if data.size % 2:
        data = np.append(data, np.uint8(0))
    words = data.view(">u2")
    # Weights count from the end, so zeros in front change nothing
    rows = -(-words.size // _SUM_WORDS)
    padded = np.zeros(rows * _SUM_WORDS)
    padded[padded.size - words.size :] = words
    sums = (padded.reshape(rows, _SUM_WORDS) @ _SUM_WEIGHTS).astype(np.int64)
    plain, weighted = sums[:, 0], sums[:, 1]
    # All words of a row count once more for each word in the rows after it
    words_after = np.arange(rows - 1, -1, -1) * _SUM_WORDS
    first = int(plain.sum())
    second = int((weighted + plain % _MODULUS * (words_after % _MODULUS)).sum())
    return _reduce(second) << 16 | _reduce(first) if first else 0


def _reduce(total: int) -> int:
    return (total - 1) % _MODULUS + 1


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
