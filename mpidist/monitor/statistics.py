"""How a job spends its time: as a dict, and as a line at its end.

`Strategy.statistics` returns the dict, of one rank. A step ends with each `run`; in
programs without `run`, before each `next`; else with each backward pass of
`mpidist.torch`. Times are in seconds:

  rank, ranks, host     this rank, the number of ranks, the name of the node
  seconds               since the strategy was created
  steps, epochs         the number of completed steps and epochs
  first_step_seconds    duration of the first step, which the numbers below exclude
  step_seconds          mean, min and max of a step
  step_histogram        a list of [from, to, number of steps]
  measured_seconds      total of all steps except the first; of all the time if there
                        is no other step
  parts                 its division: "input" in `next`, without waiting for other
                        ranks; "communication" in collectives; "checkpoint" in
                        saving and restoring; "compute" is the rest
  waiting_seconds       the part of communication until all ranks had arrived
  waiting_for           waiting time since the start, by the rank that arrived last
                        (as text), where it is known
  overlapped_seconds    communication in other threads, during computation
  operations            since the start, by name: calls, seconds, waiting_seconds, and
                        bytes of results by transport
  has_cache             whether the last dataset is cached
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpidist.util import logs
from mpidist.util.available_memory import available_cores
from mpidist.util.representation import duration
from mpidist.util.settings import BANNER, decimal

if TYPE_CHECKING:
    # At run time without: commands that read statistics from files need no MPI
    from mpidist.comm.replica_group import ReplicaGroup
    from mpidist.util.counters import Counters

PARTS = ("compute", "communication", "input", "checkpoint")
# A rank is named if the others wait for it this many times the average
_TIMES_MEAN = 1.5
_LEAST_WAITING = 0.03  # as a fraction of a step
_MORE_WORK = 1.15  # of a slow rank, relative to this one
# Shorter jobs print no line at their end
_LEAST_STEPS, _LEAST_SECONDS = 10, 5.0


def statistics(group: ReplicaGroup) -> dict[str, Any]:
    """See `Strategy.statistics`, of this rank. Not collective."""
    counters = group.consensus.recorder.counters
    beside = [recorder.counters.communication for recorder in group.recorders_beside()]
    return _describe(counters, group.replica_id, group.num_replicas) | {
        "overlapped_seconds": sum(beside) / 1e9
    }


def _describe(counters: Counters, rank: int, ranks: int) -> dict[str, Any]:
    counts = counters.snapshot()
    steps = counts["steps"]
    if steps > 1:
        begin, end = counts["first_mark"], counts["last_mark"]
    else:
        end = counts["totals"]
        begin = (end[0] - counts["seconds_ns"], 0, 0, 0, 0)
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
        "rank": rank,
        "ranks": ranks,
        "host": socket.gethostname(),
        "epochs": counters.epochs,
        "has_cache": counters.has_cache,
        "seconds": counts["seconds_ns"] / 1e9,
        "steps": steps,
        "first_step_seconds": counts["first_ns"] / 1e9,
        "step_seconds": {
            "mean": took / (steps - 1) if steps > 1 else 0.0,
            "min": counts["least_ns"] / 1e9,
            "max": counts["most_ns"] / 1e9,
        },
        "step_histogram": counts["histogram"],
        "measured_seconds": took,
        "parts": parts,
        "waiting_seconds": waiting,
        "waiting_for": {str(rank): ns / 1e9 for rank, ns in counts["waiting_for"]},
        "operations": {
            name: {
                "calls": calls,
                "seconds": spent / 1e9,
                "waiting_seconds": waited / 1e9,
                "bytes": transports,
            }
            for name, calls, spent, waited, transports in counts["operations"]
        },
    }


def work_seconds(stats: Mapping[str, Any]) -> float:
    """Return the time in which a rank did its own work."""
    return float(stats["parts"]["compute"] + stats["parts"]["input"])


def as_text(stats: Mapping[str, Any], works: Sequence[float] = ()) -> str:
    """Return one line: "step 3.1 ms: 71 % compute, 18 % communication, ...".

    Args:
      stats: the statistics of a rank.
      works: `work_seconds` of all ranks, by rank; empty if not known.
    """
    took = stats["measured_seconds"]
    if stats["steps"] > 1:
        text = f"step {duration(stats['step_seconds']['mean'])}"
    else:
        text = duration(took)
    parts = {name: s / took for name, s in stats["parts"].items()} if took else {}
    shares = []
    for name, share in sorted(parts.items(), key=lambda item: -item[1]):
        if share >= 0.005 or name == "compute":
            waits = _waits_text(stats, works) if name == "communication" else ""
            shares.append(f"{share:.0%} {name}{waits}".replace("%", " %"))
    return f"{text}: {', '.join(shares)}"


def _waits_text(stats: Mapping[str, Any], works: Sequence[float]) -> str:
    share = stats["waiting_seconds"] / stats["measured_seconds"]
    if share < 0.005:
        return ""
    slow = slowest(stats, works)
    text = "" if slow is None else f", mostly for rank {slow}"
    return f" ({share:.0%} waiting{text})"


def slowest(stats: Mapping[str, Any], works: Sequence[float] = ()) -> int | None:
    """Return the rank for which this one mostly waited, if there is one.

    Args:
      stats: the statistics of this rank.
      works: see `as_text`. Without them, the other one of two ranks always stands out.
    """
    by_rank = {int(rank): s for rank, s in stats["waiting_for"].items()}
    total, others = sum(by_rank.values()), stats["ranks"] - 1
    if not by_rank or stats["waiting_seconds"] < (
        _LEAST_WAITING * stats["measured_seconds"]
    ):
        return None
    rank = max(by_rank, key=lambda rank: by_rank[rank])
    if works and works[rank] < _MORE_WORK * work_seconds(stats):
        return None
    is_most = by_rank[rank] > total / 2
    return (
        rank
        if is_most and by_rank[rank] * others >= total * min(_TIMES_MEAN, others)
        else None
    )


def advice(
    stats: Mapping[str, Any],
    sharing: int = 0,
    threads: int = 1,
    cores: int = 1,
    works: Sequence[float] = (),
) -> list[str]:
    """Return advice on how to make a job faster, from one rank's statistics.

    Args:
      stats: the statistics.
      sharing: the number of ranks that share its cores; 0 if unknown.
      threads: the number of computing threads of each of them.
      cores: the number of cores that they share.
      works: see `as_text`.
    """
    lines: list[str] = []
    ranks, took = stats["ranks"], stats["measured_seconds"]
    if stats["steps"] < 2 or not took:
        return lines
    parts = stats["parts"]
    is_even = slowest(stats, works) is None
    # If one rank is slow, the numbers of this one are not typical
    if ranks > 1 and (works or is_even):
        own = work_seconds(stats)
        alone = sum(works) if works else own * ranks
        moving = parts["communication"] - stats["waiting_seconds"]
        if alone + parts["checkpoint"] < took:
            alone /= stats["steps"] - 1
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
        if stats["epochs"] > 1 and not stats["has_cache"]:
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


def shared_cores(ranks_on_node: int) -> tuple[int, int, int]:
    """Return how many ranks share this rank's cores, their threads, and the cores.

    The first is 1 for a rank that is bound to its own cores.
    """
    cores = len(available_cores())
    sharing = ranks_on_node if cores == os.cpu_count() else 1
    named = os.environ.get("OMP_NUM_THREADS") or os.environ.get("OPENBLAS_NUM_THREADS")
    threads = decimal((named or "").partition(",")[0].strip()) or cores
    return sharing, threads, cores


class _First(NamedTuple):
    """What is reported of the first strategy of the program."""

    counters: Counters
    rank: int
    ranks: int
    ranks_on_node: int


_first: _First | None = None


def report_at_end(group: ReplicaGroup) -> None:
    """Let `report` print a summary of this strategy, if it is the first one."""
    global _first
    if _first is None:
        counters, on_node = group.consensus.recorder.counters, group.topology.node
        rank, ranks = group.replica_id, group.num_replicas
        _first = _First(counters, rank, ranks, on_node.Get_size())


def report() -> None:
    """Print a summary of the time, of the first strategy, at the end of the program.

    On its rank 0, if there are several ranks and the job was not short.
    MPIDIST_BANNER=0 turns it off. Collective: the ranks of all strategies in use.
    """
    from mpidist.comm.consensus.consensus import Consensus
    from mpidist.comm.consensus.signatures import END

    works: dict[int, list[float]] = {}
    for consensus in list(Consensus.in_use):
        if consensus.is_usable:
            counters = consensus.recorder.counters

            def work(counters: Counters = counters) -> float:
                return work_seconds(_describe(counters, 0, 1))

            every = consensus.gather_objects(END, work)
            works[id(counters)] = every
    if _first is None or _first.rank or _first.ranks == 1:
        return
    if BANNER.read_or_default():
        _print(_first, works.get(id(_first.counters), ()))


def _print(first: _First, works: Sequence[float]) -> None:
    stats = _describe(first.counters, 0, first.ranks)
    is_long = stats["measured_seconds"] >= _LEAST_SECONDS
    if is_long and stats["steps"] >= _LEAST_STEPS:
        lines = [f"mpidist: {as_text(stats, works)}"]
        lines += advice(stats, *shared_cores(first.ranks_on_node), works)
        logs.info("monitor", "\nmpidist: ".join(lines))
