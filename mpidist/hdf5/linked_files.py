"""Files opened by h5py, and files that belong together: of one dataset, or one writer.

HDF5 shares what it knows of a file among all that have it open in this process, however
old that is. So our files are opened by a driver of our own, and outdated ones closed.

HDF5 follows external links, the sources of virtual datasets (VDS) and external storage
to other files without checking their type, and opening a FIFO would block. Rows of a
source that is missing are silently read as fill values, and external storage that ends
too early as zeros. So they are checked here.

`Hdf5Writer` notes in each file which others it wrote with it: names prove nothing.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import glob
import itertools
import json
import operator
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5f, h5fd, h5g, h5i, h5l, h5o, h5s

from mpidist.errors import DataError
from mpidist.util.files import require_regular

_LINKS = "HDF5_EXT_PREFIX"
_SOURCES = "HDF5_VDS_PREFIX"
_STORAGE = "HDF5_EXTFILE_PREFIX"
_MOST_LINKS = 64  # HDF5's default is 16
ALL_ROWS = 0, sys.maxsize


# As `sec2`, HDF5's default; but HDF5 shares nothing between files of unlike drivers
_DRIVER = "mpidist"
h5py.register_driver(_DRIVER, lambda plist, **_: plist.set_fapl_log(b"", 0, 0))
_TRIALS = 5  # to open a file between two changes
_MANY = 1024
Inode = tuple[int, int]
Identity = tuple[int, int, int, int]

_opening = threading.RLock()
# By inode: of our open files, which all saw it in one state
_open_files: dict[Inode, tuple[Identity, list[weakref.ref[h5py.File]]]] = {}
# Our files that share what this process writes: their intent is the writer's
_shared_ids: set[int] = set()


def _renew_lock() -> None:
    global _opening
    _opening = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def identity_of(status: os.stat_result) -> Identity:
    """Return device, inode, size and time of the last modification of a file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_hdf5(path: Path, is_shared: bool = False) -> h5py.File:
    """Open a file for reading, without locks: many network file systems lack them.

    Args:
      path: of the file.
      is_shared: whether to see what this process writes to it, or to its sources,
        rather than what a new process would read.

    Raises:
      OSError: it is no regular file, or cannot be opened.
    """
    require_regular(path)
    if is_shared:
        return _open_shared(path)
    with _opening:
        for _ in range(_TRIALS):
            before = identity_of(os.stat(path))
            _close_outdated(before)
            file = h5py.File(path, "r", driver=_DRIVER, locking=False)
            if identity_of(os.fstat(file.id.get_vfd_handle())) == before:
                _register(file, before)
                return file
            file.close()
    raise OSError(errno.EBUSY, "it changes while it is opened", os.fspath(path))


def _open_shared(path: Path) -> h5py.File:
    # A process must not mix locking modes for one file, so try those that others use.
    for locking in (False, "best-effort", True):
        try:
            file = h5py.File(path, "r", locking=locking)
        except OSError as error:
            # The process already has it open with another locking mode
            if "flag values" not in str(error):
                raise
            refused = error
        else:
            _shared_ids.add(file.id.id)
            return file
    raise refused


def _close_outdated(now: Identity) -> None:
    """Close our files that saw an inode in another state: their datasets must fail."""
    before, refs = _open_files.get(now[:2], (now, []))
    if before != now:
        del _open_files[now[:2]]
        for ref in refs:
            if file := ref():
                file.close()


def _register(file: h5py.File, state: Identity) -> None:
    _, refs = _open_files.setdefault(state[:2], (state, []))
    refs[:] = [*filter(lambda ref: ref(), refs), weakref.ref(file)]
    # Now and then, forget the inodes of files that were closed
    if (count := len(_open_files)) >= _MANY and not count & (count - 1):
        for inode, (_, refs) in list(_open_files.items()):
            if not any(ref() for ref in refs):
                del _open_files[inode]


def is_being_written(paths: Iterable[str | os.PathLike[str]]) -> bool:
    """Return whether a program has one of these files open for writing by h5py."""
    written = set()
    for file in h5f.get_obj_ids(h5f.OBJ_ALL, h5f.OBJ_FILE):
        # Another thread may close it at any time
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            is_read = file.id in _shared_ids or file.get_intent() == h5f.ACC_RDONLY
            if not is_read and file.get_access_plist().get_driver() == h5fd.SEC2:
                written.add(identity_of(os.fstat(file.get_vfd_handle()))[:2])
    return bool(written) and any(
        identity_of(os.stat(path))[:2] in written
        for path in paths
        if os.path.exists(path)
    )


