"""Distinguish `python -m mpidist` and `mpidist` from programs that import mpidist.

Python imports the package before `__main__`. That must not need MPI: the commands are
for login nodes too, where MPI cannot start, or is not even installed. So in such a
process the package imports nothing by itself, and each command what it needs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# What the code of `python_child` begins with
_CHILD = "import sys; sys.path[:] = "


def is_command() -> bool:
    """Return whether this process is a command, not a user's program.

    That is the console script, or a process that a command has started, or Python is
    looking for what `-m mpidist` names.
    `sys.argv[0]` is "-m" for so long, by Python's reference, and the option and the
    name end what comes before the command's own arguments.
    """
    if sys.argv[:1] == ["-c"]:
        return any(word.startswith(_CHILD) for word in sys.orig_argv)
    if sys.argv[:1] != ["-m"]:
        return bool(sys.argv) and _is_console_script(Path(sys.argv[0]))
    before = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]
    # "-m" may follow other options, as in "-Im", and the name may follow "-m"
    ending = r"\0-[^-\0]*m\0?mpidist(\.__main__)?"
    return re.search(f"{ending}$", "\0".join(before)) is not None


def python_child(code: str, *arguments: str) -> list[str]:
    """Return the command line of a Python that runs some code as a command.

    It imports what this process does. `python -c` and `python -m` alone would import
    what lies in the current folder, in which others may have put a `json.py`.
    """
    paths = [path for path in sys.path if path]
    return [sys.executable, "-c", f"{_CHILD}{paths!r}\n{code}", *arguments]


def _is_console_script(path: Path) -> bool:
    """Return whether a script is the one that pip has made for `mpidist`."""
    if path.name != "mpidist":
        return False
    try:
        with path.open("rb") as file:
            return b"from mpidist.__main__ import main" in file.read(4096)
    except OSError:
        return False
