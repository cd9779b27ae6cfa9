"""Read methods: rows of one dataset of one file, by its index.

Files are opened, and chunks decoded, once: they are kept here.
"""

from __future__ import annotations

import collections
import errno
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
import numpy.typing as npt

from mpidist.data.hdf5.chunks import decode
from mpidist.data.hdf5.files import GAP_BYTES, Map, RawFile
from mpidist.data.hdf5.index import (
    Column,
    FileIndex,
    FileState,
    kind_of,
    open_hdf5,
    state_of,
)
from mpidist.errors import DataError
from mpidist.util.buffers import Buffers
from mpidist.util.threads import share_calls

__all__ = [
    "BlockCache",
    "OpenFiles",
    "block_rows",
    "pick_rows",
    "read_bytes",
    "read_by_h5py",
    "read_chunks",
]

Rows = npt.NDArray[np.int64]


def block_rows(column: Column, block: int) -> range:
    """Return which rows a row of chunks holds."""
    step = column.chunk[0]
    return range(block * step, min((block + 1) * step, column.shape[0]))


def read_bytes(
    column: Column, file: RawFile, rows: Rows, buffers: Buffers, parallel: Map
) -> Any:
    """Return rows that are not filtered, in any order, in native byte order."""
    if column.row_bytes == 0 or rows.size == 0:
        return np.empty((rows.size, *column.row_shape), column.native)
    pieces = _gather(column, file, rows, buffers, parallel)
    pieces = pieces.view(column.dtype).reshape(-1, *column.chunk[1:])
    if column.chunk[1:] == column.row_shape:
        return pieces if column.is_native else pieces.astype(column.native)
    found = buffers.empty((rows.size, *column.row_shape), column.native)
    for number, (place, inside) in enumerate(_places(column)):
        part = pieces[number * rows.size : (number + 1) * rows.size]
        found[place] = part[inside]
    return found


