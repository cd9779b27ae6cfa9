"""Files of checkpoints: checked writing and reading, making and removing."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import deflate

from mpidist.errors import CheckpointError
from mpidist.util.files import open_regular, sync_directory

__all__ = [
    "DamagedError",
    "JOB",
    "checked_read",
    "checked_write",
    "damage",
    "hold",
    "is_locked",
    "lock",
    "make_folder",
    "release",
    "removal",
    "remove",
    "require_alone",
    "unwritable",
]


# So much is checked and written at once: it stays in the cache between the two
_STEP_BYTES = 4 << 20


class DamagedError(CheckpointError):
    """A file is missing or damaged, so that an earlier checkpoint may be taken."""


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, that are missing."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent)


def remove(path: Path) -> None:
    """Remove a file, as far as that is possible."""
    with contextlib.suppress(OSError):
        path.unlink()


class Removal:
    """Removes files, whose names go at once; their blocks are freed in a thread.

    To free them can take as long as to write them.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def remove(self, path: Path) -> None:
        """Remove a file, as far as that is possible."""
        try:
            # The blocks stay while the file is open
            descriptor = open_regular(path)
        except OSError:
            remove(path)
            return
        remove(path)
        thread = threading.Thread(target=os.close, args=(descriptor,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def wait(self) -> None:
        """Wait until the space of the files is free."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()


removal = Removal()


def checked_write(descriptor: int, offset: int, data: Any) -> int:
    """Write all of a contiguous buffer to a file at an offset; return its CRC-32."""
    rest = memoryview(data).cast("B")
    crc32 = 0
    while rest.nbytes:
        step = rest[:_STEP_BYTES]
        crc32 = deflate.crc32(step, crc32)
        rest = rest[step.nbytes :]
        while step.nbytes:
            written = os.pwrite(descriptor, step, offset)
            offset += written
            step = step[written:]
    return crc32


def checked_read(descriptor: int, offset: int, into: Any, crc32: int) -> None:
    """Fill a buffer from a file.

    Raises:
      ValueError: the file ends before, or the bytes do not have that CRC-32.
    """
    view = memoryview(into).cast("B")
    found, at, done = 0, offset, 0
    while done < view.nbytes:
        step = view[done : done + _STEP_BYTES]
        count = os.preadv(descriptor, [step], at)
        if not count:
            raise ValueError(f"it ends at byte {at}, in the middle of an array")
        found = deflate.crc32(step[:count], found)
        at += count
        done += count
    if found != crc32:
        raise ValueError(
            f"bytes {offset} to {at} do not have their checksum: {found:08x} instead "
            f"of {crc32:08x}"
        )


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Raise what the operating system says as a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """Raise a CheckpointError for whatever goes wrong while a file is read."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise DamagedError(f"{path}: there is no such file") from None
    except PermissionError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except Exception as error:  # HDF5 raises almost anything
        reason = str(error) or type(error).__name__
        raise DamagedError(f"{path}: the checkpoint is damaged: {reason}") from error


_FLOCK = "@hhqqi0q"  # of the C library: type, origin, first byte, bytes, process
_BYTE = 1 << 62
# How long a requeued job waits for the previous one to end
_PATIENCE_SECONDS = 30.0
_LOOK_SECONDS = 0.1
_MOST_HELD = 64
_SCHEDULERS = {
    "SLURM_JOB_ID": "Slurm job",
    "PBS_JOBID": "PBS job",
    "LSB_JOBID": "LSF job",
    "FLUX_JOB_ID": "Flux job",
}


def _describe_job() -> str:
    found = [
        f"{scheduler} {os.environ[name][:40]}, "
        for name, scheduler in _SCHEDULERS.items()
        if name in os.environ
    ]
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    where = f"process {os.getpid()} on host {os.uname().nodename[:64]}"
    return f"{''.join(found[:1])}{where}, started {now}"


JOB = _describe_job()


class _Held(NamedTuple):
    """The latest checkpoint that this process saved under a name."""

    descriptor: int
    serial: int
    owner: int  # the id of who has saved it


# By folder and name of the checkpoints, in the order of saving
_held: dict[tuple[str, str], _Held] = {}


def lock(descriptor: int) -> bool:
    """Lock an open file; return whether that was possible.

    The lock lasts until this descriptor and its duplicates are closed.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_RDLCK))
    except OSError:  # a file system without locks
        return False
    return True


def is_locked(path: Path) -> bool:
    """Return whether a running process holds a lock on a file by `lock`."""
    try:
        descriptor = open_regular(path)
    except OSError:
        return False
    try:
        request = _request(fcntl.F_WRLCK)
        found = struct.unpack(
            _FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request)
        )
    except OSError:
        return False
    finally:
        os.close(descriptor)
    kind, _, start, size, _ = found
    # NFS reports HDF5's flock() as a lock on the whole file: that is no saving job
    return bool(kind != fcntl.F_UNLCK and (start, size) == (_BYTE, 1))


def hold(index: Path, name: str, descriptor: int, serial: int, owner: int) -> None:
    """Keep the lock on a complete checkpoint; drop that on the previous one.

    Args:
      index: the checkpoint.
      name: of the checkpoints, without numbers.
      descriptor: of the open, locked file; owned by this module from now on.
      serial: of the checkpoint.
      owner: the argument for `release`.
    """
    key = _key(index, name)
    former = _held.pop(key, None)
    _held[key] = _Held(descriptor, serial, owner)
    if former is not None:
        os.close(former.descriptor)
    while len(_held) > _MOST_HELD:
        os.close(_held.pop(next(iter(_held))).descriptor)


def release(owner: int) -> None:
    """Drop the locks on the checkpoints of `owner`, so that other jobs may save."""
    for key in [key for key, held in _held.items() if held.owner == owner]:
        os.close(_held.pop(key).descriptor)


def require_alone(
    index: Path, name: str, newest: Path | None, serial: int, job: str
) -> None:
    """Raise if another job saves checkpoints of the same name in the same folder.

    Args:
      index: what is about to be saved.
      name: of the checkpoints, without numbers.
      newest: the checkpoint that was saved last, if there is one.
      serial: of that checkpoint.
      job: who has saved it, as it is written there.

    Raises:
      CheckpointError: the job that saved the latest checkpoint is still running; or
        it saved after the latest save of this job.
    """
    if newest is None or _is_held(newest):
        return
    mine = _held.get(_key(index, name))
    patience = 0.0 if mine is not None else _PATIENCE_SECONDS
    deadline = time.monotonic() + patience
    while is_locked(newest):
        if time.monotonic() >= deadline:
            _refuse(index, name, newest, job, "is running")
        time.sleep(_LOOK_SECONDS)
    if mine is not None and serial >= mine.serial and job != JOB:
        _refuse(index, name, newest, job, "has saved it after the last one of this job")


def _refuse(index: Path, name: str, newest: Path, job: str, why: str) -> NoReturn:
    raise CheckpointError(
        f"{index}: another job saves checkpoints {name!r} in this folder: "
        f"{job or 'one of an older version'}. It has saved {newest.name}, and {why}. "
        f"This one is {JOB}. End one of them, or give each a folder of its own"
    )


def _is_held(path: Path) -> bool:
    """Return whether this process holds a file."""
    try:
        found = path.stat()
        return any(os.path.samestat(found, os.fstat(h[0])) for h in _held.values())
    except OSError:
        return False


def _key(index: Path, name: str) -> tuple[str, str]:
    return os.path.realpath(index.parent), name


def _request(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, _BYTE, 1, 0)


def _leave_to_parent() -> None:
    """Close the copies of a forked child, which would keep locks beyond the job."""
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
