"""How long a rank may wait for others."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mpidist.errors import LaunchError

__all__ = ["HANG_SECONDS", "hang_seconds"]

HANG_SECONDS = "MPIDIST_HANG_SECONDS"
_DEFAULT_SECONDS = 1800.0


def hang_seconds(environ: Mapping[str, str]) -> float:
    """Return how long a rank may wait in one collective; math.inf for ever.

    Raises:
      LaunchError: MPIDIST_HANG_SECONDS is no number of seconds.
    """
    text = environ.get(HANG_SECONDS) or str(_DEFAULT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise LaunchError(
            f"{HANG_SECONDS} must be a number of seconds, or 0 to wait for ever, not "
            f"{text!r}"
        )
    return seconds or math.inf
