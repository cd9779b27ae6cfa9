"""Open files: their bytes, by `preadv`, or by h5py; and the names that users give.

A memory map would be faster for short rows in random order, but a disk error or a file
that is truncated meanwhile would kill the process by SIGBUS; a read returns an error.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import glob
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpidist.errors import ArgumentError, ArgumentTypeError, DataError
from mpidist.hdf5.index import (
    DatasetIndex,
    FileIndex,
    FileState,
    index_file,
    kind_of,
    state_of,
)
from mpidist.hdf5.linked_files import (
    closing,
    find_numbered,
    is_being_written,
    open_hdf5,
)
from mpidist.util import validation
from mpidist.util.buffers import Buffers
from mpidist.util.dtypes import traits
from mpidist.util.files import open_regular
from mpidist.util.mounts import is_local, lateness

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]
Spans = npt.NDArray[np.int64]  # `(2, spans)`
# `map`, or a parallel version of it
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]

_BYTE = np.dtype(np.uint8)

# On a network file system, `fstat` costs a message to the servers
_CHECK_SECONDS = 60.0
# How long it may show a node what another one has changed
_LATE_SECONDS = 10.0
_LATE_PAUSE_SECONDS = 0.05
# Waking a thread costs as much as copying 0.5 MB
_PIECE_BYTES = 2 << 20
# A call costs as much as copying this much
_GAP_BYTES = 4 << 10
# A call for each longer row costs less than copying them to their places
_LONG_BYTES = 64 << 10


@dataclasses.dataclass
class WatchedFile:
    """A file that must stay as this process has first seen it, at its path.

    Args:
      state: what it was like then.
      is_local: whether only this node writes to its file system.
      name: its path; a str is faster.
      checked: when it was checked, in seconds.
    """

    state: FileState
    is_local: bool
    name: str
    checked: float = dataclasses.field(default_factory=time.monotonic)

    def check(self, is_due: bool = False) -> None:
        """Raise a DataError if the file has changed.

        On a network file system maybe a minute late, unless the check `is_due`.
        """
        if not (self.is_local or is_due):
            now = time.monotonic()
            if now < self.checked + _CHECK_SECONDS:
                return
            self.checked = now
        before = self.state
        try:
            status = os.stat(self.name)
        except FileNotFoundError as error:
            raise DataError(
                f"{self.name}: was removed or replaced; a file must not change while "
                "it is read"
            ) from error
        # The usual case, without a function
        if (
            status.st_mtime_ns != before.mtime_ns
            or status.st_ino != before.inode
            or status.st_size != before.size_bytes
            or status.st_dev != before.device
        ):
            self._require_same()

    def _require_same(self) -> None:
        # A file system that was mounted again has another number
        now = dataclasses.replace(state_of(self.state.path), head=self.state.head)
        if changes := self.state.changes_to(now, not self.is_local):
            raise DataError(
                f"{self.state.path}: was changed: {', '.join(changes)}; a file must "
                "not change while it is read; create a new dataset to read its present "
                "contents"
            )


def _see(expected: FileState, path: Path, look: Callable[[], FileState]) -> FileState:
    """Return the state of a file, which must be as it was when it was indexed.

    If another node has read the index, this node may see an older state for a while, or
    no file: network file systems cache metadata.

    Raises:
      DataError: its state differs.
      OSError: raised by `look`.
    """
    end = None
    while True:
        try:
            state = look()
            here = expected.node, expected.device
            is_shared = (state.node, state.device) != here and not is_local(
                state.device
            )
            if not (changes := expected.changes_to(state, is_shared)):
                return state
            error: Exception = DataError(
                f"{path}: differs from the indexed file: {', '.join(changes)}"
                "; a file must not change while it is read, and must be the same on "
                "all nodes; create a new dataset to read its present contents"
            )
        except FileNotFoundError as missing:
            error = missing
        if end is None:
            end = time.monotonic() + _lateness(expected)
        if time.monotonic() >= end:
            raise error
        time.sleep(_LATE_PAUSE_SECONDS)


class RawFile:
    """An open file, which is closed with the last reference to it.

    It does not notice changes: see `OpenFiles.check`.

    Args:
      path: of the file.
      expected: state that the file must have; None for any.

    Raises:
      DataError: its state differs.
      OSError: it cannot be opened, or is not a regular file.
    """

    def __init__(self, path: Path, expected: FileState | None):
        self._path = path
        with contextlib.ExitStack() as opened:

            def look() -> FileState:
                opened.close()
                self._descriptor = open_regular(path)
                opened.callback(os.close, self._descriptor)
                return state_of(path, self._descriptor)

            self.state = look() if expected is None else _see(expected, path, look)
            opened.pop_all()
        weakref.finalize(self, os.close, self._descriptor)
        self._size_bytes = self.state.size_bytes

    def gather(
        self, offsets: Offsets, size_bytes: int, buffers: Buffers, parallel: Map = map
    ) -> Bytes:
        """Return the `size_bytes` bytes at each offset, `(offsets, size_bytes)`.

        Args:
          offsets: in any order, within the file.
          size_bytes: of each row.
          buffers: allocates the result.
          parallel: `map`, or a parallel version of it.

        Raises:
          DataError: they are not within the file.
          OSError: they cannot be read.
        """
        if offsets.size:
            self._require_inside(int(offsets.max()), size_bytes)
        rows: Bytes = buffers.empty((offsets.size, size_bytes), _BYTE)
        order = np.argsort(offsets)
        ordered = offsets[order]
        pieces = pieces_of(offsets.size, size_bytes)
        list(parallel(lambda p: self._fill(rows, order[p], ordered[p]), pieces))
        return rows

    def read(self, offset: int, size_bytes: int) -> bytearray:
        """Return the bytes at `offset`.

        Raises:
          DataError: they are not within the file.
          OSError: they cannot be read.
        """
        self._require_inside(offset, size_bytes)
        data = bytearray(size_bytes)
        self._read_into(memoryview(data), offset)
        return data

    def _require_inside(self, offset: int, size_bytes: int) -> None:
        if offset + size_bytes > self._size_bytes:
            raise DataError(
                f"{self._path}: has {self._size_bytes} bytes, but its data should be "
                f"at {offset}..{offset + size_bytes - 1}"
            )

    def _fill(self, rows: Bytes, positions: Offsets, starts: Offsets) -> None:
        """Fill the rows at `positions` with the bytes at `starts`, which ascend."""
        size_bytes, flat = rows.shape[1], rows.reshape(-1).data
        in_order, mixed = _spans_of(positions, starts, size_bytes)
        first, count = in_order
        where = starts[first], positions[first] * size_bytes, count * size_bytes
        for start, at, length in zip(*(n.tolist() for n in where), strict=True):
            self._read_into(flat[at : at + length], start)
        items = rows.view(np.dtype((np.void, size_bytes))).reshape(-1)
        for first, count in zip(*(n.tolist() for n in mixed), strict=True):
            some = slice(first, first + count)
            inside = starts[some] - starts[first]
            data = bytearray(int(inside[-1]) + size_bytes)
            self._read_into(memoryview(data), int(starts[first]))
            items[positions[some]] = _items_of(data, size_bytes)[inside]

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        while (count := os.preadv(self._descriptor, [buffer], offset)) < len(buffer):
            if not count:
                raise self._truncated(offset)
            buffer, offset = buffer[count:], offset + count  # the call was interrupted

    def _truncated(self, end: int) -> DataError:
        return DataError(
            f"{self._path}: was truncated: it ends after {end} bytes, but had "
            f"{self._size_bytes} when its index was read"
        )


def _lateness(state: FileState) -> float:
    """Return for how many seconds this node may not see that state of a file."""
    if state.node == os.uname().nodename:
        return 0.0
    return lateness(state.path.parent, _LATE_SECONDS)


def pieces_of(count: int, size_bytes: int) -> list[slice]:
    """Split `count` items of `size_bytes` into pieces that are worth a thread each."""
    pieces = max(1, min(count, round(count * size_bytes / _PIECE_BYTES)))
    edges = [count * i // pieces for i in range(pieces + 1)]
    return [slice(*edge) for edge in itertools.pairwise(edges)]


def _items_of(data: bytearray, size_bytes: int) -> npt.NDArray[np.void]:
    """Return a view of the items that start at each byte of `data` (they overlap)."""
    count, item = len(data) - size_bytes + 1, np.dtype((np.void, size_bytes))
    items: npt.NDArray[np.void] = np.ndarray((count,), item, data, strides=(1,))
    return items


def _spans_of(
    positions: Offsets, starts: Offsets, size_bytes: int
) -> tuple[Spans, Spans]:
    """Divide rows into spans of the file that are read in one call each.

    Args:
      positions: numbers of the rows in memory.
      starts: their offsets in the file, ascending.
      size_bytes: of each row.

    Returns: the spans whose rows lie side by side in memory as in the file, and the
      others, as numbers of their first rows and of their rows.
    """
    steps = np.diff(starts)
    # Rows after which the next one does not follow both in the file and in memory
    turns = np.flatnonzero((steps != size_bytes) | (np.diff(positions) != 1))
    # Rows that are near each other are read with the gap and copied into place
    before, after = starts[turns], starts[turns + 1]
    is_far = before // _PIECE_BYTES != after // _PIECE_BYTES
    is_far |= after - before > size_bytes + _GAP_BYTES
    cuts = turns[is_far] if size_bytes < _LONG_BYTES else turns
    first = np.append(0, cuts + 1)[: starts.size]
    count = np.diff(first, append=starts.size)
    # Spans without a turn
    edges = np.searchsorted(turns, [first, first + count - 1])
    is_in_order = edges[0] == edges[1]
    spans = np.stack([first, count])
    return spans[:, is_in_order], spans[:, ~is_in_order]


_OPEN_FILES = 128
_FEW_FILES = 16  # up to so many sources are checked at each read


class OpenFiles:
    """Cache of open files by path, as bytes and by h5py. Thread-safe."""

    def __init__(self) -> None:
        self._raw: collections.OrderedDict[Path, Any] = collections.OrderedDict()
        self._hdf5: collections.OrderedDict[Path, Any] = collections.OrderedDict()
        # Files and sources as this process has first seen them, kept for ever
        self._watched: dict[Path, WatchedFile] = {}
        self._watched_sources: dict[Path, WatchedFile] = {}
        self._own_indexes: dict[Path, FileIndex] = {}
        self._is_local: dict[int, bool] = {}  # by device
        self._lock = threading.RLock()

    def raw(self, path: Path, file_index: FileIndex) -> RawFile:
        """Return a file as bytes; it must be unchanged since it was indexed."""
        # Once this process has opened the file, what it saw then counts: another rank
        # may have indexed a copy of it.
        watched = self._watched.get(path)
        expected: FileState | None = watched.state if watched else file_index.state
        if watched is None and file_index.is_being_written:
            expected = None
        file: RawFile = self._opened(self._raw, path, lambda: RawFile(path, expected))
        if watched is None:
            self._watched.setdefault(path, self._watching(file.state))
        return file

    def check(
        self, path: Path, file_index: FileIndex, rows: Any = (), is_due: bool = False
    ) -> None:
        """Raise a DataError if a file has changed, or a source of the given rows.

        This alone decides whether rows may be returned, be they read or kept in memory.
        It follows every read; what was read before a change is not used after it.

        Args:
          path: of the file.
          file_index: of the file.
          rows: their numbers in the file.
          is_due: whether to ask a network file system, too.
        """
        if path not in self._watched and not self._watch(path, file_index):
            return
        self._watched[path].check(is_due)
        if not file_index.others:
            return
        if path != file_index.path:  # a rank with its own copy has its own sources
            file_index = self._own_index(path, file_index)
        for source in self._sources(file_index, rows):
            source.check(is_due)
        if list(file_index.numbered) != find_numbered(file_index.patterns):
            raise DataError(
                f"{path}: numbered sources of this file were added or removed; "
                "create a new dataset to read its present contents"
            )

    def _own_index(self, path: Path, file_index: FileIndex) -> FileIndex:
        """Return the index of this rank's copy of a file that another rank indexed."""
        if path not in self._own_indexes:
            names = [index.name for index in file_index.datasets]
            index = index_file(path, names, file_index.allow_short_external)
            self._own_indexes[path] = index
        return self._own_indexes[path]

    def _watch(self, path: Path, file_index: FileIndex) -> bool:
        """Watch a file from now on; return False while this process writes to it."""
        if file_index.is_being_written:
            paths = (path, *(state.path for state in file_index.others))
            if is_being_written(paths):
                return False
            # What it shares was written: the state of now counts, not that of the index
            self._close_hdf5(path)
            for source in file_index.others:
                watched = self._watching(state_of(source.path))
                self._watched_sources[source.path] = watched
        self.raw(path, file_index)
        return True

    def _sources(self, file_index: FileIndex, rows: Any) -> list[WatchedFile]:
        return [self._watched_source(s) for s in _sources_of(file_index, rows)]

    def _watched_source(self, source: FileState) -> WatchedFile:
        """Return a linked file or VDS source, which is watched from now on."""
        if (watched := self._watched_sources.get(source.path)) is None:

            def look() -> FileState:
                if source.node != os.uname().nodename:  # no older state after opening
                    os.close(open_regular(source.path))
                return state_of(source.path)

            try:
                state = _see(source, source.path, look)
            except FileNotFoundError as error:
                raise DataError(f"{source.path}: was removed") from error
            watched = self._watching(state)
            self._watched_sources[source.path] = watched
        return watched

    def _watching(self, state: FileState) -> WatchedFile:
        # The list of all mounts is read once for each device
        if (device := state.device) not in self._is_local:
            self._is_local[device] = is_local(device)
        return WatchedFile(state, self._is_local[device], os.fspath(state.path))

    def by_h5py(
        self,
        path: Path,
        file_index: FileIndex,
        index: DatasetIndex,
        rows: Any,
        read: Callable[[h5py.Dataset], Any],
    ) -> Any:
        """Return `read(dataset)`; the dataset must be unchanged since it was indexed.

        The caller checks the file afterwards; here only a network file system is asked.
        One thread at a time: h5py serialises calls anyway, and is not safe everywhere.
        """
        with self._lock:
            # HDF5 returns zeros for sources that it does not see, and for bytes beyond
            # the end of a truncated file.
            is_watched = path in self._watched or self._watch(path, file_index)
            if is_watched and path == file_index.path:
                self._watched[path].check()
                self._sources(file_index, rows)
            else:
                self.check(path, file_index, rows)
            try:
                result = self._by_h5py(path, index, read)
            except BaseException:
                self._close_hdf5(path)
                raise
            if is_watched and not self._watched[path].is_local:
                self.check(path, file_index, rows, is_due=True)
            return result

    def _by_h5py(
        self, path: Path, index: DatasetIndex, read: Callable[[h5py.Dataset], Any]
    ) -> Any:
        is_shared = path not in self._watched
        file = self._opened(self._hdf5, path, lambda: open_hdf5(path, is_shared))
        with closing(file[index.name]) as dataset:
            # None where it is no dataset any more: the file was replaced.
            kind = kind_of(dataset) if isinstance(dataset, h5py.Dataset) else None
            if traits(index.dtype).family == "complex" and kind == (
                index.shape,
                _swapped(index),
            ):
                # HDF5 sorts the members of a compound type at its first conversion
                return read(dataset.astype(index.dtype))
            if kind != (index.shape, index.dtype):
                raise DataError(
                    f"it was {(index.shape, index.dtype)} and is now {kind}; a file "
                    "must not change while it is read"
                )
            return read(dataset)

    def _close_hdf5(self, path: Path) -> None:
        with self._lock:
            if file := self._hdf5.pop(path, None):
                file.close()

    def close(self) -> None:
        """Close all files; a read of bytes in another thread still completes."""
        with self._lock:
            # Raw files stay open as long as readers hold them.
            self._raw.clear()
            while self._hdf5:
                self._hdf5.popitem()[1].close()

    def _opened(
        self,
        files: collections.OrderedDict[Path, Any],
        path: Path,
        open_file: Callable[[], Any],
    ) -> Any:
        with self._lock:
            if not files.get(path):  # or another dataset has closed it as outdated
                try:
                    files[path] = open_file()
                except OSError as error:
                    if error.errno != errno.EMFILE:
                        raise
                    self.close()  # the limit of open files is lower than ours
                    files[path] = open_file()
            files.move_to_end(path)
            if len(files) > _OPEN_FILES:
                files.popitem(last=False)
            return files[path]


