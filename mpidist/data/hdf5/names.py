"""Names of files and datasets: those given by users, and those stored in files.

HDF5 follows external links, VDS sources and external storage to other files without
checking their type, and opening a FIFO would block. So they are found and checked here.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import h5py
from h5py import h5g, h5l, h5o

from mpidist.errors import ArgumentError, ArgumentTypeError, DataError
from mpidist.util import validation
from mpidist.util.files import require_regular

__all__ = [
    "check_names",
    "find_linked",
    "find_storage",
    "list_files",
    "missing_sources",
]

_LONGEST = 4096  # of a name in a file, in bytes, with its groups


def list_files(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[Path]:
    """Return the files of a path, a pattern or several paths."""
    if not isinstance(files, str | bytes | os.PathLike):
        several = _listed("files must be a path, a pattern or a list of paths", files)
        paths = [Path(validation.path("each of files", f)).absolute() for f in several]
        if not paths:
            raise ArgumentError("files must name at least one file, not []")
        return paths
    pattern = validation.path("files", files)
    if not glob.has_magic(pattern) or os.path.exists(pattern):
        return [Path(pattern).absolute()]
    matches = sorted(glob.glob(pattern))
    if not matches:
        raise DataError(f"no file matches {pattern!r}")
    return [Path(file).absolute() for file in matches]


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


def missing_sources(datasets: Sequence[h5py.Dataset], existing: list[str]) -> list[str]:
    """Return the missing source files of a file's virtual datasets.

    HDF5 silently returns fill values for their rows.

    Args:
      datasets: of one file.
      existing: the paths of existing sources are appended.

    Raises:
      OSError: one is not a regular file.
    """
    names = {
        name
        for dataset in datasets
        if dataset.is_virtual
        for name in _source_names(dataset)
    }
    # "." is the file itself, and %b the number of a block
    plain = sorted(n for n in names if n != "." and "%b" not in n.replace("%%", ""))
    files = [name.replace("%%", "%") for name in plain]
    missing = []
    for name in files:
        paths = _find_sources(datasets[0], name)
        existing += paths[:1]
        missing += [] if paths else [name]
    return [] if "HDF5_VDS_PREFIX" in os.environ else missing


_LINKS = "HDF5_EXT_PREFIX"
_SOURCES = "HDF5_VDS_PREFIX"
_STORAGE = "HDF5_EXTFILE_PREFIX"
_MOST_LINKS = 64  # HDF5's default is 16


def find_linked(file: h5py.File, name: str, links: int = _MOST_LINKS) -> list[str]:
    """Return the other files on an object's path, through external links.

    Args:
      file: where the path starts.
      name: path of the object, which need not exist.
      links: how many to follow at most.

    Raises:
      OSError: one is not a regular file.
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
            break  # user-defined links need their library
    return []


def _find_sources(dataset: h5py.Dataset, name: str) -> list[str]:
    """Return the paths at which HDF5 may find a VDS source file.

    Raises:
      OSError: one is not a regular file.
    """
    return _find(name, dataset.file, _SOURCES)


def find_storage(dataset: h5py.Dataset) -> list[str]:
    """Return the files of external storage, and numbered VDS sources (%b).

    Raises:
      OSError: one is not a regular file.
    """
    files = []
    for name, _, _ in dataset.external or ():
        files += _find(name, dataset.file, _STORAGE)[:1]
    if dataset.is_virtual:
        for name in _source_names(dataset):
            if "%b" in name.replace("%%", ""):  # the number of a block
                files += _find(name, dataset.file, _SOURCES, is_numbered=True)
    return files


def _source_names(dataset: h5py.Dataset) -> set[str]:
    """Return the names of the source files of a virtual dataset."""
    plist = dataset.id.get_create_plist()
    names = set()
    for source in range(plist.get_virtual_count()):
        try:
            names.add(str(plist.get_virtual_filename(source)))
        except UnicodeDecodeError as error:  # h5py assumes UTF-8
            names.add(os.fsdecode(error.object))
    return names


def _follow(paths: list[str], name: str, links: int) -> list[str]:
    """Return the first file that opens, and those on the path `name` in it."""
    for path in paths:
        try:
            file = h5py.File(path, "r", locking=False)
        except OSError:  # HDF5 tries the next
            continue
        with file:
            return [path, *find_linked(file, name, links)]
    return []


def _find(
    name: str, file: h5py.File, prefix: str, is_numbered: bool = False
) -> list[str]:
    """Return the files that HDF5 may open for a name stored in `file`, in its order.

    Raises:
      OSError: one is not a regular file.
    """
    path = Path(file.filename)
    prefixes = [
        directory.replace("${ORIGIN}", str(path.parent))
        for directory in os.environ.get(prefix, "").split(":")
        if directory
    ]
    directories = [*prefixes, str(path.parent), "", str(path.resolve().parent)]
    # For a missing absolute path, HDF5 tries its last component alone
    places = [os.path.join(d, n) for n in (name, Path(name).name) for d in directories]
    if is_numbered:
        patterns = [
            glob.escape(p).replace("%%", "%").replace("%b", "*") for p in places
        ]
        places = [existing for pattern in patterns for existing in glob.glob(pattern)]
    places = list(dict.fromkeys(map(os.path.abspath, places)))
    existing = [p for p in places if os.path.exists(p) and not os.path.isdir(p)]
    for place in existing:
        require_regular(place)
    return existing
