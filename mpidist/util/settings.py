"""The settings: every variable of the environment that begins with MPIDIST_.

One table, from which docs/settings.md is made and which `python -m mpidist config`
prints. Modules read a variable only through its entry here, so nothing is read that is
not documented.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from mpidist.errors import LaunchError

PREFIX = "MPIDIST_"
T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One variable.

    Args:
      name: of the variable.
      kind: of its values, in a word.
      default: the value where it is not set, or empty.
      allowed: what it may be, as text.
      meaning: what it does, in a sentence.
      read_by: the module that reads it.
      parse: converts the text to a value, or raises a ValueError.
      default_text: the default as users see it.
      argument: the equivalent argument in a program, which has priority; "" if none.
    """

    name: str
    kind: str
    default: T
    allowed: str
    meaning: str
    read_by: str
    parse: Callable[[str], T]
    default_text: str
    argument: str = ""

    def text(self, environ: Mapping[str, str] | None = None) -> str | None:
        """Return the text of the variable; None if it is not set or empty.

        Args:
          environ: the environment variables, by default those of this process.
        """
        return (os.environ if environ is None else environ).get(self.name) or None

    def read(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the value.

        Args:
          environ: see `text`.

        Raises:
          LaunchError: the variable's text is invalid.
        """
        text = self.text(environ)
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise LaunchError(
                f"{self.name} must be {self.allowed}, not {text!r}"
            ) from None

    def read_or_default(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the value, or the default if the variable's text is invalid.

        For code that must not raise. `require_settings` raises the error on all ranks.
        """
        try:
            return self.read(environ)
        except LaunchError:
            return self.default


class Resolved(NamedTuple, Generic[T]):
    """A value and its source.

    Args:
      value: what holds.
      source: "argument", "environment", "tuning file" or "default".
    """

    value: T
    source: str


def resolve(
    setting: Setting[T],
    argument: T | None = None,
    environ: Mapping[str, str] | None = None,
    tuned: T | None = None,
) -> Resolved[T]:
    """Return the effective value: argument, environment, tuning file, default.

    Args:
      setting: the variable.
      argument: the program's argument; None if there is none.
      environ: see `Setting.text`.
      tuned: the tuning file's value; None if there is none.

    Raises:
      LaunchError: the variable's text is invalid, even if the argument has priority.
    """
    value = setting.read(environ)
    if argument is not None:
        return Resolved(argument, "argument")
    if setting.text(environ) is not None:
        return Resolved(value, "environment")
    if tuned is not None:
        return Resolved(tuned, "tuning file")
    return Resolved(value, "default")


class LogChoice(NamedTuple):
    """What is logged to stderr, and how.

    Args:
      level: the name of the least level, on all ranks; "" for INFO of rank 0 and
        WARNING of the others.
      is_json: whether records are lines of JSON.
    """

    level: str
    is_json: bool


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds >= 0:
        raise ValueError
    return seconds or math.inf


def decimal(text: str) -> int | None:
    """Return the number in a variable of the environment; None if it is not one."""
    # Not str.isdecimal, which takes digits of all alphabets, and any number of them
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else None


def _count(text: str) -> int:
    number = decimal(text)
    if not number or number >= 1 << 31:
        raise ValueError
    return number


def _log(text: str) -> LogChoice:
    words = [word.strip().lower() for word in text.split(",")]
    levels = [word for word in words if word != "json"]
    known = ("debug", "info", "warning", "error")
    if len(levels) > 1 or len(words) - len(levels) > 1 or not set(levels) <= {*known}:
        raise ValueError
    return LogChoice(levels[0].upper() if levels else "", "json" in words)


_ZERO_OR_ONE = "0 or 1"
_NOTHING = "not set"

ALLOW_SHARED_GPU = Setting(
    "MPIDIST_ALLOW_SHARED_GPU",
    "switch",
    False,
    _ZERO_OR_ONE,
    "Whether ranks may share a GPU; otherwise that is an error.",
    "mpidist.comm.device_info",
    _switch,
    "0",
    "MirroredStrategy(allow_shared_gpu=)",
)
ALLOW_SINGLETON = Setting(
    "MPIDIST_ALLOW_SINGLETON",
    "switch",
    False,
    _ZERO_OR_ONE,
    "Whether one process may run alone although a launcher started several.",
    "mpidist.launch.launchers",
    _switch,
    "0",
)
BANNER = Setting(
    "MPIDIST_BANNER",
    "switch",
    True,
    _ZERO_OR_ONE,
    "Whether rank 0 prints the hardware, and how the first dataset is divided.",
    "mpidist.comm.replica_group",
    _switch,
    "1",
)
BIND_GPU: Setting[bool | None] = Setting(
    "MPIDIST_BIND_GPU",
    "switch",
    None,
    _ZERO_OR_ONE,
    "Whether a GPU is made current before MPI starts.",
    "mpidist.launch.mpi_defaults",
    _switch,
    "where the MPI library needs it",
)
CUDA_AWARE: Setting[bool | None] = Setting(
    "MPIDIST_CUDA_AWARE",
    "switch",
    None,
    _ZERO_OR_ONE,
    "Whether MPI accepts GPU pointers; the same on all ranks.",
    "mpidist.comm.device_info",
    _switch,
    "asked of the library, and tested",
    "MirroredStrategy(cuda_aware=)",
)
DUMPS: Setting[Path | None] = Setting(
    "MPIDIST_DUMPS",
    "folder",
    None,
    "a folder",
    "Where each rank records its last 1,000 collectives, for `mpidist diff`.",
    "mpidist.comm.consensus.flight_recorder",
    Path,
    _NOTHING,
)
FULL_TRACEBACKS = Setting(
    "MPIDIST_FULL_TRACEBACKS",
    "switch",
    False,
    _ZERO_OR_ONE,
    "Whether tracebacks keep the frames of this library.",
    "mpidist.util.tracebacks",
    _switch,
    "0",
)
HANG_SECONDS = Setting(
    "MPIDIST_HANG_SECONDS",
    "seconds",
    1800.0,
    "a number of seconds, or 0 to wait for ever",
    "How long a rank may wait in one collective before the job is ended.",
    "mpidist.resilience.watchdog",
    _seconds,
    "1800",
    "CommunicationOptions(timeout_seconds=)",
)
LOG = Setting(
    "MPIDIST_LOG",
    "words",
    LogChoice("", False),
    "debug, info, warning or error, and json, with a comma between",
    "The lowest level that is logged to stderr; json logs lines of JSON.",
    "mpidist.util.logs",
    _log,
    "info on rank 0, warning on the others",
)
RANKS_PER_NODE: Setting[int | None] = Setting(
    "MPIDIST_RANKS_PER_NODE",
    "number",
    None,
    "a positive number",
    "Act as if each node had this many ranks; must be the same on all ranks.",
    "mpidist.comm.topology",
    _count,
    "as many as it has",
)
TIMELINE: Setting[Path | None] = Setting(
    "MPIDIST_TIMELINE",
    "folder",
    None,
    "a folder",
    "Where each rank writes trace events of its steps and collectives.",
    "mpidist.monitor.timeline",
    Path,
    _NOTHING,
    "strategy.timeline(folder)",
)
TRANSPORTS: Setting[Path | None] = Setting(
    "MPIDIST_TRANSPORTS",
    "file",
    None,
    "a file",
    "The tuning file, which `mpidist tune` writes and rank 0 reads.",
    "mpidist.comm.transports.tuning",
    Path,
    "mpidist/transports.json in $XDG_CONFIG_HOME or ~/.config",
)

SETTINGS: tuple[Setting[Any], ...] = (
    ALLOW_SHARED_GPU,
    ALLOW_SINGLETON,
    BANNER,
    BIND_GPU,
    CUDA_AWARE,
    DUMPS,
    FULL_TRACEBACKS,
    HANG_SECONDS,
    LOG,
    RANKS_PER_NODE,
    TIMELINE,
    TRANSPORTS,
)
_NAMES = {setting.name: setting for setting in SETTINGS}


def unknown_names(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that are named like settings but are none, with error messages.

    Args:
      environ: the environment variables; empty ones count as not set.
    """
    reasons = {}
    for name in sorted(environ):
        if name.startswith(PREFIX) and environ[name] and name not in _NAMES:
            reasons[name] = (
                f"{name} is not a setting of mpidist; did you mean {_nearest(name)}? "
                "(`python -m mpidist config` lists all)"
            )
    return reasons


def _nearest(name: str) -> str:
    words = {known.removeprefix(PREFIX): known for known in _NAMES}
    word = name.removeprefix(PREFIX).upper()
    return words[difflib.get_close_matches(word, words, 1, 0)[0]]


def require_settings(environ: Mapping[str, str]) -> None:
    """Raise an error if a variable MPIDIST_... is unknown or invalid, used or not.

    Raises:
      LaunchError: names the variable, and the most similar name or the allowed values.
    """
    for reason in unknown_names(environ).values():
        raise LaunchError(reason)
    for setting in SETTINGS:
        setting.read(environ)


def hang_seconds(environ: Mapping[str, str] | None = None) -> float:
    """Return how long a rank may wait in one collective; math.inf for no limit.

    Raises:
      LaunchError: MPIDIST_HANG_SECONDS is no number of seconds.
    """
    return HANG_SECONDS.read(environ)
