"""Waiting for requests; detection of ranks that left a collective by an error.

A rank may leave a collective by its own exception: a timeout, a signal handler, no
memory. From then on its position in the sequence of calls is unknown, so the strategy
cannot communicate any more. The rank sends the reason to all other ranks, which check
for such messages during longer waits.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidist.errors import CollectiveError, DeadlineError

__all__ = ["Departures", "RequestWaiter", "Requests", "WaitTimeoutError", "abandon"]

Requests = MPI.Request | list[MPI.Request]

_TAG = 2  # the announcements of `RequestWaiter` use another tag
_MOST_BYTES = 2000  # so small a message is sent eagerly
_MOST_DIRECT = 16


def _receivers(rank: int, size: int) -> list[int]:
    """Return the ranks to which `rank` sends a message for all.

    Up to 16 ranks send to each other. More ranks forward messages to the ranks at
    distances 1, 2, 4, 8, ...: a rank sends few messages, and there are many paths to
    each rank, in case some ranks forward nothing.
    """
    if size <= _MOST_DIRECT:
        return [other for other in range(size) if other != rank]
    return [(rank + (1 << k)) % size for k in range((size - 1).bit_length())]


class Departures:
    """Detects ranks that have left a collective: the communicator is unusable then.

    Args:
      comm: the communicator; its tag 2 is used for nothing else.
      channel: its number, unique on all of its ranks. It is in each message, because
        MPICH delivers unreceived messages of a freed communicator to the next one.
    """

    def __init__(self, comm: MPI.Intracomm, channel: int = 0):
        self.channel = np.array([channel]).view(np.uint8)
        # The numbers of announcements sent to each rank, and received: see `drain`
        self.sent_to = np.zeros(comm.Get_size(), np.int64)
        self.received = 0
        # Whether other threads of this process compute: a waiting thread yields the
        # core
        self.yields_cpu = False
        self._comm = comm
        self._sent: list[Any] = []  # MPI may still read these
        self._found: str | None = None
        self._lock = threading.Lock()

    def announce(self, reason: str, is_deadline: bool) -> None:
        """Send to all other ranks why this rank has left. Not collective."""
        text = f"{int(is_deadline)}{reason}".encode(errors="replace")[:_MOST_BYTES]
        self._send(np.concatenate([self.channel, np.frombuffer(text, np.uint8)]))

    def _send(self, data: Any) -> None:
        receivers = _receivers(self._comm.Get_rank(), self._comm.Get_size())
        requests = [self._comm.Isend(data, rank, _TAG) for rank in receivers]
        self._sent.append((data, requests))

    def find(self) -> str | None:
        """Return why a rank has left, if any has. Any thread."""
        with self._lock:
            while not self._found and (message := self._comm.Improbe(tag=_TAG)):
                data = np.zeros(8 + _MOST_BYTES, np.uint8)
                message.Recv(data)
                if np.array_equal(data[:8], self.channel):
                    data = np.trim_zeros(data, "b")
                    if self._comm.Get_size() > _MOST_DIRECT:
                        self._send(data)
                    self._found = data[8:].tobytes().decode(errors="replace")
        return self._found and self._found[1:]

    def require_none(self) -> None:
        """Raise if another rank has left.

        Raises:
          DeadlineError: the rank's deadline had passed.
          CollectiveError: the rank left for another reason.
        """
        reason = self.find()
        if reason is not None:
            assert self._found is not None
            kind = DeadlineError if self._found[0] == "1" else CollectiveError
            raise kind(f"this strategy cannot communicate any more: {reason}")


_HERE_TAG = 1
# Before a rank sleeps, it polls this often whether the others have arrived. Between
# polls it yields its core, perhaps to the ranks that it waits for: about a millisecond
_LOOKS = 2000
# After this time, a rank announces to the others which call it has reached
_ANNOUNCE_SECONDS = 1.0
# Minimum interval between forwarded announcements
_PASS_ON_SECONDS = 0.25
_COLLECT_CALLS = 1000
_LAST_CALL = -1  # a call without announcements
_PAUSE_SECONDS = 1e-3  # at most, and a quarter of the time waited so far
# Abandoned requests with their buffers: a late rank may still complete them, so MPI may
# write there until the process ends
_abandoned: list[Requests] = []


def abandon(request: Requests) -> None:
    """Keep the buffers of abandoned requests."""
    _abandoned.append(request)


class WaitTimeoutError(Exception):
    """A deadline was missed; the argument is the list of ranks that did not arrive."""


class RequestWaiter:
    """Waits for the requests of collective calls on one communicator.

    A rank that has waited for a second, or half of its timeout, announces this to the
    others, so that waiting ranks know which ranks have arrived. It soon sleeps between
    polls; each sleep is a small fraction of the time waited, so the added delay is
    small.

    Args:
      comm: the communicator.
      departures: detects ranks of `comm` that have left.
    """

    def __init__(self, comm: MPI.Intracomm, departures: Departures):
        self._comm = comm
        self._departures = departures
        self._rank = comm.Get_rank()
        self._sent: list[tuple[Any, list[MPI.Request]]] = []
        self._arrived: Any = None  # by rank, during a long wait

    def missing(self) -> list[int] | None:
        """Return the ranks that have not arrived, during a long wait."""
        arrived = self._arrived
        return None if arrived is None else _missing(arrived)

    def wait(
        self,
        request: Requests,
        deadline: float | None,
        call: int,
        yield_cpu: bool = False,
    ) -> None:
        """Wait for a request, or several, until `deadline`, on time.monotonic's clock.

        Args:
          request: the requests of this call.
          deadline: may differ between ranks; None for no deadline.
          call: its number, the same on all ranks.
          yield_cpu: whether to yield the processor at once.

        Raises:
          WaitTimeoutError: the deadline has passed. The communicator cannot be used
            afterwards.
          CollectiveError: see `Departures.require_none`.
        """
        if call % _COLLECT_CALLS == 0:  # also on a rank that never waits
            self._collect(self._nobody(), call)
        try:
            test: Callable[[], bool]
            if isinstance(request, MPI.Request):
                test = request.Test
            else:
                test = functools.partial(MPI.Request.Testall, request)
            looks = not (yield_cpu or self._departures.yields_cpu)
            for _ in range(_LOOKS if looks else 1):
                if test():
                    return
                os.sched_yield()
            self._wait_long(test, math.inf if deadline is None else deadline, call)
        except BaseException:
            abandon(request)
            raise
        finally:
            self._arrived = None

    def _wait_long(self, test: Callable[[], bool], deadline: float, call: int) -> None:
        start = now = time.monotonic()
        announce = start + min((deadline - start) / 2, _ANNOUNCE_SECONDS)
        if call == _LAST_CALL:
            announce = math.inf
        pause = min((deadline - start) / 20, _PASS_ON_SECONDS)
        arrived, told = self._nobody(), 0
        arrived[self._rank] = True
        while not test():
            self._collect(arrived, call)
            known = int(np.count_nonzero(arrived))
            is_news = told == 0 or (known > told and arrived.size > _MOST_DIRECT)
            if is_news and (now > announce or (told == 0 and known > 1)):
                self._announce(call, arrived)
                self._arrived, told, announce = arrived, known, now + pause
            if now > deadline:
                raise WaitTimeoutError(_missing(arrived))
            self._departures.require_none()
            time.sleep(min((now - start) / 4, _PAUSE_SECONDS))
            now = time.monotonic()

    def _nobody(self) -> Any:
        return np.zeros(self._comm.Get_size(), np.bool_)

    def _announce(self, call: int, arrived: Any) -> None:
        """Send the known waiting ranks of a call to other ranks."""
        data = np.concatenate([self._headline(call), np.packbits(arrived)])
        receivers = _receivers(self._rank, arrived.size)
        requests = [self._comm.Isend(data, rank, _HERE_TAG) for rank in receivers]
        self._sent = [s for s in self._sent if not MPI.Request.Testall(s[1])]
        self._sent.append((data, requests))
        self._departures.sent_to[receivers] += 1

    def drain(self) -> bool:
        """Receive all that ranks have announced; return whether none left. Collective.

        It is the last call before `comm` is freed. Messages in flight would be received
        by the next communicator, which may get the same context id.
        """
        expected = np.zeros(1, np.int64)
        sent_to = self._departures.sent_to
        try:
            self._departures.require_none()
            request = self._comm.Ireduce_scatter_block(sent_to, expected, MPI.SUM)
            self.wait(request, None, _LAST_CALL)
        except (CollectiveError, DeadlineError):
            return False
        while self._departures.received < expected[0]:
            self._collect(self._nobody(), _LAST_CALL)
        return True

    def _collect(self, arrived: Any, call: int) -> None:
        """Record the waiting ranks that others have announced for this call."""
        status = MPI.Status()
        while self._comm.Iprobe(tag=_HERE_TAG, status=status):
            data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._comm.Recv(data, status.Get_source(), _HERE_TAG)
            self._departures.received += 1
            if np.array_equal(data[:16], self._headline(call)):
                arrived |= np.unpackbits(data[16:], count=arrived.size).view(np.bool_)

    def _headline(self, call: int) -> Any:
        """Return the header of an announcement: communicator and call."""
        number = np.array([call]).view(np.uint8)
        return np.concatenate([self._departures.channel, number])


def _missing(arrived: Any) -> list[int]:
    found: list[int] = np.flatnonzero(~arrived).tolist()
    return found
