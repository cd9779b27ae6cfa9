"""Waits of this process outside recorded calls, for the watchdog.

Creating and freeing MPI communicators and windows is collective, without a consensus
that would detect missing ranks. What ranks exchange for that is here, too: mpi4py's
functions for objects send several messages for each call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus.signatures import call_site
from mpidist.util.forks import call_in_child
from mpidist.util.serialization import hash62

T = TypeVar("T")


class Pending:
    """A context manager around a collective operation of this thread.

    Use it only for waits in MPI, not for work of different duration.

    Args:
      operation: what it is, for messages.
      comm: the ranks that do it.
      members: their numbers in COMM_WORLD, if it needs them all, and not only those
        that are known to be here.

    Attributes:
      in_use: the entered contexts of all threads.
      thread: the identifier of the thread that has entered.
    """

    in_use: ClassVar[list[Pending]] = []

    def __init__(
        self, operation: str, comm: MPI.Intracomm, members: Sequence[int] = ()
    ):
        self.operation = operation
        self.members = members
        self.thread = 0
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.site = ""
        self.begun = 0.0

    def __enter__(self) -> None:
        if self.size > 1:
            self.site = call_site()
            self.thread = threading.get_ident()
            self.begun = time.monotonic()
            Pending.in_use.append(self)

    def __exit__(self, *_: object) -> None:
        if self.size > 1:
            Pending.in_use.remove(self)


# A forked child waits for none of them
call_in_child(Pending.in_use.clear)


def highest(comm: MPI.Intracomm, *numbers: int) -> list[int]:
    """Return the highest of all ranks' numbers, at each place. Collective."""
    found = np.array(numbers, np.int64)
    comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
    return list(map(int, found))


def gather_likely_equal(comm: MPI.Intracomm, value: T) -> list[T]:
    """Return the values of all ranks, which send them only if they differ. Collective.

    Args:
      comm: the ranks.
      value: of a type whose `repr` shows all of it.
    """
    number = hash62(repr(value))
    most, least = highest(comm, number, -number)
    return [value] * comm.Get_size() if most == -least else comm.allgather(value)
