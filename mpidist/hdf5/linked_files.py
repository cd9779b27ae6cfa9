"""Files that belong together: those that hold the rows of a dataset, or of a writer.

HDF5 follows external links, the sources of virtual datasets (VDS) and external storage
to other files without checking their type, and opening a FIFO would block. Rows of a
source that is missing are silently read as fill values, and external storage that ends
too early as zeros. So they are checked here.

`Hdf5Writer` notes in each file which others it wrote with it: names prove nothing.
"""

from __future__ import annotations

import collections
import contextlib
import glob
import itertools
import json
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5g, h5l, h5o, h5s

from mpidist.errors import DataError
from mpidist.util.files import require_regular

_LINKS = "HDF5_EXT_PREFIX"
_SOURCES = "HDF5_VDS_PREFIX"
_STORAGE = "HDF5_EXTFILE_PREFIX"
_MOST_LINKS = 64  # HDF5's default is 16


def open_hdf5(path: Path) -> h5py.File:
    """Open a file for reading, without locks: many network file systems lack them."""
    require_regular(path)
    # A process must not mix locking modes for one file, so try those that others use.
    for locking in (False, "best-effort", True):
        try:
            return h5py.File(path, "r", locking=locking)
        except OSError as error:
            # The process already has it open with another locking mode
            if "flag values" not in str(error):
                raise
            refused = error
    raise refused


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
    item, parts = root, name.encode().split(b"/")
    while parts and links:
        part, *parts = parts
        if part in (b"", b"."):
            continue
        if not isinstance(item, h5g.GroupID) or not item.links.exists(part):
            break
        kind = item.links.get_info(part).type
        if kind == h5l.TYPE_HARD:
            item = h5o.open(item, part)
        elif kind == h5l.TYPE_SOFT:
            links -= 1
            target = item.links.get_val(part)
            item = root if target.startswith(b"/") else item
            parts = target.split(b"/") + parts
        elif kind == h5l.TYPE_EXTERNAL:
            other, target = item.links.get_val(part)
            rest = os.fsdecode(b"/".join([target, *parts]))
            return _follow(_find(os.fsdecode(other), file, _LINKS), rest, links - 1)
        else:
            break  # user-defined links need their library
    return []


def check_sources(
    datasets: Sequence[h5py.Dataset],
    existing: list[str],
    allow_short_external: bool = False,
) -> list[str]:
    """Return what is missing of the files of datasets: sources, external storage.

    Of the sources of virtual datasets: files, datasets, rows.

    A source may be virtual, too. Sources with a number in their name (%b) may be
    missing, and those that grow (an unlimited selection) may have any length.

    Args:
      datasets: those that are not virtual have no sources.
      existing: the paths of existing files are appended.
      allow_short_external: whether external storage may end before its rows.

    Raises:
      OSError: one is not a regular file.
    """
    missing: dict[str, None] = {}
    pending = list(datasets)
    seen = {(dataset.file.filename, dataset.name) for dataset in pending}
    with contextlib.ExitStack() as files:
        for dataset in pending:  # sources are appended
            existing += find_storage(dataset)
            missing.update(
                dict.fromkeys(_check_external(dataset, allow_short_external))
            )
            if not dataset.is_virtual:
                continue
            for source, problem in _look_up(dataset, existing, files):
                if problem:
                    missing[problem] = None
                elif (key := (source.file.filename, source.name)) not in seen:
                    pending.append(source)
                    seen.add(key)
    return list(missing)


def _check_external(dataset: h5py.Dataset, allow_short: bool) -> Iterator[str]:
    """Yield what is missing of the external storage of a dataset, if it has any."""
    missing = (dataset.size or 0) * dataset.id.get_type().get_size()
    for name, start, size in dataset.external or ():
        count, path = min(size, missing), _storage_path(name, dataset.file)
        missing -= count
        if not count:  # HDF5 creates a file when it writes to it
            continue
        try:
            present = os.stat(path).st_size
        except OSError as error:
            yield f"external storage {path} cannot be read: {error.strerror}"
            continue
        if present < start + count and not allow_short:
            yield (
                f"external storage {path} has {present} bytes, and rows of "
                f"{dataset.name!r} need {start + count} (HDF5 reads zeros there; "
                "allow_short_external=True accepts that)"
            )


def _storage_path(name: str, file: h5py.File) -> str:
    """Return the path at which HDF5 opens external storage of a dataset in `file`."""
    origin = str(Path(file.filename).parent)
    prefix = os.environ.get(_STORAGE, "").replace("${ORIGIN}", origin)
    return os.path.abspath(os.path.join(prefix, name))


