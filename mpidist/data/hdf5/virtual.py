"""Index files: HDF5 datasets whose rows lie in other files, one after the other."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import h5py

from mpidist.atomic_files import sync_folder
from mpidist.data.hdf5.layout import Field
from mpidist.data.hdf5.other_files import find_sources, source_names
from mpidist.data.hdf5.unfinished import Unfinished
from mpidist.errors import ArgumentError

__all__ = [
    "escape_source",
    "missing_sources",
    "remove_output",
    "require_no_output",
    "shard_path",
    "write_index",
]


def shard_path(index: Path, rank: int, size: int) -> Path:
    """Return the name of one rank's file beside an index file."""
    return index.with_name(f"{index.stem}-{rank:05}-of-{size:05}{index.suffix}")


def _find_output(index: Path) -> list[Path]:
    """Return the index file and its shards, of any number of ranks, that exist."""
    pattern = re.compile(
        rf"{re.escape(index.stem)}-\d{{5,}}-of-\d{{5,}}{re.escape(index.suffix)}"
    )
    names = set(os.listdir(index.parent))
    shards = sorted(name for name in names if pattern.fullmatch(name))
    found = [index.name] if index.name in names else []
    return [index.with_name(name) for name in found + shards]


def require_no_output(index: Path) -> None:
    """Raise an ArgumentError if there is an index file or a shard of that name."""
    names = [path.name for path in _find_output(index)]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ArgumentError(
            f"{index}: there are files of this name already: {', '.join(names[:3])}"
            f"{more}; remove them, write to another path, or pass overwrite=True"
        )


def remove_output(index: Path) -> None:
    """Remove an index file, and then its shards, if there are any."""
    for path in _find_output(index):
        path.unlink(missing_ok=True)
        if path == index:
            sync_folder(index.parent)


def write_index(
    path: Path, fields: Sequence[Field], shards: Sequence[tuple[str, int]]
) -> Unfinished:
    """Write virtual datasets: the rows of the shards in the given order.

    Args:
      path: the name that the returned file gets when it is published.
      fields: the datasets, which every shard has.
      shards: the name of each file, in the same folder, and its number of rows.

    Raises:
      OSError: it cannot be written.
    """
    unfinished = Unfinished(path)
    try:
        with h5py.File(unfinished, "w") as file:
            for field in fields:
                _write_dataset(file, field, shards)
        unfinished.complete()
    except BaseException:
        unfinished.discard()
        raise
    return unfinished


def _write_dataset(
    file: h5py.File, field: Field, shards: Sequence[tuple[str, int]]
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


def missing_sources(datasets: Sequence[h5py.Dataset], found: list[str]) -> list[str]:
    """Return the files that virtual datasets of one file need and that are not there.

    HDF5 itself would give fill values for their rows, without a word.

    Args:
      datasets: of one file.
      found: gets the paths of the files that are there.

    Raises:
      OSError: one is no regular file.
    """
    names = {
        name
        for dataset in datasets
        if dataset.is_virtual
        for name in source_names(dataset)
    }
    # A dot is the file itself, and %b the number of a block
    plain = sorted(n for n in names if n != "." and "%b" not in n.replace("%%", ""))
    files = [name.replace("%%", "%") for name in plain]
    missing = []
    for name in files:
        paths = find_sources(datasets[0], name)
        found += paths[:1]
        missing += [] if paths else [name]
    return [] if "HDF5_VDS_PREFIX" in os.environ else missing


def escape_source(name: str) -> str:
    """Return the name of a source as virtual datasets write it, where %b is a number.

    That holds for names of files and of datasets; HDF5 refuses, or reads as others,
    those in which a percent sign stands alone.
    """
    return name.replace("%", "%%")
