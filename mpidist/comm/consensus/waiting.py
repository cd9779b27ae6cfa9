"""Waiting for requests, and ranks that have left a collective by an error of their own.

A rank may leave a collective by an exception of its own: its deadline is over, a signal
handler raises, there is no memory. From then on its place in the sequence of calls is
unknown, so nothing more can be communicated. It sends the reason to all other ranks,
which look for such messages wherever they wait for longer than a moment.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidist.errors import CollectiveError, DeadlineError

__all__ = ["Departures", "WaitTimeoutError", "RequestWaiter"]


_TAG = 2  # the announcements of `RequestWaiter` have another one
_MOST_BYTES = 2000  # so small a message is sent eagerly


class Departures:
    """Detects ranks that have left a collective: the communicator is unusable then.

    Args:
      comm: the communicator; its tag 2 is used for nothing else.
    """

    def __init__(self, comm: MPI.Intracomm):
        self._comm = comm
        self._others = [r for r in range(comm.Get_size()) if r != comm.Get_rank()]
        self._sent: list[Any] = []  # MPI may still read these
        self._found: str | None = None
        self._lock = threading.Lock()

    def announce(self, reason: str, is_deadline: bool) -> None:
        """Send the reason why this rank has left to all others. Not collective."""
        data = f"{int(is_deadline)}{reason}".encode(errors="replace")[:_MOST_BYTES]
        buffer = np.frombuffer(data, np.uint8)
        requests = [self._comm.Isend(buffer, rank, _TAG) for rank in self._others]
        self._sent.append((buffer, requests))

    def find(self) -> str | None:
        """Return the reason of a rank that has left, if one has. Any thread."""
        with self._lock:
            message = None if self._found else self._comm.Improbe(tag=_TAG)
            if message is not None:
                buffer = np.zeros(_MOST_BYTES, np.uint8)
                message.Recv(buffer)
                self._found = buffer.tobytes().rstrip(b"\0").decode(errors="replace")
        return self._found and self._found[1:]

    def require_none(self) -> None:
        """Raise if another rank has left.

        Raises:
          DeadlineError: it had waited for longer than its deadline.
          CollectiveError: it left for another reason.
        """
        reason = self.find()
        if reason is not None:
            assert self._found is not None
            kind = DeadlineError if self._found[0] == "1" else CollectiveError
            raise kind(f"this strategy cannot communicate any more: {reason}")


_HERE_TAG = 1
_SPINS = 200
# After so long, a rank announces to the others which call it has reached
_ANNOUNCE_SECONDS = 1.0
_COLLECT_CALLS = 1000
_PAUSE_SECONDS = 1e-3  # at most, and a quarter of the time that was waited


class WaitTimeoutError(Exception):
    """A deadline was missed; the argument is the list of ranks that did not arrive."""


class RequestWaiter:
    """Waits for the requests of collective calls on one communicator.

    A rank that has waited for a second, or half of its time, tells the others so. Thus
    those that wait know who has come. The processor is left to others soon: each sleep
    is a small part of the time before it, so that little is lost in the end.

    Args:
      comm: the communicator.
      departures: of ranks of `comm`, for whom nobody must wait.
    """

    def __init__(self, comm: MPI.Intracomm, departures: Departures):
        self._comm = comm
        self._departures = departures
        self._rank = comm.Get_rank()
        self._abandoned: list[Any] = []  # MPI may still read and write these
        self._sent: list[tuple[Any, list[MPI.Request]]] = []
        self._arrived: set[int] | None = None  # while this rank has waited for long

    def missing(self) -> list[int] | None:
        """Return the ranks that have not arrived, if this one waits for long."""
        arrived = self._arrived
        if arrived is None:
            return None
        return sorted({*range(self._comm.Get_size())} - arrived)

    def wait(
        self,
        request: MPI.Request,
        deadline: float,
        call: int,
        yield_cpu: bool = False,
    ) -> None:
        """Wait for a request until `deadline`, on time.monotonic's clock.

        Args:
          request: of what all ranks wait for in this call.
          deadline: perhaps another one on each rank; math.inf for none.
          call: its number, the same on all ranks.
          yield_cpu: whether to leave the processor to others at once.

        Raises:
          WaitTimeoutError: it is over. The communicator cannot be used afterwards.
          CollectiveError: see `Departures.require_none`.
        """
        if call % _COLLECT_CALLS == 0:  # also on a rank that never waits
            self._collect(set(), call)
        for _ in range(1 if yield_cpu else _SPINS):
            if request.Test():
                return
        try:
            self._wait_long(request, deadline, call)
        finally:
            self._arrived = None

    def _wait_long(self, request: MPI.Request, deadline: float, call: int) -> None:
        start = now = time.monotonic()
        announce = start + min((deadline - start) / 2, _ANNOUNCE_SECONDS)
        arrived = {self._rank}
        announced = False
        while not request.Test():
            self._collect(arrived, call)
            if not announced and (now > announce or len(arrived) > 1):
                self._announce(call)
                self._arrived = arrived
                announced = True
            if now > deadline:
                self._abandoned.append(request)
                raise WaitTimeoutError(
                    sorted({*range(self._comm.Get_size())} - arrived)
                )
            try:
                self._departures.require_none()
            except BaseException:
                self._abandoned.append(request)
                raise
            time.sleep(min((now - start) / 4, _PAUSE_SECONDS))
            now = time.monotonic()

    def _announce(self, call: int) -> None:
        """Announce to all other ranks that this one waits in a call."""
        here = np.array([call])
        others = [r for r in range(self._comm.Get_size()) if r != self._rank]
        requests = [self._comm.Isend(here, r, _HERE_TAG) for r in others]
        self._sent = [s for s in self._sent if not MPI.Request.Testall(s[1])]
        self._sent.append((here, requests))

    def _collect(self, arrived: set[int], call: int) -> None:
        """Add the ranks that announced this call."""
        status, announced = MPI.Status(), np.zeros(1, np.int64)
        while self._comm.Iprobe(tag=_HERE_TAG, status=status):
            self._comm.Recv(announced, status.Get_source(), _HERE_TAG)
            if announced[0] == call:
                arrived.add(status.Get_source())
