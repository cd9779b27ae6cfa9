"""Count the system calls of processes on the files in one folder, by strace."""

from __future__ import annotations

import collections
import dataclasses
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_KINDS = {
    "open": "open openat openat2 creat",
    "close": "close",
    "stat": "stat stat64 lstat lstat64 fstat fstat64 newfstatat fstatat64 statx access "
    "faccessat faccessat2 readlink readlinkat statfs fstatfs getxattr lgetxattr "
    "fgetxattr listxattr llistxattr flistxattr",
    "lock": "flock",
    "list": "getdents getdents64",
    "read": "read readv pread64 preadv preadv2",
    "map": "mmap mmap2",
    # The kernel answers these by itself
    "local": "lseek _llseek fcntl fcntl64 ioctl dup dup2 dup3 fadvise64 readahead",
}
_KIND_OF = {call: kind for kind, calls in _KINDS.items() for call in calls.split()}
# With paths for file descriptors, without the data
_STRACE = ["strace", "-y", "-s", "0", "-e", "trace=%file,%desc"]
_LOCKING = re.compile(r"\bF_(OFD_)?(SET|GET)LKW?\b|\bF_SETLEASE\b")
_TO_THE_END = re.compile(r"\bSEEK_(END|DATA|HOLE)\b")
_LINE = re.compile(r"(?P<call>\w+)\((?P<arguments>.*)\)\s+= (?P<result>-?\w+|\?)")

# What asks a metadata server; calls that are not listed above count too
METADATA = ("open", "close", "stat", "lock", "list", "other")


@dataclasses.dataclass
class Counts:
    """What a process did with the files of a folder.

    Args:
      calls: how many of each kind, see METADATA; also `read`, `map` and `local`.
      read_bytes: how many bytes it has read.
      mapped_bytes: how many bytes it has mapped, whether or not it looked at them.
    """

    calls: collections.Counter[str]
    read_bytes: int = 0
    mapped_bytes: int = 0

    @property
    def metadata(self) -> int:
        """The calls that ask a metadata server."""
        return sum(self.calls[kind] for kind in METADATA)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for a JSON file."""
        return {
            **{kind: self.calls[kind] for kind in (*METADATA, "read", "map", "local")},
            "metadata": self.metadata,
            "read_bytes": self.read_bytes,
            "mapped_bytes": self.mapped_bytes,
        }


def why_not() -> str | None:
    """Return why system calls cannot be counted here; None if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    trial = [*_STRACE, "-o", "/dev/null", "true"]
    tried = subprocess.run(trial, capture_output=True, text=True)
    if tried.returncode != 0:
        return f"strace cannot trace here: {tried.stderr.strip()}"
    return None


def trace_command(prefix: Path | str, command: Sequence[str]) -> list[str]:
    """Return a command line that runs another one and logs to `<prefix>.<thread>`.

    Calls that name a file or a file descriptor are logged. With a file for each thread
    no call is split in two lines.
    """
    return [*_STRACE, "-ff", "-o", str(prefix), *command]


def count(logs: Iterable[Path], folder: Path) -> Counts:
    """Return what the threads of one process did with a folder and its files."""
    counts = Counts(collections.Counter())
    is_inside = re.compile(re.escape(str(folder.resolve())) + '[/">]')
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            if is_inside.search(line):
                _add(counts, line)
    return counts


def _add(counts: Counts, line: str) -> None:
    found = _LINE.match(line)
    if found is None:
        raise ValueError(f"strace has written a line that is not understood: {line}")
    call, arguments, result = found["call"], found["arguments"], found["result"]
    kind = _KIND_OF.get(call, "other")
    if call.startswith("fcntl") and _LOCKING.search(arguments):
        kind = "lock"
    if "seek" in call and _TO_THE_END.search(arguments):
        kind = "stat"  # it asks for the size
    counts.calls[kind] += 1
    if kind == "read":
        counts.read_bytes += max(0, int(result))
    if kind == "map":
        counts.mapped_bytes += int(arguments.split(",")[1])
