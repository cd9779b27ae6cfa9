"""Files of checkpoints: checked writing and reading, making and removing."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deflate

from mpidist.atomic_files import sync_folder
from mpidist.errors import CheckpointError
from mpidist.regular_files import open_regular

__all__ = [
    "DamagedError",
    "checked_read",
    "checked_write",
    "damage",
    "is_left_behind",
    "make_folder",
    "removal",
    "remove",
    "unwritable",
]

_TEMPORARY = re.compile(r"(.+?\.h5)\.(.+)\.(\d+)\.(\d+)\.tmp")
# So much is checked and written at once: it stays in the cache between the two
_STEP_BYTES = 4 << 20


class DamagedError(CheckpointError):
    """A file is missing or damaged, so that an earlier checkpoint may be taken."""


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, that are missing."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


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


def is_left_behind(name: str, of: re.Pattern[str]) -> bool:
    """Return whether a temporary file belongs to no process any more.

    That is, to none of this host: a process of another one cannot be seen.

    Args:
      name: of the file.
      of: what the name of the complete file must match.
    """
    match = _TEMPORARY.fullmatch(name)
    if match is None or not of.fullmatch(match[1]):
        return False
    host, process = match[2], int(match[3])
    return host != os.uname().nodename or not _is_running(process)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


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
