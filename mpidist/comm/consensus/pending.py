"""Waits of this process outside recorded calls, for the watchdog.

Creating and freeing MPI communicators and windows is collective, without a consensus
that would detect missing ranks.
"""

from __future__ import annotations

import time
from typing import ClassVar

from mpi4py import MPI

from mpidist.comm.consensus.signatures import call_site
from mpidist.util.forks import call_in_child

__all__ = ["Pending"]


class Pending:
    """A context manager around a collective operation of this thread.

    Use it only for waits in MPI, not for work of different duration.

    Args:
      operation: what it is, for messages.
      comm: the ranks that do it.

    Attributes:
      in_use: the entered contexts of all threads.
    """

    in_use: ClassVar[list[Pending]] = []

    def __init__(self, operation: str, comm: MPI.Intracomm):
        self.operation = operation
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.site = ""
        self.begun = 0.0

    def __enter__(self) -> None:
        if self.size > 1:
            self.site = call_site()
            self.begun = time.monotonic()
            Pending.in_use.append(self)

    def __exit__(self, *_: object) -> None:
        if self.size > 1:
            Pending.in_use.remove(self)


# A forked child waits for none of them
call_in_child(Pending.in_use.clear)
