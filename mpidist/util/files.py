"""Open regular files only, and create files atomically.

Opening a FIFO blocks until there is a writer, and opening a device can change its
state, so files that users name are checked first.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def require_regular(
    path: str | os.PathLike[str], descriptor: int | None = None
) -> None:
    """Raise unless `path`, after following links, is a regular file.

    Args:
      path: of the file.
      descriptor: of the file, if it is open: then this is checked, not the path.

    Raises:
      OSError: it does not exist, or is of another type, which the message names.
    """
    mode = os.stat(path if descriptor is None else descriptor).st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "of an unknown type")
        raise OSError(
            errno.EINVAL, f"it is {kind}, and must be a regular file", os.fspath(path)
        )


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file; return a descriptor that child processes do not inherit.

    Args:
      path: of an existing file.
      flags: of `os.open`, without O_CREAT and O_TRUNC.

    Raises:
      OSError: it cannot be opened, or is not a regular file; the message names it.
    """
    require_regular(path)
    flags |= os.O_CLOEXEC
    try:
        # Do not block if the path has become a FIFO since the check
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # wait until another process releases its lease
        descriptor = os.open(path, flags)
    try:
        require_regular(path, descriptor)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file.

    Raises:
      OSError: see `open_regular`.
    """
    with open(open_regular(path), "rb") as file:
        return file.read()


def read_fully(descriptor: int, size: int, offset: int) -> bytes:
    """Return `size` bytes of a file from `offset` on; fewer only at its end.

    One call may return fewer: on a network file system, when a signal arrives.
    """
    parts, end = [], offset + size
    while offset < end and (part := os.pread(descriptor, end - offset, offset)):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def close(descriptor: int) -> None:
    """Close a file that was written by others, or flushed; errors mean nothing then."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def user_directory(
    variable: str, default: str, environ: Mapping[str, str] = os.environ
) -> Path | None:
    """Return a directory of this user for files of one kind; None if there is none.

    Args:
      variable: names it, such as "XDG_CONFIG_HOME"; a relative path does not count.
      default: its path in the home directory.
      environ: the environment variables.
    """
    named = Path(environ.get(variable) or ".")
    if named.is_absolute():
        return named
    try:
        home = Path.home()
    except (RuntimeError, KeyError):  # a user who is in no list of users
        return None
    return home / default if home.is_absolute() else None


# Errors of `os.link` on file systems without hard links
_WITHOUT_LINKS = {
    errno.EPERM,
    errno.EMLINK,
    errno.ENOSYS,
    errno.EXDEV,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
}


def identity(file: Path | int) -> tuple[int, int]:
    """Return device and inode of a path, following no link, or of an open file."""
    status = os.fstat(file) if isinstance(file, int) else os.lstat(file)
    return status.st_dev, status.st_ino


def rename_beside(source: Path, target: Path) -> None:
    """Give a file another name, if there is no file of that name.

    Its first name may stay, too.

    Raises:
      FileExistsError: there is one.
      OSError: the file did not get that name, as far as one can see.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _WITHOUT_LINKS:
            raise
        _claim_and_rename(source, target)


def _claim_and_rename(source: Path, target: Path) -> None:
    """Rename a file over an empty one, which only this call can have created."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
    claimed = None
    try:
        claimed = identity(descriptor)
        os.replace(source, target)
    except BaseException:
        with contextlib.suppress(OSError):
            if identity(target) == claimed:
                os.unlink(target)
        raise
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


# After the final name, which may have dots as the host may
_TEMPORARY = r"\.(?P<host>.+)\.(?P<process>\d+)\.\d+\.tmp"


