"""The mounted file systems of this node: which are local, and which show files late."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

_POLL_SECONDS = 0.02
# File systems that only this kernel writes to
LOCAL_FILE_SYSTEMS = frozenset(
    ["btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"]
)


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo. Names may have any bytes: see `os.fsdecode`.

    Args:
      point: the folder on which it is mounted.
      kind: the type of the file system, such as "nfs4".
      source: the device or server.
      options: of the mount and of the file system.
      device: its number, as "major:minor".
    """

    point: str
    kind: str
    source: str
    options: frozenset[str]
    device: str = ""


def read_mounts() -> list[Mount]:
    """Return the mounts of this process; none if the kernel does not tell."""
    try:
        return parse_mounts(Path("/proc/self/mountinfo").read_bytes())
    except OSError:
        return []


def parse_mounts(table: bytes) -> list[Mount]:
    """Return the mounts of a /proc/self/mountinfo; lines of other forms are skipped."""
    mounts = []
    for line in table.split(b"\n"):
        # ID, parent, device, root, mount point, options... - type, source, options
        left, _, right = line.partition(b" - ")
        fields, after = left.split(b" "), right.split(b" ")
        if len(fields) >= 6 and len(after) >= 3:
            texts = map(_unescape, (fields[4], *after[:2], fields[5], after[2]))
            point, kind, source, options, more = texts
            both = frozenset(f"{options},{more}".split(","))
            mounts.append(Mount(point, kind, source, both, _unescape(fields[2])))
    return mounts


def _unescape(text: bytes) -> str:
    octal = rb"\\([0-3][0-7]{2})"
    return os.fsdecode(re.sub(octal, lambda m: bytes([int(m[1], 8)]), text))


def find_mount(mounts: list[Mount], path: str) -> Mount | None:
    """Return the mount of an absolute path without symbolic links."""
    over = [m for m in mounts if Path(path).is_relative_to(m.point)]
    # The last mount at a point hides the others
    return max(reversed(over), key=lambda mount: len(mount.point), default=None)


def is_local(device: int) -> bool:
    """Return whether only this node writes to the file system of a device number."""
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = (mount.kind for mount in read_mounts() if mount.device == number)
    return next(kinds, "") in LOCAL_FILE_SYSTEMS


def lateness(directory: Path, most_seconds: float) -> float:
    """Return for how many seconds this node may not see what others have written.

    Args:
      directory: of the files.
      most_seconds: what network file systems may take. Those of this node alone never
        show what others write; nor does a directory that is not there.
    """
    try:
        device = directory.stat().st_dev
    except OSError:
        return 0.0
    return 0.0 if is_local(device) else most_seconds


def wait_for_file(path: Path, most_seconds: float) -> bool:
    """Return whether this node sees a file that others may have made before.

    Args:
      path: of the file.
      most_seconds: how long to wait for it; see `lateness`.
    """
    if os.path.exists(path):  # an error of the file system may pass, too
        return True
    end = time.monotonic() + lateness(path.parent, most_seconds)
    while not os.path.exists(path):
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_SECONDS)
    return True
