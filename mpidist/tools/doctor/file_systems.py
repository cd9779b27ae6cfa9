"""What lies under a path: the file system, and whether files can be written there.

These functions may block for ever, or crash: only a `Worker` calls them.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

__all__ = ["PREFIX", "Mount", "PathFacts", "find_mount", "look", "open_hdf5", "write"]

PREFIX = ".mpidist-doctor-"
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_TRIED_BYTES = 1 << 20


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo.

    Args:
      point: where it is mounted.
      kind: the type of the file system, such as "nfs4".
      source: the device or server.
      options: of the mount and of the file system.
    """

    point: str
    kind: str
    source: str
    options: frozenset[str]


class PathFacts(NamedTuple):
    """What a rank sees of a path.

    Args:
      error: why it cannot be looked at; empty if it can.
      folder: where files are tried: the path, or the folder of a file.
      is_file, is_hdf5: what it is.
      mount: of the file system; None where the system does not tell.
      size_bytes, free_bytes: of the file system.
    """

    error: str = ""
    folder: str = ""
    is_file: bool = False
    is_hdf5: bool = False
    mount: Mount | None = None
    size_bytes: int = 0
    free_bytes: int = 0


def look(path: str) -> PathFacts:
    """Return what there is at a path."""
    try:
        found = Path(path).resolve(strict=True)
        folder = found if found.is_dir() else found.parent
        is_file = found.is_file()
        if not is_file and not found.is_dir():
            return PathFacts("it is neither a file nor a folder")
        is_hdf5 = is_file and _starts_as_hdf5(found)
        status = os.statvfs(found)
        if not is_file:
            next(os.scandir(found), None)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # RuntimeError: links in a ring
        return PathFacts(getattr(error, "strerror", None) or str(error))
    with contextlib.suppress(OSError):
        table = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        mount = find_mount(table, str(found))
        block = status.f_frsize
        return PathFacts(
            "",
            str(folder),
            is_file,
            is_hdf5,
            mount,
            status.f_blocks * block,
            status.f_bavail * block,
        )
    return PathFacts("", str(folder), is_file, is_hdf5)


def _starts_as_hdf5(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_SIGNATURE)) == _SIGNATURE


def find_mount(table: str, path: str) -> Mount | None:
    """Return what is mounted where `path`, which holds no links, lies.

    Args:
      table: the text of /proc/self/mountinfo.
      path: absolute.
    """
    best: Mount | None = None
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        fields, after = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(after) < 3:
            continue
        point = _unescape(fields[4])
        options = frozenset(f"{fields[5]},{after[2]}".split(","))
        # Of those at one point the last hides the others
        if Path(path).is_relative_to(point) and (
            best is None or len(point) >= len(best.point)
        ):
            best = Mount(point, after[0], _unescape(after[1]), options)
    return best


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def open_hdf5(path: str) -> str:
    """Open an HDF5 file to read; return why that fails, or nothing."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            list(file)
    except (OSError, RuntimeError) as error:
        return " ".join(str(error).split())
    return ""


def write(folder: str) -> tuple[int, str]:
    """Do in a folder what checkpoints do: write, fsync, rename, map, remove.

    Returns: the number and the text of the error, 0 if there was none; the number is
    negative where no file could be made at all.
    """
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=PREFIX)
    except OSError as error:
        return -(error.errno or errno.EIO), error.strerror or str(error)
    renamed = f"{name}-renamed"
    step = "writing 1 MiB"
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(os.urandom(_TRIED_BYTES))
            file.flush()
            step = "fsync of a file"
            os.fsync(file.fileno())
        step = "renaming"
        Path(name).rename(renamed)
        step = "fsync of the folder"
        _sync_folder(folder)
        step = "mapping a file into memory"
        with open(renamed, "rb") as file:
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).close()
    except OSError as error:
        return error.errno or errno.EIO, f"{step}: {error.strerror or error}"
    finally:
        for path in (name, renamed):
            with contextlib.suppress(OSError):
                os.unlink(path)
    return 0, ""


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
