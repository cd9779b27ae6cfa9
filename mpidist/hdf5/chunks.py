"""Chunks: their offsets in the file, and decoding of deflate, shuffle and fletcher32.

The formats are those of the HDF5 library's H5Zdeflate.c, H5Zshuffle.c and
H5Zfletcher32.c. libdeflate (the package `deflate`) inflates, among the fastest on PyPI;
it releases the GIL, so threads decode in parallel.
"""

from __future__ import annotations

import dataclasses
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

Bytes = npt.NDArray[np.uint8]
Filter = tuple[int, tuple[int, ...]]  # HDF5's filter code, parameters

_DEFLATE, _SHUFFLE, _FLETCHER32 = 1, 2, 3
_KNOWN = {_DEFLATE: "gzip", _SHUFFLE: "shuffle", _FLETCHER32: "fletcher32"}

_CHECKSUM_BYTES = 4
_PIECE_BYTES = 1 << 20
_MODULUS = 65535
_SUM_WORDS = 256  # weighted sums of this many words are exact in float64
_SUM_WEIGHTS = np.stack([np.ones(_SUM_WORDS), np.arange(_SUM_WORDS, 0.0, -1)], axis=1)


def can_decode(filters: Sequence[Filter]) -> bool:
    """Return whether `decode` supports these filters."""
    codes = [code for code, _ in filters]
    # After a second deflate, the size of the first result is unknown
    return _KNOWN.keys() >= set(codes) and codes.count(_DEFLATE) <= 1


def filter_name(code: int) -> str:
    """Return h5py's name of a filter that `decode` supports."""
    return _KNOWN[code]


