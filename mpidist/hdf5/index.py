"""Indexes: at which bytes of its file each dataset is stored.

One rank reads an index and sends it to the others. It is plain data, with which rows
can be read from the bytes of the file, without HDF5. Datasets that it does not describe
(virtual, external, compact or variable-length data, other filters) are read by h5py.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpidist.errors import DataError
from mpidist.hdf5 import chunks as hdf5_chunks
from mpidist.hdf5.chunks import Filter
from mpidist.hdf5.linked_files import (
    OutputPart,
    Sources,
    check_sources,
    closing,
    find_linked,
    is_being_written,
    open_hdf5,
    read_part,
)
from mpidist.util.files import open_regular, read_fully

Offsets = npt.NDArray[np.int64]

_HEAD_BYTES = 4096


class ReadMethod(enum.Enum):
    """How the rows of a dataset are read."""

    BYTES = "each row's bytes"
    CHUNKS = "whole chunks, decoded here"
    H5PY_CHUNKS = "whole chunks, by h5py"
    H5PY = "by h5py"


@dataclasses.dataclass(frozen=True)
class DatasetIndex:
    """Where one dataset is stored in one file.

    A contiguous dataset counts as one chunk of all rows.

    Args:
      name: of the HDF5 dataset.
      shape: `(rows, *row_shape)`.
      dtype: as it is stored, with its byte order.
      method: how to read it.
      is_chunked: whether the dataset has chunks.
      chunk: the shape of a chunk.
      offsets: start of each chunk in the file, in C order of the chunks; -1 for a chunk
        that was never written. Empty if h5py reads.
      sizes: bytes of each chunk in the file; empty without filters.
      skipped: per chunk, a bit mask of the filters that were not applied; empty if
        all were.
      filters: in the order of their application.
      fill: the bytes of the fill value; empty if every chunk was written.
      why: the reason why h5py reads it, as text; empty otherwise.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    method: ReadMethod
    is_chunked: bool
    chunk: tuple[int, ...] = ()
    offsets: Offsets = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    sizes: Offsets = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    skipped: Offsets = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    filters: tuple[Filter, ...] = ()
    fill: bytes = b""
    why: str = ""

    @functools.cached_property
    def native(self) -> np.dtype[Any]:
        """The dtype of rows in memory: in native byte order."""
        native: np.dtype[Any] = self.dtype.newbyteorder("=")
        return native

    @functools.cached_property
    def is_native(self) -> bool:
        """Whether rows are stored in native byte order."""
        return self.dtype == self.native

    @functools.cached_property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.shape[1:]

    @functools.cached_property
    def row_bytes(self) -> int:
        """The bytes of a row in memory."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @functools.cached_property
    def chunk_row_bytes(self) -> int:
        """The bytes of a row within one chunk."""
        return self.dtype.itemsize * math.prod(self.chunk[1:])

    @functools.cached_property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each dimension."""
        pairs = zip(self.shape, self.chunk, strict=True)
        return tuple(-(-n // max(1, c)) for n, c in pairs)

    @property
    def is_in_blocks(self) -> bool:
        """Whether reading a row means reading whole chunks."""
        return self.method in (ReadMethod.CHUNKS, ReadMethod.H5PY_CHUNKS)


@dataclasses.dataclass(frozen=True)
class FileState:
    """The identity of a file when it was opened, to detect later changes.

    Args:
      path: of the file.
      node: host name of the node that opened it.
      device: number of its file system on that node.
      inode: inode number.
      size_bytes: of the file.
      mtime_ns: time of the last modification.
      head: a checksum of its first bytes.
    """

    path: Path
    node: str
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    head: int

    def changes_to(self, now: FileState, is_shared: bool) -> list[str]:
        """Return the differences of a later state of the file, as text.

        Other nodes, and ranks with another path, may have a copy of the file, whose
        inode and times differ legitimately.

        Args:
          now: the later state.
          is_shared: whether several nodes share its file system.
        """
        changes = []
        if now.size_bytes != self.size_bytes:
            changes.append(
                f"it has {now.size_bytes} bytes instead of {self.size_bytes}"
            )
        if now.head != self.head:
            changes.append("it starts with other bytes")
        # The same node and file system: then inode and times can be compared.
        is_here = (now.node, now.device) == (self.node, self.device)
        # Another path, or another node's copy: only size and content count.
        if now.path != self.path or not (is_here or is_shared):
            return changes
        # Replaced by a file of the same size and beginning.
        if is_here and now.inode != self.inode:
            changes.append(f"it has inode {now.inode} instead of {self.inode}")
        # Times of one and the same inode, also across nodes that share it.
        elif now.inode == self.inode and now.mtime_ns != self.mtime_ns:
            changes.append(
                f"it was modified at {now.mtime_ns} instead of {self.mtime_ns} ns"
            )
        return changes


@dataclasses.dataclass(frozen=True)
class FileIndex:
    """The datasets of one file, all with the same number of rows.

    Args:
      state: of the file when it was indexed.
      rows: number of rows of each dataset.
      datasets: one index per requested dataset.
      is_being_written: whether the indexing process writes to it, or to its sources.
      others: states of other files that store rows (external links, VDS sources).
      other_rows: the first row of each of those, and the one after its last.
      patterns: of the names of numbered VDS sources (%b).
      numbered: those that exist, which are among `others`.
      allow_short_external: see `index_file`.
      part: which file of an output of `Hdf5Writer` it is, if it is one.
    """

    state: FileState
    rows: int
    datasets: tuple[DatasetIndex, ...]
    is_being_written: bool = False
    others: tuple[FileState, ...] = ()
    other_rows: Offsets = dataclasses.field(
        default_factory=lambda: np.empty((0, 2), np.int64)
    )
    patterns: tuple[str, ...] = ()
    numbered: tuple[str, ...] = ()
    allow_short_external: bool = False
    part: OutputPart | None = None

    @property
    def path(self) -> Path:
        """The path of the file on the rank that indexed it."""
        return self.state.path


def index_file(
    path: Path, names: Sequence[str], allow_short_external: bool = False
) -> FileIndex:
    """Index the named datasets of a file.

    Args:
      path: of the file.
      names: of its datasets.
      allow_short_external: whether external storage may end before its rows.

    Raises:
      DataError: the file or a dataset cannot be read, or the numbers of rows differ.
    """
    with _explain(path, "cannot be opened as HDF5"):
        is_shared = is_being_written([path])
        index = _index_file(path, names, allow_short_external, is_shared)
        if not is_shared and is_being_written(state.path for state in index.others):
            index = _index_file(path, names, allow_short_external, is_shared=True)
    lengths = [index.shape[0] for index in index.datasets]
    if len(set(lengths)) > 1:
        pairs = ", ".join(f"{c.name!r} has {c.shape[0]}" for c in index.datasets)
        raise DataError(f"{path}: the datasets have unequal rows: {pairs}")
    return index


def _index_file(
    path: Path, names: Sequence[str], allow_short_external: bool, is_shared: bool
) -> FileIndex:
    others = Sources({}, [], [])
    with contextlib.ExitStack() as opened:
        # Opened without HDF5 first: HDF5 would block on a FIFO and print its own errors
        descriptor = open_regular(path)
        opened.callback(os.close, descriptor)
        state = state_of(path, descriptor)
        file = opened.enter_context(open_hdf5(path, is_shared))
        part = read_part(file)
        # All datasets before any index: an error names a missing dataset first.
        datasets = [
            opened.enter_context(closing(_dataset(path, file, name, others)))
            for name in names
        ]
        with _explain(path, f"the files of {', '.join(names)} cannot be read"):
            missing = check_sources(datasets, others, allow_short_external)
            states = tuple(state_of(Path(other)) for other in others.rows)
        if missing:
            raise DataError(
                f"{path}: sources of its rows are missing: {'; '.join(missing)}"
            )
        indexes = tuple(
            _index_dataset(path, file, name, dataset, is_shared)
            for name, dataset in zip(names, datasets, strict=True)
        )
    return FileIndex(
        state,
        indexes[0].shape[0],
        indexes,
        is_shared,
        states,
        np.array(list(others.rows.values()), np.int64).reshape(-1, 2),
        tuple(others.patterns),
        tuple(others.numbered),
        allow_short_external,
        part,
    )


@contextlib.contextmanager
def _explain(path: Path, problem: str) -> Iterator[None]:
    """Raise errors of the block as a DataError; a damaged file can cause any."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: {problem}: {error}") from error


def choose_datasets(path: Path) -> tuple[list[str], list[str]]:
    """Return the names of datasets with equally many rows, and the other names.

    Of the groups with equal numbers of rows, the one with the most bytes is chosen.
    Links are not followed.

    Raises:
      DataError: the file cannot be read, or has no dataset with rows.
    """
    sizes: dict[str, int] = {}
    names = collections.defaultdict(list)
    others: list[str] = []

    def visit(name: str, item: h5py.Dataset | h5py.Group) -> None:
        if not isinstance(item, h5py.Dataset):
            return
        try:
            shape, dtype = kind_of(item) if item.shape else ((), None)
        except TypeError:  # a type without a NumPy equivalent
            shape, dtype = (), None
        if dtype is None:
            others.append(name)
            return
        names[shape[0]].append(name)
        sizes[name] = item.size * dtype.itemsize

    with _explain(path, "cannot be opened as HDF5"):
        os.close(open_regular(path))  # a shorter error message than HDF5's
        with open_hdf5(path) as file:
            file.visititems(visit)
    if not names:
        raise DataError(f"{path}: has no dataset with rows")
    # Take the datasets with equal numbers of rows that have most bytes
    taken = max(names.values(), key=lambda group: sum(sizes[name] for name in group))
    # Everything else is reported, so that no dataset is left out silently.
    others += [name for group in names.values() for name in group if group is not taken]
    return taken, sorted(others)


def state_of(path: Path, descriptor: int | None = None) -> FileState:
    """Return the state of an open file.

    Without a descriptor: of the file now at `path`, whose bytes are not read.
    """
    status = os.stat(path) if descriptor is None else os.fstat(descriptor)
    # The first bytes are only read from an open descriptor: no second open.
    head = b"" if descriptor is None else read_fully(descriptor, _HEAD_BYTES, 0)
    return FileState(
        path,
        os.uname().nodename,
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        zlib.crc32(head),
    )


def _dataset(path: Path, file: h5py.File, name: str, others: Sources) -> h5py.Dataset:
    with _explain(path, f"dataset {name!r} cannot be opened"):
        others.add(find_linked(file, name))
        dataset = file.get(name)
    if not isinstance(dataset, h5py.Dataset):
        raise DataError(
            f"{path}: there is no dataset {name!r}; there are: "
            f"{', '.join(sorted(file)) or 'none'} (a group or a broken link is not a "
            "dataset)"
        )
    return dataset


def _index_dataset(
    path: Path, file: h5py.File, name: str, dataset: h5py.Dataset, is_shared: bool
) -> DatasetIndex:
    with _explain(path, f"dataset {name!r} cannot be read"):
        return _index_readable(path, file, name, dataset, is_shared)


def _index_readable(
    path: Path, file: h5py.File, name: str, dataset: h5py.Dataset, is_shared: bool
) -> DatasetIndex:
    if dataset.ndim == 0 or dataset.shape is None:
        raise DataError(f"{path}: dataset {name!r} is a scalar, without rows")
    with _explain(path, f"dataset {name!r} has a type that NumPy lacks"):
        kind = kind_of(dataset)
        _require_apart(kind[1])
    by_h5py = DatasetIndex(
        name,
        *kind,
        ReadMethod.H5PY if dataset.chunks is None else ReadMethod.H5PY_CHUNKS,
        dataset.chunks is not None,
        dataset.chunks or dataset.shape,
    )
    if is_shared:  # its chunks may change
        why = "this process has the file open to write"
        return dataclasses.replace(by_h5py, method=ReadMethod.H5PY, why=why)
    index = _indexed(file, name, dataset)
    if isinstance(index, str):
        return dataclasses.replace(by_h5py, why=index)
    return index


def _indexed(file: h5py.File, name: str, dataset: h5py.Dataset) -> DatasetIndex | str:
    if dataset.file.filename != file.filename:
        return "an external link to another file"
    if not _is_plain(dataset):
        return "values of a type that NumPy stores differently"
    is_chunked = dataset.chunks is not None
    index = (_chunked if is_chunked else _contiguous)(name, dataset)
    if (
        isinstance(index, DatasetIndex)
        and (index.offsets == hdf5_chunks.UNWRITTEN).any()
    ):
        properties = dataset.id.get_create_plist()
        is_filled = properties.get_fill_time() != h5py.h5d.FILL_TIME_NEVER
        is_defined = properties.fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED
        if not is_filled or not is_defined:
            return "rows that were never written, without a fill value"
        fill = np.array(dataset.fillvalue, dataset.dtype).tobytes()
        index = dataclasses.replace(index, fill=fill)
    return index


def kind_of(dataset: h5py.Dataset) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype of the array that h5py reads.

    HDF5's array types add dimensions to those of the dataset.
    """
    dtype, shape = dataset.dtype, dataset.shape
    while dtype.subdtype is not None:  # array types can be nested
        dtype, more = dtype.subdtype
        shape = (*shape, *more)
    return shape, dtype


def _require_apart(dtype: np.dtype[Any]) -> None:
    """Raise if members of a compound overlap: h5py would write beyond its buffer.

    They do where NumPy has no type of that size, as for bfloat16: h5py takes a longer
    one, but leaves the members where they are.
    """
    if isinstance(item := h5py.check_vlen_dtype(dtype), np.dtype):
        _require_apart(item)
    end = 0
    fields: Mapping[str, Any] = dtype.fields or {}
    for name in sorted(dtype.names or (), key=lambda name: fields[name][1]):
        item, start = fields[name][:2]
        if start < end:
            raise TypeError(f"member {name!r} overlaps the one before it in {dtype}")
        end = start + item.itemsize
        _require_apart(item.base)


def _is_plain(dataset: h5py.Dataset) -> bool:
    """Return whether NumPy stores the dtype with the same bytes."""
    dtype = dataset.dtype
    if dtype.hasobject or dtype.subdtype is not None or dtype.itemsize == 0:
        return False
    same_type = h5py.h5t.py_create(dtype, logical=True)
    return bool(same_type == dataset.id.get_type())


def contiguous_offset(dataset: h5py.Dataset) -> int | None:
    """Return where the bytes of a dataset start in the file; None if it has chunks.

    Also None if no bytes were stored, though HDF5 then gives an offset after a user
    block.
    """
    is_stored = dataset.id.get_storage_size() > 0
    offset: int | None = dataset.id.get_offset() if is_stored else None
    return offset


def _contiguous(name: str, dataset: h5py.Dataset) -> DatasetIndex | str:
    properties = dataset.id.get_create_plist()
    if dataset.is_virtual:
        return "a virtual dataset, whose rows are in other datasets"
    if properties.get_layout() != h5py.h5d.CONTIGUOUS:
        return "compact storage, in the file's metadata"
    if properties.get_external_count() > 0:
        return "external storage, in raw files"
    offset = contiguous_offset(dataset)
    offsets = np.array([hdf5_chunks.UNWRITTEN if offset is None else offset], np.int64)
    shape = dataset.shape
    return DatasetIndex(
        name, shape, dataset.dtype, ReadMethod.BYTES, False, shape, offsets
    )


def _chunked(name: str, dataset: h5py.Dataset) -> DatasetIndex | str:
    if (filters := hdf5_chunks.filters_of(dataset)) is None:
        names = ", ".join(hdf5_chunks.filter_names(dataset))
        return f"filters that only HDF5 can decode: {names}"
    if hdf5_chunks.skips_user_block(dataset.file):
        version = h5py.version.hdf5_version
        return f"chunks after a user block, which HDF5 {version} does not locate"
    if (table := hdf5_chunks.table_of(dataset)) is None:
        return "a chunk index that HDF5 does not report, or that is mostly empty"
    return DatasetIndex(
        name,
        dataset.shape,
        dataset.dtype,
        ReadMethod.CHUNKS if filters else ReadMethod.BYTES,
        True,
        dataset.chunks,
        table.offsets,
        table.sizes if filters else table.sizes[:0],
        table.skipped if table.skipped.any() else table.skipped[:0],
        filters,
    )
