"""The report of a job: one page, from the folder of its timeline.

It needs no network and no scripts. Numbers over all steps are exact; charts over steps
show recorded steps only.
"""

from __future__ import annotations

import html
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.errors import DataError
from mpidist.monitor import charts
from mpidist.monitor.page import PARTS, bars, figure, page, row, table, tiles
from mpidist.monitor.summary import advice, as_text, work_seconds
from mpidist.monitor.trace_reader import RankTrace, read_statuses, read_traces
from mpidist.util.available_memory import as_text as bytes_text

__all__ = ["how_ended", "report", "scaling", "slowest_rank"]

_BINS = 30
_MOST_ROWS = 32
_STANDS_OUT = 1.15  # a slow rank does this many times the work of the others


def report(folder: Path) -> str:
    """Return the HTML report of the last job that wrote into a folder.

    Raises:
      DataError: the folder has no timeline, or it cannot be read.
    """
    statuses = read_statuses(folder)
    traces = read_traces(folder)
    if not statuses:
        raise DataError(
            f"{folder} has a timeline without recorded progress; try again later"
        )
    first = statuses[0]
    slow = slowest_rank(statuses)
    sections = [
        tiles(_tiles(first, statuses)),
        _findings(first, statuses, slow),
        '<div class="charts">',
        figure(
            "Time per step",
            "Mean over the ranks, of the recorded steps.",
            _series(traces),
        ),
        figure(
            "Step durations",
            f"All steps of rank {first['rank']} except the first.",
            charts.histogram(
                "steps by duration", [tuple(r) for r in first["step_histogram"]]
            ),
        ),
        figure("Estimated scaling", _SCALING, _scaling_chart(statuses)),
        "</div>",
        _ranks(statuses, slow),
        _first_step(statuses),
        _operations(statuses),
        _clocks(traces, first),
    ]
    how = how_ended(statuses) or "still running or killed"
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(first["began"]))
    subtitle = f"{first['ranks']} ranks, {began}"
    subtitle += "" if how == "ended" else f", {how}"
    return page("Where the time went", subtitle, "\n".join(sections))


def how_ended(statuses: Sequence[Mapping[str, Any]]) -> str:
    """Return "ended", or by whose error; "" if the job runs, or was killed."""
    failed = [str(one["rank"]) for one in statuses if one["state"] == "failed"]
    if failed:
        return f"ended by an error of rank {', '.join(failed[:4])}"
    return "ended" if all(one["state"] == "ended" for one in statuses) else ""


def step_parts(status: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean seconds per step of each of `PARTS`, of one rank."""
    steps = max(1, status["steps"] - 1)
    parts, waiting = status["parts"], status["waiting_seconds"]
    found = {
        "compute": parts["compute"],
        "input": parts["input"],
        "transfer": max(0.0, parts["communication"] - waiting),
        "waiting": min(waiting, parts["communication"]),
        "checkpoint": parts["checkpoint"],
    }
    return {name: seconds / steps for name, seconds in found.items()}


def slowest_rank(statuses: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the rank that the others wait for, if one is clearly slower."""
    if len(statuses) < 2:
        return None
    own = [s["compute"] + s["input"] for s in map(step_parts, statuses)]
    most = max(own)
    others = [work for work in own if work is not most] or own
    found = statuses[own.index(most)]["rank"]
    waits = max(step_parts(one)["waiting"] for one in statuses)
    if most < _STANDS_OUT * statistics.median(others) or waits < 0.03 * most:
        return None
    return int(found)


def _tiles(
    first: Mapping[str, Any], statuses: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str]]:
    """Return label, value and CSS class of the summary's tiles."""
    means = [step_parts(one) for one in statuses]
    mean = {name: statistics.fmean(m[name] for m in means) for name in PARTS}
    total = sum(mean.values()) or 1.0
    unit, size = charts.unit_of(total)
    found = [
        ("mean step", f"{charts.quantity(total / size)} {unit}", ""),
        ("steps", f"{first['steps']:,}", ""),
    ]
    for name in PARTS:
        if mean[name] or name != "checkpoint":
            found.append((name, f"{mean[name] / total:.0%}".replace("%", " %"), name))
    return found


