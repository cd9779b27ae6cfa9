"""Rows of HDF5 datasets over one or several files, read by number."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from mpidist.data.hdf5 import dataset_reader as hdf5_columns
from mpidist.data.hdf5.dataset_reader import BlockCache, OpenFiles, pick_rows
from mpidist.data.hdf5.files import RawFile
from mpidist.data.hdf5.index import Column, FileIndex, Way, index_file
from mpidist.data.shuffling import Blocks
from mpidist.errors import DataError
from mpidist.util import nest
from mpidist.util.buffers import Buffers

__all__ = ["Hdf5Rows", "KEPT_BYTES", "Layout", "Part"]


Rows = npt.NDArray[np.int64]

_LARGE_BYTES = 4 << 20  # so much of several files is worth several threads
_READ_ERRORS = (OSError, KeyError, RuntimeError, ValueError)


class Hdf5Rows:
    """The rows of HDF5 datasets, file after file; see `Dataset.from_hdf5`.

    Where the rows lie is read from each file once, by this process or another one (see
    `adopt`). Files are opened when they are first read, read-only and without locks,
    once in every process; a copy or a fork opens its own. May be used in threads.

    Args:
      paths: of the files.
      names: a name of an HDF5 dataset, or a tuple or dict of names.
      threads: how many read and decode at the same time; None for one per core that
        this process may use.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        names: str | tuple[str, ...] | Mapping[str, str],
        threads: int | None = None,
    ):
        self._paths = list(paths)
        self._names, self._spec = nest.flatten(names)
        self._all_paths = self._paths
        self._threads = threads
        self._layout: Layout | None = None
        self._on_rank = ""
        self._start()

    def _start(self) -> None:
        """Begin without open files and threads."""
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._users = 0
        self._open_files = OpenFiles()
        self.buffers = Buffers()
        self._scratch = Buffers()
        threads = self._threads or len(os.sched_getaffinity(0))
        self._blocks = BlockCache(threads, KEPT_BYTES)

    def __len__(self) -> int:
        return self.layout().rows

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
        share = Hdf5Rows(self._paths[worker::workers], names, self._threads)
        share._all_paths = self._paths
        return share

    def describe(self) -> str:
        """Return the rows of each file, and the names, dtypes and row shapes."""
        files = [path.name for path in self._paths]
        if self._all_paths is not self._paths:  # other workers' files are not opened
            files = [path.name for path in self._all_paths]
            return f"from_hdf5({files}, {self._names}, by file)"
        layout = self.layout()
        columns = zip(self._names, layout.files[0].columns, strict=True)
        fields = [f"{n}: {c.native} {c.row_shape}" for n, c in columns]
        starts, rows = layout.starts.tolist(), layout.blocks.rows
        return f"from_hdf5({files}, {fields}, first rows {starts}, blocks of {rows})"

    def identify(self) -> str:
        """Return which files and datasets these are, without opening a file."""
        return f"from_hdf5({[path.name for path in self._paths]}, {self._names})"

    def inspect(self, files: Iterable[int]) -> list[FileIndex]:
        """Return where the rows of some files lie; reads it from them if need be.

        Raises:
          DataError: a file or a dataset is missing, or cannot be read.
        """
        if self._layout is not None:
            return [self._layout.files[i] for i in files]
        return [index_file(self._paths[i], self._names) for i in files]

    def adopt(
        self,
        files: Sequence[FileIndex],
        rank: int | None = None,
        threads: int | None = None,
    ) -> None:
        """See `IndexedSource.adopt`.

        Raises:
          DataError: the files do not fit together.
        """
        self._on_rank = "" if rank is None else f" on rank {rank}"
        self._layout = Layout.of(files)
        if threads is not None and self._threads is None:
            self._threads = threads
            self._blocks.end_threads()
            self._blocks.threads = threads

    def blocks(self) -> Blocks:
        """Return how the rows lie in chunks."""
        return self.layout().blocks

    def keep(self, rows: int) -> None:
        """Make room for the chunks of so many rows that are read in random order."""
        self._blocks.capacity_bytes = self.layout().bytes_to_keep(rows)

    def read(self, rows: Rows) -> Any:
        """Return the rows with the given numbers, in the given order.

        Raises:
          DataError: names the file, the dataset and the rows that cannot be read.
        """
        layout = self.layout()
        if self._owner != os.getpid():  # forked: handles must not be shared
            self._start()
        parts = list(layout.cut(rows))
        needed = list(layout.blocks_in(parts))
        blocks = self._blocks.get(needed, self._load_block) if needed else {}
        columns = layout.files[0].columns
        if len(parts) == 1:
            fields = range(len(columns))
            leaves = [self._read(parts[0], i, blocks, self.buffers) for i in fields]
            return nest.unflatten(self._spec, leaves)
        leaves = [
            self.buffers.empty((rows.size, *c.row_shape), c.native) for c in columns
        ]

        def fill(part: Part) -> None:
            for field, leaf in enumerate(leaves):
                found = self._read(part, field, blocks, self._scratch)
                leaf[part.places] = found

        is_large = sum(leaf.nbytes for leaf in leaves) >= _LARGE_BYTES
        list((self._blocks.parallel if is_large else map)(fill, parts))
        return nest.unflatten(self._spec, leaves)

    def retain(self) -> None:
        """See `BlockSource.retain`."""
        with self._lock:
            self._users += 1
        self._open_files.check_others()

    def release(self, keep_files: bool = False) -> None:
        """See `BlockSource.release`."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._blocks.end_threads()
                if not keep_files:
                    self.close()

    def close(self) -> None:
        """Close the files and end the threads; reading opens them again."""
        self._open_files.close()
        self.buffers.clear()
        self._scratch.clear()
        self._blocks.clear()

    def layout(self) -> Layout:
        """Return the layout of all files, read when first needed.

        Raises:
          DataError: a file or a dataset cannot be read, or does not fit the others.
        """
        if self._layout is None:
            self.adopt(self.inspect(range(len(self._paths))))
        assert self._layout is not None
        return self._layout

    def _column(self, file: int, field: int) -> Column:
        return self.layout().files[file].columns[field]

    def _read(
        self, part: Part, field: int, blocks: Mapping[Any, Any], buffers: Buffers
    ) -> Any:
        """Return the wanted rows of one dataset of one file, perhaps in a buffer."""
        column = self._column(part.file, field)
        if column.is_in_blocks:
            return self._pick(part, field, blocks, buffers)

        def read() -> Any:
            if column.way is Way.BYTES:
                file = self._raw_file(part.file)
                return hdf5_columns.read_bytes(
                    column, file, part.rows, buffers, self._blocks.parallel
                )
            return self._by_h5py(
                part.file,
                field,
                lambda dataset: hdf5_columns.read_by_h5py(dataset, column, part.rows),
            )

        return self._explain(part.file, field, part.rows, read)

    def _pick(
        self, part: Part, field: int, blocks: Mapping[Any, Any], buffers: Buffers
    ) -> Any:
        """Return the wanted rows out of decoded chunks."""
        column = self._column(part.file, field)
        if not part.rows.size:
            return np.empty((0, *column.row_shape), column.native)
        numbers, inside = np.divmod(part.rows, column.chunk[0])
        distinct = np.unique(numbers)
        wanted = [blocks[part.file, field, number] for number in distinct.tolist()]
        which = np.searchsorted(distinct, numbers)
        return pick_rows(wanted, which, inside, buffers)

    def _load_block(self, key: tuple[int, ...]) -> Any:
        """Return all rows of a row of chunks."""
        file, field, block = key
        column = self._column(file, field)
        rows = hdf5_columns.block_rows(column, block)

        def by_h5py(region: tuple[slice, ...]) -> Any:
            return self._by_h5py(file, field, lambda dataset: dataset[region])

        def load() -> Any:
            if column.way is Way.H5PY_CHUNKS:
                return by_h5py((slice(rows.start, rows.stop),))
            return hdf5_columns.read_chunks(
                column, self._raw_file(file), by_h5py, block
            )

        return self._explain(file, field, rows, load)

    def _explain(
        self, file: int, field: int, rows: Any, read: Callable[[], Any]
    ) -> Any:
        """Return `read()`, or raise a DataError that says what could not be read."""
        try:
            return read()
        except (*_READ_ERRORS, DataError) as error:
            path, where = self._paths[file], "no rows"
            if len(rows):
                where = f"rows {min(rows)}..{max(rows)}"
            raise DataError(
                f"{path}: {where} of dataset {self._names[field]!r} cannot be read"
                f"{self._on_rank}: {str(error).removeprefix(f'{path}: ')}"
            ) from error

    def _raw_file(self, file: int) -> RawFile:
        return self._open_files.raw(self._paths[file], self.layout().files[file])

    def _by_h5py(
        self, file: int, field: int, read: Callable[[h5py.Dataset], Any]
    ) -> Any:
        """Return what h5py reads, in native byte order."""
        column = self._column(file, field)
        path, index = self._paths[file], self.layout().files[file]
        found = self._open_files.by_h5py(path, index, column, read)
        return found.astype(column.native, copy=False)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_open_files", "buffers", "_scratch", "_blocks", "_lock"}
        own |= {"_owner", "_users"}
        return {k: v for k, v in self.__dict__.items() if k not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


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
