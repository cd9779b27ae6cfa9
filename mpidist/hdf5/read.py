"""Rows of HDF5 datasets across several files, read by number.

`Hdf5Rows` divides wanted rows by file, and reads those of each dataset as its index
says: the bytes of each row, whole chunks that are decoded and kept for a while, or by
h5py. Short rows that are not in chunks are kept, too, if they are few.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import h5py
import numpy as np
import numpy.typing as npt

from mpidist.errors import DataError
from mpidist.hdf5.chunks import ChunkLayout, decode
from mpidist.hdf5.files import Map, OpenFiles, RawFile, pieces_of
from mpidist.hdf5.index import DatasetIndex, FileIndex, ReadMethod, index_file
from mpidist.hdf5.linked_files import Parts, require_complete, require_distinct
from mpidist.util import nest, validation
from mpidist.util.available_memory import available_cores
from mpidist.util.buffers import Buffers
from mpidist.util.threads import share_calls

Rows = npt.NDArray[np.int64]
T = TypeVar("T")
Key = tuple[int, ...]

# Capacity of the cache of decoded chunks, unless `reserve_cache` sets another one
KEPT_BYTES = 64 << 20
_LARGE_BYTES = 4 << 20  # reads of several files above this size use threads
_BLOCK_BYTES = 1 << 20  # of rows that are not in chunks
_SHORT_BYTES = 16 << 10  # for longer rows, copying outweighs a call for each
_READ_ERRORS = (OSError, KeyError, RuntimeError, ValueError)


class Hdf5Rows:
    """The rows of HDF5 datasets of concatenated files; see `Dataset.from_hdf5`.

    Each file is indexed once, by this process or another one (see `set_index`). Files
    are opened at the first read, read-only and without locks, once per process; a copy
    or a forked child opens its own. Thread-safe.

    Args:
      paths: of the files.
      names: name of an HDF5 dataset, or a tuple or dict of names.
      allow_short_external: see `Dataset.from_hdf5`.
      threads: how many read and decode concurrently; None for one per available core.
      may_be_part: whether they may be some of the shards that an `Hdf5Writer` wrote.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        names: str | tuple[str, ...] | Mapping[str, str],
        allow_short_external: bool = False,
        threads: int | None = None,
        may_be_part: bool = False,
    ):
        self._paths = list(paths)
        self._may_be_part = may_be_part
        self._names, self._spec = nest.flatten(names)
        # Kept for `describe` when this object is one worker's share of the files.
        self._all_paths = self._paths
        self._allow_short_external = allow_short_external
        self._threads = threads
        self._file_map: FileMap | None = None
        self._on_rank = ""
        self._keeps_short = False
        self._start()

    def _start(self) -> None:
        """Set up the state that copies and forks do not share: files and threads."""
        # A fork shares descriptors and locks with its parent: none of these may be
        # used.
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._users = 0
        self._open_files = OpenFiles()
        self.buffers = Buffers()
        self._scratch = Buffers()
        self._kept: dict[tuple[int, int], _RowCache] = {}  # by file and dataset
        # Until `set_index` says how many cores this rank has.
        threads = self._threads or len(available_cores())
        self._blocks = BlockCache(threads, KEPT_BYTES)

    def __len__(self) -> int:
        return self.file_map().rows

    @property
    def is_indexed(self) -> bool:
        """Whether the rows are counted already, so that `len` opens no file."""
        return self._file_map is not None

    @property
    def file_count(self) -> int:
        """The number of files."""
        return len(self._paths)

    @property
    def paths(self) -> list[Path]:
        """The files."""
        return list(self._paths)

    def shard_files(self, workers: int, worker: int) -> Hdf5Rows:
        """Return the rows of every `workers`-th file, from file `worker` on."""
        names = nest.unflatten(self._spec, self._names)
        paths, allow_short = self._paths[worker::workers], self._allow_short_external
        share = Hdf5Rows(paths, names, allow_short, self._threads, self._may_be_part)
        share._all_paths = self._paths
        return share

    def describe(self) -> str:
        """Return the rows of each file, and the names, dtypes and row shapes."""
        files = [path.name for path in self._paths]
        if self._all_paths is not self._paths:  # do not open the files of other workers
            files = [path.name for path in self._all_paths]
            return f"from_hdf5({files}, {self._names}, by file)"
        file_map = self.file_map()
        indexes = zip(self._names, file_map.files[0].datasets, strict=True)
        # Names without folders: a checkpoint of one machine continues on another.
        fields = [f"{n}: {c.native} {c.row_shape}" for n, c in indexes]
        starts, rows = file_map.starts.tolist(), file_map.chunk_layout.rows
        return f"from_hdf5({files}, {fields}, first rows {starts}, blocks of {rows})"

    def identify(self) -> str:
        """Return the names of files and datasets, without opening a file."""
        option = ", allow_short_external=True" if self._allow_short_external else ""
        files = [path.name for path in self._paths]
        return f"from_hdf5({files}, {self._names}{option})"

    def inspect(self, files: Iterable[int]) -> list[FileIndex]:
        """Return the indexes of some files, reading them if necessary.

        Raises:
          DataError: a file or a dataset is missing, or cannot be read.
        """
        # Known already, perhaps from another rank.
        if self._file_map is not None:
            return [self._file_map.files[i] for i in files]
        allow = self._allow_short_external
        return [index_file(self._paths[i], self._names, allow) for i in files]

    def parts(self, files: Sequence[FileIndex]) -> Parts:
        """Return those of the files that an `Hdf5Writer` wrote with others."""
        pairs = zip(self._paths, files, strict=True)
        if self._may_be_part:
            return []
        return [(path, file.part) for path, file in pairs if file.part is not None]

    def set_index(
        self,
        files: Sequence[FileIndex],
        rank: int | None = None,
        threads: int | None = None,
        most_kept_bytes: int = 0,
    ) -> None:
        """Use the indexes that `inspect` returned, perhaps on other ranks.

        Args:
          files: the index of each file.
          rank: of this process, for error messages.
          threads: the most concurrent reads, unless the user has set a number.
          most_kept_bytes: of short rows that may stay in memory, if more than 64 MiB.

        Raises:
          DataError: the files do not fit together.
        """
        self._on_rank = "" if rank is None else f" on rank {rank}"
        require_distinct(self.parts(files))
        self._file_map = FileMap.of(files)
        most_bytes = max(KEPT_BYTES, most_kept_bytes)
        self._keeps_short = self._file_map.bytes_to_keep(most_bytes) > 0
        # A value set by the user is kept.
        if threads is not None and self._threads is None:
            self._threads = threads
            self._blocks.end_threads()
            self._blocks.threads = threads

    def chunk_layout(self) -> ChunkLayout:
        """Return how the rows are grouped in chunks."""
        return self.file_map().chunk_layout

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        """The dtype of each dataset, with the members of enums."""
        return [index.dtype for index in self.file_map().files[0].datasets]

    def reserve_cache(self, rows: int) -> None:
        """Size the cache for random reads among so many rows."""
        self._blocks.capacity_bytes = self.file_map().cache_bytes_for(rows)

    def read(self, rows: Rows) -> Any:
        """Return the rows with the given numbers, in that order.

        Raises:
          DataError: names the file, the dataset and the rows that cannot be read.
        """
        file_map = self.file_map()
        if self._owner != os.getpid():  # a forked child must not share handles
            self._start()
        parts = list(file_map.cut(rows))
        # Decode all needed chunks first, in threads
        needed = list(file_map.blocks_in(parts))
        blocks = self._blocks.get(needed, self._load_block) if needed else {}
        if len(parts) == 1:
            leaves = self._read_part(parts[0], blocks, self.buffers)
        else:
            leaves = self._read_and_scatter(parts, rows.size, blocks)
        is_one = self._spec.is_leaf()
        return leaves[0] if is_one else nest.unflatten(self._spec, leaves)

    def _read_and_scatter(
        self, parts: Sequence[FileRows], count: int, blocks: Mapping[Key, Any]
    ) -> list[Any]:
        """Return `count` rows of several files, for each dataset."""
        indexes = self.file_map().files[0].datasets
        leaves = [self.buffers.empty((count, *c.row_shape), c.native) for c in indexes]

        def fill(part: FileRows) -> None:
            found = self._read_part(part, blocks, self._scratch)
            for leaf, rows in zip(leaves, found, strict=True):
                leaf[part.positions] = rows

        # Threads help only with many bytes
        is_large = sum(leaf.nbytes for leaf in leaves) >= _LARGE_BYTES
        list((self._blocks.parallel if is_large else map)(fill, parts))
        return leaves

    def retain(self) -> None:
        """Count one more user; the files stay open until all have released them."""
        with self._lock:
            self._users += 1

    def release(self, keep_files: bool = False) -> None:
        """Count one user less; the last ends the threads, and may keep the files."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._blocks.end_threads()
                # keep_files: the next epoch reads the same files.
                if not keep_files:
                    self.close()

    def close(self) -> None:
        """Close the files and end the threads; reading opens them again."""
        self._open_files.close()
        self.buffers.clear()
        self._scratch.clear()
        self._blocks.clear()
        with self._lock:
            self._kept = {}

    def file_map(self) -> FileMap:
        """Return the map of all files; the first call indexes them.

        Raises:
          DataError: a file or a dataset cannot be read, or does not fit the others.
        """
        if self._file_map is None:
            # Without a strategy this process indexes the files itself.
            files = self.inspect(range(len(self._paths)))
            if self._all_paths is self._paths:
                require_complete(self.parts(files))
            self.set_index(files)
        assert self._file_map is not None
        return self._file_map

    def _index(self, file: int, field: int) -> DatasetIndex:
        return self.file_map().files[file].datasets[field]

    def _read_part(
        self, part: FileRows, blocks: Mapping[Key, Any], buffers: Buffers
    ) -> list[Any]:
        fields = range(len(self._names))
        leaves = [self._read(part, i, blocks, buffers) for i in fields]
        file, rows, _ = part
        if rows.size:  # also if all were in memory
            try:
                files = self.file_map().files
                self._open_files.check(self._paths[file], files[file], rows)
            except (*_READ_ERRORS, DataError) as error:
                raise self._unreadable(file, 0, rows, error) from error
        return leaves

    def _read(
        self, part: FileRows, field: int, blocks: Mapping[Key, Any], buffers: Buffers
    ) -> Any:
        file, rows, _ = part
        index, parallel = self._index(file, field), self._blocks.parallel
        if index.is_in_blocks:
            return _pick_from_blocks(index, blocks, (file, field), rows, buffers)
        with self._explain(file, field, rows):
            if index.method is not ReadMethod.BYTES:
                return self._by_h5py(
                    file, field, rows, lambda d: read_by_h5py(d, index, rows)
                )
            raw = self._open_files.raw(self._paths[file], self.file_map().files[file])
            if not (self._keeps_short and _is_short(index)):
                return read_bytes(index, raw, rows, buffers, parallel)
            with self._lock:
                if (file, field) not in self._kept:
                    self._kept[file, field] = _RowCache(index)
                kept = self._kept[file, field]
            kept.load(rows, raw, self._scratch, parallel)
            return kept.take(rows, buffers, parallel)

    def _load_block(self, key: Key) -> Any:
        file, field, block = key
        index = self._index(file, field)
        rows = block_rows(index, block)

        def by_h5py(region: tuple[slice, ...]) -> Any:
            return self._by_h5py(file, field, rows, lambda dataset: dataset[region])

        with self._explain(file, field, rows):
            if index.method is ReadMethod.H5PY_CHUNKS:
                return by_h5py((slice(rows.start, rows.stop),))
            raw = self._open_files.raw(self._paths[file], self.file_map().files[file])
            return read_chunks(index, raw, by_h5py, block)

    @contextlib.contextmanager
    def _explain(self, file: int, field: int, rows: Any) -> Iterator[None]:
        """Raise errors of a read as a DataError with file, rows and dataset."""
        try:
            yield
        # Errors of HDF5, of the system, and of our own decoder, in one form.
        except (*_READ_ERRORS, DataError) as error:
            raise self._unreadable(file, field, rows, error) from error

    def _unreadable(
        self, file: int, field: int, rows: Any, error: Exception
    ) -> DataError:
        path, where = self._paths[file], "no rows"
        if len(rows):
            where = f"rows {min(rows)}..{max(rows)}"
        return DataError(
            f"{path}: {where} of dataset {self._names[field]!r} cannot be read"
            f"{self._on_rank}: {str(error).removeprefix(f'{path}: ')}"
        )

    def _by_h5py(
        self, file: int, field: int, rows: Any, read: Callable[[h5py.Dataset], Any]
    ) -> Any:
        index = self._index(file, field)
        path, file_index = self._paths[file], self.file_map().files[file]
        found = self._open_files.by_h5py(path, file_index, index, rows, read)
        return found.astype(index.native, copy=False)

    def __getstate__(self) -> dict[str, Any]:
        transient = {"_open_files", "buffers", "_scratch", "_blocks", "_kept", "_lock"}
        transient |= {"_owner", "_users"}
        return {k: v for k, v in self.__dict__.items() if k not in transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


class FileRows(NamedTuple):
    """Wanted rows of one file, and their positions among all wanted rows."""

    file: int
    rows: Rows
    positions: Any


class FileMap(NamedTuple):
    """Which file holds which rows. The files must not change.

    Args:
      files: at least one index.
      starts: number of the first row of each file, then that of all rows.
      rows: number of all rows.
      chunk_layout: how the rows are grouped in chunks.
    """

    files: list[FileIndex]
    starts: Rows
    rows: int
    chunk_layout: ChunkLayout

    @classmethod
    def of(cls, files: Sequence[FileIndex]) -> FileMap:
        """Return the map of concatenated files.

        Raises:
          DataError: the files do not fit together.
        """
        for file in files[1:]:
            _require_like(file, files[0])
        starts = np.cumsum([0, *(file.rows for file in files)])
        return cls(list(files), starts, int(starts[-1]), _chunk_layout_of(files))

    def cut(self, rows: Rows) -> Iterator[FileRows]:
        """Split wanted rows by file; yields at least one part."""
        starts = self.starts
        if len(starts) == 2 or not rows.size:
            yield FileRows(0, rows, slice(None))
            return
        files = np.searchsorted(starts, rows, "right") - 1
        if len(starts) < 1 << 16:  # numbers of 16 bits are sorted faster
            files = files.astype(np.uint16)
        order = np.argsort(files, kind="stable")
        files, ordered = files[order], rows[order]
        edges = np.flatnonzero(files[1:] != files[:-1]) + 1
        for first, last in itertools.pairwise([0, *edges.tolist(), rows.size]):
            file = int(files[first])
            inside = ordered[first:last] - starts[file]
            yield FileRows(file, inside, order[first:last])

    def blocks_in(self, parts: Iterable[FileRows]) -> Iterator[Key]:
        """Yield the keys of the blocks of chunks to read: file, field, number."""
        for part in parts:
            for field, index in enumerate(self.files[part.file].datasets):
                if index.is_in_blocks and part.rows.size:
                    for block in np.unique(part.rows // index.chunk[0]).tolist():
                        yield part.file, field, block

    def bytes_to_keep(self, most_bytes: int) -> int:
        """Return the size of all short rows that are not in chunks to decode.

        0 if that is more than `most_bytes`.
        """
        indexes = [index for file in self.files for index in file.datasets]
        short = [index for index in indexes if _is_short(index)]
        size_bytes = sum(index.row_bytes * index.shape[0] for index in short)
        return size_bytes if size_bytes <= most_bytes else 0

    def cache_bytes_for(self, rows: int) -> int:
        """Return the cache size for reading so many rows in random order."""
        # Half as many again: windows begin before earlier ones have ended
        return sum(
            (rows + rows // 2 + 2 * index.chunk[0]) * index.row_bytes
            for index in self.files[0].datasets
            if index.is_in_blocks
        )


def _is_short(index: DatasetIndex) -> bool:
    """Return whether a read of each row would take longer than copying it."""
    return index.method is ReadMethod.BYTES and 0 < index.row_bytes < _SHORT_BYTES


def _require_like(file: FileIndex, first: FileIndex) -> None:
    for index, other in zip(file.datasets, first.datasets, strict=True):
        if _rows_of(index) != _rows_of(other):
            here, there = (
                f"{dtype}{dict(members) or ''} {shape}"
                for dtype, shape, members in map(_rows_of, (index, other))
            )
            raise DataError(
                f"{file.path}: rows of dataset {index.name!r} are {here}, but {there} "
                f"in {first.path}"
            )


def _rows_of(index: DatasetIndex) -> tuple[Any, ...]:
    """Return what files have in common: dtype, shape, and members of enums."""
    return index.native, index.row_shape, validation.members_of(index.dtype)


def _chunk_layout_of(files: Sequence[FileIndex]) -> ChunkLayout:
    """Return how the rows are grouped: by the largest chunks of any dataset."""
    indexes = [index for file in files for index in file.datasets]
    # Blocks that must be decoded decide; else any chunk size will do.
    costly = [index for index in indexes if index.is_in_blocks]
    _, rows = max(map(_block_size, costly or indexes))
    return ChunkLayout(
        tuple(file.rows for file in files),
        rows,
        sum(index.row_bytes for index in files[0].datasets),
        is_costly=sum(c.row_bytes * c.shape[0] for c in costly) > KEPT_BYTES,
    )


def _block_size(index: DatasetIndex) -> tuple[int, int]:
    """Return the bytes and rows of a chunk, or of 1 MiB of contiguous rows."""
    row_bytes = max(1, index.row_bytes)
    if index.is_chunked:
        return row_bytes * index.chunk[0], index.chunk[0]
    return row_bytes, max(1, _BLOCK_BYTES // row_bytes)


class _RowCache:
    """Short rows of one dataset, which stay in memory once their block was read."""

    def __init__(self, index: DatasetIndex):
        self._index = index
        self._step = _block_size(index)[1]
        self._rows = np.empty((index.shape[0], *index.row_shape), index.native)
        self._is_read = np.zeros(1 + index.shape[0] // self._step, bool)
        self._lock = threading.Lock()

    def load(self, rows: Rows, file: RawFile, scratch: Buffers, parallel: Map) -> None:
        """Read the blocks of these rows, unless that was done before.

        Two threads may read the same block at once.
        """

        def read(block: int) -> None:
            start, stop = block * self._step, (block + 1) * self._step
            numbers = np.arange(start, min(stop, len(self._rows)))
            read_rows = read_bytes(self._index, file, numbers, scratch, map)
            self._rows[start:stop] = read_rows
            with self._lock:
                self._is_read[block] = True

        blocks = rows // self._step
        with self._lock:
            missing = blocks[~self._is_read[blocks]]
        if missing.size:
            list(parallel(read, np.unique(missing).tolist()))

    def take(self, rows: Rows, buffers: Buffers, parallel: Map) -> Any:
        result = buffers.empty((rows.size, *self._index.row_shape), self._index.native)

        def take(piece: slice) -> None:
            # mode="clip": `take` writes to `out` without a buffer; no row is clipped
            self._rows.take(rows[piece], axis=0, out=result[piece], mode="clip")

        list(parallel(take, pieces_of(len(result), self._index.row_bytes)))
        return result


def _pick_from_blocks(
    index: DatasetIndex,
    blocks: Mapping[Key, Any],
    dataset: tuple[int, int],
    rows: Rows,
    buffers: Buffers,
) -> Any:
    """Return rows of decoded blocks; `dataset` is the file and the field."""
    if not rows.size:
        return np.empty((0, *index.row_shape), index.native)
    numbers, inside = np.divmod(rows, index.chunk[0])
    distinct, which = np.unique(numbers, return_inverse=True)
    file, field = dataset
    wanted = [blocks[file, field, number] for number in distinct.tolist()]
    return pick_rows(wanted, which, inside, buffers)


def block_rows(index: DatasetIndex, block: int) -> range:
    """Return the numbers of the rows in one block, which is a row of chunks."""
    step = index.chunk[0]
    return range(block * step, min((block + 1) * step, index.shape[0]))


def read_bytes(
    index: DatasetIndex, file: RawFile, rows: Rows, buffers: Buffers, parallel: Map
) -> Any:
    """Return unfiltered rows, in any order, in native byte order."""
    if index.row_bytes == 0 or rows.size == 0:
        return np.empty((rows.size, *index.row_shape), index.native)
    pieces = _gather(index, file, rows, buffers, parallel)
    pieces = pieces.view(index.dtype).reshape(-1, *index.chunk[1:])
    if index.chunk[1:] == index.row_shape:
        return pieces if index.is_native else pieces.astype(index.native)
    result = buffers.empty((rows.size, *index.row_shape), index.native)
    # Pieces of all rows for one chunk column lie together.
    for number, (region, inside) in enumerate(_regions(index)):
        part = pieces[number * rows.size : (number + 1) * rows.size]
        result[region] = part[inside]
    return result


def _gather(
    index: DatasetIndex, file: RawFile, rows: Rows, buffers: Buffers, parallel: Map
) -> Any:
    size_bytes, step = index.chunk_row_bytes, index.chunk[0]
    # Several chunks side by side make up a row; `across` is how many.
    across = math.prod(index.grid[1:])
    chunks, inside = np.divmod(rows, step)
    numbers = (chunks * across + np.arange(across)[:, np.newaxis]).reshape(-1)
    starts = index.offsets[numbers]
    offsets = starts + np.tile(inside * size_bytes, across)
    if not index.fill:
        return file.gather(offsets, size_bytes, buffers, parallel)
    written = starts >= 0
    fill = index.fill * (size_bytes // len(index.fill))
    # Rows of chunks that were never written have the fill value.
    pieces = np.full((starts.size, size_bytes), np.frombuffer(fill, np.uint8))
    pieces[written] = file.gather(offsets[written], size_bytes, buffers, parallel)
    return pieces


def _regions(index: DatasetIndex) -> list[tuple[Any, Any]]:
    """Return, per chunk of a block, its region in the rows, and in the chunk.

    Chunks at the edge extend beyond the rows.
    """
    edges = [
        [slice(i * c, min((i + 1) * c, n)) for i in range(count)]
        for n, c, count in zip(
            index.row_shape, index.chunk[1:], index.grid[1:], strict=True
        )
    ]
    return [
        (
            (slice(None), *region),
            (slice(None), *(slice(0, s.stop - s.start) for s in region)),
        )
        for region in itertools.product(*edges)
    ]


def read_chunks(
    index: DatasetIndex,
    file: RawFile,
    by_h5py: Callable[[tuple[slice, ...]], Any],
    block: int,
) -> Any:
    """Return all rows of a block, decoded, in native byte order.

    Args:
      index: of the dataset.
      file: its file.
      by_h5py: reads a region of the dataset, for chunks that only HDF5 can decode.
      block: number of the row of chunks.
    """
    rows, across = block_rows(index, block), math.prod(index.grid[1:])
    numbers = range(block * across, (block + 1) * across)
    is_whole = index.chunk == (len(rows), *index.row_shape) and index.is_native
    # The common case: the block is one chunk, used as decoded, without a copy.
    if is_whole and index.offsets[numbers[0]] >= 0:
        chunk = _chunk(index, file, numbers[0])
        return by_h5py((slice(rows.start, rows.stop),)) if chunk is None else chunk
    result = np.empty((len(rows), *index.row_shape), index.native)
    for number, (region, inside) in zip(numbers, _regions(index), strict=True):
        if index.offsets[number] < 0:
            result[region] = np.frombuffer(index.fill, index.dtype)[0]
        elif (chunk := _chunk(index, file, number)) is not None:
            result[region] = chunk[: len(rows)][inside]
        else:
            result[region] = by_h5py((slice(rows.start, rows.stop), *region[1:]))
    return result


def _chunk(index: DatasetIndex, file: RawFile, number: int) -> Any:
    """Return a decoded chunk; None if it may be stored unfiltered.

    HDF5 has an option to store chunks at the edge unfiltered (H5Pset_chunk_opts); only
    their size shows it.
    """
    size_bytes = index.dtype.itemsize * math.prod(index.chunk)
    stored = int(index.sizes[number])
    skipped = int(index.skipped[number]) if index.skipped.size else 0
    is_edge = any(n % c for n, c in zip(index.shape, index.chunk, strict=True))
    # Equal sizes may also mean that compression saved nothing: then HDF5 decides.
    if is_edge and stored == size_bytes and not skipped:
        return None
    data = file.read(int(index.offsets[number]), stored)
    decoded = decode(data, index.filters, skipped, size_bytes)
    return decoded.view(index.dtype).reshape(index.chunk)


# A call of HDF5 costs as much as reading this much
_GAP_BYTES = 32 << 10


def read_by_h5py(dataset: h5py.Dataset, index: DatasetIndex, rows: Rows) -> Any:
    """Return rows in native byte order; read each distinct row once, in order."""
    # HDF5 reads increasing selections fastest; `back` restores the wanted order.
    wanted, back = np.unique(rows, return_inverse=True)
    result = np.empty((wanted.size, *index.row_shape), index.native)
    row_bytes = max(1, index.row_bytes)
    # Small gaps are read along: one call costs more than a few unwanted bytes.
    gaps = np.flatnonzero((np.diff(wanted) - 1) * row_bytes > _GAP_BYTES) + 1
    for first, last in itertools.pairwise([0, *gaps.tolist(), wanted.size]):
        if first < last:
            start, stop = int(wanted[first]), int(wanted[last - 1]) + 1
            result[first:last] = dataset[start:stop][wanted[first:last] - start]
    return result[back]


_GATHER_BYTES = (
    1 << 20
)  # NumPy gathers into a temporary array; this much fits into a CPU cache


def pick_rows(arrays: Sequence[Any], which: Rows, rows: Rows, buffers: Buffers) -> Any:
    """Return row `rows[i]` of `arrays[which[i]]` for each i, in one of `buffers`.

    Args:
      arrays: at least one, C-contiguous `(rows, *shape)`, of equal dtype and row shape.
      which: number of the array that holds each wanted row.
      rows: number of the row in that array.
      buffers: allocates the result.
    """
    first = arrays[0]
    row_bytes = first[:1].nbytes
    result = buffers.empty((which.size, *first.shape[1:]), first.dtype)
    if 0 < row_bytes <= _SHORT_BYTES and not first.dtype.hasobject:
        _pick_short(arrays, which, rows, result)
        return result
    for number, array in enumerate(arrays):
        here = np.flatnonzero(which == number)
        result[here] = array[rows[here]]
    return result


class _Memory:
    """Memory of this process as overlapping items that start at each byte."""

    def __init__(self, start: int, stop: int, item_bytes: int):
        self.__array_interface__ = {
            "version": 3,
            "data": (start, True),
            "shape": (stop - start - item_bytes + 1,),
            "strides": (1,),
            "typestr": f"|V{item_bytes}",
        }


def _pick_short(arrays: Sequence[Any], which: Rows, rows: Rows, result: Any) -> None:
    """Copy the rows by their addresses, in one call for all arrays."""
    starts = np.array([a.__array_interface__["data"][0] for a in arrays], np.int64)
    stop = max(s + a.nbytes for s, a in zip(starts.tolist(), arrays, strict=True))
    start, row_bytes = int(starts.min()), arrays[0][:1].nbytes
    memory = np.asarray(_Memory(start, stop, row_bytes))
    items = result.reshape(-1).view(memory.dtype)
    addresses = starts[which] - start + rows * row_bytes
    step = _GATHER_BYTES // row_bytes
    for first in range(0, len(addresses), step):
        items[first : first + step] = memory[addresses[first : first + step]]


class BlockCache:
    """LRU cache of decoded blocks, which are loaded in threads.

    Args:
      threads: how many load concurrently, including the caller's.
      capacity_bytes: of cached blocks, besides those of the current call.
    """

    def __init__(self, threads: int, capacity_bytes: int):
        self.threads = threads
        self.capacity_bytes = capacity_bytes
        self._blocks: collections.OrderedDict[Key, Future[Any]] = (
            collections.OrderedDict()
        )
        self._bytes = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def get(self, keys: Sequence[Key], load: Callable[[Key], Any]) -> dict[Key, Any]:
        """Return the blocks of several keys.

        Args:
          keys: in any order.
          load: returns the block of a missing key; called in threads.
        """
        missing: list[tuple[Key, Future[Any]]] = []
        # Register missing blocks under the lock, so that only one call loads each
        with self._lock:
            futures = {}
            for key in keys:
                if key not in self._blocks:
                    self._blocks[key] = Future()
                    missing.append((key, self._blocks[key]))
                self._blocks.move_to_end(key)
                futures[key] = self._blocks[key]
        # Outside of the lock: decoding takes long, and other calls wait only for their
        # blocks.
        list(self.parallel(lambda item: self._fulfil(item[0], item[1], load), missing))
        try:
            return {key: future.result() for key, future in futures.items()}
        finally:
            # Blocks of this call stay: their rows are about to be copied.
            self._evict(futures)

    def parallel(self, fn: Callable[[Any], T], items: Iterable[Any]) -> Iterable[T]:
        """Map `fn` over items in threads, including this one."""
        items = list(items)
        if self.threads == 1 or len(items) < 2:
            return map(fn, items)
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads - 1, "mpidist-read")
            pool = self._pool
        return share_calls(fn, items, pool, self.threads - 1)

    def clear(self) -> None:
        """Drop all blocks and end the threads."""
        with self._lock:
            self._blocks.clear()
            self._bytes = 0
        self.end_threads()

    def end_threads(self) -> None:
        """End the threads; the next `get` restarts them."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            # Outside of the lock: ending threads may want it.
            pool.shutdown(wait=True, cancel_futures=True)

    def _fulfil(
        self, key: Key, future: Future[Any], load: Callable[[Key], Any]
    ) -> None:
        try:
            block = load(key)
        except BaseException as error:
            with self._lock:  # so the next `get` retries
                self._blocks.pop(key, None)
            future.set_exception(error)
        else:
            with self._lock:
                self._bytes += block.nbytes
            future.set_result(block)

    def _evict(self, in_use: Iterable[Key]) -> None:
        used = set(in_use)
        with self._lock:
            while self._bytes > self.capacity_bytes and self._blocks:
                oldest, block = next(iter(self._blocks.items()))
                # Blocks that are being loaded or in use end the search.
                if oldest in used or not block.done():
                    break
                self._bytes -= block.result().nbytes
                del self._blocks[oldest]
