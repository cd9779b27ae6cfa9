"""Index files: HDF5 datasets whose rows lie in other files, one after the other."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

import h5py
from h5py import h5g, h5l, h5o

from mpidist.data.hdf5.written_rows import Field
from mpidist.errors import ArgumentError
from mpidist.util.files import (
    SHARD_PATTERN,
    AtomicHdf5File,
    require_regular,
    shard_name,
    sync_directory,
)

__all__ = [
    "escape_source",
    "find_linked",
    "find_sources",
    "find_storage",
    "missing_sources",
    "remove_output",
    "require_no_output",
    "shard_path",
    "source_names",
    "write_index",
]


def shard_path(index: Path, rank: int, size: int) -> Path:
    """Return the name of one rank's file beside an index file."""
    return index.with_name(shard_name(index.stem, rank, size, index.suffix))


def _find_output(index: Path) -> list[Path]:
    """Return the index file and its shards, of any number of ranks, that exist."""
    pattern = re.compile(
        re.escape(index.stem) + SHARD_PATTERN + re.escape(index.suffix)
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
            sync_directory(index.parent)


def write_index(
    path: Path, fields: Sequence[Field], shards: Sequence[tuple[str, int]]
) -> AtomicHdf5File:
    """Write virtual datasets: the rows of the shards in the given order.

    Args:
      path: the name that the returned file gets when it is published.
      fields: the datasets, which every shard has.
      shards: the name of each file, in the same folder, and its number of rows.

    Raises:
      OSError: it cannot be written.
    """
    unfinished = AtomicHdf5File(path)
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


_LINKS = "HDF5_EXT_PREFIX"
_SOURCES = "HDF5_VDS_PREFIX"
_STORAGE = "HDF5_EXTFILE_PREFIX"
_MOST_LINKS = 64  # HDF5 follows 16 if it is not told otherwise


def find_linked(file: h5py.File, name: str, links: int = _MOST_LINKS) -> list[str]:
    """Return the other files on the way to an object, by external links.

    Args:
      file: in which the way begins.
      name: of the object, which need not exist.
      links: how many may be followed.

    Raises:
      OSError: one is no regular file.
    """
    root = h5g.open(file.id, b"/")
    place, parts = root, name.encode().split(b"/")
    while parts and links:
        part, *parts = parts
        if part in (b"", b"."):
            continue
        if not isinstance(place, h5g.GroupID) or not place.links.exists(part):
            break
        kind = place.links.get_info(part).type
        if kind == h5l.TYPE_HARD:
            place = h5o.open(place, part)
        elif kind == h5l.TYPE_SOFT:
            links -= 1
            target = place.links.get_val(part)
            place = root if target.startswith(b"/") else place
            parts = target.split(b"/") + parts
        elif kind == h5l.TYPE_EXTERNAL:
            other, target = place.links.get_val(part)
            rest = os.fsdecode(b"/".join([target, *parts]))
            return _follow(_find(os.fsdecode(other), file, _LINKS), rest, links - 1)
        else:
            break  # of a type that only its own library follows
    return []


def find_sources(dataset: h5py.Dataset, name: str) -> list[str]:
    """Return where the file `name` may be that a virtual dataset has rows in.

    Raises:
      OSError: it is no regular file.
    """
    return _find(name, dataset.file, _SOURCES)


def find_storage(dataset: h5py.Dataset) -> list[str]:
    """Return the files of external storage, and of sources that have a number.

    Raises:
      OSError: one is no regular file.
    """
    found = []
    for name, _, _ in dataset.external or ():
        found += _find(name, dataset.file, _STORAGE)[:1]
    if dataset.is_virtual:
        for name in source_names(dataset):
            if "%b" in name.replace("%%", ""):  # the number of a block
                found += _find(name, dataset.file, _SOURCES, is_numbered=True)
    return found


def source_names(dataset: h5py.Dataset) -> set[str]:
    """Return the names of the files that a virtual dataset has rows in."""
    plist = dataset.id.get_create_plist()
    names = set()
    for source in range(plist.get_virtual_count()):
        try:
            names.add(str(plist.get_virtual_filename(source)))
        except UnicodeDecodeError as error:  # h5py takes each to be UTF-8
            names.add(os.fsdecode(error.object))
    return names


def _follow(paths: list[str], name: str, links: int) -> list[str]:
    """Return the first file that can be opened, and those on the way from there."""
    for path in paths:
        try:
            file = h5py.File(path, "r", locking=False)
        except OSError:  # HDF5 tries the next one
            continue
        with file:
            return [path, *find_linked(file, name, links)]
    return []


def _find(
    name: str, file: h5py.File, prefix: str, is_numbered: bool = False
) -> list[str]:
    """Return the files that HDF5 may open by a name in `file`, in its order.

    Raises:
      OSError: one is no regular file.
    """
    path = Path(file.filename)
    prefixes = [
        folder.replace("${ORIGIN}", str(path.parent))
        for folder in os.environ.get(prefix, "").split(":")
        if folder
    ]
    folders = [*prefixes, str(path.parent), "", str(path.resolve().parent)]
    # Of an absolute path that does not exist, HDF5 tries the last part alone
    places = [os.path.join(f, n) for n in (name, Path(name).name) for f in folders]
    if is_numbered:
        patterns = [
            glob.escape(p).replace("%%", "%").replace("%b", "*") for p in places
        ]
        places = [found for pattern in patterns for found in glob.glob(pattern)]
    places = list(dict.fromkeys(map(os.path.abspath, places)))
    found = [p for p in places if os.path.exists(p) and not os.path.isdir(p)]
    for place in found:
        require_regular(place)
    return found
