"""Raw access to the bytes of a file, by memory map or by `pread`.

On a local file system rows are copied from a memory map. If the file were truncated
during the copy, SIGBUS would kill the process. So the process holds a read lease while
it copies (fcntl(2), F_SETLEASE; 1 microsecond): until it is released, the kernel blocks
any process that opens the file for writing or truncates it. Where the kernel grants no
lease (another user's file, a file open for writing, a network file system), `pread` is
used.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpidist.data.hdf5.index import FileState, state_of
from mpidist.errors import DataError
from mpidist.util.buffers import Buffers
from mpidist.util.files import LOCAL_FILE_SYSTEMS, file_system, lateness, open_regular

__all__ = ["GAP_BYTES", "Map", "RawFile", "wait_until_seen"]


T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]
# `map`, or a parallel version of it
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]

_BYTE = np.dtype(np.uint8)

# On a network file system, `fstat` costs a message to the servers
_CHECK_SECONDS = 60.0
# How long it may show a node what another one has changed
_LATE_SECONDS = 10.0
_LATE_PAUSE_SECONDS = 0.05
# Shorter rows: one read and a copy are cheaper than a vector of buffers for the kernel
_VECTOR_BYTES = 32 << 10
# Waking a thread costs as much as copying 0.5 MB
_PIECE_BYTES = 2 << 20
# For longer rows, copying outweighs the cost of a Python loop
_LONG_BYTES = 64 << 10
# Ranges with smaller gaps are merged into one read of at most _CALL_BYTES
GAP_BYTES = 32 << 10
_CALL_BYTES = 8 << 20


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
        self._lock = threading.Lock()
        self._map = self._map_bytes() if self._is_local else None
        self._map_users = 0

    def _open(self, expected: FileState) -> None:
        """Open the file, as it was when its index was read.

        If another node has read the index, this node may see an older state for a
        while, or no file: network file systems cache metadata.
        """
        end = time.monotonic() + _lateness(expected)
        while True:
            try:
                self._descriptor = open_regular(self._path)
                error: Exception | None = self._find_change(expected)
                if error is None:
                    return
                os.close(self._descriptor)
            except FileNotFoundError as missing:
                error = missing
            if time.monotonic() >= end:
                raise error
            time.sleep(_LATE_PAUSE_SECONDS)

    def _find_change(self, expected: FileState) -> DataError | None:
        """Return an error message if the open file differs from the expected one."""
        self.state = state_of(self._path, self._descriptor)
        self._is_local = file_system(self.state.device) in LOCAL_FILE_SYSTEMS
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
        """
        if offsets.size:
            self._require_inside(int(offsets.max()), size_bytes)
        destination: Bytes = buffers.empty((offsets.size, size_bytes), _BYTE)
        if (mapped := self._acquire_map()) is None:
            self._read_rows(offsets, destination, parallel)
            return destination
        try:
            _copy_rows(mapped, offsets, destination, parallel)
            return destination
        finally:
            self._release_map()

    def take(
        self,
        offset: int,
        size_bytes: int,
        rows: Offsets,
        buffers: Buffers,
        parallel: Map = map,
    ) -> Bytes:
        """Return rows of `size_bytes` of an array that starts at `offset`.

        Faster than `gather`, for contiguous datasets.
        """
        last = int(rows.max()) if rows.size else 0
        self._require_inside(offset + last * size_bytes, size_bytes)
        stop = offset + (last + 1) * size_bytes
        destination: Bytes = buffers.empty((rows.size, size_bytes), _BYTE)
        if (mapped := self._acquire_map()) is None:
            self._read_rows(offset + rows * size_bytes, destination, parallel)
            return destination
        try:
            _take_rows(mapped[:stop], offset, rows, destination, parallel)
            return destination
        finally:
            self._release_map()

    def read(self, offset: int, size_bytes: int, use: Callable[[Any], T]) -> T:
        """Return `use(buffer)` of the bytes at `offset`. `use` must not keep it."""
        self._require_inside(offset, size_bytes)
        if (mapped := self._acquire_map()) is None:
            self._check_periodically()
            return use(self._pread(offset, size_bytes))
        try:
            return use(mapped[offset : offset + size_bytes])
        finally:
            self._release_map()

    def _require_inside(self, offset: int, size_bytes: int) -> None:
        if offset + size_bytes > self._size_bytes:
            raise DataError(
                f"{self._path}: has {self._size_bytes} bytes, but its data should be "
                f"at {offset}..{offset + size_bytes - 1}"
            )

    def _check_periodically(self) -> None:
        """Check for changes: always if that is cheap, else once a minute."""
        now = time.monotonic()
        if self._is_local or now >= self._checked + _CHECK_SECONDS:
            self._checked = now
            self.require_unchanged()

    def require_unchanged(self) -> None:
        """Raise a DataError if the file has changed since it was opened."""
        status = os.fstat(self._descriptor)
        if _identity(status) != self._identity:
            raise DataError(f"{self._path}: {self._change(status)}")

    def _acquire_map(self) -> Bytes | None:
        """Acquire the lease and return the map; return None if that is not safe."""
        if self._map is None:
            return None
        with self._lock:
            if self._map_users == 0 and not self._lease(fcntl.F_RDLCK):
                return None
            if fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
                # The lease is being broken: a writer waits, so start no more reads
                if self._map_users == 0:
                    self._lease(fcntl.F_UNLCK)
                return None
            self._map_users += 1
        try:
            self._check_periodically()  # the lease keeps it unchanged from here on
        except DataError:
            self._release_map()
            raise
        return self._map

    def _release_map(self) -> None:
        with self._lock:
            self._map_users -= 1
            if self._map_users == 0:
                self._lease(fcntl.F_UNLCK)

    def _lease(self, kind: int) -> bool:
        """Acquire or release the lease; return whether that succeeded."""
        try:
            # The kernel reports a waiting writer by SIGIO, which kills the process.
            # Choose a harmless signal, each time: releasing the lease resets it
            if kind == fcntl.F_RDLCK:
                fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, kind)
        except OSError:
            return False
        return True

    def _change(self, status: os.stat_result) -> str:
        advice = "a file must not change while it is read"
        if status.st_nlink == 0:
            return f"was removed or replaced; {advice}"
        return (
            f"was changed: it has {status.st_size} bytes; when it was opened it had "
            f"{self._size_bytes} and a different modification time; {advice}"
        )

    def _map_bytes(self) -> Bytes | None:
        """Map the file; return None if it is empty."""
        if not self._size_bytes:
            return None
        length = self._size_bytes
        return np.frombuffer(
            mmap.mmap(self._descriptor, length, prot=mmap.PROT_READ), np.uint8
        )

    def _read_rows(self, offsets: Offsets, destination: Bytes, parallel: Map) -> None:
        """Fill `destination` with the rows at `offsets`, by few reads in file order."""
        self._check_periodically()
        order = np.argsort(offsets, kind="stable")
        ordered, size_bytes = offsets[order], destination.shape[1]
        whole = destination.view(np.dtype((np.void, size_bytes))).reshape(-1)

        def read(span: tuple[int, int]) -> None:
            starts, places = ordered[slice(*span)], order[slice(*span)]
            start = int(starts[0])
            if (views := _side_by_side(destination, starts, places)) is not None:
                self._read_into(views, start)
                return
            data = self._pread(start, int(starts[-1]) + size_bytes - start)
            items = _items_of(np.frombuffer(data, np.uint8), size_bytes)
            whole[places] = items[starts - start]

        list(parallel(read, _spans_of(ordered, size_bytes)))

    def _read_into(self, views: list[memoryview], offset: int) -> None:
        """Fill buffers with the bytes from `offset` on."""
        while views:
            count = os.preadv(self._descriptor, views, offset)
            if not count:
                raise self._truncated(offset)
            offset += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:  # a short read: a signal, or the limit of one call
                views[0] = views[0][count:]

    def _pread(self, offset: int, size_bytes: int) -> bytes | bytearray:
        data = os.pread(self._descriptor, size_bytes, offset)
        if len(data) == size_bytes:
            return data
        parts = bytearray(data)  # a short read: a signal, or the limit of one call
        while data and len(parts) < size_bytes:
            missing = size_bytes - len(parts)
            data = os.pread(self._descriptor, missing, offset + len(parts))
            parts += data
        if len(parts) < size_bytes:
            raise self._truncated(offset + len(parts))
        return parts

    def _truncated(self, end: int) -> DataError:
        return DataError(
            f"{self._path}: was truncated: it ends after {end} bytes, but had "
            f"{self._size_bytes} when its index was read"
        )


