"""Other files that HDF5 opens for the rows of a file: they must be regular ones.

HDF5 itself would wait for a writer where a link leads to a FIFO.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path

import h5py
from h5py import h5g, h5l, h5o

from mpidist.regular_files import require_regular

__all__ = ["find_linked", "find_sources", "find_storage", "source_names"]

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