def _findings(
    first: Mapping[str, Any], statuses: Sequence[Mapping[str, Any]], slow: int | None
) -> str:
    is_whole = len(statuses) == first["ranks"]
    works = [work_seconds(one) for one in statuses] if is_whole else []
    lines = [f"Rank {first['rank']}: {as_text(first, works)}."]
    if slow is not None:
        parts = {one["rank"]: step_parts(one) for one in statuses}
        other = statistics.fmean(
            p["compute"] + p["input"] for rank, p in parts.items() if rank != slow
        )
        own = parts[slow]["compute"] + parts[slow]["input"]
        why = "input" if parts[slow]["input"] > parts[slow]["compute"] else "compute"
        lines.append(
            f"Rank {slow} is the slowest: its own work takes {own / other:.1f} times "
            f"as long as that of others, mostly {why}. The others wait for it."
        )
    else:
        lines += [
            f"{text[0].upper()}{text[1:]}." for text in advice(first, works=works)
        ]
    return (
        '<ul class="findings">'
        + "".join(f"<li>{html.escape(line)}</li>" for line in lines)
        + "</ul>"
    )


def _series(traces: Sequence[RankTrace]) -> str:
    """Return a chart of the parts of steps by step number, means over the ranks."""
    steps = [step for trace in traces for step in trace.steps()]
    rest = [step for step in steps if step.number > 1] or steps
    if not rest:
        return "<p>No steps were recorded.</p>"
    begun = np.array([step.number for step in rest])
    first, end = int(begun.min()), int(begun.max()) + 1
    # Bins of equally many steps, since some steps read for the following ones
    width = -(-(end - first) // _BINS)
    edges = np.arange(first, end + width, width)
    weights = np.array([step.one_of for step in rest], float)
    number = np.histogram(begun, edges, weights=weights)[0]
    parts: list[charts.Series] = []
    for name in PARTS:
        values = np.array([_part(step, name) for step in rest])
        sums = np.histogram(begun, edges, weights=values * weights)[0]
        parts.append((name, (sums / np.maximum(number, 1)).tolist()))
    return charts.stacked("time per step by part", edges.tolist(), parts)


def _part(step: Any, name: str) -> float:
    if name == "transfer":
        return max(0.0, float(step.communication - step.waiting))
    return float(getattr(step, name))


def scaling(
    statuses: Sequence[Mapping[str, Any]],
) -> tuple[list[int], list[float], list[float]]:
    """Return numbers of ranks, estimated speeds relative to now, and ideal ones.

    Assumes the same global batch: computing and input are divided by the ranks, waiting
    stays the same fraction of them, and transfer takes as long as now.
    """
    ranks = statuses[0]["ranks"]
    means = [step_parts(one) for one in statuses]
    mean = {name: statistics.fmean(m[name] for m in means) for name in PARTS}
    divided = mean["compute"] + mean["input"] + mean["waiting"]
    fixed = mean["transfer"] + mean["checkpoint"]
    places = sorted({ranks} | {1 << k for k in range((4 * ranks).bit_length())})
    now = (divided + fixed) or 1.0
    speeds = []
    for place in places:
        if place == 1:
            took = (mean["compute"] + mean["input"]) * ranks + mean["checkpoint"]
        else:
            took = divided * ranks / place + fixed
        speeds.append(now / took if took else 1.0)
    return places, speeds, [place / ranks for place in places]


_SCALING = (
    "Steps per second relative to this job (the dot); dashed: ideal scaling. Assumes "
    "the same global batch; computing, input and waiting are divided by the ranks; "
    "transfer takes as long as now. It may take longer on more nodes."
)


def _scaling_chart(statuses: Sequence[Mapping[str, Any]]) -> str:
    places, speeds, ideal = scaling(statuses)
    series: list[charts.Series] = [("estimate", speeds), ("ideal", ideal)]
    title = "estimated speed by number of ranks"
    return charts.lines(title, places, series, statuses[0]["ranks"], "relative speed")


def _ranks(statuses: Sequence[Mapping[str, Any]], slow: int | None) -> str:
    """Return a row for each rank, or for those that wait least."""
    found = [(one, step_parts(one)) for one in statuses]
    note = "Mean step of each rank, except the first step."
    if len(found) > _MOST_ROWS:
        found.sort(key=lambda pair: pair[1]["waiting"])
        found = found[:_MOST_ROWS]
        note += f" The {_MOST_ROWS} of {len(statuses)} ranks that wait least."
    most = max(sum(parts.values()) for _, parts in found) or 1.0
    unit, size = charts.unit_of(most)
    rows = []
    for one, parts in found:
        is_slow = one["rank"] == slow
        pieces = [
            (
                name,
                parts[name] / most,
                f"{name}: {charts.quantity(parts[name] / size)} {unit}",
            )
            for name in PARTS
        ]
        total = f"{charts.quantity(sum(parts.values()) / size)} {unit}"
        mark = "slowest" if is_slow else ""
        rows.append(row(f"rank\u00a0{one['rank']}", mark, one["host"], pieces, total))
    return bars("Ranks", note, rows, f"{charts.quantity(most / size)} {unit}", True)


def _first_step(statuses: Sequence[Mapping[str, Any]]) -> str:
    first = max(one["first_step_seconds"] for one in statuses)
    usual = statistics.fmean(one["step_seconds"]["mean"] for one in statuses)
    most = max(first, usual) or 1.0
    unit, size = charts.unit_of(most)
    rows = [
        row(
            name,
            "",
            "",
            [("neutral", seconds / most, "")],
            f"{charts.quantity(seconds / size)} {unit}",
        )
        for name, seconds in (("first step", first), ("mean of the others", usual))
    ]
    note = (
        "The first step opens files, starts threads, plans collectives and compiles "
        "functions. The other numbers exclude it."
    )
    return bars("First step", note, rows, f"{charts.quantity(most / size)} {unit}")


def _operations(statuses: Sequence[Mapping[str, Any]]) -> str:
    """Return bars of the bytes, and a table, of rank 0's operations."""
    operations = statuses[0]["operations"].items()
    moved = {name: sum(o["bytes"].values()) for name, o in operations}
    most = max(moved.values(), default=0) or 1
    rows, lines = [], []
    for name, found in sorted(operations, key=lambda item: -moved[item[0]]):
        if moved[name]:
            pieces = [
                (f"by-{i % 4}", size / most, f"{transport}: {bytes_text(size)}")
                for i, (transport, size) in enumerate(sorted(found["bytes"].items()))
            ]
            ways = ", ".join(sorted(found["bytes"]))
            rows.append(row(name, "", f"by {ways}", pieces, bytes_text(moved[name])))
        mean = found["seconds"] / max(1, found["calls"])
        unit, size = charts.unit_of(mean)
        waiting = found["waiting_seconds"] / (found["seconds"] or 1.0)
        lines.append(
            (
                name,
                f"{found['calls']:,}",
                f"{charts.quantity(mean / size)} {unit}",
                f"{waiting:.0%}".replace("%", " %"),
                bytes_text(moved[name]),
            )
        )
    head = ("operation", "calls", "per call", "waiting", "bytes")
    rank = f"Rank {statuses[0]['rank']}, since its strategy was created"
    shown = bars("Bytes", f"{rank}; results only.", rows[:12], bytes_text(most))
    note = f"{rank}, including the first step."
    if len(lines) > _MOST_ROWS:
        lines = lines[:_MOST_ROWS]
        note += f" The {_MOST_ROWS} that moved most bytes."
    return shown + table("Operations", note, head, lines)


def _clocks(traces: Sequence[RankTrace], first: Mapping[str, Any]) -> str:
    error = max(trace.clock_error_us for trace in traces)
    drift = max(abs(trace.drift_ppm) for trace in traces)
    text = f"Times of different ranks are comparable to within {error:.1f} us"
    text += (
        f"; their clocks drift by up to {drift:.2f} us per second." if drift else "."
    )
    if first["one_of_steps"] > 1:
        text += (
            f" To limit the size of files, one of {first['one_of_steps']} steps was "
            "recorded at the end."
        )
    return f'<p class="note">{html.escape(text)}</p>'
