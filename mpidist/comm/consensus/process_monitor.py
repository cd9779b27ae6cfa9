"""Detect that the process of another rank on the node has ended.

Launchers detect it too, but some of them late.
"""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

import numpy as np
from mpi4py import MPI

_NAMESPACE = "/proc/self/ns/pid"
_descriptors: dict[int, int] = {}  # by process id
_is_stopped = False


def monitor_processes(comm: MPI.Intracomm, node: MPI.Intracomm) -> dict[int, int]:
    """Return the process ids of the other ranks of a node, by their rank. Collective.

    An empty dict if they cannot be monitored: not on Linux >= 5.3, or ranks are in
    containers with separate process namespaces.

    Args:
      comm: the communicator of the rank numbers.
      node: the ranks that share memory with this one.
    """
    namespace, own = 0, os.getpid()
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            namespace = os.stat(_NAMESPACE).st_ino
    everyone = np.empty((node.Get_size(), 3), np.int64)
    node.Allgather(np.array([comm.Get_rank(), own, namespace]), everyone)
    if namespace == 0 or (everyone[:, 2] != namespace).any():
        return {}
    pids = {rank: pid for rank, pid, _ in everyone.tolist() if pid != own}
    try:
        for pid in pids.values():
            if pid not in _descriptors:  # while it is open, the number is not reused
                _descriptors[pid] = os.pidfd_open(pid)
    except OSError:  # not allowed, or too many
        return {}
    return pids


def ended(pids: dict[int, int]) -> list[int]:
    """Return the ranks whose processes have ended, given what is monitored.

    None after `expect_exits`.
    """
    if _is_stopped:
        return []
    ranks = {_descriptors[pid]: rank for rank, pid in pids.items()}
    poll = select.poll()
    for descriptor in ranks:
        poll.register(descriptor, select.POLLIN)
    return sorted(ranks[descriptor] for descriptor, _ in poll.poll(0))


def stopped(pids: dict[int, int]) -> list[int]:
    """Return the ranks whose processes are stopped, by SIGSTOP or a debugger."""
    halted = []
    for rank, pid in pids.items():
        with contextlib.suppress(OSError):
            # The state follows the name, which may contain anything: proc(5)
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            if state and state[0] in (b"T", b"t"):
                halted.append(rank)
    return sorted(halted)


def expect_exits() -> None:
    """From now on, treat process exits as normal: the program is shutting down."""
    global _is_stopped
    _is_stopped = True
