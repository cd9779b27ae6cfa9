"""Waiting for MPI requests: sparingly, or until a deadline."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from mpi4py import MPI

__all__ = ["LateError", "Waiting", "wait_patiently"]

_HERE_TAG = 1


class LateError(Exception):
    """A deadline was missed; its argument is the list of ranks not heard of."""


def wait_patiently(request: MPI.Request) -> None:
    """Wait for an MPI request; after 100 microseconds without using the processor.

    Each sleep is a small part of the time before it, so that little is lost in the end.
    """
    start = time.monotonic()
    while not request.Test():
        if (waited := time.monotonic() - start) > 1e-4:
            time.sleep(min(waited / 4, 1e-3))


class Waiting:
    """Deadlines of the calls on one communicator, each of which all ranks make.

    A rank that has waited for half of its time tells the others so. Thus those that
    miss the deadline know who has come.
    """

    def __init__(self, comm: MPI.Intracomm):
        self._comm = comm
        self._rank = comm.Get_rank()
        self._abandoned: list[Any] = []  # MPI may still read and write these

    def wait(self, request: MPI.Request, deadline: float, call: int) -> None:
        """Wait for a request until `deadline`, on time.monotonic's clock.

        Args:
          request: of what all ranks wait for in this call.
          deadline: perhaps another one on each rank.
          call: its number, the same on all ranks.

        Raises:
          LateError: it is over. The communicator cannot be used afterwards.
        """
        start = time.monotonic()
        announce = start + (deadline - start) / 2
        arrived = {self._rank}
        announced = False
        pause = 0.0
        while not request.Test():
            now = time.monotonic()
            if pause:
                self._collect(arrived, call)
            if not announced and (now > announce or len(arrived) > 1):
                self._announce(call)
                announced = True
            if now > deadline:
                self._abandoned.append(request)
                raise LateError(sorted({*range(self._comm.Get_size())} - arrived))
            time.sleep(pause)
            pause = min(pause + 1e-6, 1e-3)

    def _announce(self, call: int) -> None:
        """Tell all other ranks that this one waits in a call."""
        here = np.array([call])
        others = [r for r in range(self._comm.Get_size()) if r != self._rank]
        requests = [self._comm.Isend(here, r, _HERE_TAG) for r in others]
        self._abandoned.append((here, requests))

    def _collect(self, arrived: set[int], call: int) -> None:
        """Add the ranks that announced this call."""
        status, announced = MPI.Status(), np.zeros(1, np.int64)
        while self._comm.Iprobe(tag=_HERE_TAG, status=status):
            self._comm.Recv(announced, status.Get_source(), _HERE_TAG)
            if announced[0] == call:
                arrived.add(status.Get_source())
