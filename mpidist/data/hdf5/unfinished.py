"""Files that get their names when they are complete, for HDF5 to write into."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Unfinished", "sync_folder"]

_numbers = itertools.count()


class Unfinished(io.FileIO):
    """A new file, under a temporary name in the folder of `path`: for `h5py.File`.

    Its writes do not raise: HDF5 cannot close a file after a write that failed, and
    brings the process down when that ends. The first error is kept for `require_sound`
    and nothing is written after it. In a forked process nothing is written at all.

    The temporary name has host and process in it. HDF5 takes no locks on it, which fail
    on many network file systems: no other process writes to that name.

    Raises:
      OSError: the folder is not there, or cannot be written to.
    """

    def __init__(self, path: Path):
        self.path = path
        self._owner = os.getpid()
        self._error: OSError | None = None
        self._is_published = False
        unique = f"{os.uname().nodename}.{self._owner}.{next(_numbers)}"
        self.temporary = path.with_name(f"{path.name}.{unique}.tmp")
        super().__init__(self.temporary, "w+")

    def write(self, data: Any) -> int:
        """Write all of `data`, or keep the error."""
        rest = memoryview(data)
        size = rest.nbytes
        with self._keep_error():
            while rest.nbytes and self._may_write():
                rest = rest[super().write(rest) :]
        return size

    def truncate(self, size: int | None = None) -> int:
        """Change the length of the file, or keep the error."""
        with self._keep_error():
            if self._may_write():
                super().truncate(size)
        return 0 if size is None else size

    def require_sound(self) -> None:
        """Raise the OSError of the first write that failed."""
        if self._error is not None:
            raise self._error

    def complete(self) -> None:
        """Bring everything to the disk, and close the file.

        Raises:
          OSError: something could not be written.
        """
        with self._keep_error():
            os.fsync(self.fileno())
        self.close()
        self.require_sound()

    def publish(self) -> None:
        """Give the complete file its name."""
        self.temporary.replace(self.path)
        self._is_published = True

    def withdraw(self) -> None:
        """Remove the file if it was published, as far as that is possible."""
        if self._is_published:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def discard(self) -> None:
        """Close and remove the file, as far as that is possible."""
        with contextlib.suppress(OSError):
            self.close()
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self.temporary.unlink()

    def _may_write(self) -> bool:
        return self._error is None and os.getpid() == self._owner

    @contextlib.contextmanager
    def _keep_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = self._error or error


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
