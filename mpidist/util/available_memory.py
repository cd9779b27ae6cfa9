"""What this process may use of its node: memory, by what limits it, and cores.

Also sizes of memory: cache lines, and texts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Of the longest cache lines, A64FX's (x86 has 64, and fetches two at a time). Arrays in
# one memory begin at lines of their own, so that writers do not share lines. It is the
# same on all machines, as ranks divide arrays by it
LINE_BYTES = 256
# What is allocated on one socket or another. Arm's may have 64 KiB
PAGE_BYTES = mmap.PAGESIZE
# Control groups, versions 2 and 1: the controller, the mount point, the files of the
# limit and of the memory in use, and the prefix of cached files in memory.stat (cached
# files count as in use, but can be dropped)
_GROUPS = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current", ""),
    (
        "memory",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_",
    ),
)


def available_cores() -> list[int]:
    """Return the cores that this process may use, sorted."""
    if not hasattr(os, "sched_getaffinity"):  # not on Linux
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0))


def physical_core(core: int) -> int:
    """Return the first of the hardware threads of a core; `core` if that is unknown."""
    path = f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
    try:
        return int(re.split(r"[-,]", Path(path).read_text().strip())[0])
    except (OSError, ValueError):
        return core


def round_up(size_bytes: int, multiple: int = LINE_BYTES) -> int:
    """Return the least multiple that is not less, such as of cache lines."""
    return -(-size_bytes // multiple) * multiple


def free_bytes(is_shared: bool, root: Path = Path("/")) -> dict[str, int]:
    """Return the free bytes under each limit of memory, by the limit's name.

    Args:
      is_shared: whether the memory will be shared between processes.
      root: the directory of /proc, /sys and /dev.
    """
    free = {}
    if is_shared:  # MPI libraries create shared memory as files there
        with contextlib.suppress(OSError):  # or there is no folder at all
            folder = root / "dev" / "shm"
            folder = folder if folder.is_dir() else Path(tempfile.gettempdir())
            status = os.statvfs(folder)
            free[str(folder)] = status.f_bavail * status.f_frsize
    with contextlib.suppress(OSError, KeyError):
        free["the machine"] = _read_table(root / "proc/meminfo")["MemAvailable"] << 10
    for folder, *names in _memory_groups(root):
        with contextlib.suppress(OSError, KeyError, ValueError):  # the limit is "max"
            free["the job's control group"] = min(
                free.get("the job's control group", 1 << 63), _free_in(folder, *names)
            )
    return free


def as_text(count: float) -> str:
    """Return a number of bytes as text, such as "1.5 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def _memory_groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield the control groups of this process, with the names of their files."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for kind, top, limit, used, prefix in _GROUPS:
            if kind in controllers.split(","):
                group = root / top / path.lstrip("/")
                above = [p for p in group.parents if p.is_relative_to(root / top)]
                for folder in [group, *above]:
                    yield folder, limit, used, prefix


def _free_in(folder: Path, limit: str, used: str, prefix: str) -> int:
    limit_bytes = int((folder / limit).read_text())
    used_bytes = int((folder / used).read_text())
    cached = _read_table(folder / "memory.stat")
    files = cached[f"{prefix}active_file"] + cached[f"{prefix}inactive_file"]
    return max(0, limit_bytes - used_bytes + files)


def _read_table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1}
