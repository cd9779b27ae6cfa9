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
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus.failures import FailureDetector
from mpidist.comm.consensus.signatures import Tag
from mpidist.errors import CollectiveError, DeadlineError, DivergenceError

if TYPE_CHECKING:
    from mpidist.comm.consensus.barrier import NodeBarrier

Requests = MPI.Request | list[MPI.Request]

_MOST_BYTES = 2000  # so small a message is sent eagerly
_MOST_DIRECT = 16

# So many ranks of a core do not keep it busy by looking for each other
_MANY_RANKS = 5
# What a rank that shares its core needs to look once: its caches hold others' data
_LOOK_SECONDS = 2e-4
# A rank sleeps a quarter of the time that it has waited so far, but no longer than this
_PAUSE_SECONDS = 1e-3


def least_pause(ranks_per_core: float) -> float:
    """Return for how many seconds a waiting rank at least sleeps between two looks.

    All ranks of a core look for the last of them, and keep it from arriving: 256 ranks
    on 2 cores that look every millisecond would need 25 cores.
    """
    return _LOOK_SECONDS * max(0.0, ranks_per_core - _MANY_RANKS)


def pause_seconds(waited: float, least: float) -> float:
    """Return how long a rank sleeps before it looks again, see `least_pause`."""
    return max(least, min(waited / 4, max(_PAUSE_SECONDS, 2 * least)))


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
      comm: the communicator.
      channel: its number, unique on all of its ranks. It is in each message, because
        MPICH delivers unreceived messages of a freed communicator to the next one.
      failures: detects ranks that have died.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        channel: int = 0,
        failures: FailureDetector | None = None,
    ):
        self.channel = np.array([channel]).view(np.uint8)
        # The numbers of announcements sent to each rank, and received: see `drain`
        self.sent_to = np.zeros(comm.Get_size(), np.int64)
        self.received = 0
        # Whether other threads of this process compute: a waiting thread yields the
        # core
        self.yields_cpu = False
        self.least_pause = 0.0  # see `least_pause`
        # The identifier of a thread that sleeps and has no deadline; else 0
        self.waiter = 0
        self.deadlock: str | None = None
        self._comm = comm
        self._failures = failures
        self._sent: list[Any] = []  # MPI may still read these
        self._announced: list[tuple[Any, list[MPI.Request]]] = []
        self._found: str | None = None
        self._lock = threading.Lock()

    def leave(self, reason: str, is_deadline: bool) -> None:
        """Send to all other ranks why this rank has left. Not collective.

        Other threads of this rank that wait for them raise, too.
        """
        self._found = self._found or f"{int(is_deadline)}{reason}"
        text = f"{int(is_deadline)}{reason}".encode(errors="replace")[:_MOST_BYTES]
        self._send(np.concatenate([self.channel, np.frombuffer(text, np.uint8)]))

    def _send(self, data: Any) -> None:
        receivers = _receivers(self._comm.Get_rank(), self._comm.Get_size())
        requests = [self._comm.Isend(data, rank, Tag.DEPARTURE) for rank in receivers]
        self._sent.append((data, requests))

    def keep_messages(self) -> None:
        """Keep what this rank has sent, as long as the process runs: see `abandon`."""
        for _, requests in self._sent:
            abandon(requests)

    def find(self) -> str | None:
        """Return why a rank has left, if any has. Any thread."""
        if self.deadlock is not None:
            return self.deadlock
        with self._lock:
            while not self._found:
                message = self._comm.Improbe(tag=Tag.DEPARTURE)
                if message is None:
                    break
                data = np.zeros(8 + _MOST_BYTES, np.uint8)
                message.Recv(data)
                if np.array_equal(data[:8], self.channel):
                    data = np.trim_zeros(data, "b")
                    if self._comm.Get_size() > _MOST_DIRECT:
                        self._send(data)
                    self._found = data[8:].tobytes().decode(errors="replace")
        return self._found and self._found[1:]

    def require_none(self) -> None:
        """Raise if another rank has left, or has died.

        Raises:
          RankLostError: it has died.
          DeadlineError: the rank's deadline had passed.
          DivergenceError: `deadlock` is set.
          CollectiveError: the rank left for another reason.
        """
        if self._failures is not None:
            self._failures.require_none()
        reason = self.find()
        if self.deadlock is not None:
            raise DivergenceError(self.deadlock)
        if reason is not None:
            assert self._found is not None
            kind = DeadlineError if self._found[0] == "1" else CollectiveError
            raise kind(f"this strategy cannot communicate any more: {reason}")

    def meet(self, seconds: float) -> bool:
        """Return whether all ranks have come here, in this time. Collective.

        It needs no agreement: also after ranks have left collectives by errors.
        """
        end = time.monotonic() + seconds
        others = range(1, self._comm.Get_size())
        if self._comm.Get_rank() > 0:
            self._send_meeting([0])
            return self._receive_meeting(0, end)
        if not all(self._receive_meeting(rank, end) for rank in others):
            return False
        self._send_meeting(others)
        return True

    def _send_meeting(self, ranks: Sequence[int]) -> None:
        requests = [self._comm.Isend(self.channel, rank, Tag.MEETING) for rank in ranks]
        self._sent.append((self.channel, requests))

    def _receive_meeting(self, rank: int, end: float) -> bool:
        data = np.empty_like(self.channel)
        while time.monotonic() < end:
            if (message := self._comm.Improbe(rank, Tag.MEETING)) is None:
                time.sleep(_PAUSE_SECONDS)
                continue
            message.Recv(data)
            if np.array_equal(data, self.channel):
                return True
        return False

    def send_announcement(self, data: Any) -> None:
        """Send where ranks wait, see `RollCall`. Any thread."""
        receivers = _receivers(self._comm.Get_rank(), self._comm.Get_size())
        self._send_counted(data, receivers, Tag.ANNOUNCEMENT)

    def receive_announcement(self) -> Any:
        """Return what a rank has announced, or None. Any thread."""
        return self._receive_counted(Tag.ANNOUNCEMENT)

    def send_probe(self, data: bytes, receivers: list[int]) -> None:
        """Send a message of `resilience.deadlocks`. Any thread."""
        both = np.concatenate([self.channel, np.frombuffer(data, np.uint8)])
        self._send_counted(both, receivers, Tag.PROBE)

    def receive_probe(self) -> bytes | None:
        """Return a message of `resilience.deadlocks`, or None. Any thread."""
        while (data := self._receive_counted(Tag.PROBE)) is not None:
            if np.array_equal(data[:8], self.channel):
                return bytes(data[8:])
        return None

    def _send_counted(self, data: Any, receivers: list[int], tag: int) -> None:
        with self._lock:
            requests = [self._comm.Isend(data, rank, tag) for rank in receivers]
            sent = [s for s in self._announced if not MPI.Request.Testall(s[1])]
            self._announced = [*sent, (data, requests)]
            self.sent_to[receivers] += 1

    def _receive_counted(self, tag: int) -> Any:
        status = MPI.Status()
        with self._lock:
            message = self._comm.Improbe(tag=tag, status=status)
            if message is None:
                return None
            data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            message.Recv(data)
            self.received += 1
        return data


