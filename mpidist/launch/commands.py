"""Knowing `python -m mpidist` from programs that import mpidist.

Python imports the package before `__main__`. That must not need MPI: the commands are
for login nodes too, where MPI cannot start, or is not even installed. So in such a
process the package imports nothing by itself, and each command what it needs.
"""

from __future__ import annotations

import re
import sys

__all__ = ["is_command"]


def is_command() -> bool:
    """Return whether Python is looking for what `-m mpidist` names.

    `sys.argv[0]` is "-m" for so long, by Python's reference, and the option and the
    name end what comes before the command's own arguments.
    """
    if sys.argv[:1] != ["-m"]:
        return False
    before = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]
    # "-m" may follow other options, as in "-Im", and the name may follow "-m"
    ending = r"\0-[^-\0]*m\0?mpidist(\.__main__)?"
    return re.search(f"{ending}$", "\0".join(before)) is not None
