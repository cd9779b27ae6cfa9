"""Rows of HDF5 datasets across several files, read by number."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from mpidist.data.hdf5 import dataset_reader as dataset_reader
from mpidist.data.hdf5.dataset_reader import BlockCache, OpenFiles, pick_rows
from mpidist.data.hdf5.files import RawFile, pieces_of
from mpidist.data.hdf5.index import DatasetIndex, FileIndex, ReadMethod, index_file
from mpidist.data.shuffling import ChunkLayout
from mpidist.errors import DataError
from mpidist.util import nest
from mpidist.util.available_memory import available_cores
from mpidist.util.buffers import Buffers

__all__ = ["Hdf5Rows", "KEPT_BYTES", "FileMap", "FileRows"]


Rows = npt.NDArray[np.int64]

_LARGE_BYTES = 4 << 20  # reads of several files above this size use threads
_READ_ERRORS = (OSError, KeyError, RuntimeError, ValueError)


class Hdf5Rows:
    """The rows of HDF5 datasets of concatenated files; see `Dataset.from_hdf5`.

    Each file is indexed once, by this process or another one (see `adopt`). Files are
    opened at the first read, read-only and without locks, once per process; a copy or
    a forked child opens its own. Thread-safe.

    Args:
      paths: of the files.
      names: name of an HDF5 dataset, or a tuple or dict of names.
      allow_short_external: see `Dataset.from_hdf5`.
      threads: how many read and decode concurrently; None for one per available core.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        names: str | tuple[str, ...] | Mapping[str, str],
        allow_short_external: bool = False,
        threads: int | None = None,
    ):
        self._paths = list(paths)
        self._names, self._spec = nest.flatten(names)
        # Kept for `describe` when this object is one worker's share of the files.
        self._all_paths = self._paths
        self._allow_short_external = allow_short_external
        self._threads = threads
        self._file_map: FileMap | None = None
        self._on_rank = ""
        self._kept_bytes = 0
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
        self._kept: dict[tuple[int, int], Any] = {}  # by file and dataset
        # Until `adopt` says how many cores this rank has.
        threads = self._threads or len(available_cores())
        self._blocks = BlockCache(threads, KEPT_BYTES + self._kept_bytes)

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
        """See `FileSource.shard_files`."""
        names = nest.unflatten(self._spec, self._names)
        # Only files differ.
        paths, allow_short = self._paths[worker::workers], self._allow_short_external
        share = Hdf5Rows(paths, names, allow_short, self._threads)
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

    def adopt(
        self,
        files: Sequence[FileIndex],
        rank: int | None = None,
        threads: int | None = None,
        most_kept_bytes: int = 0,
    ) -> None:
        """See `IndexedSource.adopt`.

        Raises:
          DataError: the files do not fit together.
        """
        self._on_rank = "" if rank is None else f" on rank {rank}"
        self._file_map = FileMap.of(files)
        self._kept_bytes = self._file_map.bytes_to_keep(
            max(KEPT_BYTES, most_kept_bytes)
        )
        self._blocks.capacity_bytes = KEPT_BYTES + self._kept_bytes
        # A value set by the user is kept.
        if threads is not None and self._threads is None:
            self._threads = threads
            self._blocks.end_threads()
            self._blocks.threads = threads

    def chunk_layout(self) -> ChunkLayout:
        """Return how the rows are grouped in chunks."""
        return self.file_map().chunk_layout

    def reserve_cache(self, rows: int) -> None:
        """Size the cache for random reads among so many rows."""
        cached_bytes = self.file_map().cache_bytes_for(rows)
        self._blocks.capacity_bytes = cached_bytes + self._kept_bytes

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
        needed = list(file_map.blocks_in(parts, self._kept_bytes > 0))
        blocks = self._blocks.get(needed, self._load_block) if needed else {}
        indexes = file_map.files[0].datasets
        # One file: read into the result at once.
        if len(parts) == 1:
            fields = range(len(indexes))
            leaves = [self._read(parts[0], i, blocks, self.buffers) for i in fields]
            return nest.unflatten(self._spec, leaves)
        # Rows of several files: read each part, and scatter it into the result
        # `places` scatter the parts, to keep the requested order.
        leaves = [
            self.buffers.empty((rows.size, *c.row_shape), c.native) for c in indexes
        ]

        def fill(part: FileRows) -> None:
            for field, leaf in enumerate(leaves):
                rows_of_part = self._read(part, field, blocks, self._scratch)
                leaf[part.places] = rows_of_part

        # Threads help only with many bytes.
        is_large = sum(leaf.nbytes for leaf in leaves) >= _LARGE_BYTES
        list((self._blocks.parallel if is_large else map)(fill, parts))
        return nest.unflatten(self._spec, leaves)

    def retain(self) -> None:
        """See `ChunkedSource.retain`."""
        with self._lock:
            self._users += 1
        # A new iteration checks again whether sources of virtual datasets have changed.
        self._open_files.check_others()

    def release(self, keep_files: bool = False) -> None:
        """See `ChunkedSource.release`."""
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
            self.adopt(self.inspect(range(len(self._paths))))
        assert self._file_map is not None
        return self._file_map

    def _index(self, file: int, field: int) -> DatasetIndex:
        return self.file_map().files[file].datasets[field]

    def _read(
        self, part: FileRows, field: int, blocks: Mapping[Any, Any], buffers: Buffers
    ) -> Any:
        """Return rows of one dataset of one file, perhaps in a buffer."""
        index = self._index(part.file, field)
        if index.is_in_blocks:
            return self._pick(part, field, blocks, buffers)

        def read() -> Any:
            if index.method is ReadMethod.BYTES:
                file = self._raw_file(part.file)
                if _rows_per_block(index, self._kept_bytes > 0):
                    rows = self._pick(part, field, blocks, buffers)
                    file.check()  # rows that were read before must still be there
                    return rows
                return dataset_reader.read_bytes(
                    index, file, part.rows, buffers, self._blocks.parallel
                )
            return self._by_h5py(
                part.file,
                field,
                lambda dataset: dataset_reader.read_by_h5py(dataset, index, part.rows),
            )

        return self._explain(part.file, field, part.rows, read)

    def _pick(
        self, part: FileRows, field: int, blocks: Mapping[Any, Any], buffers: Buffers
    ) -> Any:
        """Return rows of decoded blocks."""
        index = self._index(part.file, field)
        if not part.rows.size:
            return np.empty((0, *index.row_shape), index.native)
        step = _rows_per_block(index, self._kept_bytes > 0)
        numbers = part.rows // step
        # Each block once, however many of its rows are wanted.
        distinct = np.unique(numbers)
        wanted = [blocks[part.file, field, number] for number in distinct.tolist()]
        everything = wanted[0].base
        if index.is_in_blocks or any(b.base is not everything for b in wanted):
            which = np.searchsorted(distinct, numbers)
            return pick_rows(wanted, which, part.rows - numbers * step, buffers)
        # The blocks are parts of one array
        result = buffers.empty((part.rows.size, *index.row_shape), index.native)

        def take(piece: slice) -> None:
            # mode="clip": `take` writes to `out` without a buffer; no row is clipped
            rows, out = part.rows[piece], result[piece]
            everything.take(rows, axis=0, out=out, mode="clip")

        list(self._blocks.parallel(take, pieces_of(len(result), index.row_bytes)))
        return result

    def _load_block(self, key: tuple[int, ...]) -> Any:
        """Return all rows of a block."""
        file, field, block = key
        index = self._index(file, field)
        step = _rows_per_block(index, self._kept_bytes > 0)
        rows = range(block * step, min((block + 1) * step, index.shape[0]))

        def by_h5py(region: tuple[slice, ...]) -> Any:
            return self._by_h5py(file, field, lambda dataset: dataset[region])

        def load() -> Any:
            if index.method is ReadMethod.H5PY_CHUNKS:
                return by_h5py((slice(rows.start, rows.stop),))
            raw = self._raw_file(file)
            if index.method is ReadMethod.BYTES:
                return self._keep(file, field, raw, rows)
            return dataset_reader.read_chunks(index, raw, by_h5py, block)

        return self._explain(file, field, rows, load)

    def _keep(self, file: int, field: int, raw: RawFile, rows: range) -> Any:
        """Read a block of short rows to its place in the array of all of them."""
        index = self._index(file, field)
        shape = (index.shape[0], *index.row_shape)
        with self._lock:
            if (file, field) not in self._kept:
                self._kept[file, field] = np.empty(shape, index.native)
            block = self._kept[file, field][rows.start : rows.stop]
        numbers = np.arange(rows.start, rows.stop)
        block[...] = dataset_reader.read_bytes(index, raw, numbers, self._scratch, map)
        return block

    def _explain(
        self, file: int, field: int, rows: Any, read: Callable[[], Any]
    ) -> Any:
        """Return `read()`; raise errors as a DataError with file, rows and dataset."""
        try:
            return read()
        # Errors of HDF5, of the system, and of our own decoder, in one form.
        except (*_READ_ERRORS, DataError) as error:
            path, where = self._paths[file], "no rows"
            if len(rows):
                where = f"rows {min(rows)}..{max(rows)}"
            raise DataError(
                f"{path}: {where} of dataset {self._names[field]!r} cannot be read"
                f"{self._on_rank}: {str(error).removeprefix(f'{path}: ')}"
            ) from error

    def _raw_file(self, file: int) -> RawFile:
        return self._open_files.raw(self._paths[file], self.file_map().files[file])

    def _by_h5py(
        self, file: int, field: int, read: Callable[[h5py.Dataset], Any]
    ) -> Any:
        """Return `read(dataset)` in native byte order."""
        index = self._index(file, field)
        path, file_index = self._paths[file], self.file_map().files[file]
        rows = self._open_files.by_h5py(path, file_index, index, read)
        # HDF5 returns the stored byte order.
        return rows.astype(index.native, copy=False)

    def __getstate__(self) -> dict[str, Any]:
        # Without the state of this process, which `__setstate__` creates again.
        own = {"_open_files", "buffers", "_scratch", "_blocks", "_kept", "_lock"}
        own |= {"_owner", "_users"}
        return {k: v for k, v in self.__dict__.items() if k not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


RowNumbers = npt.NDArray[np.int64]

# Capacity of the cache of decoded chunks, unless `reserve_cache` sets another one
KEPT_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20  # of rows that are not in chunks
_SHORT_BYTES = 16 << 10


class FileRows(NamedTuple):
    """Wanted rows of one file, and their positions among all wanted rows."""

    file: int
    rows: RowNumbers
    places: Any


class FileMap(NamedTuple):
    """Which file holds which rows. The files must not change.

    Args:
      files: at least one index.
      starts: number of the first row of each file, then that of all rows.
      rows: number of all rows.
      chunk_layout: how the rows are grouped in chunks.
    """

    files: list[FileIndex]
    starts: RowNumbers
    rows: int
    chunk_layout: ChunkLayout

    @classmethod
    def of(cls, files: Sequence[FileIndex]) -> FileMap:
        """Return the map of concatenated files.

        Raises:
          DataError: the files do not fit together.
        """
        # All files must give rows of one dtype and shape.
        for file in files[1:]:
            _require_like(file, files[0])
        starts = np.cumsum([0, *(file.rows for file in files)])
        return cls(list(files), starts, int(starts[-1]), _chunk_layout_of(files))

    def cut(self, rows: RowNumbers) -> Iterator[FileRows]:
        """Split wanted rows by file; yields at least one part."""
        starts = self.starts
        # One file, or nothing wanted: no grouping.
        if len(starts) == 2 or not rows.size:
            yield FileRows(0, rows, slice(None))
            return
        files = np.searchsorted(starts, rows, "right") - 1
        if len(starts) < 1 << 16:  # numbers of 16 bits are sorted faster
            files = files.astype(np.uint16)
        # Group the rows by file
        order = np.argsort(files, kind="stable")
        files, ordered = files[order], rows[order]
        # Where the file number changes, a new part begins.
        edges = np.flatnonzero(files[1:] != files[:-1]) + 1
        for first, last in itertools.pairwise([0, *edges.tolist(), rows.size]):
            file = int(files[first])
            inside = ordered[first:last] - starts[file]
            yield FileRows(file, inside, order[first:last])

    def blocks_in(
        self, parts: Iterable[FileRows], keeps_short: bool = False
    ) -> Iterator[tuple[int, ...]]:
        """Yield the keys of the blocks to read: file, field, number."""
        for part in parts:
            for field, index in enumerate(self.files[part.file].datasets):
                step = _rows_per_block(index, keeps_short)
                if step and part.rows.size:
                    for block in np.unique(part.rows // step).tolist():
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


def _rows_per_block(index: DatasetIndex, keeps_short: bool) -> int:
    """Return how many rows are read and kept together; 0 if rows are read alone."""
    if index.is_in_blocks:
        return index.chunk[0]
    return _block_size(index)[1] if keeps_short and _is_short(index) else 0


def _require_like(file: FileIndex, first: FileIndex) -> None:
    """Raise a DataError if the rows of two files differ in dtype or shape."""
    for index, other in zip(file.datasets, first.datasets, strict=True):
        if (index.native, index.row_shape) != (other.native, other.row_shape):
            raise DataError(
                f"{file.path}: rows of dataset {index.name!r} are {index.native} "
                f"{index.row_shape}, but {other.native} {other.row_shape} in "
                f"{first.path}"
            )


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
