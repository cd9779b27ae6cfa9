"""Rows of files of any format that opens as arrays: see `Dataset.from_files`.

Each file is opened and described by one rank for all, as files of HDF5 are; so an error
of one rank is raised on all, and the metadata server sees each file once.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpidist.data.elements import plain_array
from mpidist.data.sources import Positions
from mpidist.errors import DataError, MpidistError
from mpidist.hdf5.chunks import ChunkLayout
from mpidist.hdf5.read import KEPT_BYTES, BlockCache
from mpidist.util import nest
from mpidist.util.available_memory import available_cores
from mpidist.util.buffers import Buffers

_STEP_BYTES = 1 << 20  # of arrays without chunks


class _File(NamedTuple):
    """What is known of a file.

    Args:
      rows: in it.
      kind: the structure, dtypes and shapes of rows, which all files must share.
      chunk: how many rows are stored together; 0 if each can be read alone.
      stamp: differs once the file was written or replaced; empty for folders.
    """

    rows: int
    kind: tuple[nest.Spec, tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]]
    chunk: int
    stamp: tuple[int, ...]


class _Block(NamedTuple):
    leaves: Sequence[Any]
    nbytes: int


class ArrayFiles:
    """The rows of the arrays in files, file after file. Thread-safe.

    Args:
      paths: of the files.
      open_file: see `Dataset.from_files`.
    """

    def __init__(self, paths: Sequence[Path], open_file: Callable[[str], Any]):
        self._paths = self._all_paths = list(paths)
        self._open_file = open_file
        self._files: list[_File] = []
        self._starts = np.zeros(1, np.int64)
        self._on_rank = ""
        self._start()

    def _start(self) -> None:
        """Set up what a forked child does not share: files and threads."""
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._users = 0
        self._opened: dict[int, Sequence[Any]] = {}
        self._blocks = BlockCache(len(available_cores()), KEPT_BYTES)
        self.buffers = Buffers()

    def __len__(self) -> int:
        return int(self._known()[1][-1])

    @property
    def is_indexed(self) -> bool:
        """Whether the rows are counted already."""
        return bool(self._files)

    @property
    def file_count(self) -> int:
        """See `IndexedSource.file_count`."""
        return len(self._paths)

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        """Of the arrays."""
        return [dtype for dtype, _ in self._known()[0][0].kind[1]]

    def shard_files(self, workers: int, worker: int) -> ArrayFiles:
        """See `FileSource.shard_files`."""
        share = ArrayFiles(self._paths[worker::workers], self._open_file)
        share._all_paths = self._paths
        return share

    def identify(self) -> str:
        """See `IndexedSource.identify`."""
        return f"from_files({[path.name for path in self._all_paths]})"

    def describe(self) -> str:
        """See `RowSource.describe`."""
        if self._all_paths is not self._paths:  # do not open the files of other workers
            return f"{self.identify()}, by file"
        files, starts = self._known()
        layout = self.chunk_layout()
        # Not the dtypes' repr, which differs once they were pickled
        kind = f"{files[0].kind[0]}, {_text(files[0])}"
        parts = f"first rows {starts.tolist()}, blocks of {layout.rows}"
        return f"{self.identify()}: {kind}, {parts}"

    def inspect(self, files: Iterable[int]) -> list[_File]:
        """See `IndexedSource.inspect`.

        Raises:
          DataError: a file is missing, or does not open as arrays with rows.
        """
        return [self._files[i] if self._files else self._describe(i) for i in files]

    def set_index(
        self,
        files: Sequence[_File],
        rank: int | None = None,
        threads: int | None = None,
        most_kept_bytes: int = 0,
    ) -> None:
        """See `IndexedSource.set_index`.

        Raises:
          DataError: the files do not fit together.
        """
        for path, file in zip(self._paths, files, strict=True):
            if file.kind != files[0].kind:
                raise DataError(
                    f"{path} has rows of {_text(file)}, but {self._paths[0]} of "
                    f"{_text(files[0])}"
                )
        self._on_rank = "" if rank is None else f" on rank {rank}"
        self._files = list(files)
        self._starts = np.cumsum([0, *(file.rows for file in files)])
        if threads is not None:
            self._blocks.threads = threads

    def chunk_layout(self) -> ChunkLayout:
        """See `ChunkedSource.chunk_layout`."""
        files, _ = self._known()
        row_bytes = sum(d.itemsize * int(np.prod(s)) for d, s in files[0].kind[1])
        chunk = max(file.chunk for file in files)
        lengths = tuple(file.rows for file in files)
        is_costly = chunk > 1 and sum(lengths) * row_bytes > KEPT_BYTES
        rows = chunk or max(1, _STEP_BYTES // max(1, row_bytes))
        return ChunkLayout(lengths, rows, row_bytes, is_costly)

    def reserve_cache(self, rows: int) -> None:
        """See `ChunkedSource.reserve_cache`."""
        wanted = rows * self.chunk_layout().row_bytes
        self._blocks.capacity_bytes = max(KEPT_BYTES, wanted)

    def retain(self) -> None:
        """See `ChunkedSource.retain`."""
        with self._lock:
            self._users += 1

    def release(self, keep_files: bool = False) -> None:
        """See `ChunkedSource.release`."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self._blocks.end_threads()
            if not keep_files:
                self._blocks.clear()
                self.buffers.clear()
                self._opened = {}

    def read(self, rows: Positions) -> Any:
        """See `RowSource.read`.

        Raises:
          DataError: names the file that cannot be read, or has changed.
        """
        files, starts = self._known()
        if self._owner != os.getpid():
            self._start()
        spec, leaves = files[0].kind
        # Of big-endian files, too
        results = [
            self.buffers.empty((rows.size, *shape), dtype.newbyteorder("="))
            for dtype, shape in leaves
        ]
        file_of = np.searchsorted(starts, rows, side="right") - 1
        for i in np.unique(file_of).tolist():
            where = np.flatnonzero(file_of == i)
            with self._naming(i):
                self._read_file(i, rows[where] - starts[i], where, results)
        return nest.unflatten(spec, results)

    def _read_file(
        self, i: int, rows: Positions, where: Positions, results: Sequence[Any]
    ) -> None:
        # Before kept blocks are used, too
        if _stamp(self._paths[i]) != self._files[i].stamp:
            raise DataError("it has changed since its rows were counted")
        if chunk := self._files[i].chunk:
            block_of = rows // chunk
            numbers = np.unique(block_of).tolist()
            blocks = self._blocks.get([(i, n) for n in numbers], self._load)
            for n in numbers:
                inside = block_of == n
                for result, leaf in zip(results, blocks[i, n].leaves, strict=True):
                    result[where[inside]] = leaf[rows[inside] - n * chunk]
            return
        for result, leaf in zip(results, self._arrays(i), strict=True):
            result[where] = plain_array(_take(leaf, rows))

    def _load(self, key: tuple[int, ...]) -> _Block:
        i, number = key
        begin = number * self._files[i].chunk
        end = min(begin + self._files[i].chunk, self._files[i].rows)
        leaves = [plain_array(leaf[begin:end]) for leaf in self._arrays(i)]
        if any(len(leaf) != end - begin for leaf in leaves):
            raise DataError("it has fewer rows than before")
        return _Block(leaves, sum(leaf.nbytes for leaf in leaves))

    def _arrays(self, i: int) -> Sequence[Any]:
        """Return the arrays of a file, which are as it was described."""
        with self._lock:
            if i not in self._opened:
                opened, spec = nest.flatten(self._open_file(str(self._paths[i])))
                if (spec, _kinds(opened)) != self._files[i].kind:
                    raise DataError("it has changed since its rows were counted")
                self._opened[i] = opened
            return self._opened[i]

    def _describe(self, i: int) -> _File:
        path = self._paths[i]
        with self._naming(i):
            stamp = _stamp(path)
            leaves, spec = nest.flatten(self._open_file(str(path)))
            shapes = [tuple(leaf.shape) for leaf in leaves]
            if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
                raise DataError(f"arrays of equal first dimension are needed: {shapes}")
            for leaf in leaves:
                plain_array(np.empty(0, leaf.dtype))  # or there are objects in it
            chunks = [getattr(leaf, "chunks", None) or (0,) for leaf in leaves]
            chunk = max(int(chunk[0]) for chunk in chunks)
            return _File(int(shapes[0][0]), (spec, _kinds(leaves)), chunk, stamp)

    def __getstate__(self) -> dict[str, Any]:
        transient = {"_owner", "_lock", "_users", "_opened", "_blocks", "buffers"}
        return {k: v for k, v in vars(self).items() if k not in transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def _known(self) -> tuple[list[_File], Any]:
        if not self._files:
            with self._lock:
                if not self._files:
                    self.set_index(self.inspect(range(self.file_count)))
        return self._files, self._starts

    @contextlib.contextmanager
    def _naming(self, i: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of whatever opens files
            kind = (
                "" if isinstance(error, MpidistError) else f"{type(error).__name__}: "
            )
            raise DataError(
                f"{self._paths[i]} cannot be read{self._on_rank}: {kind}{error}"
            ) from error


def _kinds(leaves: Sequence[Any]) -> tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]:
    return tuple((np.dtype(a.dtype), tuple(map(int, a.shape[1:]))) for a in leaves)


def _take(array: Any, rows: Positions) -> Any:
    """Return rows of an array, which need not know more than slices."""
    if isinstance(array, np.ndarray):
        return array[rows]
    numbers, back = np.unique(rows, return_inverse=True)
    ends = np.flatnonzero(np.diff(numbers) > 1) + 1
    runs = [array[int(run[0]) : int(run[-1]) + 1] for run in np.split(numbers, ends)]
    return np.concatenate(list(map(plain_array, runs)))[back]


def _text(file: _File) -> str:
    return ", ".join(f"{dtype} {shape}" for dtype, shape in file.kind[1])


def _stamp(path: Path) -> tuple[int, ...]:
    found = path.stat()
    is_file = os.path.isfile(path)
    return (found.st_size, found.st_mtime_ns) if is_file else ()
