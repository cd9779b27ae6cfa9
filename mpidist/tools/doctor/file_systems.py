"""Checks of a path: its file system, writing files there, and locks on them.

These functions may block for ever, or crash: call them in a child process.

Locks are of three kinds, which a file system may treat differently: fcntl's, flock's,
and HDF5's own, which is a flock that HDF5 takes when it opens a file, unless
HDF5_USE_FILE_LOCKING says otherwise. One process holds them, and others must see that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mpidist.tools.doctor.children import cleanups
from mpidist.util.mounts import Mount, find_mount, read_mounts

__all__ = [
    "HELD",
    "HIDDEN",
    "KINDS",
    "MISSED",
    "PathFacts",
    "hold",
    "look",
    "open_hdf5",
    "see",
    "write",
]

_PREFIX = ".mpidist-doctor-"
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_TRIED_BYTES = 1 << 20
KINDS = ("fcntl", "flock", "HDF5")
# States of a lock for another process: taken; not taken; its file is not visible
HELD, MISSED, HIDDEN = "held", "missed", "hidden"
# Other nodes see a new file when their caches of the folder have expired
_VISIBLE_SECONDS = 4.0
_TAKEN = (errno.EAGAIN, errno.EACCES)


class PathFacts(NamedTuple):
    """A path as one rank sees it.

    Args:
      error: why it cannot be accessed; empty if it can.
      folder: for trial files: the path, or the folder of a file.
      is_file, is_hdf5: what it is.
      mount: of the file system; None if unknown.
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
    """Return the facts of a path."""
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
    block = status.f_frsize
    return PathFacts(
        "",
        str(folder),
        is_file,
        is_hdf5,
        find_mount(read_mounts(), str(found)),
        status.f_blocks * block,
        status.f_bavail * block,
    )


def _starts_as_hdf5(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_SIGNATURE)) == _SIGNATURE


def open_hdf5(path: str) -> str:
    """Open an HDF5 file for reading; return the error, or nothing."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            list(file)
    except (OSError, RuntimeError) as error:
        return " ".join(str(error).split())
    return ""


def write(folder: str) -> tuple[int, str]:
    """Write, fsync, rename and remove a file, as checkpoints do.

    Returns: errno and text of the error, or 0; errno is negative if no file could be
    created at all.
    """
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=_PREFIX)
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


def hold(folder: str) -> dict[str, tuple[str, str]]:
    """Create and lock a file for each kind of lock, until this process ends.

    Returns: for each kind the file's path, and why the lock was refused, or nothing.
    """
    return {kind: _hold_one(folder, kind) for kind in KINDS}


def see(held: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Return for each kind HELD, MISSED, HIDDEN, or why the lock was refused."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    return {
        kind: _see_one(kind, path, deadline)
        for kind, (path, refused) in held.items()
        if not refused
    }


def _hold_one(folder: str, kind: str) -> tuple[str, str]:
    try:
        handle, name = tempfile.mkstemp(".h5", _PREFIX, folder)
    except OSError as error:
        return "", error.strerror or str(error)
    cleanups.callback(_remove, name)
    cleanups.callback(os.close, handle)
    try:
        if kind == "HDF5":
            _hold_hdf5(name)
        else:
            _lock(kind)(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, RuntimeError) as error:
        return name, _explain(error)
    return name, ""


def _hold_hdf5(name: str) -> None:
    import h5py

    file = h5py.File(name, "w")
    cleanups.callback(file.close)
    file["x"] = 1
    file.flush()


def _see_one(kind: str, path: str, deadline: float) -> str:
    while not Path(path).exists():
        if time.monotonic() > deadline:
            return HIDDEN
        time.sleep(0.05)
    try:
        if kind == "HDF5":
            import h5py

            h5py.File(path, "r").close()
        else:
            with open(path, "rb+") as file:
                _lock(kind)(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, RuntimeError) as error:
        is_taken = getattr(error, "errno", None) in _TAKEN
        return HELD if is_taken else _explain(error)
    return MISSED


def _lock(kind: str) -> Callable[[int, int], None]:
    return fcntl.lockf if kind == "fcntl" else fcntl.flock


def _explain(error: OSError | RuntimeError) -> str:
    number = getattr(error, "errno", None)
    if number:
        return f"{errno.errorcode.get(number, number)}: {os.strerror(number)}"
    return " ".join(str(error).split())


def _remove(name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name)
