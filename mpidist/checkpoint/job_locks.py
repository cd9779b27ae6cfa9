"""File locks that detect a second job which saves to the same folder.

A job keeps a lock on the latest checkpoint that it saved under each name, and on the
files that it is writing. There is no lock file to clean up: the operating system drops
the lock when the process ends, however it ends. The lock is a shared one on a single
byte far beyond the end of the file, so it does not conflict with HDF5's own locks, and
the file can be read, copied and removed as usual. On file systems without locks, a job
detects checkpoints that another job saved between two of its own.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

from mpidist.errors import CheckpointError
from mpidist.regular_files import open_regular

__all__ = ["JOB", "hold", "is_locked", "lock", "release", "require_alone"]

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
