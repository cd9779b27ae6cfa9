"""What the rows of a written HDF5 file are, and what HDF5 can hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import h5py
import numpy as np

from mpidist import arrays, checks
from mpidist.agreement.calls import group_by_rank
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    DataError,
    DTypeError,
    MismatchError,
)

__all__ = [
    "BLOCK_BYTES",
    "LARGEST_CHUNK_BYTES",
    "Field",
    "Storage",
    "clean_name",
    "fields_of",
    "common_fields",
    "require_same_fields",
    "require_storable",
    "to_arrays",
]

BLOCK_BYTES = 1 << 20
LARGEST_CHUNK_BYTES = (1 << 32) - 1  # HDF5's limit


@dataclasses.dataclass(frozen=True)
class Field:
    """What each row of one dataset is."""

    name: str
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    members: tuple[
        tuple[str, int], ...
    ] = ()  # of an enum, which dtypes compare without

    @property
    def row_bytes(self) -> int:
        """The size of a row; 0 if a length in its shape is 0."""
        return self.dtype.itemsize * math.prod(self.row_shape)

    def __str__(self) -> str:
        members = f" {dict(self.members)}" if self.members else ""
        return f"{self.dtype}{members} {self.row_shape}"


@dataclasses.dataclass(frozen=True)
class Storage:
    """How rows are stored; the arguments are those of `Hdf5Writer`."""

    chunk_rows: int | None = None
    compression: str | None = None
    compression_level: int | None = None
    shuffle: bool = False

    def __post_init__(self) -> None:
        # As Python's own, since the ranks compare them as text
        if self.chunk_rows is not None:
            rows = checks.integer(
                "chunk_rows", self.chunk_rows, 1, most=LARGEST_CHUNK_BYTES
            )
            object.__setattr__(self, "chunk_rows", rows)
        is_text = isinstance(self.compression, str)
        if self.compression is not None and not (
            is_text and self.compression == "gzip"
        ):
            raise ArgumentError(
                "compression must be None or 'gzip', not "
                f"{checks.shown(self.compression)}"
            )
        name = "compression_level"
        level = checks.optional_integer(name, self.compression_level)
        if level is not None and not (self.compression and level in range(10)):
            raise ArgumentError(
                "compression_level must be 0..9, with compression='gzip', or None, "
                f"not {checks.shown(level)} with compression={self.compression!r}"
            )
        object.__setattr__(self, name, level)
        object.__setattr__(self, "shuffle", checks.switch("shuffle", self.shuffle))

    @property
    def filters(self) -> dict[str, Any]:
        """The arguments of h5py's create_dataset, empty for none."""
        if self.compression is None and not self.shuffle:
            return {}
        return {
            "compression": self.compression,
            "compression_opts": self.compression_level,
            "shuffle": self.shuffle,
        }

    def chunk_rows_of(self, field: Field) -> int:
        """Return the rows of a chunk: as asked for, or about 1 MiB of them."""
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
    """Return arrays with equal numbers of rows, sorted by the name of their dataset."""
    found = {
        clean_name(name): arrays.to_array(value, f"append: dataset {name!r}")
        for name, value in rows.items()
    }
    if not found or len(found) < len(rows):
        raise ArgumentError(
            f"append: name at least one dataset, and none twice, not {list(rows)}"
        )
    for name, array in found.items():
        if array.ndim == 0:
            raise ArgumentError(f"append: dataset {name!r}: {array!r} is a scalar")
    lengths = {name: len(array) for name, array in found.items()}
    if len(set(lengths.values())) > 1:
        pairs = ", ".join(f"{name!r} has {n}" for name, n in lengths.items())
        raise ArgumentError(f"append: the arrays have unequal rows: {pairs}")
    return dict(sorted(found.items()))


def clean_name(name: str) -> str:
    """Return the name of a dataset as HDF5 lists it: groups and `/` between them.

    Raises:
      ArgumentTypeError: not a string.
      ArgumentError: no name, or one that HDF5 takes otherwise.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"the name of a dataset must be a str, not {checks.shown(name)}"
        )
    parts = [part for part in name.split("/") if part]
    if not parts or "." in parts or "\0" in name:
        raise ArgumentError(f"{name!r} cannot be the name of an HDF5 dataset")
    return "/".join(parts)


def fields_of(found: Mapping[str, Any]) -> tuple[Field, ...]:
    """Return the fields of arrays `(rows, *shape)` by name."""
    return tuple(
        Field(n, a.dtype, a.shape[1:], _members(a.dtype)) for n, a in found.items()
    )


def _members(dtype: np.dtype[Any]) -> tuple[tuple[str, int], ...]:
    if dtype.metadata is None:
        return ()
    return tuple((h5py.check_enum_dtype(dtype) or {}).items())


def require_storable(fields: Sequence[Field]) -> None:
    """Raise if one HDF5 file cannot hold these fields.

    Raises:
      ArgumentError: the name of one is a group in the name of another.
      DTypeError: HDF5 would not give back the same dtype.
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


def _require_dtype(field: Field) -> None:
    try:
        stored = h5py.h5t.py_create(field.dtype, logical=True).dtype
    except (TypeError, ValueError):
        stored = None
    if stored != field.dtype:
        instead = "" if stored is None else f" (it would give back {stored})"
        raise DTypeError(
            f"append: dataset {field.name!r}: HDF5 has no dtype {field.dtype}"
            f"{instead}; convert it first, such as bfloat16 to float32, str by "
            "np.char.encode, dates by view('int64')"
        )


def require_same_fields(before: Sequence[Field], now: Sequence[Field]) -> None:
    """Raise an ArgumentError that names the first difference."""
    names, new_names = [c.name for c in before], [c.name for c in now]
    if names != new_names:
        raise ArgumentError(
            f"append: the datasets were {names}, and are now {new_names}"
        )
    for old, new in zip(before, now, strict=True):
        if old != new:
            raise ArgumentError(
                f"append: rows of dataset {old.name!r} were {old}, and are now {new}"
            )


def common_fields(
    call: str, fields: Sequence[tuple[Field, ...] | None]
) -> tuple[Field, ...]:
    """Return the fields of all ranks that have any, given those of each rank.

    Raises:
      MismatchError: they differ.
      DataError: no rank has any.
    """
    known = [mine for mine in fields if mine]
    if not known:
        raise DataError(
            f"{call}: no rank appended anything, so there is nothing to write; an "
            "append of zero rows says what the datasets are"
        )
    if any(mine != known[0] for mine in known):
        raise MismatchError(f"{call}: {_difference(fields)}")
    return known[0]


def _difference(fields: Sequence[tuple[Field, ...] | None]) -> str:
    """Say what each rank has where they first differ."""
    names = [str([c.name for c in mine]) if mine else "nothing" for mine in fields]
    if len({*names} - {"nothing"}) > 1:
        return f"the datasets are {group_by_rank(names)}"
    rows = [{c.name: str(c) for c in mine or ()} for mine in fields]
    for name in max(rows, key=len):
        texts = [mine.get(name, "nothing") for mine in rows]
        if len({*texts} - {"nothing"}) > 1:
            return f"rows of dataset {name!r} are {group_by_rank(texts)}"
    raise AssertionError("the fields are the same")
