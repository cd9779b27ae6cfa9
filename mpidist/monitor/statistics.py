"""Where the time of a job goes, as a dict and as a line at its end.

The dict is that of `Strategy.statistics`, of one rank. A step ends with each `run`; in
programs without it, before each `next`; in others, with each backward pass of
`mpidist.torch`. Times are seconds:

  rank, ranks, host     whose numbers these are; `seconds` since the beginning
  steps, epochs         how many have ended
  first_step_seconds    of the first one, which is in nothing below
  step_seconds          mean, min and max; `step_histogram`: [from, to, steps]
  measured_seconds      of all steps but the first; of all where that is alone
  parts                 of them: "input" in `next`, without waiting for other
                        ranks; "communication" in collectives; "checkpoint" in
                        saving and restoring; "compute" is what is left
  waiting_seconds       of communication: until all ranks had arrived
  waiting_for           the same, since the beginning, by the rank that arrived
                        last (as text), where that is known
  overlapped_seconds    communication in other threads, beside computing
  operations            by name: calls, seconds, waiting_seconds; and bytes of
                        results by transport. All since the beginning
  has_cache             whether the last dataset is cached
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Mapping
from typing import Any

from mpidist.comm.replica_group import ReplicaGroup
from mpidist.util.counters import Counters, bucket_seconds
from mpidist.util.environment import BANNER
from mpidist.util.forks import is_forked
from mpidist.util.notices import print_notice

__all__ = ["PARTS", "as_text", "describe", "report_at_end", "statistics"]

PARTS = ("compute", "communication", "input", "checkpoint")
# What is shorter has no line at its end
_LEAST_STEPS, _LEAST_SECONDS = 10, 5.0
# A rank is named that others wait for so many times as long as they would on average
_TIMES_MEAN = 1.5
_LEAST_WAITING = 0.03  # of a step


def statistics(group: ReplicaGroup) -> dict[str, Any]:
    """See `Strategy.statistics`, of this rank. Not collective."""
    counters = group.consensus.recorder.counters
    beside = [recorder.counters.communication for recorder in group.recorders_beside()]
    return _describe(counters, group.replica_id, group.num_replicas) | {
        "overlapped_seconds": sum(beside) / 1e9
    }


def _describe(counters: Counters, rank: int, ranks: int) -> dict[str, Any]:
    found = counters.snapshot()
    return describe(found) | {
        "rank": rank,
        "ranks": ranks,
        "host": socket.gethostname(),
        "epochs": counters.epochs,
        "has_cache": counters.has_cache,
    }


def describe(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `Counters.snapshot` has, in seconds and by name.

    The parts are those of all steps but the first, or of all the time where there is
    no other step.
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


def as_text(found: Mapping[str, Any]) -> str:
    """Return one line: "step 3.1 ms: 71 % compute, 18 % communication, ..."."""
    took = found["measured_seconds"]
    if found["steps"] > 1:
        text = f"step {_duration(found['step_seconds']['mean'])}"
    else:
        text = _duration(took)
    parts = {name: s / took for name, s in found["parts"].items()} if took else {}
    shares = []
    for name, share in sorted(parts.items(), key=lambda item: -item[1]):
        if share >= 0.005 or name == "compute":
            waits = _waits_text(found) if name == "communication" else ""
            shares.append(f"{share:.0%} {name}{waits}".replace("%", " %"))
    return f"{text}: {', '.join(shares)}"


def _waits_text(found: Mapping[str, Any]) -> str:
    share = found["waiting_seconds"] / found["measured_seconds"]
    if share < 0.005:
        return ""
    slow = slowest(found)
    text = "" if slow is None else f", mostly for rank {slow}"
    return f" ({share:.0%} waiting{text})"


def slowest(found: Mapping[str, Any]) -> int | None:
    """Return the rank for which this one has mostly waited, if it stands out."""
    by_rank = {int(rank): s for rank, s in found["waiting_for"].items()}
    total, others = sum(by_rank.values()), found["ranks"] - 1
    if not by_rank or found["waiting_seconds"] < (
        _LEAST_WAITING * found["measured_seconds"]
    ):
        return None
    rank = max(by_rank, key=lambda rank: by_rank[rank])
    is_most = by_rank[rank] > total / 2
    return (
        rank
        if is_most and by_rank[rank] * others >= total * min(_TIMES_MEAN, others)
        else None
    )


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def advice(found: Mapping[str, Any], threads: int, cores: int) -> list[str]:
    """Return what would make a job faster, as far as one rank can tell.

    Args:
      found: its statistics.
      threads: of all ranks that share cores with it.
      cores: that they share.
    """
    lines: list[str] = []
    ranks, took = found["ranks"], found["measured_seconds"]
    if found["steps"] < 2 or not took:
        return lines
    parts = found["parts"]
    # Where one rank is slow, this one's numbers say nothing of others
    if ranks > 1 and slowest(found) is None:
        own = parts["compute"] + parts["input"]
        moving = parts["communication"] - found["waiting_seconds"]
        if own * ranks + parts["checkpoint"] < took:
            lines.append(
                "on one rank a step would take about "
                f"{_duration(own * ranks / (found['steps'] - 1))}: it is too small to "
                "gain from more ranks; larger batches would"
            )
        elif moving > own:
            lines.append(
                "more ranks would gain little, as communication takes longer than "
                "computing; larger batches would"
            )
    if parts["input"] > 0.15 * took and found["epochs"] and not found["has_cache"]:
        lines.append(
            "the same rows are read and decoded in each epoch: Dataset.cache() would "
            "spare that, if they fit into memory"
        )
    if threads > cores:
        lines.append(
            f"{threads} threads of all ranks compete for {cores} cores: set "
            f"OMP_NUM_THREADS={max(1, cores // max(1, ranks))}"
        )
    return lines


def count_threads(ranks_on_node: int) -> tuple[int, int]:
    """Return how many computing threads ranks have together, and on how many cores.

    Ranks that are bound to cores of their own count alone.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    sharing = ranks_on_node if cores == os.cpu_count() else 1
    named = os.environ.get("OMP_NUM_THREADS") or os.environ.get("OPENBLAS_NUM_THREADS")
    threads = int(named) if named and named.isdecimal() else cores
    return sharing * threads, cores


_ends: list[int] = []  # processes that will report


def report_at_end(group: ReplicaGroup) -> None:
    """Print where the time went when the program ends, for its first strategy.

    On rank 0, from its own numbers, if there are several ranks and the job was no short
    one. The variable MPIDIST_BANNER=0 keeps it from that. Not collective.
    """
    is_wanted = os.environ.get(BANNER) != "0"
    if group.num_replicas == 1 or group.replica_id or not is_wanted:
        return
    if os.getpid() in _ends:
        return
    _ends.append(os.getpid())
    counters, ranks = group.consensus.recorder.counters, group.num_replicas
    on_node = group.topology.node.Get_size()

    def report() -> None:
        if is_forked():
            return
        found = _describe(counters, 0, ranks)
        is_long = found["measured_seconds"] >= _LEAST_SECONDS
        if is_long and found["steps"] >= _LEAST_STEPS:
            lines = [f"mpidist: {as_text(found)}"]
            lines += advice(found, *count_threads(on_node))
            print_notice("\nmpidist: ".join(lines))

    atexit.register(report)