# Before a rank sleeps, it polls this often whether the others have arrived. Between
# polls it yields its core, perhaps to the ranks that it waits for: about a millisecond
_LOOKS = 2000
# After this time, a rank announces to the others which call it has reached, and again
# so long as it waits, each time after so long a part of what it has waited
_ANNOUNCE_SECONDS = 1.0
_ANNOUNCE_PART = 8
# Minimum interval between forwarded announcements
_PASS_ON_SECONDS = 0.25
_COLLECT_CALLS = 1000
_LAST_PLACE = sys.maxsize  # after all others: a wait without announcements
# A call of MPI moves on some of the data that has arrived, but not all: so often a rank
# calls it before it sleeps
_PROGRESS_CALLS = 5
# A waiting rank listens to the others at such intervals: as often as it looks at its
# requests, that would take as long as the sums of gradients
_LISTEN_SECONDS = 0.01
_POLL_SECONDS = 0.5
# Abandoned requests with their buffers: a late rank may still complete them, so MPI may
# write there until the process ends
_abandoned: list[Requests] = []


def abandon(request: Requests) -> None:
    """Keep the buffers of abandoned requests."""
    _abandoned.append(request)


class WaitTimeoutError(Exception):
    """A deadline was missed; the argument is the list of ranks that did not arrive."""


