"""Read methods: rows of one dataset of one file, by its index.

Also the caches of open files and of decoded chunks.
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
from mpidist.data.hdf5.files import Map, RawFile, wait_until_seen
from mpidist.data.hdf5.index import (
    DatasetIndex,
    FileIndex,
    FileState,
    kind_of,
    state_of,
)
from mpidist.data.hdf5.linked_files import open_hdf5
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


def block_rows(index: DatasetIndex, block: int) -> range:
    """Return the numbers of the rows in one block, which is a row of chunks."""
    step = index.chunk[0]
    # The last block may be short.
    return range(block * step, min((block + 1) * step, index.shape[0]))


def read_bytes(
    index: DatasetIndex, file: RawFile, rows: Rows, buffers: Buffers, parallel: Map
) -> Any:
    """Return unfiltered rows, in any order, in native byte order."""
    # Nothing to read: do not touch the file.
    if index.row_bytes == 0 or rows.size == 0:
        return np.empty((rows.size, *index.row_shape), index.native)
    pieces = _gather(index, file, rows, buffers, parallel)
    pieces = pieces.view(index.dtype).reshape(-1, *index.chunk[1:])
    # One chunk per row range: pieces are rows already.
    if index.chunk[1:] == index.row_shape:
        return pieces if index.is_native else pieces.astype(index.native)
    result = buffers.empty((rows.size, *index.row_shape), index.native)
    # Pieces of all rows for one chunk column lie together.
    for number, (place, inside) in enumerate(_places(index)):
        part = pieces[number * rows.size : (number + 1) * rows.size]
        result[place] = part[inside]
    return result


def _gather(
    index: DatasetIndex, file: RawFile, rows: Rows, buffers: Buffers, parallel: Map
) -> Any:
    """Return the bytes of the rows, in the order of the chunks across a row."""
    size_bytes, step = index.chunk_row_bytes, index.chunk[0]
    # Several chunks side by side make up a row; `across` is how many.
    across = math.prod(index.grid[1:])
    chunks, inside = np.divmod(rows, step)
    # Chunk column by chunk column, all rows of each: one large gather.
    numbers = (chunks * across + np.arange(across)[:, np.newaxis]).reshape(-1)
    starts = index.offsets[numbers]
    offsets = starts + np.tile(inside * size_bytes, across)
    # Every chunk was written, so no offset is -1.
    if not index.fill:
        return file.gather(offsets, size_bytes, buffers, parallel)
    written = starts >= 0
    fill = index.fill * (size_bytes // len(index.fill))
    # Rows of chunks that were never written have the fill value.
    pieces = np.full((starts.size, size_bytes), np.frombuffer(fill, np.uint8))
    pieces[written] = file.gather(offsets[written], size_bytes, buffers, parallel)
    return pieces


def _places(index: DatasetIndex) -> list[tuple[Any, Any]]:
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
            (slice(None), *place),
            (slice(None), *(slice(0, s.stop - s.start) for s in place)),
        )
        for place in itertools.product(*edges)
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
    for number, (place, inside) in zip(numbers, _places(index), strict=True):
        if index.offsets[number] < 0:
            # Never written: HDF5 gives the fill value for it.
            result[place] = np.frombuffer(index.fill, index.dtype)[0]
        elif (chunk := _chunk(index, file, number)) is not None:
            # The last block has fewer rows than its chunk.
            result[place] = chunk[: len(rows)][inside]
        else:
            result[place] = by_h5py((slice(rows.start, rows.stop), *place[1:]))
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
            # Cut what was wanted out of the span.
            result[first:last] = dataset[start:stop][wanted[first:last] - start]
    return result[back]


# For longer rows, copying outweighs the cost of a loop over the arrays
_SHORT_BYTES = 16 << 10
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
    # Long rows: one indexed copy per array.
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
    # One range of addresses that covers all arrays.
    stop = max(s + a.nbytes for s, a in zip(starts.tolist(), arrays, strict=True))
    start, row_bytes = int(starts.min()), arrays[0][:1].nbytes
    memory = np.asarray(_Memory(start, stop, row_bytes))
    items = result.reshape(-1).view(memory.dtype)
    # Gathered in pieces that fit into the cache.
    places, step = starts[which] - start + rows * row_bytes, _GATHER_BYTES // row_bytes
    for first in range(0, len(places), step):
        items[first : first + step] = memory[places[first : first + step]]


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
                    wait_until_seen(state)
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
                files[path] = self._try_to_open(open_file)
            files.move_to_end(path)
            # The least recently used one.
            if len(files) > _OPEN_FILES:
                files.popitem(last=False)
            return files[path]

    def _try_to_open(self, open_file: Callable[[], Any]) -> Any:
        try:
            return open_file()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            self.close()  # the limit of open files is lower than ours
            return open_file()


def _swapped(index: DatasetIndex) -> np.dtype[Any]:
    """Return the dtype of complex numbers with the imaginary part first."""
    part = f"{index.dtype.byteorder}f{index.dtype.itemsize // 2}"
    return np.dtype([("i", part), ("r", part)])


T = TypeVar("T")
Key = tuple[int, ...]


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
        # Threads are started at the first read that needs them.
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