def _identity(status: os.stat_result) -> tuple[int, ...]:
    # The link count is 0 once the file was removed or replaced
    return status.st_size, status.st_mtime_ns, min(status.st_nlink, 1)


def _side_by_side(
    destination: Bytes, starts: Offsets, places: Offsets
) -> list[memoryview] | None:
    """Return the destinations of consecutive rows of a file, for one vectored read.

    None if they are not consecutive, or too short for that.

    Args:
      destination: array `(rows, bytes)` to fill.
      starts: offsets of rows, ascending.
      places: numbers of the same rows in `destination`.
    """
    if starts.size == 1:
        return [destination[places[0]].data]
    if (np.diff(starts) != destination.shape[1]).any():
        return None
    if (np.diff(places) == 1).all():
        return [destination[places[0] : places[-1] + 1].reshape(-1).data]
    if destination.shape[1] < _VECTOR_BYTES:
        return None
    return [destination[place].data for place in places.tolist()]


def wait_until_seen(state: FileState) -> None:
    """Wait a while for a file that another node has seen and this one does not."""
    end = time.monotonic() + _lateness(state)
    while not state.path.exists() and time.monotonic() < end:
        time.sleep(_LATE_PAUSE_SECONDS)


def _lateness(state: FileState) -> float:
    """Return for how many seconds this node may not see that state of a file."""
    if state.node == os.uname().nodename:
        return 0.0
    return lateness(state.path.parent, _LATE_SECONDS)


