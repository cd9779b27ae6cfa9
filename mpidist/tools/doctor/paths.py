"""Paths of a job's files: whether all ranks can read, write and lock files there.

A file system may block a process for ever, so a path is tried in a child process. Locks
are of two kinds, which a file system may treat differently: fcntl's, which checkpoints
use, and HDF5's, a flock that HDF5 takes when it opens a file, unless
HDF5_USE_FILE_LOCKING says otherwise. One process holds them, and others must see that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpidist.tools.doctor.children import Child, cleanups, run_named, send
from mpidist.tools.doctor.rows import FAIL, OK, WARN, Failure, Row
from mpidist.util.available_memory import as_text
from mpidist.util.files import sync_directory
from mpidist.util.mounts import find_mount, read_mounts

LOCKING = "HDF5_USE_FILE_LOCKING"
_OR_ELSE = f"; if that blocks, set {LOCKING}=FALSE"
_PREFIX = ".mpidist-doctor-"
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_TRIED_BYTES = 1 << 20
_LITTLE = 0.01
KINDS = ("fcntl", "HDF5")
# States of a lock for another process: taken; not taken; its file is not visible
HELD, MISSED, HIDDEN = "held", "missed", "hidden"
# Other nodes see a new file when their caches of the folder have expired
_VISIBLE_SECONDS = 4.0
_TAKEN = (errno.EAGAIN, errno.EACCES)
# Errors of creating a file that have other reasons than permissions
_TROUBLES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENFILE)
_ERRORS = (OSError, RuntimeError, ValueError)  # RuntimeError: of HDF5; links in a ring
Locks = dict[str, tuple[str, str]]  # by kind: the file, and why it could not be locked
Tried = tuple[list[Row], Locks]


def try_path(path: str, is_writer: bool, is_holder: bool) -> Tried:
    """Access a path, open an HDF5 file, and perhaps write, and hold locks.

    Locks are held until this process ends; it may block: call it in a child.
    """
    send("step", "accessing it")
    try:
        real = Path(path).resolve(strict=True)
        rows = _look(real, path)
    except _ERRORS as error:
        return [_unreachable(path, getattr(error, "strerror", None) or str(error))], {}
    folder = real if real.is_dir() else real.parent
    locks: Locks = {}
    if is_writer:
        rows.append(_write(folder)._replace(what=f"{path}: writing"))
        if is_holder and rows[-1].status is OK:
            locks = {kind: _hold(folder, kind) for kind in KINDS}
    return rows, locks


def _unreachable(path: str, why: str) -> Row:
    remedy = "correct the path, or check that it is mounted and responds on every node"
    return Row(FAIL, why, remedy, path)


def _look(real: Path, path: str) -> list[Row]:
    """Read from a path; raises one of _ERRORS if it cannot be accessed."""
    if not real.is_dir() and not real.is_file():
        raise OSError(errno.EINVAL, "it is neither a file nor a folder")
    mount = find_mount(read_mounts(), str(real))
    kind = f"{mount.kind} mounted on {mount.point}" if mount else "of an unknown type"
    remedy = "mount the same file system on every node"
    rows = [Row(OK, kind, remedy, path, unlike=WARN)]
    if real.is_dir():
        next(os.scandir(real), None)
        return rows
    with real.open("rb") as file:
        is_hdf5 = file.read(len(_SIGNATURE)) == _SIGNATURE
    return [*rows, _open(real)._replace(what=f"{path}: HDF5")] if is_hdf5 else rows


def _open(path: Path) -> Row:
    import h5py

    send("step", "opening it as an HDF5 file")
    try:
        with h5py.File(path, "r") as file:
            list(file)
    except (OSError, RuntimeError) as error:
        remedy = "a file is damaged or being written; if locking is refused, set "
        return Row(FAIL, " ".join(str(error).split()), f"{remedy}{LOCKING}=BEST_EFFORT")
    return Row(OK, "can be read")


def _write(folder: Path) -> Row:
    """Write, fsync, rename and remove a file, as checkpoints do."""
    lost = "checkpoints would be lost: make room, or use another file system"
    send("step", "creating a file there")
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=_PREFIX)
    except OSError as error:
        if error.errno in _TROUBLES:
            return Row(FAIL, error.strerror or str(error), lost)
        remedy = "the folder is read-only: choose another one for checkpoints and "
        remedy += "Hdf5Writer, or change the permissions"
        return Row(WARN, error.strerror or str(error), remedy)
    renamed = f"{name}-renamed"
    try:
        with os.fdopen(handle, "wb") as file:
            send("step", step := "writing 1 MiB")
            file.write(os.urandom(_TRIED_BYTES))
            file.flush()
            send("step", step := "fsync of a file")
            os.fsync(file.fileno())
        send("step", step := "renaming")
        Path(name).rename(renamed)
        send("step", step := "fsync of the folder")
        sync_directory(folder)
        status = os.statvfs(folder)
    except OSError as error:
        return Row(FAIL, f"{step}: {error.strerror or error}", lost)
    finally:
        _remove(name)
        _remove(renamed)
    size, free = (n * status.f_frsize for n in (status.f_blocks, status.f_bavail))
    found = (
        f"write, fsync and rename work; {free / max(size, 1):.0%} of {as_text(size)} "
    )
    if free < _LITTLE * size:
        return Row(WARN, f"{found}free", "make room there")
    return Row(OK, f"{found}free")


def _remove(name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name)


def _hold(folder: Path, kind: str) -> tuple[str, str]:
    """Create and lock a file; return its path, and why it was refused, or nothing."""
    send("step", f"locking a file there ({kind}){_OR_ELSE}")
    try:
        handle, name = tempfile.mkstemp(".h5", _PREFIX, folder)
    except OSError as error:
        return "", error.strerror or str(error)
    os.close(handle)
    cleanups.callback(_remove, name)
    try:
        cleanups.callback(_lock(kind, name, "w").close)
    except (OSError, RuntimeError) as error:
        return name, _explain(error)
    return name, ""


def _lock(kind: str, name: str, mode: str) -> Any:
    """Return a file that is locked until it is closed."""
    if kind == "HDF5":
        import h5py

        file = h5py.File(name, mode)
        file.flush()  # or others could not open it
        return file
    file = io.FileIO(name, "rb+")
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _explain(error: OSError | RuntimeError) -> str:
    number = getattr(error, "errno", None)
    if number:
        return f"{errno.errorcode.get(number, number)}: {os.strerror(number)}"
    return " ".join(str(error).split())


def see_locks(held: Locks) -> dict[str, str]:
    """Return for each kind HELD, MISSED, HIDDEN, or why a lock was refused."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    return {
        kind: refused or _see(kind, name, deadline)
        for kind, (name, refused) in held.items()
    }


