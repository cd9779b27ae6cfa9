"""Warnings that never raise.

`python -W error` turns warnings into exceptions, and an exception on one rank alone
would leave the others waiting. See `logs` for messages that are not warnings.
"""

from __future__ import annotations

import warnings

from mpidist.util import logs


def warn(text: str, stacklevel: int = 1) -> None:
    """Issue a RuntimeWarning and log it; if it would raise, only log it.

    Python shows it on stderr once per line of code, with rank and host at its end;
    handlers of the application, and JSON lines, get it as a record.

    Args:
      text: the message.
      stacklevel: as in `warnings.warn`: 1 is the caller of this function.
    """
    try:
        shown = f"{text} [{logs.rank_and_host()}]"
        warnings.warn(shown, RuntimeWarning, stacklevel=stacklevel + 1)
    except Exception:  # -W error, or the program's own `warnings.showwarning`
        logs.warning("warnings", f"RuntimeWarning: {text}")
    else:
        logs.warning("warnings", text, is_shown=True)
