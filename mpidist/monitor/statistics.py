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

import atexit
import os
import socket
from typing import Any

from mpidist.comm.replica_group import ReplicaGroup
from mpidist.monitor.summary import advice, as_text, describe
from mpidist.util import logs
from mpidist.util.counters import Counters
from mpidist.util.forks import is_forked
from mpidist.util.settings import BANNER

__all__ = ["report_at_end", "statistics"]

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
    threads = int(named) if named and named.isdecimal() else cores
    return sharing, threads, cores


_ends: list[int] = []  # processes that will report


def report_at_end(group: ReplicaGroup) -> None:
    """Print a summary of the time at the end of the program, for its first strategy.

    Rank 0 prints its own numbers, if there are several ranks and the job was not short.
    MPIDIST_BANNER=0 turns it off. Not collective.
    """
    is_wanted = BANNER.read_or_default()
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
            lines += advice(found, *shared_cores(on_node))
            logs.info("monitor", "\nmpidist: ".join(lines))

    atexit.register(report)
