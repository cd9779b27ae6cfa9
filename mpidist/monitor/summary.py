"""Statistics of a rank as text; needs no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpidist.util.durations import bucket_seconds, duration

__all__ = ["PARTS", "advice", "as_text", "describe", "slowest", "work_seconds"]

PARTS = ("compute", "communication", "input", "checkpoint")
# A rank is named if the others wait for it this many times the average
_TIMES_MEAN = 1.5
_LEAST_WAITING = 0.03  # as a fraction of a step
_MORE_WORK = 1.15  # of a slow rank, relative to this one


def describe(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `Counters.snapshot` by name, in seconds.

    The parts are those of all steps except the first; if there is no other step, those
    of the whole time.
    """
    steps = found["steps"]
    if steps > 1:
        begin, end = found["first_mark"], found["last_mark"]
    else:
        end = found["totals"]
        begin = (end[0] - found["seconds_ns"], 0, 0, 0, 0)
    took, reading, communication, waiting, saving = (
        max(0, b - a) / 1e9 for a, b in zip(begin, end)
    )
    parts = {
        "compute": max(0.0, took - reading - communication - saving),
        "communication": communication,
        "input": reading,
        "checkpoint": saving,
    }
    return {
        "seconds": found["seconds_ns"] / 1e9,
        "steps": steps,
        "first_step_seconds": found["first_ns"] / 1e9,
        "step_seconds": {
            "mean": took / (steps - 1) if steps > 1 else 0.0,
            "min": found["least_ns"] / 1e9,
            "max": found["most_ns"] / 1e9,
        },
        "step_histogram": [
            [*bucket_seconds(bucket), count] for bucket, count in found["histogram"]
        ],
        "measured_seconds": took,
        "parts": parts,
        "waiting_seconds": waiting,
        "waiting_for": {str(rank): ns / 1e9 for rank, ns in found["waiting_for"]},
        "operations": {
            name: {
                "calls": calls,
                "seconds": spent / 1e9,
                "waiting_seconds": waited / 1e9,
                "bytes": transports,
            }
            for name, calls, spent, waited, transports in found["operations"]
        },
    }


def work_seconds(found: Mapping[str, Any]) -> float:
    """Return the time in which a rank did its own work."""
    return float(found["parts"]["compute"] + found["parts"]["input"])


def as_text(found: Mapping[str, Any], works: Sequence[float] = ()) -> str:
    """Return one line: "step 3.1 ms: 71 % compute, 18 % communication, ...".

    Args:
      found: the statistics of a rank.
      works: `work_seconds` of all ranks, by rank; empty if not known.
    """
    took = found["measured_seconds"]
    if found["steps"] > 1:
        text = f"step {duration(found['step_seconds']['mean'])}"
    else:
        text = duration(took)
    parts = {name: s / took for name, s in found["parts"].items()} if took else {}
    shares = []
    for name, share in sorted(parts.items(), key=lambda item: -item[1]):
        if share >= 0.005 or name == "compute":
            waits = _waits_text(found, works) if name == "communication" else ""
            shares.append(f"{share:.0%} {name}{waits}".replace("%", " %"))
    return f"{text}: {', '.join(shares)}"


def _waits_text(found: Mapping[str, Any], works: Sequence[float]) -> str:
    share = found["waiting_seconds"] / found["measured_seconds"]
    if share < 0.005:
        return ""
    slow = slowest(found, works)
    text = "" if slow is None else f", mostly for rank {slow}"
    return f" ({share:.0%} waiting{text})"


def slowest(found: Mapping[str, Any], works: Sequence[float] = ()) -> int | None:
    """Return the rank for which this one mostly waited, if there is one.

    Args:
      found: the statistics of this rank.
      works: see `as_text`. Without them, the other one of two ranks always stands out.
    """
    by_rank = {int(rank): s for rank, s in found["waiting_for"].items()}
    total, others = sum(by_rank.values()), found["ranks"] - 1
    if not by_rank or found["waiting_seconds"] < (
        _LEAST_WAITING * found["measured_seconds"]
    ):
        return None
    rank = max(by_rank, key=lambda rank: by_rank[rank])
    if works and works[rank] < _MORE_WORK * work_seconds(found):
        return None
    is_most = by_rank[rank] > total / 2
    return (
        rank
        if is_most and by_rank[rank] * others >= total * min(_TIMES_MEAN, others)
        else None
    )


def advice(
    found: Mapping[str, Any],
    sharing: int = 0,
    threads: int = 1,
    cores: int = 1,
    works: Sequence[float] = (),
) -> list[str]:
    """Return advice on how to make a job faster, from one rank's statistics.

    Args:
      found: the statistics.
      sharing: the number of ranks that share its cores; 0 if unknown.
      threads: the number of computing threads of each of them.
      cores: the number of cores that they share.
      works: see `as_text`.
    """
    lines: list[str] = []
    ranks, took = found["ranks"], found["measured_seconds"]
    if found["steps"] < 2 or not took:
        return lines
    parts = found["parts"]
    is_even = slowest(found, works) is None
    # If one rank is slow, the numbers of this one are not typical
    if ranks > 1 and (works or is_even):
        own = work_seconds(found)
        alone = sum(works) if works else own * ranks
        moving = parts["communication"] - found["waiting_seconds"]
        if alone + parts["checkpoint"] < took:
            alone /= found["steps"] - 1
            lines.append(
                f"on one rank a step would take about {duration(alone)}: it is too "
                "small to gain from more ranks; use larger batches"
            )
        elif is_even and moving > own:
            lines.append(
                "more ranks would gain little, because communication takes longer "
                "than computing; use larger batches"
            )
    if parts["input"] > 0.15 * took:
        text = "input is too slow: use more threads with map(..., num_parallel_calls=n)"
        if found["epochs"] > 1 and not found["has_cache"]:
            text = (
                "the same rows are read and decoded in each epoch: use Dataset.cache() "
            )
            text += "if they fit in memory"
        lines.append(text)
    if sharing * threads > cores:
        text = f"{sharing} ranks share {cores} cores"
        if threads > 1:
            fitting = max(1, cores // sharing)
            text += f", with {threads} threads each: set OMP_NUM_THREADS={fitting}"
        lines.append(text)
    return lines
