"""How a job spends its time, as a dict and as a line at its end.

The dict is that of `Strategy.statistics`, of one rank. A step ends with each `run`; in
programs without `run`, before each `next`; else with each backward pass of
`mpidist.torch`. Times are in seconds:

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
from typing import Any

from mpidist.comm.replica_group import ReplicaGroup
from mpidist.monitor.summary import advice, as_text, describe
from mpidist.util import logs
from mpidist.util.counters import Counters
from mpidist.util.forks import is_forked
from mpidist.util.settings import BANNER

__all__ = ["report_at_end", "statistics"]

# What is shorter has no line at its end
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
    """Return how many ranks share cores with this one, threads of each, and cores.

    Ranks that are bound to cores of their own count alone.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    sharing = ranks_on_node if cores == os.cpu_count() else 1
    named = os.environ.get("OMP_NUM_THREADS") or os.environ.get("OPENBLAS_NUM_THREADS")
    threads = int(named) if named and named.isdecimal() else cores
    return sharing, threads, cores


_ends: list[int] = []  # processes that will report


def report_at_end(group: ReplicaGroup) -> None:
    """Print a summary of the time when the program ends, for its first strategy.

    On rank 0, from its own numbers, if there are several ranks and the job was not
    short. MPIDIST_BANNER=0 turns it off. Not collective.
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
