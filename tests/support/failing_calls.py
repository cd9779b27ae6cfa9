"""Let calls of the operating system fail below a folder; see failing_calls.c."""

import ctypes
import errno
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

# What happens at a call: its number in failing_calls.c, and the error
HOW = {
    "nothing": (0, 0),
    "fails": (1, errno.EIO),
    "disk full": (1, errno.ENOSPC),
    "late": (2, errno.EIO),  # it did what it was asked for
    "short": (3, 0),
    "interrupted": (4, 0),  # by SIGINT, which Python handles in its main thread
    "kills": (5, 0),
    "copies": (6, 0),
}


def build(folder: Path) -> str | None:
    """Return the path of the library; None if there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = Path(folder) / "failing_calls.so"
    source = Path(__file__).with_suffix(".c")
    flags = "-shared", "-fPIC", "-O1", "-Wall", "-Werror"
    command = [compiler, *flags, str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return str(library)


def preload() -> str:
    """Return the path of the library, with which this program is started again."""
    library = os.environ.get("LD_PRELOAD", "")
    if not library.endswith("failing_calls.so"):
        built = build(Path(tempfile.mkdtemp(prefix="failing-calls-")))
        assert built is not None, "there is no C compiler"
        os.environ["LD_PRELOAD"] = built
        os.execv(sys.executable, sys.orig_argv)
    return library


class FailingCalls:
    """The calls of this process, into which the library was preloaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.failing_trace.restype = ctypes.c_char_p

    def arm(self, folder, number=0, how="nothing", copies="/"):
        """Count calls on files below a folder; let the one of that number fail.

        If it "copies", the folder is copied to `copies`/number before each call whose
        number is a multiple.
        """
        paths = (os.fsencode(path) for path in (folder, copies))
        self._library.failing_arm(*paths, number, *HOW[how])

    def disarm(self) -> list[str]:
        """Return the calls since `arm`: name and path below the folder."""
        self._library.failing_disarm()
        return self._library.failing_trace().decode().splitlines()


def names_left_out(library: str) -> set[str]:
    """Return what Python calls to change files, and the library does not stand in for.

    Only what this C library's large-file names show; "renameat" and such need `dir_fd`.
    """
    python = Path(*map(sysconfig.get_config_var, ("LIBDIR", "LDLIBRARY")))
    if python.suffix == ".a" or not python.exists():
        python = Path(sys.executable).resolve()
    used = _symbols(str(python), "-u") & set(re.findall(r"\w+", _ON_FILES))
    return used - _symbols(library, "--defined-only")


def _symbols(path: str, which: str) -> set[str]:
    run = subprocess.run(["nm", "-D", which, path], capture_output=True, text=True)
    return {line.split()[-1].partition("@")[0] for line in run.stdout.splitlines()}


_ON_FILES = """
access chmod close fcntl64 fdatasync fstat64 fstatat64 fsync ftruncate64 link linkat
lstat64 mkdir open64 opendir pread64 preadv64v2 pwrite64 read rename stat64 symlink
unlink unlinkat write
"""