def _see(kind: str, name: str, deadline: float) -> str:
    send("step", f"locking a file ({kind}) that rank 0 has locked{_OR_ELSE}")
    while not Path(name).exists():
        if time.monotonic() > deadline:
            return HIDDEN
        time.sleep(0.05)
    try:
        _lock(kind, name, "r").close()
    except (OSError, RuntimeError) as error:
        is_taken = getattr(error, "errno", None) in _TAKEN
        return HELD if is_taken else _explain(error)
    return MISSED


def check_locks(states: Mapping[str, str], locking: str | None) -> Row:
    """Return a row on what one process sees of the locks of another.

    Args:
      states: see `see_locks`.
      locking: the variable HDF5_USE_FILE_LOCKING.
    """
    if HIDDEN in states.values():
        remedy = "use this path only for files of one node each: it is not shared"
        return Row(WARN, "does not see the files of rank 0", remedy)
    remedy = "mount the file system with locks (Lustre: flock; NFS: without nolock)"
    for kind, state in sorted(states.items()):  # HDF5's first
        if state not in (HELD, MISSED):
            found, is_hdf5 = f"{kind} is refused: {state}", kind == "HDF5"
            remedy += f", or set {LOCKING}=FALSE on all ranks" * is_hdf5
            return Row(FAIL if is_hdf5 else WARN, found, remedy)
    off = ["HDF5"] if locking in ("FALSE", "0") else []
    kinds = {
        state: [k for k, s in states.items() if s == state and k not in off]
        for state in (HELD, MISSED)
    }
    if kinds[MISSED]:
        found = f"not kept out by locks of rank 0: {', '.join(kinds[MISSED])}"
        return Row(WARN, found, f"{remedy}; or let one rank write a file")
    text = f"; HDF5 does not lock files ({LOCKING}={locking})" * bool(off)
    found = f"another process sees those of rank 0: {', '.join(kinds[HELD])}{text}"
    return Row(OK, found)


@contextlib.contextmanager
def try_paths(
    paths: Sequence[str], seconds: float, is_writer: bool, is_holder: bool
) -> Iterator[tuple[list[Row], dict[str, Locks]]]:
    """Yield the rows on all paths, and the locks by path, held inside of the block.

    All paths are tried at the same time, so that a dead one does not delay others.
    """
    with contextlib.ExitStack() as children:
        started = [
            children.enter_context(Child(try_path, path, is_writer, is_holder))
            for path in paths
        ]
        rows, locks = [], {}
        for path, child in zip(paths, started, strict=True):
            result = child.result(seconds)
            if isinstance(result, Failure):
                result = [_unreachable(path, result)], {}
            rows += result[0]
            locks[path] = result[1]
        yield rows, locks


def try_locks(locks: Mapping[str, Locks], seconds: float) -> list[Row]:
    """Return rows on what another process than the holder sees of its locks."""
    calls = {
        f"{path}: locks": (_try_to_lock, own) for path, own in locks.items() if own
    }
    return run_named(calls, seconds)


def _try_to_lock(held: Locks) -> Row:
    return check_locks(see_locks(held), os.environ.get(LOCKING))


def try_alone(paths: Sequence[str], seconds: float) -> list[Row]:
    """Try paths by this process alone; a second child looks at the locks."""
    with try_paths(paths, seconds, is_writer=True, is_holder=True) as (rows, locks):
        return [*rows, *try_locks(locks, seconds)]
