"""Bytes of different lengths, from one rank to all, and from all to all.

Ranks wait for nonblocking calls of MPI: see `MpiTransport`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

__all__ = ["all_gather", "broadcast"]

# `Consensus.wait`
Wait = Callable[[MPI.Request, None, str], None]


def broadcast(
    comm: MPI.Intracomm, data: bytes, root: int, wait: Wait, operation: str
) -> Any:
    """Return the bytes of rank `root`, as an array, for an operation. Collective."""
    size, received = np.array([len(data)]), np.frombuffer(data, np.uint8)
    wait(comm.Ibcast(size, root), None, operation)
    if comm.Get_rank() != root:
        received = np.empty(size[0], np.uint8)
    wait(comm.Ibcast([received, MPI.BYTE], root), None, operation)
    return received


def all_gather(
    comm: MPI.Intracomm, data: bytes, wait: Wait, operation: str
) -> list[Any]:
    """Return the bytes of all ranks, as arrays, for an operation. Collective."""
    sizes = np.empty(comm.Get_size(), np.int64)
    wait(comm.Iallgather(np.array([len(data)]), sizes), None, operation)
    edges = list(itertools.accumulate(sizes.tolist(), initial=0))
    received = np.empty(edges[-1], np.uint8)
    spec = [received, sizes.tolist(), MPI.BYTE]
    wait(comm.Iallgatherv([data, MPI.BYTE], spec), None, operation)
    # Not np.split, which calls several functions for each rank
    return [received[start:end] for start, end in itertools.pairwise(edges)]