def _sources_of(file_index: FileIndex, rows: Any) -> Iterable[FileState]:
    others = file_index.others
    if len(others) <= _FEW_FILES:  # as fast as finding out which
        return others
    ordered = np.sort(rows)
    edges = np.searchsorted(ordered, file_index.other_rows)
    return [others[i] for i in np.flatnonzero(edges[:, 0] < edges[:, 1]).tolist()]


def _swapped(index: DatasetIndex) -> np.dtype[Any]:
    """Return the dtype of complex numbers with the imaginary part first."""
    part = f"{index.dtype.byteorder}f{index.dtype.itemsize // 2}"
    return np.dtype([("i", part), ("r", part)])


_LONGEST = 4096  # of a name in a file, in bytes, with its groups


def list_files(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[Path]:
    """Return the files of a path, a pattern or several paths."""
    if not isinstance(files, str | bytes | os.PathLike):
        several = _listed("files must be a path, a pattern or a list of paths", files)
        paths = [validation.absolute("each of files", file) for file in several]
        if not paths:
            raise ArgumentError("files must name at least one file, not []")
        return paths
    if is_one_path(files):
        return [validation.absolute("files", files)]
    pattern = validation.path("files", files)
    matches = sorted(glob.glob(pattern))
    if not matches:
        raise DataError(f"no file matches {pattern!r}")
    return [validation.absolute("files", file) for file in matches]


def is_one_path(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> bool:
    """Return whether `files` is the path of one file, no pattern and no list."""
    if not isinstance(files, str | bytes | os.PathLike):
        return False
    pattern = validation.path("files", files)
    return not glob.has_magic(pattern) or os.path.exists(pattern)


def check_names(
    datasets: str | Sequence[str] | Mapping[str, str],
) -> str | tuple[str, ...] | dict[str, str]:
    """Validate the names of HDF5 datasets, in the structure of the elements."""
    if isinstance(datasets, str):
        _require_name(datasets)
        return datasets
    if isinstance(datasets, Mapping):
        names: dict[str, str] | tuple[str, ...] = dict(datasets)
    else:
        must = "datasets must be a name, or a list or dict of names"
        names = tuple(_listed(must, datasets))
    several = list(names.values()) if isinstance(names, dict) else names
    if not several:
        raise ArgumentError("datasets must name at least one HDF5 dataset")
    for name in several:
        _require_name(name)
    return names


def _listed(must: str, value: Any) -> list[Any]:
    """Return the items of an iterable; sets differ in order between ranks."""
    try:
        if not isinstance(value, Set | Mapping | bytes):
            return list(value)
    except (TypeError, ArgumentError) as error:  # ArgumentError: a PerReplica
        raise ArgumentTypeError(f"{must}, not {validation.shown(value)}") from error
    raise ArgumentTypeError(f"{must}, not {validation.shown(value)}")


def _require_name(name: Any) -> None:
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"datasets must hold names, not {validation.shown(name)}"
        )
    try:
        is_good = name != "" and len(name.encode()) < _LONGEST and "\0" not in name
    except UnicodeEncodeError:
        is_good = False
    if not is_good:
        raise ArgumentError(
            f"datasets must hold valid HDF5 names, not {validation.shown(name)}"
        )
