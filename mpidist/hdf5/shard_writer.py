"""Write rows to HDF5: one shard per rank, and virtual datasets (VDS) over all.

Each shard is a file of growing datasets; the index has a virtual dataset per field.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import h5py
import numpy as np

from mpidist.comm.consensus.signatures import group_by_rank
from mpidist.device import arrays
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    DataError,
    DTypeError,
    MismatchError,
)
from mpidist.hdf5.linked_files import OutputPart
from mpidist.util import validation
from mpidist.util.dtypes import traits
from mpidist.util.files import AtomicHdf5File
from mpidist.util.logs import warn

BLOCK_BYTES = 1 << 20
LARGEST_CHUNK_BYTES = (1 << 32) - 1  # HDF5's limit


@dataclasses.dataclass(frozen=True)
class FieldSpec:
    """Name, dtype and shape of the rows of one dataset."""

    name: str
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    # Of an enum: `==` of dtypes ignores them
    members: tuple[tuple[str, Any], ...] = ()

    @property
    def row_bytes(self) -> int:
        """The bytes of a row, which may be 0."""
        return self.dtype.itemsize * math.prod(self.row_shape)

    def __str__(self) -> str:
        members = f" {dict(self.members)}" if self.members else ""
        return f"{self.dtype}{members} {self.row_shape}"


@dataclasses.dataclass(frozen=True)
class StorageOptions:
    """How rows are stored; for the arguments see `Hdf5Writer`."""

    chunk_rows: int | None = None
    compression: str | None = None
    compression_level: int | None = None
    shuffle: bool = False

    def __post_init__(self) -> None:
        # Convert to Python's types, since ranks compare them as text
        if self.chunk_rows is not None:
            rows = validation.integer(
                "chunk_rows", self.chunk_rows, 1, most=LARGEST_CHUNK_BYTES
            )
            object.__setattr__(self, "chunk_rows", rows)
        is_text = isinstance(self.compression, str)
        if self.compression is not None and not (
            is_text and self.compression == "gzip"
        ):
            raise ArgumentError(
                "compression must be None or 'gzip', not "
                f"{validation.shown(self.compression)}"
            )
        name = "compression_level"
        level = validation.optional_integer(name, self.compression_level)
        if level is not None and not (self.compression and level in range(10)):
            raise ArgumentError(
                "compression_level must be 0..9, with compression='gzip', or None, "
                f"not {validation.shown(level)} with compression={self.compression!r}"
            )
        object.__setattr__(self, name, level)
        object.__setattr__(self, "shuffle", validation.switch("shuffle", self.shuffle))

    @property
    def filters(self) -> dict[str, Any]:
        """The arguments of h5py's create_dataset; empty without filters."""
        if self.compression is None and not self.shuffle:
            return {}
        return {
            "compression": self.compression,
            "compression_opts": self.compression_level,
            "shuffle": self.shuffle,
        }

    def chunk_rows_of(self, field: FieldSpec) -> int:
        """Return the rows of a chunk: as requested, or about 1 MiB."""
        if self.chunk_rows is None:
            return max(1, BLOCK_BYTES // max(1, field.row_bytes))
        if self.chunk_rows * field.row_bytes > LARGEST_CHUNK_BYTES:
            raise ArgumentError(
                f"chunk_rows={self.chunk_rows} makes chunks of "
                f"{self.chunk_rows * field.row_bytes} bytes of dataset "
                f"{field.name!r}; HDF5 allows {LARGEST_CHUNK_BYTES}"
            )
        return self.chunk_rows


def to_arrays(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays with equal numbers of rows, sorted by the names of datasets."""
    by_name = {
        clean_name(name): arrays.to_array(value, f"append: dataset {name!r}")
        for name, value in rows.items()
    }
    if not by_name or len(by_name) < len(rows):
        raise ArgumentError(
            f"append: rows must name at least one dataset, each once, not {list(rows)}"
        )
    for name, array in by_name.items():
        if array.ndim == 0:
            raise ArgumentError(f"append: dataset {name!r}: {array!r} is a scalar")
    lengths = {name: len(array) for name, array in by_name.items()}
    if len(set(lengths.values())) > 1:
        pairs = ", ".join(f"{name!r} has {n}" for name, n in lengths.items())
        raise ArgumentError(f"append: the arrays have unequal rows: {pairs}")
    return dict(sorted(by_name.items()))


def clean_name(name: str) -> str:
    """Return a dataset's name as HDF5 lists it: with its groups, separated by `/`.

    Raises:
      ArgumentTypeError: not a string.
      ArgumentError: empty, or not a name that HDF5 can store.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"the name of a dataset must be a str, not {validation.shown(name)}"
        )
    parts = [part for part in name.split("/") if part]
    if not parts or "." in parts or "\0" in name:
        raise ArgumentError(f"{name!r} cannot be the name of an HDF5 dataset")
    return "/".join(parts)


def fields_of(by_name: Mapping[str, Any]) -> tuple[FieldSpec, ...]:
    """Return the specs of arrays `(rows, *shape)` by name."""
    return tuple(
        FieldSpec(n, a.dtype, a.shape[1:], validation.members_of(a.dtype))
        for n, a in by_name.items()
    )


def require_storable(fields: Sequence[FieldSpec]) -> None:
    """Raise if one HDF5 file cannot hold these fields.

    Raises:
      ArgumentError: one name is a group of another name.
      DTypeError: HDF5 would return another dtype.
    """
    names = {field.name for field in fields}
    for name in names:
        for group in map(str, PurePosixPath(name).parents):
            if group in names:
                raise ArgumentError(
                    f"append: {group!r} cannot be a dataset and, in {name!r}, a group"
                )
    for field in fields:
        _require_dtype(field)


def _require_dtype(field: FieldSpec) -> None:
    try:
        stored = h5py.h5t.py_create(field.dtype, logical=True).dtype
    except (TypeError, ValueError):
        stored = None
    if stored != field.dtype:
        instead = "" if stored is None else f" (it would return {stored})"
        raise DTypeError(
            f"append: dataset {field.name!r}: HDF5 has no dtype "
            f"{field.dtype}{instead}; convert it first, such as bfloat16 to float32, "
            "str with np.char.encode(x).astype('S20'), dates with view('int64')"
        )


def with_wider_text(
    others: Sequence[FieldSpec], fields: Sequence[FieldSpec]
) -> tuple[FieldSpec, ...]:
    """Return `fields`, with text at least as wide as in fields of the same names."""
    dtypes = {field.name: field.dtype for field in others}

    def widen(field: FieldSpec) -> FieldSpec:
        other = dtypes.get(field.name, field.dtype)
        is_wider = other.itemsize > field.dtype.itemsize
        if {traits(other).family, traits(field.dtype).family} == {"bytes"} and is_wider:
            return dataclasses.replace(field, dtype=other)
        return field

    return tuple(map(widen, fields))


def require_same_fields(before: Sequence[FieldSpec], now: Sequence[FieldSpec]) -> None:
    """Raise an ArgumentError that names the first difference, if any."""
    names, new_names = [c.name for c in before], [c.name for c in now]
    if names != new_names:
        raise ArgumentError(
            f"append: the datasets were {names} and are now {new_names}"
        )
    for old, new in zip(before, now, strict=True):
        if old != new:
            raise ArgumentError(
                f"append: rows of dataset {old.name!r} were {old}, and are now {new}"
            )


def common_fields(
    call: str, fields: Sequence[tuple[FieldSpec, ...] | None]
) -> tuple[FieldSpec, ...]:
    """Return the fields that all ranks with rows have in common.

    Text is as wide as the widest of any rank.

    Raises:
      MismatchError: they differ.
      DataError: no rank has any.
    """
    known = [specs for specs in fields if specs]
    if not known:
        raise DataError(
            f"{call}: no rank appended rows, so the datasets are unknown; append zero "
            "rows to define them"
        )
    widest = functools.reduce(with_wider_text, known)
    alike = [specs and with_wider_text(widest, specs) for specs in fields]
    if any(specs and specs != widest for specs in alike):
        raise MismatchError(f"{call}: {_difference(alike)}")
    return widest


def _difference(fields: Sequence[tuple[FieldSpec, ...] | None]) -> str:
    names = [str([c.name for c in specs]) if specs else "nothing" for specs in fields]
    if len({*names} - {"nothing"}) > 1:
        return f"the datasets are {group_by_rank(names)}"
    rows = [{c.name: str(c) for c in specs or ()} for specs in fields]
    for name in max(rows, key=len):
        texts = [specs.get(name, "nothing") for specs in rows]
        if len({*texts} - {"nothing"}) > 1:
            return f"rows of dataset {name!r} are {group_by_rank(texts)}"
    raise AssertionError("the fields are the same")


T = TypeVar("T")


class ShardWriter:
    """Writes one rank's HDF5 file, under a temporary name until `publish`.

    Nothing here communicates. Rows are buffered until they fill a chunk, or 1 MiB.

    Args:
      path: final name of the file.
      storage: how rows are stored.

    Raises:
      DataError: the file cannot be created.
    """

    def __init__(self, path: Path, storage: StorageOptions):
        self.path = path
        self.rows = 0
        self.fields: tuple[FieldSpec, ...] | None = None  # since the first append
        self._is_whole = True
        self._storage = storage
        self._datasets: list[_Dataset] = []
        self._atomic = self._checked("created", lambda: AtomicHdf5File(path))
        try:
            # Chunks are written whole, once: HDF5 needs no cache of them
            self._hdf5 = self._checked(
                "created", lambda: h5py.File(self._atomic, "w", rdcc_nbytes=0)
            )
        except BaseException:
            self._atomic.discard()
            raise
        # Also runs at exit, before HDF5 loses its Python file
        self._end = weakref.finalize(self, _forget, self._hdf5, self._atomic)

    @property
    def temporary(self) -> Path:
        """The path of the file until `publish`."""
        return self._atomic.temporary

    def append(self, rows: Mapping[str, Any]) -> None:
        """Add rows: arrays `(rows, *shape)` by name of the dataset.

        Raises:
          ArgumentError: the arrays have unequal numbers of rows, or other names, dtypes
            or row shapes than before. Nothing was added.
          ArgumentTypeError: no mapping of names to arrays.
          DTypeError: a dtype that HDF5 does not have.
          DataError: the file cannot be written; it is incomplete from now on.
        """
        self.require_whole()
        by_name = to_arrays(rows)
        fields, count = fields_of(by_name), len(next(iter(by_name.values())))
        if self.rows and not count:
            return  # an empty list has become an array of any dtype
        if self.fields is None or not self.rows:  # what had no rows decides nothing
            require_storable(fields)
            self._datasets = [_Dataset(c, self._storage) for c in fields]
            self.fields = fields
        elif fields != self.fields:
            fields = with_wider_text(self.fields, fields)
            require_same_fields(with_wider_text(fields, self.fields), fields)
            self._widen(fields)
        self._is_whole = False
        for dataset, array in zip(self._datasets, by_name.values(), strict=True):
            self._write(dataset, functools.partial(dataset.append, self._hdf5, array))
        self._is_whole = True
        self.rows += count

    def _widen(self, fields: Sequence[FieldSpec]) -> None:
        self._is_whole = False
        for i, field in enumerate(fields):
            before = self._datasets[i]
            if field != before.field:
                self._datasets[i] = wide = _Dataset(field, self._storage)
                self._write(wide, functools.partial(before.move, self._hdf5, wide))
        self.fields = tuple(fields)
        self._is_whole = True

    def finish(
        self, fields: Sequence[FieldSpec] = (), part: OutputPart | None = None
    ) -> None:
        """Write the buffered rows and `part`, and flush the file to the disk.

        Args:
          fields: of all ranks, whose text may be wider; by default as appended.
          part: what the file says of itself; None for one that is only read here.

        Raises:
          DataError: this, or an earlier write, failed.
        """
        self.require_whole()
        if self.rows and fields:
            self._widen(fields)
        for dataset in self._datasets:
            self._write(dataset, functools.partial(dataset.finish, self._hdf5))
        if part is not None:
            self._checked("written", functools.partial(part.write, self._hdf5))
        self._checked("written", self._hdf5.close)
        self._checked("written", self._atomic.complete)

    def publish(self) -> None:
        """Rename the finished file; remove it if it has no rows.

        Raises:
          ArgumentError: a file of that name exists; it is unchanged.
          DataError: it cannot be renamed.
        """
        if self.rows:
            self._checked("renamed", functools.partial(publish_new, self._atomic))
        else:
            self.discard()

    def withdraw(self) -> None:
        """Remove the file if it was renamed."""
        self._atomic.withdraw()

    def discard(self) -> None:
        """Remove the file unless it was published; a second call does nothing."""
        if self._end.detach() is not None:
            _discard(self._hdf5, self._atomic)

    def require_whole(self) -> None:
        """Raise a DataError if an append has failed."""
        if not self._is_whole:
            raise DataError(
                f"{self.path}: an earlier append failed and wrote only some of its rows"
            )

    def _write(self, dataset: _Dataset, write: Callable[[], None]) -> None:
        def checked() -> None:
            write()
            self._atomic.require_sound()

        self._checked(f"written (dataset {dataset.field.name!r})", checked)

    def _checked(self, what: str, fn: Callable[[], T]) -> T:
        try:
            return fn()
        except ArgumentError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"{self.path}: cannot be {what}: {error}") from error