def _look_up(
    dataset: h5py.Dataset, existing: list[str], files: contextlib.ExitStack
) -> Iterator[tuple[Any, str]]:
    """Yield each source of a virtual dataset, and what is missing of it, or nothing.

    Raises:
      OSError: a file is not a regular one.
    """
    index = read_part(dataset.file)
    for escaped, shapes in _sources_of(dataset).items():
        if _is_numbered(escaped):
            continue
        file_name = escaped.replace("%%", "%")
        file, refused = _open_source(dataset.file, file_name, existing, files)
        if file is not None and index is not None:
            shard = read_part(file)
            if shard is None or shard.output != index.output:
                file, refused = None, "is not what was written with this index"
        if file is None:
            yield None, f"{file_name} {refused}"
            continue
        for escaped, shape in shapes.items():
            if _is_numbered(escaped):
                continue
            name = escaped.replace("%%", "%")
            try:
                existing += find_linked(file, name)
                source = file.get(name)
                problem = _problem(source, shape)
            except (KeyError, RuntimeError, ValueError) as error:
                source, problem = None, f"cannot be read: {error}"
            yield source, problem and f"{name!r} of {file_name} {problem}"


def _open_source(
    virtual: h5py.File, name: str, existing: list[str], files: contextlib.ExitStack
) -> tuple[h5py.File | None, str]:
    """Open a source file of a dataset in the file `virtual`.

    Returns: the file, and why there is none.

    Raises:
      OSError: one is not a regular file.
    """
    if name == ".":
        return virtual, ""
    refused = "does not exist"
    for path in _find(name, virtual, _SOURCES):
        try:
            file = files.enter_context(open_hdf5(Path(path)))
        except OSError as error:  # HDF5 tries the next
            refused = f"cannot be opened as HDF5: {error}"
            continue
        existing.append(path)
        return file, ""
    return None, refused


def _problem(source: Any, shape: tuple[int, ...]) -> str:
    """Return why a source has not the elements within `shape`, or nothing."""
    if not isinstance(source, h5py.Dataset):
        return "is no dataset" if source else "does not exist"
    # HDF5 raises where the numbers of dimensions differ
    is_short = len(shape) == source.ndim and any(map(operator.lt, source.shape, shape))
    return f"has shape {source.shape}, not {shape} at least" if is_short else ""


def _is_numbered(escaped: str) -> bool:
    """Return whether a name has the number of a block (%b), and stands for many."""
    return "%b" in escaped.replace("%%", "")


