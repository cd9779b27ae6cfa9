"""`python -m mpidist top`: the progress of a job, from the folder of its timeline."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpidist.errors import DataError
from mpidist.monitor.page import PARTS
from mpidist.monitor.report import how_ended, slowest_rank, step_parts
from mpidist.monitor.trace_reader import read_statuses
from mpidist.util.durations import duration

__all__ = ["table", "top"]

_LATE_SECONDS = 30.0  # a rank without updates for this long may have ended
_CLEAR = "\033[H\033[J"
_MARKS = dict(zip(PARTS, "#+=.*"))
_LEAST_COLUMNS, _MOST_COLUMNS = 8, 50


def top(folder: Path, seconds: float | None) -> None:
    """Print a table of the ranks, again and again until the job has ended.

    Args:
      folder: of the timeline.
      seconds: interval of updates; None prints once.

    Raises:
      DataError: the folder has no timeline, or it cannot be read.
    """
    is_terminal = sys.stdout.isatty()
    while True:
        statuses = read_statuses(folder)
        columns, lines = shutil.get_terminal_size()
        if not statuses:
            raise DataError(
                f"{folder} has no timeline of a job; run it with "
                f"MPIDIST_TIMELINE={folder}"
            )
        text = table(statuses, time.time(), columns, lines if is_terminal else None)
        print((_CLEAR if is_terminal and seconds else "") + text, flush=True)
        if seconds is None or how_ended(statuses):
            return
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            return


def table(
    statuses: Sequence[Mapping[str, Any]],
    now: float,
    columns: int = 80,
    lines: int | None = None,
) -> str:
    """Return a table of the ranks; the slowest first if not all have room.

    Args:
      statuses: see `read_statuses`; at least one.
      now: seconds since the epoch.
      columns: of the terminal.
      lines: likewise; None for all ranks.
    """
    first = statuses[0]
    slow = slowest_rank(statuses)
    took = duration(first["seconds"])  # not of clocks, which may be set
    rate = 1 / mean if (mean := first["step_seconds"]["mean"]) else 0.0
    marks = ", ".join(f"{mark} {name}" for name, mark in _MARKS.items())
    head = (
        f"{first['ranks']} ranks, {_state(statuses, now)}; {first['steps']:,} steps in "
        f"{took}, {rate:.3g} steps/s\n{marks}"
    )
    shown = list(statuses)
    room = len(shown) if lines is None else max(1, lines - 5)
    if len(shown) > room:
        shown.sort(key=lambda one: step_parts(one)["waiting"])
        shown = shown[:room]
    names = [f"rank {one['rank']} {one['host']}" for one in shown]
    width = min(max(map(len, names)), 24)
    bar = min(_MOST_COLUMNS, max(_LEAST_COLUMNS, columns - width - 22))
    most = max(sum(step_parts(one).values()) for one in shown) or 1.0
    rows = []
    for name, one in zip(names, shown):
        parts = step_parts(one)
        text = _bar(parts, most, bar)
        mark = " slowest" if one["rank"] == slow else ""
        late = " silent" if _is_late(one, now) else ""
        total = duration(sum(parts.values()))
        rows.append(f"{name[:width]:{width}} {total:>8} {text}{mark}{late}".rstrip())
    return "\n".join([head, *rows])


def _bar(parts: Mapping[str, float], most: float, columns: int) -> str:
    """Return a bar of `columns` characters, divided among the parts."""
    text, done = "", 0.0
    for name in PARTS:
        done += parts[name]
        text += _MARKS[name] * (round(columns * done / most) - len(text))
    return text.ljust(columns)


def _state(statuses: Sequence[Mapping[str, Any]], now: float) -> str:
    if how := how_ended(statuses):
        return how
    if all(_is_late(one, now) for one in statuses):
        return "silent, perhaps killed"
    missing = statuses[0]["ranks"] - len(statuses)
    return f"running, {missing} not seen yet" if missing else "running"


def _is_late(status: Mapping[str, Any], now: float) -> bool:
    limit = max(_LATE_SECONDS, status["ranks"] / 2)
    return bool(status["state"] != "ended" and now - status["time"] > limit)