class _Dataset:
    """One growing dataset of a file, written in blocks of whole chunks."""

    def __init__(self, field: FieldSpec, storage: StorageOptions):
        self.field = field
        self._filters = storage.filters if field.row_bytes else {}
        self._chunk_rows = storage.chunk_rows_of(field)
        chunk_bytes = max(1, self._chunk_rows * field.row_bytes)
        block_rows = self._chunk_rows * max(1, BLOCK_BYTES // chunk_bytes)
        self._block = np.empty((block_rows, *field.row_shape), field.dtype)
        self._buffered = 0  # rows in the block
        self._written = 0
        self._hdf5: h5py.Dataset | None = None

    def append(self, file: h5py.File, rows: Any) -> None:
        """Write the blocks that the rows fill; buffer the rest."""
        if (
            not self.field.row_bytes
        ):  # only count them: HDF5 has no chunks of zero bytes
            self._buffered += len(rows)
            return
        start, size = 0, len(self._block)
        while start < len(rows):
            count = min(len(rows) - start, size - self._buffered)
            piece = arrays.to_host(rows[start : start + count])
            start += count
            # Full blocks of the caller's rows are written without buffering
            if count < size:
                self._block[self._buffered : self._buffered + count] = piece
                self._buffered += count
                if self._buffered < size:
                    return
                piece, self._buffered = self._block, 0
            self._write(file, piece)

    def finish(self, file: h5py.File) -> None:
        rows, self._buffered = self._buffered, 0
        if rows and self._hdf5 is None:
            self._hdf5 = self._create_small(file, rows)
        if rows and self.field.row_bytes:
            self._write(file, self._block[:rows])

    def move(self, file: h5py.File, to: _Dataset) -> None:
        """Append all rows to another dataset, which gets the name of this one."""
        if self._hdf5 is not None:
            del file[self.field.name]  # the rows can be read until the file is closed
            step = len(self._block)
            for start in range(0, self._written, step):
                to.append(file, self._hdf5[start : start + step])
        to.append(file, self._block[: self._buffered])

    def _write(self, file: h5py.File, rows: Any) -> None:
        if self._hdf5 is None:
            self._hdf5 = self._create_growing(file)
        end = self._written + len(rows)
        if end > len(self._hdf5):
            self._hdf5.resize(end, axis=0)
        self._hdf5[self._written : end] = rows
        self._written = end

    def _create_growing(self, file: h5py.File) -> h5py.Dataset:
        field = self.field
        return file.create_dataset(
            field.name,
            (0, *field.row_shape),
            field.dtype,
            maxshape=(None, *field.row_shape),
            chunks=self._chunks(self._chunk_rows),
            **self._filters,
        )

    def _create_small(self, file: h5py.File, rows: int) -> h5py.Dataset:
        field = self.field
        chunks = self._chunks(min(rows, self._chunk_rows)) if self._filters else None
        shape = (rows, *field.row_shape)
        return file.create_dataset(
            field.name, shape, field.dtype, chunks=chunks, **self._filters
        )

    def _chunks(self, rows: int) -> Any:
        """Return the shape of a chunk; True lets h5py split giant rows."""
        if rows * self.field.row_bytes > LARGEST_CHUNK_BYTES:
            return True
        return (rows, *self.field.row_shape)


def _forget(file: h5py.File, atomic: AtomicHdf5File) -> None:
    if atomic.is_pending():
        warn(f"{atomic.path}: the writer was not closed, and its rows are lost")
    _discard(file, atomic)


def _discard(file: h5py.File, atomic: AtomicHdf5File) -> None:
    try:
        file.close()
    finally:
        atomic.discard()


def publish_new(atomic: AtomicHdf5File) -> None:
    """Give a complete file its final name; if that fails, it has not that name.

    After an interrupt it may have it.

    Raises:
      ArgumentError: a file of that name exists; it is unchanged.
      OSError: it cannot be renamed.
    """
    try:
        atomic.publish(replaces=False)
    except Exception as error:
        atomic.withdraw()
        if isinstance(error, FileExistsError):
            raise ArgumentError(
                f"{atomic.path}: exists already: another job has written it since this "
                "one looked; remove it, or write to another path"
            ) from error
        raise


def write_vds(
    path: Path,
    fields: Sequence[FieldSpec],
    shards: Sequence[tuple[str, int]],
    part: OutputPart,
) -> AtomicHdf5File:
    """Write virtual datasets with the rows of the shards, in the given order.

    Args:
      path: name of the returned file after it is published.
      fields: the datasets, which every shard has.
      shards: name of each file, in the same directory, and its number of rows.
      part: of the index.

    Raises:
      OSError: it cannot be written.
    """
    atomic = AtomicHdf5File(path)
    try:
        with h5py.File(atomic, "w") as file:
            for field in fields:
                _write_dataset(file, field, shards)
            part.write(file)
        atomic.complete()
    except BaseException:
        atomic.discard()
        raise
    return atomic


def _write_dataset(
    file: h5py.File, field: FieldSpec, shards: Sequence[tuple[str, int]]
) -> None:
    rows = sum(count for _, count in shards)
    shape = (rows, *field.row_shape)
    if not rows or not field.row_bytes:
        file.create_dataset(field.name, shape, field.dtype)
        return
    layout = h5py.VirtualLayout(shape, field.dtype)
    end = 0
    for name, count in shards:
        start, end = end, end + count
        layout[start:end] = h5py.VirtualSource(
            escape_source(name), escape_source(field.name), (count, *field.row_shape)
        )
    group, _, leaf = field.name.rpartition("/")
    file.require_group(f"/{group}").create_virtual_dataset(leaf, layout)


def escape_source(name: str) -> str:
    """Escape the name of a VDS source, of a file or a dataset.

    HDF5 reads %b as the number of a block; it refuses or misreads other single percent
    signs.
    """
    return name.replace("%", "%%")