@contextlib.contextmanager
def closing(dataset: Any) -> Iterator[Any]:
    """Close a dataset, and with it its sources, at the end, whoever refers to it."""
    try:
        yield dataset
    finally:
        if dataset and dataset.id.valid:
            h5i.dec_ref(dataset.id)


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
            return _follow(file, os.fsdecode(other), rest, links - 1)
        else:
            break  # user-defined links need their library
    return []


class Sources(NamedTuple):
    """Other files with rows of datasets.

    Args:
      rows: by path, of which rows: the first one, and that after the last.
      patterns: paths of numbered sources, with %b for the number and %% for %.
      numbered: which of those exist, sorted.
    """

    rows: dict[str, tuple[int, int]]
    patterns: list[str]
    numbered: list[str]

    def add(self, paths: Iterable[str], rows: tuple[int, int] = ALL_ROWS) -> None:
        """Add files, or more rows of them."""
        for path in paths:
            first, stop = self.rows.get(path, rows)
            self.rows[path] = min(first, rows[0]), max(stop, rows[1])


def check_sources(
    datasets: Sequence[h5py.Dataset],
    existing: Sources,
    allow_short_external: bool = False,
) -> list[str]:
    """Return what is missing of the files of datasets: sources, external storage.

    Of the sources of virtual datasets: files, datasets, rows.

    A source may be virtual, too. Sources with a number in their name (%b) may be
    missing, and those that grow (an unlimited selection) may have any length.

    Args:
      datasets: those that are not virtual have no sources.
      existing: files that exist are added.
      allow_short_external: whether external storage may end before its rows.

    Raises:
      OSError: one is not a regular file.
    """
    missing: dict[str, None] = {}
    pending = list(datasets)
    seen = {(dataset.file.filename, dataset.name) for dataset in pending}
    with contextlib.ExitStack() as files:
        for number, dataset in enumerate(pending):  # sources are appended
            _find_storage(dataset, existing)
            missing.update(
                dict.fromkeys(_check_external(dataset, allow_short_external))
            )
            if not dataset.is_virtual:
                continue
            # Of sources of sources it is not known which rows they have
            rows = _rows_by_source(dataset) if number < len(datasets) else {}
            for source, problem in _look_up(dataset, existing, files, rows):
                if problem:
                    missing[problem] = None
                elif (key := (source.file.filename, source.name)) not in seen:
                    files.enter_context(closing(source))
                    pending.append(source)
                    seen.add(key)
    existing.numbered[:] = find_numbered(existing.patterns)
    existing.add(existing.numbered)
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
    origin = str(Path(file.filename).parent)
    prefix = os.environ.get(_STORAGE, "").replace("${ORIGIN}", origin)
    return os.path.abspath(os.path.join(prefix, name))


def _look_up(
    dataset: h5py.Dataset,
    existing: Sources,
    files: contextlib.ExitStack,
    rows: Mapping[str, tuple[int, int]],
) -> Iterator[tuple[Any, str]]:
    """Yield each source of a virtual dataset, and what is missing of it, or nothing.

    Args:
      dataset: a virtual one.
      existing: files that exist are added.
      files: keeps sources open.
      rows: by source file, which rows it has, if that is known.

    Raises:
      OSError: a file is not a regular one.
    """
    index, sources = read_part(dataset.file), _sources_of(dataset)
    ranks = index.shard_ranks() if index is not None else []
    if len(ranks) != len(sources):  # not a dataset of the writer
        ranks = []
    for (escaped, shapes), rank in itertools.zip_longest(sources.items(), ranks):
        if _is_numbered(escaped):
            continue
        file_name = escaped.replace("%%", "%")
        file, refused = _open_source(dataset.file, file_name, files)
        if file is not None and index is not None:
            shard = read_part(file)
            if shard is None or shard.output != index.output:
                file, refused = None, "is not what was written with this index"
            elif rank not in (None, shard.rank):
                refused = f"has the rows of rank {shard.rank}, not of rank {rank}"
                file = None
        if file is None:
            yield None, f"{file_name} {refused}"
            continue
        if file_name != ".":
            existing.add([file.filename], rows.get(escaped, ALL_ROWS))
        for escaped, shape in shapes.items():
            if _is_numbered(escaped):
                continue
            name = escaped.replace("%%", "%")
            try:
                existing.add(find_linked(file, name))
                source = file.get(name)
                problem = _problem(source, shape)
            except (KeyError, RuntimeError, ValueError) as error:
                source, problem = None, f"cannot be read: {error}"
            yield source, problem and f"{name!r} of {file_name} {problem}"


