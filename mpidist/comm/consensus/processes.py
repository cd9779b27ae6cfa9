"""The processes of the ranks of a node: noticing that one has ended.

Launchers do so, too, but not all of them at once, and each in its own way.
"""

from __future__ import annotations

import contextlib
import os
import select

from mpi4py import MPI

__all__ = ["ended", "learn_pids", "stop"]

_NAMESPACE = "/proc/self/ns/pid"
_descriptors: dict[int, int] = {}  # by process id
_is_stopped = False


def learn_pids(comm: MPI.Intracomm, node: MPI.Intracomm) -> dict[int, int]:
    """Return the process ids of the other ranks of a node, by their rank. Collective.

    An empty dict where they cannot be watched: not on Linux >= 5.3, or where ranks are
    in containers that do not see each other's processes.

    Args:
      comm: whose ranks are meant.
      node: those that share memory with this one.
    """
    namespace = None
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            namespace = os.readlink(_NAMESPACE)
    mine = comm.Get_rank(), os.getpid(), namespace
    everyone = node.allgather(mine)
    if any(found[2] != namespace for found in everyone) or namespace is None:
        return {}
    pids = {rank: pid for rank, pid, _ in everyone if pid != os.getpid()}
    try:
        for pid in pids.values():
            if pid not in _descriptors:  # it keeps the number from another process
                _descriptors[pid] = os.pidfd_open(pid)
    except OSError:  # not allowed, or too many
        return {}
    return pids


def ended(pids: dict[int, int]) -> list[int]:
    """Return the ranks whose processes have ended, of those that `learn_pids` gave.

    None after `stop`.
    """
    if _is_stopped:
        return []
    ranks = {_descriptors[pid]: rank for rank, pid in pids.items()}
    poll = select.poll()
    for descriptor in ranks:
        poll.register(descriptor, select.POLLIN)
    return sorted(ranks[descriptor] for descriptor, _ in poll.poll(0))


def stop() -> None:
    """Take it for right from now on if processes end: the program does."""
    global _is_stopped
    _is_stopped = True
