"""Opening files that must be regular ones: opening anything else may block or act.

Opening a FIFO waits for a writer, and opening a device may do things to it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "NewFile",
    "Unfinished",
    "open_regular",
    "replace_file",
    "require_regular",
    "sync_folder",
]


_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raise unless a path leads to a regular file, after following links.

    Raises:
      OSError: there is none, or it is something else; the message names it.
    """
    _require_mode(os.stat(path).st_mode, path)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file, which is not inherited.

    Args:
      path: to an existing file.
      flags: of `os.open`; neither O_CREAT nor O_TRUNC.

    Raises:
      OSError: it cannot be opened, or is no regular file; the message names it.
    """
    require_regular(path)
    flags |= os.O_CLOEXEC
    try:
        # Without waiting, in case the path leads to a FIFO by now
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # another process must give back its lease first
        descriptor = os.open(path, flags)
    try:
        _require_mode(os.fstat(descriptor).st_mode, path)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_mode(mode: int, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "of an unknown type")
        raise OSError(
            errno.EINVAL, f"it is {kind}, and must be a regular file", os.fspath(path)
        )


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


class Unfinished(NewFile):
    """A new file for `h5py.File`, whose writes do not raise.

    HDF5 cannot close a file after a write that failed, and brings the process down when
    that ends. The first error is kept for `require_sound`, and nothing is written after
    it. In a forked process nothing is written at all. HDF5 takes no locks on such a
    file, which fail on many network file systems.

    Raises:
      OSError: the folder is not there, or cannot be written to.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`, or keep the error."""
        if self._may_write():
            with self._keep_error():
                return super().write(data)
        return memoryview(data).nbytes

    def truncate(self, size: int | None = None) -> int:
        """Change the length of the file, or keep the error."""
        if self._may_write():
            with self._keep_error():
                super().truncate(size)
        return 0 if size is None else size

    def require_sound(self) -> None:
        """Raise the OSError of the first write that failed."""
        if self._error is not None:
            raise self._error

    def complete(self) -> None:
        """Bring everything to the disk, and close the file.

        Raises:
          OSError: something could not be written, now or before.
        """
        with self._keep_error():
            super().complete()
        self.close()
        self.require_sound()

    def _may_write(self) -> bool:
        return self._error is None and self._is_owned()

    @contextlib.contextmanager
    def _keep_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = self._error or error
