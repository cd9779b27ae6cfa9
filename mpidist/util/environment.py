"""Environment variables that take 0 or 1."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mpidist.errors import LaunchError

__all__ = [
    "ALLOW_SHARED_GPU",
    "ALLOW_SINGLETON",
    "BANNER",
    "BIND_GPU",
    "CUDA_AWARE",
    "FULL_TRACEBACKS",
    "HANG_SECONDS",
    "hang_seconds",
]


__all__ += ["read_switch", "require_switches", "timeline_folder"]

ALLOW_SHARED_GPU = "MPIDIST_ALLOW_SHARED_GPU"
ALLOW_SINGLETON = "MPIDIST_ALLOW_SINGLETON"
BANNER = "MPIDIST_BANNER"
BIND_GPU = "MPIDIST_BIND_GPU"
CUDA_AWARE = "MPIDIST_CUDA_AWARE"
FULL_TRACEBACKS = "MPIDIST_FULL_TRACEBACKS"
_ALL = (
    ALLOW_SHARED_GPU,
    ALLOW_SINGLETON,
    BANNER,
    BIND_GPU,
    CUDA_AWARE,
    FULL_TRACEBACKS,
)


def read_switch(environ: Mapping[str, str], name: str) -> bool | None:
    """Return whether a variable is 1; None where it is not set, or empty.

    Raises:
      LaunchError: it is neither 0 nor 1.
    """
    text = environ.get(name) or None
    if text not in (None, "0", "1"):
        raise LaunchError(f"{name} must be 0 or 1, not {text!r}")
    return None if text is None else text == "1"


def require_switches(environ: Mapping[str, str]) -> None:
    """Raise if one of these variables cannot be read, whether it is needed or not.

    Some are read where not all ranks are, and are taken there for what they are not.

    Raises:
      LaunchError: see `read_switch`.
    """
    for name in _ALL:
        read_switch(environ, name)


_TIMELINE = "MPIDIST_TIMELINE"


def timeline_folder(environ: Mapping[str, str]) -> str:
    """Return where the timeline of a job goes; "" for nowhere."""
    return environ.get(_TIMELINE, "")


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