class RollCall:
    """Exchanges with the other ranks, during a long wait, where each one waits.

    A rank that waits further on in the program has arrived here. One that still waits
    before has not, but waits for another rank itself, so it is not to blame.

    Args:
      comm: the communicator.
      departures: of its ranks.
      place: of the wait, equal on all ranks and growing: twice the number of the call;
        one more after the comparison of the ranks' calls.
      first_seconds: after this time the first announcement is due.
      pass_on_seconds: the shortest time between two announcements.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        departures: Departures,
        place: int,
        first_seconds: float = _ANNOUNCE_SECONDS,
        pass_on_seconds: float = _PASS_ON_SECONDS,
    ):
        self.place = place
        self._departures = departures
        self._pass_on = pass_on_seconds
        self._begun = time.monotonic()
        self._due = self._begun + first_seconds
        self._told_at = -math.inf
        self._told = 0
        self._is_large = comm.Get_size() > _MOST_DIRECT
        self._arrived = np.zeros(comm.Get_size(), np.bool_)
        self._behind = self._arrived.copy()
        self._arrived[comm.Get_rank()] = True

    def exchange(self, now: float) -> None:
        """Receive all announcements, and send one if it is due."""
        self.collect()
        known = int(np.count_nonzero(self._arrived))
        is_news = known > max(self._told, 1) and (self._is_large or not self._told)
        if now > self._due or (is_news and now > self._told_at + self._pass_on):
            self._told, self._told_at = known, now
            again = max(_ANNOUNCE_SECONDS, (now - self._begun) / _ANNOUNCE_PART)
            self._due = now + again
            packed = np.packbits(self._arrived)
            self._departures.send_announcement(np.concatenate([self._head(), packed]))

    def collect(self) -> None:
        """Receive all announcements."""
        head, size = self._head(), self._arrived.size
        while (data := self._departures.receive_announcement()) is not None:
            if data.size < head.size or not np.array_equal(data[:8], head[:8]):
                continue  # of a communicator that was freed
            waiting = np.unpackbits(data[16:], count=size).view(np.bool_)
            place = int(data[8:16].view(np.int64)[0])
            if place >= self.place:
                self._arrived |= waiting
            elif self._told:  # else it may be an old one, of a rank that died since
                self._behind |= waiting

    def missing(self) -> list[int] | None:
        """Return the ranks that do not wait; None before the first announcement."""
        if not self._told:
            return None
        silent = ~(self._arrived | self._behind)
        missing: list[int] = np.flatnonzero(
            silent if silent.any() else ~self._arrived
        ).tolist()
        return missing

    def _head(self) -> Any:
        """Return the header of an announcement: communicator and place."""
        return np.concatenate(
            [self._departures.channel, np.array([self.place]).view(np.uint8)]
        )


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
        self._roll_call: RollCall | None = None  # during a long wait

    def missing(self) -> list[int] | None:
        """Return the ranks that do not wait as this one does; None if unknown."""
        roll_call = self._roll_call
        return None if roll_call is None else roll_call.missing()

    def poll(self, request: MPI.Request, deadline: float | None) -> bool:
        """Return whether a request completes soon; poll for it without sleeping.

        `wait` follows if it does not. Many MPI libraries send the next piece of a large
        array only when they are called.
        """
        if self._departures.yields_cpu:
            return False
        now = time.monotonic()
        end = now + _POLL_SECONDS
        if deadline is not None:
            end = min(end, (now + deadline) / 2)
        try:
            while time.monotonic() < end:
                for _ in range(_LOOKS):
                    if request.Test():
                        return True
                    os.sched_yield()
        except BaseException:
            abandon(request)
            raise
        return False

    def wait(
        self,
        request: Requests,
        deadline: float | None,
        place: int,
        yield_cpu: bool = False,
    ) -> None:
        """Wait for a request, or several, until `deadline`, on time.monotonic's clock.

        Args:
          request: the requests of this wait.
          deadline: may differ between ranks; None for no deadline.
          place: see `RollCall`.
          yield_cpu: whether to yield the processor at once.

        Raises:
          WaitTimeoutError: the deadline has passed. The communicator cannot be used
            afterwards.
          CollectiveError: see `Departures.require_none`.
        """
        if place // 2 % _COLLECT_CALLS == 0:  # also on a rank that never waits
            RollCall(self._comm, self._departures, place).collect()
        try:
            test: Callable[[], bool]
            if isinstance(request, MPI.Request):
                test = request.Test
            else:
                test = functools.partial(MPI.Request.Testall, request)
            looks = not (yield_cpu or self._departures.yields_cpu)
            looks = looks and not self._departures.least_pause
            for _ in range(_LOOKS if looks else 1):
                if test():
                    return
                os.sched_yield()
            self._wait_long(test, math.inf if deadline is None else deadline, place)
        except BaseException:
            abandon(request)
            raise
        finally:
            self._roll_call = None
            self._departures.waiter = 0

    def wait_at(self, barrier: NodeBarrier, deadline: float | None, place: int) -> None:
        """Like `wait`, at a barrier of some of the ranks; raises what that raises."""

        def exchange() -> None:
            if self._roll_call is None:
                self._roll_call = RollCall(self._comm, self._departures, place)
            self._roll_call.exchange(time.monotonic())

        try:
            barrier.wait(deadline, meanwhile=exchange)
        finally:
            self._roll_call = None

    def _wait_long(self, test: Callable[[], bool], deadline: float, place: int) -> None:
        start = now = time.monotonic()
        left, roll_call = deadline - start, None
        interval = min(left / 20, _LISTEN_SECONDS)
        listens_at = start + interval
        while not test():
            if now >= listens_at:
                if roll_call is None:
                    is_last = place == _LAST_PLACE
                    roll_call = RollCall(
                        *(self._comm, self._departures, place),
                        math.inf if is_last else min(left / 2, _ANNOUNCE_SECONDS),
                        min(left / 20, _PASS_ON_SECONDS),
                    )
                    self._roll_call = roll_call
                roll_call.exchange(now)
                if now > deadline:
                    raise WaitTimeoutError(roll_call.missing())
                self._departures.require_none()
                if math.isinf(deadline):
                    self._departures.waiter = threading.get_ident()
                listens_at = now + interval
            for _ in range(_PROGRESS_CALLS):
                self._comm.Iprobe(tag=Tag.DEPARTURE)
            time.sleep(pause_seconds(now - start, self._departures.least_pause))
            now = time.monotonic()

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
            self.wait(request, None, _LAST_PLACE)
        except (CollectiveError, DeadlineError):
            return False
        roll_call = RollCall(self._comm, self._departures, _LAST_PLACE)
        while self._departures.received < expected[0]:
            roll_call.collect()
            self._departures.receive_probe()
        return True
