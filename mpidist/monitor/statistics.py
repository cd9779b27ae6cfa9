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
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.monitor.summary import advice, as_text, describe, work_seconds
from mpidist.util import logs
from mpidist.util.counters import Counters
from mpidist.util.settings import BANNER, decimal

__all__ = ["report", "report_at_end", "statistics"]

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
    found = counters.snapshot()
    return describe(found) | {
        "rank": rank,
        "ranks": ranks,
        "host": socket.gethostname(),
        "epochs": counters.epochs,
        "has_cache": counters.has_cache,
    }


def shared_cores(ranks_on_node: int) -> tuple[int, int, int]:
    """Return how many ranks share this rank's cores, their threads, and the cores.

    The first is 1 for a rank that is bound to its own cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
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
    works: dict[int, list[float]] = {}
    for consensus in list(Consensus.in_use):
        if consensus.broken is None and not consensus.failures.ranks:
            counters, call = consensus.recorder.counters, "the end of the program"
            # An error of one rank must not let the others wait
            found = consensus.guard(call, lambda c=counters: describe(c.snapshot()))
            works[id(counters)] = consensus.gather(call, work_seconds(found))
    if _first is None or _first.rank or _first.ranks == 1:
        return
    if BANNER.read_or_default():
        _print(_first, works.get(id(_first.counters), ()))


def _print(first: _First, works: Sequence[float]) -> None:
    found = _describe(first.counters, 0, first.ranks)
    is_long = found["measured_seconds"] >= _LEAST_SECONDS
    if is_long and found["steps"] >= _LEAST_STEPS:
        lines = [f"mpidist: {as_text(found, works)}"]
        lines += advice(found, *shared_cores(first.ranks_on_node), works)
        logs.info("monitor", "\nmpidist: ".join(lines))