def _copy_rows(
    source: Bytes, offsets: Offsets, destination: Bytes, parallel: Map
) -> None:
    """Fill row i of `destination` with the bytes at `offsets[i]` of `source`."""
    rows, size_bytes = destination.shape
    if size_bytes >= _LONG_BYTES:
        _copy_long(source, offsets, destination, parallel)
        return
    items = _items_of(source, size_bytes)
    whole = destination.view(items.dtype).reshape(-1)

    def copy(piece: slice) -> None:
        whole[piece] = items[offsets[piece]]

    list(parallel(copy, _pieces(rows, size_bytes)))


def _take_rows(
    source: Bytes, offset: int, rows: Offsets, destination: Bytes, parallel: Map
) -> None:
    """Fill `destination` with rows of the array from `offset` to the end of `source`.

    Faster than `_copy_rows`, for contiguous datasets.
    """
    size_bytes = destination.shape[1]
    if not rows.size or size_bytes >= _LONG_BYTES:
        _copy_long(source, offset + rows * size_bytes, destination, parallel)
        return
    table = source[offset:].reshape(-1, size_bytes)

    def copy(piece: slice) -> None:
        # mode="clip": `take` writes to `out` without a buffer; no row is clipped
        table.take(rows[piece], axis=0, out=destination[piece], mode="clip")

    list(parallel(copy, _pieces(rows.size, size_bytes)))


def _copy_long(
    source: Bytes, offsets: Offsets, destination: Bytes, parallel: Map
) -> None:
    """Copy long rows one by one; very long ones in parts."""
    rows, size_bytes = destination.shape
    starts = offsets.tolist()

    def copy(piece: tuple[slice, slice]) -> None:
        some, part = piece
        for row, start in zip(destination[some, part], starts[some], strict=True):
            row[:] = source[start + part.start : start + part.stop]

    parts = _pieces(size_bytes, 1)
    several = _pieces(rows, size_bytes) if len(parts) == 1 else _pieces(rows, 1 << 62)
    list(parallel(copy, itertools.product(several, parts)))


def _pieces(count: int, size_bytes: int) -> list[slice]:
    """Split `count` items of `size_bytes` into pieces that are worth a thread each."""
    pieces = max(1, min(count, round(count * size_bytes / _PIECE_BYTES)))
    edges = [count * i // pieces for i in range(pieces + 1)]
    return [slice(*edge) for edge in itertools.pairwise(edges)]


def _items_of(data: Bytes, size_bytes: int) -> npt.NDArray[np.void]:
    """Return a view of the items that start at each byte of `data` (they overlap)."""
    count = max(0, data.size - size_bytes + 1)
    items: npt.NDArray[np.void] = np.ndarray(
        (count,), np.dtype((np.void, size_bytes)), data, strides=(1,)
    )
    return items


def _spans_of(ordered: Offsets, size_bytes: int) -> list[tuple[int, int]]:
    """Split ascending offsets at wide gaps, and where one read would be too long."""
    if not ordered.size:
        return []
    is_far = np.diff(ordered) - size_bytes > GAP_BYTES
    cuts = [0, *(np.flatnonzero(is_far) + 1).tolist(), ordered.size]
    spans = []
    for first, last in itertools.pairwise(cuts):
        while first < last:
            reach = int(ordered[first]) + max(_CALL_BYTES, size_bytes) - size_bytes
            stop = min(last, int(np.searchsorted(ordered, reach, "right")))
            spans.append((first, stop))
            first = stop
    return spans
