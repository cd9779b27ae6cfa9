"""The report of a job: one page, from the folder of its timeline.

It needs no network: `report.html` shows the data that are put into it. Numbers over all
steps are exact; charts over steps show recorded steps only.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.errors import DataError
from mpidist.monitor.statistics import advice, as_text, work_seconds
from mpidist.monitor.traces import RankTrace, read_statuses, read_traces

PARTS = ("compute", "input", "transfer", "waiting", "checkpoint")
_BINS = 30
_MOST_ROWS = 32
_STANDS_OUT = 1.15  # a slow rank does this many times the work of the others
_LATE_SECONDS = 30.0  # a rank without updates for this long may have ended
Status = Mapping[str, Any]


def page(data: Status) -> str:
    """Return the page that shows the result of `describe`."""
    template = resources.files("mpidist.monitor").joinpath("report.html").read_text()
    # In a script "<" might begin its end
    return template.replace("DATA", json.dumps(data).replace("<", "\\u003c"), 1)


def describe(folder: Path) -> dict[str, Any]:
    """Return what the report shows, of the last job that wrote into a folder.

    Raises:
      DataError: the folder has no timeline, or it cannot be read.
    """
    statuses = read_statuses(folder)
    traces = read_traces(folder)
    if not statuses:
        raise DataError(
            f"{folder} has a timeline without recorded progress; try again later"
        )
    first, slow = statuses[0], slowest_rank(statuses)
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(first["began"]))
    how = state(statuses, time.time())
    ranks, estimate, ideal = scaling(statuses)
    operations = [
        {
            **found,
            "name": name,
            "bytes": dict(sorted(found["bytes"].items())),
            "moved": sum(found["bytes"].values()),
        }
        for name, found in first["operations"].items()
    ]
    operations.sort(key=lambda one: -one["moved"])
    is_long = len(operations) > _MOST_ROWS
    return {
        "subtitle": f"{first['ranks']} ranks, {began}"
        + ("" if how == "ended" else f", {how}"),
        "script": first["script"],
        "command": first["command"],
        "rank": first["rank"],
        "steps": first["steps"],
        "mean": _mean_parts(statuses),
        "findings": _findings(statuses, slow),
        "series": _series(traces),
        "histogram": first["step_histogram"],
        "scaling": {
            "now": first["ranks"],
            "ranks": ranks,
            "estimate": estimate,
            "ideal": ideal,
        },
        **_ranks(statuses, slow),
        "first_step": {
            "first": max(one["first_step_seconds"] for one in statuses),
            "others": statistics.fmean(one["step_seconds"]["mean"] for one in statuses),
        },
        "operations": operations[:_MOST_ROWS],
        "operations_note": f"The {_MOST_ROWS} that moved most bytes." * is_long,
        "clocks": _clocks(traces, first),
    }


def state(statuses: Sequence[Status], now: float) -> str:
    """Return whether a job has ended, by whose error, or which ranks are silent.

    Args:
      statuses: see `read_statuses`; at least one.
      now: seconds since the epoch.
    """
    failed = [str(one["rank"]) for one in statuses if one["state"] == "failed"]
    if failed:
        return f"ended by an error of rank {', '.join(failed[:4])}"
    going_on = [one for one in statuses if one["state"] != "ended"]
    if not going_on:
        return "ended"
    most = max(_LATE_SECONDS, statuses[0]["ranks"] / 2)
    silent = [str(one["rank"]) for one in going_on if now - one["time"] > most]
    if len(silent) == len(statuses):
        return "silent, perhaps killed"
    missing = statuses[0]["ranks"] - len(statuses)
    text = f"running, {missing} not seen yet" if missing else "running"
    return f"{text}, silent: rank {', '.join(silent[:4])}" if silent else text


def step_parts(status: Status) -> dict[str, float]:
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


def _mean_parts(statuses: Sequence[Status]) -> dict[str, float]:
    ranks = [step_parts(one) for one in statuses]
    return {name: statistics.fmean(parts[name] for parts in ranks) for name in PARTS}


def slowest_rank(statuses: Sequence[Status]) -> int | None:
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


def _findings(statuses: Sequence[Status], slow: int | None) -> list[str]:
    first = statuses[0]
    works = [work_seconds(one) for one in statuses]
    if len(statuses) < first["ranks"]:
        works = []
    summary = f"Rank {first['rank']}: {as_text(first, works)}."
    if slow is None:
        more = advice(first, works=works)
        return [summary, *(f"{text[0].upper()}{text[1:]}." for text in more)]
    parts = {one["rank"]: step_parts(one) for one in statuses}
    own = parts.pop(slow)
    work = own["compute"] + own["input"]
    other = statistics.fmean(p["compute"] + p["input"] for p in parts.values())
    times = f"{work / other:.1f} times as long as" if other else "longer than"
    why = "input" if own["input"] > own["compute"] else "compute"
    return [
        summary,
        f"Rank {slow} is the slowest: its own work takes {times} that of others, "
        f"mostly {why}. The others wait for it.",
    ]


def _series(traces: Sequence[RankTrace]) -> dict[str, Any] | None:
    steps = [step for trace in traces for step in trace.steps()]
    rest = [step for step in steps if step.number > 1] or steps
    if not rest:
        return None
    begun = np.array([step.number for step in rest])
    first, end = int(begun.min()), int(begun.max()) + 1
    # Bins of equally many steps, since some steps read for the following ones
    width = -(-(end - first) // _BINS)
    edges = np.arange(first, end + width, width)
    weights = np.array([step.one_of for step in rest], float)
    number = np.histogram(begun, edges, weights=weights)[0]
    parts = {}
    for name in PARTS:
        if name == "transfer":
            seconds = [max(0.0, step.communication - step.waiting) for step in rest]
        else:
            seconds = [getattr(step, name) for step in rest]
        values = np.array(seconds, float)
        sums = np.histogram(begun, edges, weights=values * weights)[0]
        parts[name] = (sums / np.maximum(number, 1)).tolist()
    return {"edges": edges.tolist(), "parts": parts}


def scaling(statuses: Sequence[Status]) -> tuple[list[int], list[float], list[float]]:
    """Return numbers of ranks, estimated speeds relative to now, and ideal ones.

    Assumes the same global batch: computing and input are divided by the ranks, waiting
    stays the same fraction of them, and transfer takes as long as now.
    """
    ranks, mean = statuses[0]["ranks"], _mean_parts(statuses)
    divided = mean["compute"] + mean["input"] + mean["waiting"]
    fixed = mean["transfer"] + mean["checkpoint"]
    numbers = sorted({ranks} | {1 << k for k in range((4 * ranks).bit_length())})
    now = (divided + fixed) or 1.0
    speeds = []
    for number in numbers:
        if number == 1:
            took = (mean["compute"] + mean["input"]) * ranks + mean["checkpoint"]
        else:
            took = divided * ranks / number + fixed
        # The numbers of a damaged file may have a ratio that no float holds
        speeds.append(min(now / took, 1e9) if took else 1.0)
    return numbers, speeds, [number / ranks for number in numbers]


def _ranks(statuses: Sequence[Status], slow: int | None) -> dict[str, Any]:
    rows = [
        {
            "rank": one["rank"],
            "host": one["host"],
            "mark": "slowest" if one["rank"] == slow else "",
            "parts": step_parts(one),
        }
        for one in statuses
    ]
    note = ""
    if len(rows) > _MOST_ROWS:
        rows = sorted(rows, key=lambda row: row["parts"]["waiting"])[:_MOST_ROWS]
        note = f"The {_MOST_ROWS} of {len(statuses)} ranks that wait least."
    return {"ranks": rows, "ranks_note": note}


def _clocks(traces: Sequence[RankTrace], first: Status) -> str:
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
    return text
