"""Opening files that must be regular ones: opening anything else may block or act.

Opening a FIFO waits for a writer, and opening a device may do things to it.
"""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["open_regular", "require_regular"]

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