def _sources_of(dataset: h5py.Dataset) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the sources of a virtual dataset.

    Returns: by file and by dataset (% is written as %%), the shape that holds all
    selected elements; empty if that is not known.
    """
    plist = dataset.id.get_create_plist()
    sources: dict[str, dict[str, tuple[int, ...]]] = collections.defaultdict(dict)
    for number in range(plist.get_virtual_count()):
        file = _decoded(plist.get_virtual_filename, number)
        name = _decoded(plist.get_virtual_dsetname, number)
        stops = _stops(plist.get_virtual_srcspace(number))
        before = sources[file].get(name, ())
        both = itertools.zip_longest(before, stops, fillvalue=0)
        sources[file][name] = tuple(map(max, both))
    return sources


def _decoded(get: Callable[[int], str], number: int) -> str:
    try:
        return str(get(number))
    except UnicodeDecodeError as error:  # h5py assumes UTF-8
        return os.fsdecode(error.object)


def _stops(space: h5s.SpaceID) -> tuple[int, ...]:
    """Return where a selection ends, per dimension; empty if it is all, or grows."""
    kind = space.get_select_type()
    if kind in (h5s.SEL_ALL, h5s.SEL_NONE):
        return ()  # HDF5 raises if a source is not as large as all of it
    if kind == h5s.SEL_HYPERSLABS and space.is_regular_hyperslab():
        _, _, count, block = space.get_regular_hyperslab()
        if h5s.UNLIMITED in (*count, *block):
            return ()
    return tuple(last + 1 for last in space.get_select_bounds()[1])


def find_storage(dataset: h5py.Dataset) -> list[str]:
    """Return the files of external storage, and numbered VDS sources (%b).

    Raises:
      OSError: one is not a regular file.
    """
    files = []
    for name, _, _ in dataset.external or ():
        path = _storage_path(name, dataset.file)
        if os.path.exists(path):
            require_regular(path)
            files.append(path)
    if dataset.is_virtual:
        for name in _sources_of(dataset):
            if _is_numbered(name):
                files += _find(name, dataset.file, _SOURCES, is_numbered=True)
    return files


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
    paths = [os.path.join(d, n) for n in (name, Path(name).name) for d in directories]
    if is_numbered:
        patterns = [glob.escape(p).replace("%%", "%").replace("%b", "*") for p in paths]
        paths = [existing for pattern in patterns for existing in glob.glob(pattern)]
    paths = list(dict.fromkeys(map(os.path.abspath, paths)))
    existing = [p for p in paths if os.path.exists(p) and not os.path.isdir(p)]
    for name in existing:
        require_regular(name)
    return existing


_OUTPUT = "mpidist_output"  # an attribute of the root group


class OutputPart(NamedTuple):
    """Which file this is among those that one `Hdf5Writer` wrote.

    Args:
      output: random, the same in all of them.
      index_name: of the index file.
      rank: of the shard; -1 is the index.
      ranks: of the writer.
      with_rows: of the ranks that have a shard, the bits.
    """

    output: str
    index_name: str
    rank: int
    ranks: int
    with_rows: int

    @property
    def is_index(self) -> bool:
        """Whether it is the index, which has the rows of all shards."""
        return self.rank < 0

    def write(self, file: h5py.File) -> None:
        """Note it in a file."""
        fields = {**self._asdict(), "with_rows": f"{self.with_rows:x}"}
        file.attrs[_OUTPUT] = np.bytes_(json.dumps(fields))

    def names_of(self, ranks: Iterable[int], name: str) -> list[str]:
        """Return the names of the shards of these ranks, given that of this one."""
        mine = f"{self.rank:05}-of-{self.ranks:05}"
        if mine not in name:  # it was renamed
            return [f"that of rank {rank}" for rank in ranks]
        return [name.replace(mine, f"{r:05}-of-{self.ranks:05}") for r in ranks]


Parts = Sequence[tuple[Path, OutputPart]]


def read_part(file: h5py.File) -> OutputPart | None:
    """Return which file of an output this is; None if `Hdf5Writer` did not write it."""
    try:
        fields = json.loads(file.attrs.get(_OUTPUT))
        rank, ranks = int(fields["rank"]), int(fields["ranks"])
        with_rows = int(fields["with_rows"], 16)
        names = str(fields["output"]), str(fields["index_name"])
    except (KeyError, TypeError, ValueError):
        return None
    return OutputPart(*names, rank, ranks, with_rows)


def require_distinct(parts: Parts) -> None:
    """Raise a DataError if two of the files have the same rows, or replace each other.

    Args:
      parts: of the files that are read together; a path may be there twice.
    """
    known: dict[tuple[str, int], Path] = {}
    writes: dict[tuple[Path, str], tuple[Path, str]] = {}
    for path, part in sorted(dict(parts).items(), key=lambda item: item[1].rank):
        index = known.get((part.output, -1))
        if index is not None or (part.output, part.rank) in known:
            other = index or known[part.output, part.rank]
            raise DataError(
                f"{path}: has rows that {other} has, too, and each row would be read "
                "twice; name the index alone, or the shards"
            )
        known[part.output, part.rank] = path
        name = path.parent, part.index_name
        other, output = writes.setdefault(name, (path, part.output))
        if output != part.output:
            raise DataError(
                f"{path}: is of another write of {part.index_name} than {other}, which "
                "a job leaves that is killed while it replaces files; remove the files "
                "of one write, or write the rows again"
            )


def require_complete(parts: Parts) -> None:
    """Raise a DataError if shards of a writer are missing among the files."""
    by_output: dict[str, dict[int, tuple[Path, OutputPart]]] = {}
    for path, part in parts:
        by_output.setdefault(part.output, {})[part.rank] = path, part
    for shards in by_output.values():
        path, part = next(iter(shards.values()))
        if part.is_index:
            continue
        bits = range(part.with_rows.bit_length())
        ranks = [r for r in bits if part.with_rows >> r & 1]
        missing = [r for r in ranks if r not in shards]
        if missing and -1 not in shards:
            names = part.names_of(missing[:3], path.name)
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise DataError(
                f"{path}: of the {len(ranks)} files that one Hdf5Writer wrote, these "
                f"are missing: {', '.join(names)}{more}; the job was killed before it "
                "published them, or they were removed. Write the rows again (a file "
                "that is named alone, by its path, is read without the others)"
            )