def _gather(
    column: Column, file: RawFile, rows: Rows, buffers: Buffers, parallel: Map
) -> Any:
    """Return the bytes of the rows: their parts in each column of chunks in turn."""
    size_bytes, step = column.chunk_row_bytes, column.chunk[0]
    if not column.is_chunked and not column.fill:
        offset = int(column.offsets[0])
        return file.take(offset, size_bytes, rows, buffers, parallel)
    across = math.prod(column.grid[1:])
    chunks, inside = np.divmod(rows, step)
    numbers = (chunks * across + np.arange(across)[:, np.newaxis]).reshape(-1)
    starts = column.offsets[numbers]
    offsets = starts + np.tile(inside * size_bytes, across)
    if not column.fill:
        return file.gather(offsets, size_bytes, buffers, parallel)
    written = starts >= 0
    fill = column.fill * (size_bytes // len(column.fill))
    pieces = np.full((starts.size, size_bytes), np.frombuffer(fill, np.uint8))
    pieces[written] = file.gather(offsets[written], size_bytes, buffers, parallel)
    return pieces


def _places(column: Column) -> list[tuple[Any, Any]]:
    """Return which part of rows each chunk across them holds, and where it is in it.

    The chunks at the edge reach over it.
    """
    edges = [
        [slice(i * c, min((i + 1) * c, n)) for i in range(count)]
        for n, c, count in zip(
            column.row_shape, column.chunk[1:], column.grid[1:], strict=True
        )
    ]
    return [
        (
            (slice(None), *place),
            (slice(None), *(slice(0, s.stop - s.start) for s in place)),
        )
        for place in itertools.product(*edges)
    ]


def read_chunks(
    column: Column,
    file: RawFile,
    by_h5py: Callable[[tuple[slice, ...]], Any],
    block: int,
) -> Any:
    """Return all rows of a row of chunks, in native byte order.

    Args:
      column: filtered, or not.
      file: that it lies in.
      by_h5py: reads a region of the dataset, for chunks that are not understood.
      block: the number of the row of chunks.
    """
    rows, across = block_rows(column, block), math.prod(column.grid[1:])
    numbers = range(block * across, (block + 1) * across)
    is_whole = column.chunk == (len(rows), *column.row_shape) and column.is_native
    if is_whole and column.offsets[numbers[0]] >= 0:
        chunk = _chunk(column, file, numbers[0])
        return by_h5py((slice(rows.start, rows.stop),)) if chunk is None else chunk
    found = np.empty((len(rows), *column.row_shape), column.native)
    for number, (place, inside) in zip(numbers, _places(column), strict=True):
        if column.offsets[number] < 0:
            found[place] = np.frombuffer(column.fill, column.dtype)[0]
        elif (chunk := _chunk(column, file, number)) is not None:
            found[place] = chunk[: len(rows)][inside]
        else:
            found[place] = by_h5py((slice(rows.start, rows.stop), *place[1:]))
    return found


def _chunk(column: Column, file: RawFile, number: int) -> Any:
    """Return a decoded chunk; None for one that may be stored without its filters.

    HDF5 can be told to do so with the chunks at the edge (H5Pset_chunk_opts), which
    cannot be seen but by their size.
    """
    size_bytes = column.dtype.itemsize * math.prod(column.chunk)
    stored = int(column.sizes[number])
    skipped = int(column.skipped[number]) if column.skipped.size else 0
    is_edge = any(n % c for n, c in zip(column.shape, column.chunk, strict=True))
    if is_edge and stored == size_bytes and not skipped:
        return None

    def read_chunk(data: Any) -> Any:
        decoded = decode(data, column.filters, skipped, size_bytes)
        # The map must not be used when this returns
        is_view = np.may_share_memory(decoded, np.frombuffer(data, np.uint8))
        return decoded.copy() if is_view else decoded

    data = file.read(int(column.offsets[number]), stored, read_chunk)
    return data.view(column.dtype).reshape(column.chunk)


def read_by_h5py(dataset: h5py.Dataset, column: Column, rows: Rows) -> Any:
    """Return rows in native byte order, each read once, in the order of the file."""
    wanted, back = np.unique(rows, return_inverse=True)
    found = np.empty((wanted.size, *column.row_shape), column.native)
    row_bytes = max(1, column.row_bytes)
    gaps = np.flatnonzero((np.diff(wanted) - 1) * row_bytes > GAP_BYTES) + 1
    for first, last in itertools.pairwise([0, *gaps.tolist(), wanted.size]):
        if first < last:
            start, stop = int(wanted[first]), int(wanted[last - 1]) + 1
            found[first:last] = dataset[start:stop][wanted[first:last] - start]
    return found[back]


# Longer rows take longer than Python needs for each array
_SHORT_BYTES = 16 << 10
_GATHER_BYTES = 1 << 20  # NumPy collects rows elsewhere first; so much is in a cache


def pick_rows(arrays: Sequence[Any], which: Rows, rows: Rows, buffers: Buffers) -> Any:
    """Return row `rows[i]` of `arrays[which[i]]` for each i, in one of `buffers`.

    Args:
      arrays: at least one, all `(rows, *shape)` with the same shape of a row and the
        same dtype, contiguous in memory.
      which: the number of the array that each wanted row is in.
      rows: its number there, which must exist.
      buffers: where the rows are copied to.
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
    """Bytes of this process from an address on, as items that start at each byte."""

    def __init__(self, start: int, stop: int, item_bytes: int):
        self.__array_interface__ = {
            "version": 3,
            "data": (start, True),
            "shape": (stop - start - item_bytes + 1,),
            "strides": (1,),
            "typestr": f"|V{item_bytes}",
        }


def _pick_short(arrays: Sequence[Any], which: Rows, rows: Rows, result: Any) -> None:
    """Copy the bytes of the rows by their addresses: one call for all arrays."""
    starts = np.array([a.__array_interface__["data"][0] for a in arrays], np.int64)
    stop = max(s + a.nbytes for s, a in zip(starts.tolist(), arrays, strict=True))
    start, row_bytes = int(starts.min()), arrays[0][:1].nbytes
    memory = np.asarray(_Memory(start, stop, row_bytes))
    found = result.reshape(-1).view(memory.dtype)
    places, step = starts[which] - start + rows * row_bytes, _GATHER_BYTES // row_bytes
    for first in range(0, len(places), step):
        found[first : first + step] = memory[places[first : first + step]]


_OPEN_FILES = 128
_FEW_FILES = 16  # are checked at each read


class OpenFiles:
    """Files by path, as bytes and by h5py. May be used in threads."""

    def __init__(self) -> None:
        self._raw: collections.OrderedDict[Path, Any] = collections.OrderedDict()
        self._hdf5: collections.OrderedDict[Path, Any] = collections.OrderedDict()
        # What files were when this process first opened them: kept when they are closed
        self._states: dict[Path, FileState] = {}
        self._other_states: dict[Path, FileState] = {}
        # Whose many other files were checked since `check_others`
        self._checked: set[Path] = set()
        self._lock = threading.RLock()

    def raw(self, path: Path, index: FileIndex) -> RawFile:
        """Return a file as bytes; it must be the one with this index, unchanged."""
        expected = self._states.get(path, index.state)
        file: RawFile = self._opened(self._raw, path, lambda: RawFile(path, expected))
        self._states.setdefault(path, file.state)
        return file

    def by_h5py(
        self,
        path: Path,
        index: FileIndex,
        column: Column,
        read: Callable[[h5py.Dataset], Any],
    ) -> Any:
        """Return `read(dataset)`, of a dataset that must be as it was.

        One thread at a time: h5py waits for itself anyway, and is not safe everywhere.
        """
        with self._lock:
            found = self._by_h5py(path, column, read)
            if not index.is_being_written:
                # HDF5 gives zeros for what lies behind the end of a file
                self.raw(path, index).require_unchanged()
                self._require_others_unchanged(path, index)
            return found

    def check_others(self) -> None:
        """Check all other files that rows lie in once more, where they are many."""
        with self._lock:
            self._checked.clear()

    def _require_others_unchanged(self, path: Path, index: FileIndex) -> None:
        """Raise a DataError if a file has changed that a link or a source leads to."""
        # Where a rank has a path of its own, so may the others be
        if path != index.path or path in self._checked:
            return
        for before in index.others:
            expected = self._other_states.setdefault(before.path, before)
            if changes := expected.changes_to(state_of(before.path), is_shared=False):
                raise DataError(
                    f"{before.path}, which it leads to, was changed: "
                    f"{', '.join(changes)}; a file must not change while it is read; "
                    "make a new dataset to read it as it is now"
                )
        if len(index.others) > _FEW_FILES:
            self._checked.add(path)

    def _by_h5py(
        self, path: Path, column: Column, read: Callable[[h5py.Dataset], Any]
    ) -> Any:
        file = self._opened(self._hdf5, path, lambda: open_hdf5(path))
        dataset = file[column.name]
        found = kind_of(dataset) if isinstance(dataset, h5py.Dataset) else None
        if column.dtype.kind == "c" and found == (column.shape, _swapped(column)):
            # HDF5 sorts the members of a type by offset when it is first converted
            return read(dataset.astype(column.dtype))
        if found != (column.shape, column.dtype):
            raise DataError(
                f"it was {(column.shape, column.dtype)} and is now {found}; a file "
                "must not change while it is read"
            )
        return read(dataset)

    def close(self) -> None:
        """Close all files. Bytes of a file that is being read go on until the end."""
        with self._lock:
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
                files[path] = self._try_to_open(open_file)
            files.move_to_end(path)
            if len(files) > _OPEN_FILES:
                files.popitem(last=False)
            return files[path]

    def _try_to_open(self, open_file: Callable[[], Any]) -> Any:
        try:
            return open_file()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            self.close()  # this process may have fewer open
            return open_file()


def _swapped(column: Column) -> np.dtype[Any]:
    """Return the dtype of complex numbers with the imaginary part in front."""
    part = f"{column.dtype.byteorder}f{column.dtype.itemsize // 2}"
    return np.dtype([("i", part), ("r", part)])


T = TypeVar("T")
Key = tuple[int, ...]


class BlockCache:
    """Blocks by key, loaded in threads; those not used for the longest time go first.

    Args:
      threads: how many load at the same time; with one the caller's does.
      capacity_bytes: of the blocks that are kept beyond those just asked for.
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
          load: returns the block of a key that is missing; called in threads.
        """
        missing: list[tuple[Key, Future[Any]]] = []
        with self._lock:
            found = {}
            for key in keys:
                if key not in self._blocks:
                    self._blocks[key] = Future()
                    missing.append((key, self._blocks[key]))
                self._blocks.move_to_end(key)
                found[key] = self._blocks[key]
        list(self.parallel(lambda item: self._fulfil(item[0], item[1], load), missing))
        try:
            return {key: future.result() for key, future in found.items()}
        finally:
            self._evict(found)

    def parallel(self, fn: Callable[[Any], T], items: Iterable[Any]) -> Iterable[T]:
        """Return `fn` of each item, computed in threads, of which one is this one."""
        items = list(items)
        if self.threads == 1 or len(items) < 2:
            return map(fn, items)
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads - 1, "mpidist-read")
            pool = self._pool
        return share_calls(fn, items, pool, self.threads - 1)

    def clear(self) -> None:
        """Drop all blocks, and end the threads."""
        with self._lock:
            self._blocks.clear()
            self._bytes = 0
        self.end_threads()

    def end_threads(self) -> None:
        """End the threads; another `get` starts them again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def _fulfil(
        self, key: Key, future: Future[Any], load: Callable[[Key], Any]
    ) -> None:
        try:
            block = load(key)
        except BaseException as error:
            with self._lock:  # the next one who asks tries again
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
                if oldest in used or not block.done():
                    break
                self._bytes -= block.result().nbytes
                del self._blocks[oldest]