class AtomicFile(io.FileIO):
    """A new file that appears at `path` only once it is complete.

    Until `publish` it has a temporary name in the same directory, of the host, the
    process and a random number. It is created exclusively: a file or link that exists
    under that name is neither followed nor overwritten. Its permissions are those of
    any new file.

    Raises:
      OSError: the directory does not exist, or is not writable.
    """

    def __init__(self, path: Path):
        self.path = path
        self._owner = os.getpid()
        self._is_published = False
        unique = f"{os.uname().nodename}.{self._owner}.{secrets.randbits(32)}"
        self.temporary = path.with_name(f"{path.name}.{unique}.tmp")
        # O_CREAT | O_EXCL follows no link
        super().__init__(os.fspath(self.temporary), "x+")
        try:
            self._identity = identity(self.fileno())
        except BaseException:
            self.discard()
            raise

    def write(self, data: Any) -> int:
        """Write all of `data`; return its size in bytes."""
        rest = memoryview(data)
        size = rest.nbytes
        while rest.nbytes:
            rest = rest[super().write(rest) :]
        return size

    def complete(self) -> None:
        """Flush the file to the disk and close it.

        Raises:
          OSError: a write failed.
        """
        os.fsync(self.fileno())
        self.close()

    def publish(self, *, replaces: bool = True) -> None:
        """Give the complete file its name, which is durable after `sync_directory`.

        Args:
          replaces: whether to replace a file of that name.

        Raises:
          FileExistsError: there is one, and it is not to be replaced.
          OSError: the file did not get its name, as far as one can see.
        """
        try:
            (os.replace if replaces else rename_beside)(self.temporary, self.path)
        except OSError:
            # A server that answers late reports an error for what took place
            if not self.has_final_name():
                raise
        self._is_published = True
        if not replaces:  # a link's other name; the final one is as good
            with contextlib.suppress(OSError):
                self.temporary.unlink(missing_ok=True)

    def has_final_name(self) -> bool:
        """Return whether the file at `path` is this one.

        Raises:
          OSError: that cannot be known.
        """
        try:
            return identity(self.path) == self._identity
        except FileNotFoundError:
            return False

    def withdraw(self) -> None:
        """Remove the file if it has its final name; errors are ignored."""
        with contextlib.suppress(OSError):
            if self.has_final_name():
                self.path.unlink()

    def discard(self) -> None:
        """Close the file; remove it unless it was published. Errors are ignored."""
        with contextlib.suppress(OSError):
            self.close()
        if self.is_pending():
            with contextlib.suppress(OSError):
                self.temporary.unlink()

    def is_pending(self) -> bool:
        """Return whether this process has created the file, and not published it."""
        return self._is_owned() and not self._is_published

    def _is_owned(self) -> bool:
        """Return whether this process, not its parent, created the file."""
        return os.getpid() == self._owner


class AtomicHdf5File(AtomicFile):
    """An `AtomicFile` for `h5py.File`, whose writes do not raise.

    HDF5 cannot close a file after a failed write, and crashes the process at exit. So
    the first error, or exception of a signal handler, is kept for `require_sound`, and
    later writes are skipped. A forked child writes nothing. HDF5 takes no locks on such
    a file; they fail on many network file systems.

    Raises:
      OSError: the directory does not exist, or is not writable.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        self._error: BaseException | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`, or keep the error."""
        with self._keep_error():
            if self._may_write():
                return super().write(data)
        return memoryview(data).nbytes

    def truncate(self, size: int | None = None) -> int:
        """Change the length of the file, or keep the error."""
        with self._keep_error():
            if self._may_write():
                super().truncate(size)
        return 0 if size is None else size

    def require_sound(self) -> None:
        """Raise the error of the first write that failed."""
        if self._error is not None:
            raise self._error

    def complete(self) -> None:
        """Flush the file to the disk and close it.

        Raises:
          OSError: this, or an earlier write, failed.
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
        except BaseException as error:
            self._error = self._error or error


@contextlib.contextmanager
def replace_file(path: Path, *, is_durable: bool = True) -> Iterator[AtomicFile]:
    """Yield a file to write; publish it at the end of the block.

    If the block or a write fails, nothing is left and `path` is unchanged.

    Args:
      path: of the file; a link there is replaced, not followed.
      is_durable: whether it is on the disk at the end of the block.

    Raises:
      OSError: the file cannot be written, or a device, FIFO or directory is there.
    """
    if path.exists():
        require_regular(path)
    file = AtomicFile(path)
    try:
        yield file
        if is_durable:
            file.complete()
        file.close()
        file.publish()
        if is_durable:
            sync_directory(path.parent)
    except BaseException:
        file.discard()
        raise


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk, if the file system can do that."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def writer_of(name: str, published: str) -> tuple[str, int] | None:
    """Return host and process that write an `AtomicFile` of that temporary name.

    Args:
      name: of a file; None is returned for another one.
      published: a regular expression, which the name after `publish` must match.
    """
    match = re.fullmatch(f"(?:{published}){_TEMPORARY}", name)
    return (match["host"], int(match["process"])) if match else None


def is_running(host: str, process: int) -> bool | None:
    """Return whether a process exists; None if it is of another host."""
    if host != os.uname().nodename:
        return None
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


# What `shard_name` adds to the stem
SHARD_PATTERN = r"-\d{5,}-of-\d{5,}"


def shard_name(stem: str, rank: int, ranks: int, suffix: str) -> str:
    """Return the name of one rank's file of an output that `ranks` ranks write."""
    return f"{stem}-{rank:05}-of-{ranks:05}{suffix}"