def decode(
    stored: Any, filters: Sequence[Filter], skipped: int, size_bytes: int
) -> Bytes:
    """Return the `size_bytes` bytes of a decoded chunk.

    Args:
      stored: buffer of the chunk in the file.
      filters: of the dataset, in the order of their application.
      skipped: bit mask of the filters that were not applied to this chunk.
      size_bytes: size of the decoded chunk.

    Raises:
      ValueError: the chunk is damaged, or its checksum does not match.
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
            data = _unshuffle(data, *parameters)
        else:
            data = _without_checksum(data)
    if data.size != size_bytes:
        raise ValueError(f"a chunk has {data.size} bytes instead of {size_bytes}")
    return data


def _inflate(data: Bytes, size: int) -> Bytes:
    try:
        return np.frombuffer(deflate.zlib_decompress(data, size), np.uint8)
    except deflate.DeflateError:
        return np.frombuffer(_inflate_longer(data, size), np.uint8)


def _inflate_longer(data: Bytes, size: int) -> bytes:
    """Return the first `size` bytes of inflated data, which may be longer.

    The rest is inflated in pieces, for the checksum at its end, and not kept.
    """
    stream = zlib.decompressobj()
    try:
        first = stream.decompress(data.data, max(1, size))
        while not stream.eof:
            more = stream.decompress(stream.unconsumed_tail, _PIECE_BYTES)
            if not more and not stream.eof:
                raise zlib.error("incomplete or truncated stream")
    except zlib.error as error:
        raise ValueError(
            f"a chunk of {data.size} bytes cannot be inflated: {error}"
        ) from error
    return first[:size]


def _unshuffle(data: Bytes, item: int) -> Bytes:
    """Undo the shuffle of values of `item` bytes: all first bytes, all second..."""
    count = data.size // item
    if item == 1 or count <= 1:
        return data
    planes = data[: count * item].reshape(item, count)
    values = np.empty(data.size, np.uint8)
    body = values[: count * item]
    if item in (2, 4, 8):  # shifting words is faster than scattering bytes
        _join(planes, body.view(f"<u{item}"))
    else:
        body.reshape(count, item)[:] = planes.T
    values[count * item :] = data[count * item :]
    return values


def _join(planes: Bytes, words: Any) -> None:
    """Join little-endian words of planes of bytes, the lowest first."""
    words[:] = planes[-1]
    for plane in planes[-2::-1]:
        words <<= 8
        words |= plane


def _without_checksum(data: Bytes) -> Bytes:
    """Verify the checksum at the end of the data; return the data without it."""
    body, tail = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if data.size < _CHECKSUM_BYTES:
        raise ValueError(f"a chunk of {data.size} bytes is too short for a checksum")
    stored, computed = int(tail.view("<u4")[0]), _fletcher32(body)
    # HDF5 before 1.6.3 swapped the bytes of both halves on some machines
    swapped = (computed & 0x00FF00FF) << 8 | (computed & 0xFF00FF00) >> 8
    if stored not in (computed, swapped):
        raise ValueError(
            f"a chunk has the checksum {computed:#x} instead of {stored:#x}"
        )
    return body


def _fletcher32(data: Bytes) -> int:
    """Return the checksum of n 16-bit words w_i: the sums of w_i and of (n - i) w_i.

    Both modulo 65535, but multiples of it, unless 0, give 65535.
    """
    if data.size % 2:
        data = np.append(data, np.uint8(0))
    words = data.view(">u2")
    # Weights count from the end, so leading zeros change nothing
    rows = -(-words.size // _SUM_WORDS)
    padded = np.zeros(rows * _SUM_WORDS)
    padded[padded.size - words.size :] = words
    sums = (padded.reshape(rows, _SUM_WORDS) @ _SUM_WEIGHTS).astype(np.int64)
    plain, weighted = sums[:, 0], sums[:, 1]
    # A word counts once more for each word in the rows after its own
    words_after = np.arange(rows - 1, -1, -1) * _SUM_WORDS
    first = int(plain.sum())
    second = int((weighted + plain % _MODULUS * (words_after % _MODULUS)).sum())
    return _reduce(second) << 16 | _reduce(first) if first else 0


def _reduce(total: int) -> int:
    return (total - 1) % _MODULUS + 1


# Of a shuffle block
_SHUFFLED_BYTES = 256 << 20
_SHUFFLED_CHUNKS = 384


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """How rows are stored in chunks.

    Args:
      lengths: number of rows of each run (file); each run starts a new chunk.
      rows: number of rows of a chunk; the last chunk of a run may have fewer.
      row_bytes: bytes of a row in memory.
      is_costly: whether reading one row costs as much as reading its chunk.
    """

    lengths: tuple[int, ...]
    rows: int
    row_bytes: int
    is_costly: bool

    @functools.cached_property
    def count(self) -> int:
        """The number of chunks."""
        return sum(-(-length // self.rows) for length in self.lengths)

    @property
    def default_block_chunks(self) -> int:
        """The default size of a shuffle block: 384 chunks, or at most 256 MiB."""
        fitting = _SHUFFLED_BYTES // max(1, self.rows * self.row_bytes)
        return min(max(1, fitting), _SHUFFLED_CHUNKS)


Numbers = npt.NDArray[np.int64]

UNWRITTEN = -1
_FAR_AWAY = 1 << 60
# Datasets with this many times more chunks than were written get no table
_SPARSE = 1000


class ChunkTable(NamedTuple):
    """Place of each chunk in the file, in C order of the chunks.

    Args:
      offsets: start in the file; UNWRITTEN if it was never written.
      sizes: bytes in the file.
      skipped: bit mask of the filters that were not applied.
    """

    offsets: Numbers
    sizes: Numbers
    skipped: Numbers


def filters_of(dataset: h5py.Dataset) -> tuple[Filter, ...] | None:
    """Return the filters; None if `decode` does not support them.

    Raises:
      ValueError: one is damaged.
    """
    properties = dataset.id.get_create_plist()
    filters = []
    for i in range(properties.get_nfilters()):
        code, _, parameters, _ = properties.get_filter(i)
        if code == _SHUFFLE and len(parameters) != 1:  # as the second of two has
            return None
        # HDF5 refuses it too, but after inflating
        if code == _SHUFFLE and not parameters[0]:
            raise ValueError(f"its shuffle filter has the parameters {parameters}")
        filters.append((code, tuple(parameters)))
    return tuple(filters) if can_decode(filters) else None


def filter_names(dataset: h5py.Dataset) -> list[str]:
    """Return the names that the filters of a dataset give themselves."""
    properties = dataset.id.get_create_plist()
    infos = [properties.get_filter(i) for i in range(properties.get_nfilters())]
    return [name.decode(errors="replace") or str(code) for code, _, _, name in infos]


def skips_user_block(file: h5py.File) -> bool:
    """Return whether HDF5 reports chunk offsets in `file` without its user block.

    HDF5 1.14.0 to 1.14.3 do. The version and patches of h5py's HDF5 are only known at
    run time.
    """
    return file.userblock_size > 0 and not _offsets_include_user_block()


@functools.cache
def _offsets_include_user_block() -> bool:
    image, data = io.BytesIO(), np.arange(1, 17, dtype=np.uint8)
    offsets: list[int] = []
    with h5py.File(image, "w", userblock_size=512) as file:
        dataset = file.create_dataset("x", data=data, chunks=data.shape)
        file.flush()
        dataset.id.chunk_iter(lambda chunk: offsets.append(chunk.byte_offset))
    (offset,) = offsets
    return image.getvalue()[offset : offset + data.size] == data.tobytes()


def table_of(dataset: h5py.Dataset) -> ChunkTable | None:
    """Return the chunks of a dataset; None if HDF5 does not report them correctly."""
    grid = [-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True)]
    count = math.prod(grid)
    is_sparse = count > _SPARSE * (dataset.id.get_num_chunks() + _SPARSE)
    if is_sparse or _is_confused(dataset):
        return None
    stored = _stored(dataset) if count else np.empty((0, dataset.ndim + 3), np.int64)
    # Refuse positions outside of the dataset, and two chunks at one position
    coordinates = stored[:, : dataset.ndim] // dataset.chunks
    if (coordinates >= grid).any():
        return None
    numbers = np.ravel_multi_index(tuple(coordinates.T), grid)
    if np.unique(numbers).size < numbers.size:
        return None
    size_bytes = dataset.dtype.itemsize * math.prod(dataset.chunks)
    # Reading at an impossible offset reports a chunk of a wrong size as damaged
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
    """Return position, offset, size and skipped filters of each stored chunk."""
    rows: list[tuple[int, ...]] = []

    def add(chunk: Any) -> None:
        # Damaged offsets can exceed an int64; reading so far away fails anyway
        offset = min(chunk.byte_offset, _FAR_AWAY)
        where = offset, chunk.size, chunk.filter_mask
        rows.append((*chunk.chunk_offset, *where))

    dataset.id.chunk_iter(add)
    return np.array(rows, np.int64).reshape(-1, dataset.ndim + 3)


def _is_confused(dataset: h5py.Dataset) -> bool:
    """Return whether HDF5 reports wrong positions of chunks.

    HDF5 2.0.0 does if exactly one dimension is unlimited, and is not the first: its
    index has that dimension first, which the reported positions ignore.
    """
    is_endless = [limit is None for limit in dataset.maxshape]
    return sum(is_endless) == 1 and not is_endless[0]
