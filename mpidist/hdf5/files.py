"""Open files: their bytes, by `preadv`, or by h5py; and the names that users give.

A memory map would be faster for short rows in random order, but a disk error or a file
that is truncated meanwhile would kill the process by SIGBUS; a read returns an error.
"""

from __future__ import annotations

import collections
import contextlib
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
    kind_of,
    state_of,
)
from mpidist.hdf5.linked_files import open_hdf5
from mpidist.util import validation
from mpidist.util.buffers import Buffers
from mpidist.util.files import open_regular
from mpidist.util.mounts import is_local, lateness, wait_for_file

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


class RawFile:
    """An open file, which is closed with the last reference to it.

    Args:
      path: of the file.
      expected: state that the file must have.

    Raises:
      DataError: its state differs.
      OSError: it cannot be opened, or is not a regular file.
    """

    def __init__(self, path: Path, expected: FileState):
        self._path = path
        self._open(expected)
        weakref.finalize(self, os.close, self._descriptor)
        self._size_bytes = self.state.size_bytes
        self._identity = _identity(os.fstat(self._descriptor))
        self._checked = time.monotonic()

    def _open(self, expected: FileState) -> None:
        """Open the file, as it was when its index was read.

        If another node has read the index, this node may see an older state for a
        while, or no file: network file systems cache metadata.
        """
        end = None
        while True:
            try:
                with contextlib.ExitStack() as closing:
                    self._descriptor = open_regular(self._path)
                    closing.callback(os.close, self._descriptor)
                    error: Exception | None = self._find_change(expected)
                    if error is None:
                        closing.pop_all()
                        return
            except FileNotFoundError as missing:
                error = missing
            if end is None:
                end = time.monotonic() + _lateness(expected)
            if time.monotonic() >= end:
                raise error
            time.sleep(_LATE_PAUSE_SECONDS)

    def _find_change(self, expected: FileState) -> DataError | None:
        """Return an error message if the open file differs from the expected one."""
        self.state = state_of(self._path, self._descriptor)
        self._is_local = is_local(self.state.device)
        changes = expected.changes_to(self.state, not self._is_local)
        if not changes:
            return None
        return DataError(
            f"{self._path}: differs from the indexed file: {', '.join(changes)}"
            "; a file must not change while it is read, and must be the same on all "
            "nodes; create a new dataset to read its present contents"
        )

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
          DataError: they are not within the file, or it was changed.
          OSError: they cannot be read.
        """
        if offsets.size:
            self._require_inside(int(offsets.max()), size_bytes)
        rows: Bytes = buffers.empty((offsets.size, size_bytes), _BYTE)
        order = np.argsort(offsets)
        ordered = offsets[order]
        pieces = pieces_of(offsets.size, size_bytes)
        list(parallel(lambda p: self._fill(rows, order[p], ordered[p]), pieces))
        self.check()
        return rows

    def read(self, offset: int, size_bytes: int) -> bytearray:
        """Return the bytes at `offset`.

        Raises:
          DataError: they are not within the file, or it was changed.
          OSError: they cannot be read.
        """
        self._require_inside(offset, size_bytes)
        data = bytearray(size_bytes)
        self._read_into(memoryview(data), offset)
        self.check()
        return data

    def _require_inside(self, offset: int, size_bytes: int) -> None:
        if offset + size_bytes > self._size_bytes:
            raise DataError(
                f"{self._path}: has {self._size_bytes} bytes, but its data should be "
                f"at {offset}..{offset + size_bytes - 1}"
            )

    def check(self) -> None:
        """Raise a DataError if the file has changed; maybe a minute late."""
        now = time.monotonic()
        if self._is_local or now >= self._checked + _CHECK_SECONDS:
            self._checked = now
            self.require_unchanged()

    def require_unchanged(self) -> None:
        """Raise a DataError if the file has changed since it was opened."""
        status = os.fstat(self._descriptor)
        if _identity(status) != self._identity:
            raise DataError(f"{self._path}: {self._change(status)}")

    def _change(self, status: os.stat_result) -> str:
        advice = "a file must not change while it is read"
        if status.st_nlink == 0:
            return f"was removed or replaced; {advice}"
        return (
            f"was changed: it has {status.st_size} bytes; when it was opened it had "
            f"{self._size_bytes} and a different modification time; {advice}"
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
        """Fill a buffer with the bytes from `offset` on."""
        while (count := os.preadv(self._descriptor, [buffer], offset)) < len(buffer):
            if not count:
                self.require_unchanged()
                raise self._truncated(offset)
            buffer, offset = buffer[count:], offset + count  # the call was interrupted

    def _truncated(self, end: int) -> DataError:
        return DataError(
            f"{self._path}: was truncated: it ends after {end} bytes, but had "
            f"{self._size_bytes} when its index was read"
        )


def _identity(status: os.stat_result) -> tuple[int, ...]:
    # The link count is 0 once the file was removed or replaced
    return status.st_size, status.st_mtime_ns, min(status.st_nlink, 1)


def _wait_until_seen(state: FileState) -> None:
    """Wait a while for a file that another node has seen and this one does not."""
    if state.node != os.uname().nodename:
        wait_for_file(state.path, _LATE_SECONDS)


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
_FEW_FILES = 16  # up to so many are checked at each read


class OpenFiles:
    """Cache of open files by path, as bytes and by h5py. Thread-safe."""

    def __init__(self) -> None:
        self._raw: collections.OrderedDict[Path, Any] = collections.OrderedDict()
        self._hdf5: collections.OrderedDict[Path, Any] = collections.OrderedDict()
        # States when this process first opened them, kept when files are closed
        self._states: dict[Path, FileState] = {}
        self._other_states: dict[Path, FileState] = {}
        # Files whose many sources were checked since `check_others`
        self._checked: set[Path] = set()
        self._lock = threading.RLock()

    def raw(self, path: Path, file_index: FileIndex) -> RawFile:
        """Return a file as bytes; it must be unchanged since it was indexed."""
        # Once this process has opened the file, what it saw then counts: another rank
        # may have indexed a copy of it.
        expected = self._states.get(path, file_index.state)
        file: RawFile = self._opened(self._raw, path, lambda: RawFile(path, expected))
        self._states.setdefault(path, file.state)
        return file

    def by_h5py(
        self,
        path: Path,
        file_index: FileIndex,
        index: DatasetIndex,
        read: Callable[[h5py.Dataset], Any],
    ) -> Any:
        """Return `read(dataset)`; the dataset must be unchanged since it was indexed.

        One thread at a time: h5py serialises calls anyway, and is not safe everywhere.
        """
        with self._lock:
            if path not in self._hdf5 and path == file_index.path:
                # HDF5 returns zeros for sources that it does not see
                for state in (file_index.state, *file_index.others):
                    _wait_until_seen(state)
            result = self._by_h5py(path, index, read)
            if not file_index.is_being_written:
                # HDF5 returns zeros for bytes beyond the end of a truncated file
                self.raw(path, file_index).require_unchanged()
                self._require_others_unchanged(path, file_index)
            return result

    def check_others(self) -> None:
        """Check the sources of files with many of them again at the next read."""
        # Many sources are checked once per epoch instead of at each read.
        with self._lock:
            self._checked.clear()

    def _require_others_unchanged(self, path: Path, file_index: FileIndex) -> None:
        """Raise a DataError if a linked file or VDS source has changed."""
        # A rank that has its own path of the file may have its own sources, too
        if path != file_index.path or path in self._checked:
            return
        for before in file_index.others:
            expected = self._other_states.setdefault(before.path, before)
            if changes := expected.changes_to(state_of(before.path), is_shared=False):
                raise DataError(
                    f"{before.path}, a source of this file, was changed: "
                    f"{', '.join(changes)}; a file must not change while it is read; "
                    "create a new dataset to read its present contents"
                )
        if len(file_index.others) > _FEW_FILES:
            self._checked.add(path)

    def _by_h5py(
        self, path: Path, index: DatasetIndex, read: Callable[[h5py.Dataset], Any]
    ) -> Any:
        file = self._opened(self._hdf5, path, lambda: open_hdf5(path))
        dataset = file[index.name]
        # None where it is no dataset any more: the file was replaced.
        kind = kind_of(dataset) if isinstance(dataset, h5py.Dataset) else None
        if index.dtype.kind == "c" and kind == (index.shape, _swapped(index)):
            # HDF5 sorts the members of a compound type at its first conversion
            return read(dataset.astype(index.dtype))
        if kind != (index.shape, index.dtype):
            raise DataError(
                f"it was {(index.shape, index.dtype)} and is now {kind}; a file "
                "must not change while it is read"
            )
        return read(dataset)

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
            if path not in files:
                try:
                    files[path] = open_file()
                except OSError as error:
                    if error.errno != errno.EMFILE:
                        raise
                    self.close()  # the limit of open files is lower than ours
                    files[path] = open_file()
            files.move_to_end(path)
            # The least recently used one.
            if len(files) > _OPEN_FILES:
                files.popitem(last=False)
            return files[path]


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