def _open_source(
    virtual: h5py.File, name: str, files: contextlib.ExitStack
) -> tuple[h5py.File | None, str]:
    """Open a source file of a dataset in the file `virtual`.

    Returns: the file, and why there is none.
    """
    if name == ".":
        return virtual, ""
    refused = "does not exist"
    for path in _find(name, virtual, _SOURCES):
        try:
            return files.enter_context(open_hdf5(Path(path), _is_shared(virtual))), ""
        except OSError as error:  # HDF5 tries the next
            refused = f"cannot be opened as HDF5: {error}"
    return None, refused


def _problem(source: Any, shape: tuple[int, ...]) -> str:
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


def _rows_by_source(dataset: h5py.Dataset) -> dict[str, tuple[int, int]]:
    plist, existing = dataset.id.get_create_plist(), Sources({}, [], [])
    for number in range(plist.get_virtual_count()):
        space, rows = plist.get_virtual_vspace(number), ALL_ROWS
        if not _grows(space) and space.get_select_type() == h5s.SEL_HYPERSLABS:
            first, last = space.get_select_bounds()
            rows = first[0], last[0] + 1
        existing.add([_decoded(plist.get_virtual_filename, number)], rows)
    return existing.rows


def _grows(space: h5s.SpaceID) -> bool:
    if (
        space.get_select_type() != h5s.SEL_HYPERSLABS
        or not space.is_regular_hyperslab()
    ):
        return False
    _, _, count, block = space.get_regular_hyperslab()
    return h5s.UNLIMITED in (*count, *block)


def _decoded(get: Callable[[int], str], number: int) -> str:
    try:
        return str(get(number))
    except UnicodeDecodeError as error:  # h5py assumes UTF-8
        return os.fsdecode(error.object)


def _stops(space: h5s.SpaceID) -> tuple[int, ...]:
    kind = space.get_select_type()
    if kind in (h5s.SEL_ALL, h5s.SEL_NONE):
        return ()  # HDF5 raises if a source is not as large as all of it
    if _grows(space):
        return ()
    return tuple(last + 1 for last in space.get_select_bounds()[1])


def _find_storage(dataset: h5py.Dataset, existing: Sources) -> None:
    """Add the files of external storage, and patterns of numbered VDS sources (%b)."""
    for name, _, _ in dataset.external or ():
        path = _storage_path(name, dataset.file)
        if os.path.exists(path):
            require_regular(path)
            existing.add([path])
    for name in _sources_of(dataset) if dataset.is_virtual else ():
        if _is_numbered(name):
            existing.patterns.extend(_candidates(name, dataset.file, _SOURCES))


def find_numbered(patterns: Iterable[str]) -> list[str]:
    """Return the numbered sources that exist, sorted.

    Raises:
      OSError: one is not a regular file.
    """

    def insert(digits: str, escaped: str) -> str:
        return re.sub("%(.)", lambda m: digits if m[1] == "b" else m[1], escaped)

    paths: set[str] = set()
    for pattern in patterns:
        like = re.compile(insert(r"\d+", re.escape(pattern)))
        near = glob.glob(insert("[0-9]*", glob.escape(pattern)))
        paths.update(filter(like.fullmatch, near))
    return _existing(sorted(paths))


def _follow(file: h5py.File, target: str, name: str, links: int) -> list[str]:
    """Return the first file that opens, and those on the path `name` in it."""
    for path in _find(target, file, _LINKS):
        try:
            other = open_hdf5(Path(path), _is_shared(file))
        except OSError:  # HDF5 tries the next
            continue
        with other:
            return [path, *find_linked(other, name, links)]
    return []


def _is_shared(file: h5py.File) -> bool:
    """Return whether a file was opened to see what this process writes."""
    return file.id.id in _shared_ids


def _find(name: str, file: h5py.File, prefix: str) -> list[str]:
    """Return the files that HDF5 may open for a name stored in `file`, in its order."""
    return _existing(_candidates(name, file, prefix))


def _candidates(name: str, file: h5py.File, prefix: str) -> list[str]:
    """Return where HDF5 looks for a name that is stored in `file`."""
    path = Path(file.filename)
    prefixes = [
        directory.replace("${ORIGIN}", str(path.parent))
        for directory in os.environ.get(prefix, "").split(":")
        if directory
    ]
    directories = [*prefixes, str(path.parent), "", str(path.resolve().parent)]
    # For a missing absolute path, HDF5 tries its last component alone
    paths = [os.path.join(d, n) for n in (name, Path(name).name) for d in directories]
    return list(dict.fromkeys(map(os.path.abspath, paths)))


def _existing(paths: Iterable[str]) -> list[str]:
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

    def shard_ranks(self) -> list[int]:
        """Return the ranks that have a shard, in the order of the index."""
        bits = range(self.with_rows.bit_length())
        return [rank for rank in bits if self.with_rows >> rank & 1]

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
        ranks = part.shard_ranks()
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
