"""Files that appear under their names all at once: written beside, then renamed."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["NewFile", "replace_file", "sync_folder"]


class NewFile(io.FileIO):
    """A new file under a temporary name in the folder of `path`, until `publish`.

    The temporary name holds the host, the process and a random number. The file is
    created exclusively, so nothing that lies under that name is followed or
    overwritten, whoever put it there. Its permissions are those of any new file.

    Raises:
      OSError: the folder is not there, or cannot be written to.
    """

    def __init__(self, path: Path):
        self.path = path
        self._owner = os.getpid()
        self._is_published = False
        unique = f"{os.uname().nodename}.{self._owner}.{secrets.randbits(32)}"
        self.temporary = path.with_name(f"{path.name}.{unique}.tmp")
        super().__init__(self.temporary, "x+")  # O_CREAT | O_EXCL follows no link

    def write(self, data: Any) -> int:
        """Write all of `data`; return its size in bytes."""
        rest = memoryview(data)
        size = rest.nbytes
        while rest.nbytes:
            rest = rest[super().write(rest) :]
        return size

    def complete(self) -> None:
        """Bring everything to the disk, and close the file.

        Raises:
          OSError: something could not be written.
        """
        os.fsync(self.fileno())
        self.close()

    def publish(self) -> None:
        """Give the complete file its name, in place of one that had it before.

        The name is on the disk once `sync_folder` was called.
        """
        self.temporary.replace(self.path)
        self._is_published = True

    def withdraw(self) -> None:
        """Remove the file if it was published, as far as that is possible."""
        if self._is_published:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def discard(self) -> None:
        """Close the file; remove it unless it was published, as far as possible."""
        with contextlib.suppress(OSError):
            self.close()
        if self._is_owned() and not self._is_published:
            with contextlib.suppress(OSError):
                self.temporary.unlink()

    def _is_owned(self) -> bool:
        """Return whether this process, and not a parent of it, made the file."""
        return os.getpid() == self._owner


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[NewFile]:
    """Give a file to write, which is published at the end of the block.

    If the block, or writing, fails, nothing is left and `path` is as it was.

    Raises:
      OSError: the file cannot be written.
    """
    file = NewFile(path)
    try:
        yield file
        file.complete()
        file.publish()
        sync_folder(path.parent)
    except BaseException:
        file.discard()
        raise


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the file system has that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
