"""Messages that only inform, and so never raise, whatever becomes of them.

`python -W error` raises warnings, and on one rank alone that would leave the others
waiting. See `logs` for messages that are no warnings.
"""

from __future__ import annotations

import warnings

from mpidist.util import logs

__all__ = ["warn"]


def warn(text: str, stacklevel: int = 1) -> None:
    """Issue a RuntimeWarning, and log it; where it would raise, it is logged alone.

    Python shows it on stderr once per place, with rank and host at its end; handlers of
    the application, and lines of JSON, have it as a record.

    Args:
      text: the message.
      stacklevel: as in `warnings.warn`: 1 is the caller of this.
    """
    try:
        shown = f"{text} [{logs.rank_and_host()}]"
        warnings.warn(shown, RuntimeWarning, stacklevel=stacklevel + 1)
    except Exception:  # also of a `warnings.showwarning` of the program's own
        logs.warning("warnings", f"RuntimeWarning: {text}")
    else:
        logs.warning("warnings", text, is_shown=True)
