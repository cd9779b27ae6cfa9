"""Messages that only inform, and so never raise, whatever becomes of them.

stderr may be closed, a broken pipe or a file on a full disk; `python -W error` raises
warnings, and on one rank alone that would leave the others waiting.
"""

from __future__ import annotations

import contextlib
import sys
import warnings

__all__ = ["print_notice", "warn"]


def print_notice(text: str) -> None:
    """Write text to stderr in one piece, if that is possible.

    In one piece, so that no other rank's output comes between.
    """
    # Not `print`: it writes to stdout where stderr was closed before Python started
    with contextlib.suppress(Exception):  # replaced streams may raise anything
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def warn(text: str, stacklevel: int = 1) -> None:
    """Issue a RuntimeWarning; where that would raise, print it instead.

    Args:
      text: the message.
      stacklevel: as in `warnings.warn`: 1 is the caller of this.
    """
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
    except Exception:  # also of a `warnings.showwarning` of the program's own
        print_notice(f"RuntimeWarning: {text}")
