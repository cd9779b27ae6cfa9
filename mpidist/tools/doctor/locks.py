"""Locks on files, tried: one process holds them, and others must see that.

Three kinds, which a file system may treat differently: fcntl's, flock's, and HDF5's
own, which is a flock that HDF5 takes when it opens a file, unless HDF5_USE_FILE_LOCKING
says otherwise. Only a `Worker` calls these functions.
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

from mpidist.tools.doctor.file_systems import PREFIX
from mpidist.tools.doctor.workers import cleanups

__all__ = ["HELD", "HIDDEN", "KINDS", "MISSED", "hold", "release", "see"]

KINDS = ("fcntl", "flock", "HDF5")
# What can be said of a lock: somebody has it; nobody seems to; the file is not there
HELD, MISSED, HIDDEN = "held", "missed", "hidden"
# Network file systems tell other nodes of a new file when their caches are old enough
_VISIBLE_SECONDS = 4.0
_TAKEN = (errno.EAGAIN, errno.EACCES)


def hold(folder: str) -> dict[str, tuple[str, str]]:
    """Make a file for each kind of lock, and take it, until `release`.

    Returns: for each kind the file's path, and why the lock was refused, or nothing.
    """
    return {kind: _hold_one(folder, kind) for kind in KINDS}


def release() -> None:
    """Give the locks back, and remove the files."""
    cleanups.close()


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
        handle, name = tempfile.mkstemp(".h5", PREFIX, folder)
    except OSError as error:
        return "", error.strerror or str(error)
    cleanups.callback(_remove, name)
    # Other users' ranks do not matter, but other nodes' may be other users to a server
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
