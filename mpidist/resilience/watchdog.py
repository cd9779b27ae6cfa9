"""The watchdog: a thread that periodically checks the waits of this rank.

It reports slow ranks, and ends the job if a rank has died, was stopped or never
arrives. It adds no work to the calls: it reads the flight recorder, the ranks that have
arrived in the call, and other waits (`pending`). If MPI continues without dead ranks
(see `failures`), it asks MPI which ranks have died. It sends messages only while a rank
waits for more than a second: see `DeadlockDetector`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from mpi4py import MPI

from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.diagnostics import missing_threads
from mpidist.comm.consensus.failures import (
    FailureDetector,
    can_survive,
    ended_processes,
    is_last,
    stopped_processes,
)
from mpidist.comm.consensus.flight_recorder import Entry
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.signatures import END, name_ranks
from mpidist.comm.consensus.thread_order import (
    is_only_thread,
    joined_threads,
    may_start_threads,
)
from mpidist.util import logs
from mpidist.util.cpython import ThreadFrames
from mpidist.util.logs import warn
from mpidist.util.serialization import hash62
from mpidist.util.settings import HANG_SECONDS, hang_seconds

_LOOK_SECONDS = 1.0
_LOOK_FOR_DEAD_SECONDS = 0.02
# A rank is slow if others wait for it this long, and this many times their own work
_SLOW_SECONDS = 5.0
_SLOW_TIMES = 20
_SAY_AGAIN_SECONDS = 600.0
_UNKNOWN = "it is not known which ranks did not arrive, or died in the call"
_ABORT_SECONDS = 5.0
_LAUNCHER_SECONDS = 2.0
_SAY_SECONDS = 1.0
# A longer time between two checks means that the process was stopped
_STOP_SECONDS = 5.0
_MOST_STOPS = 100  # that are stored


def start_watch() -> None:
    """Start the watchdog if there are several ranks. `import mpidist` calls it.

    Raises:
      LaunchError: see `hang_seconds`.
    """
    limit = hang_seconds(os.environ)
    if MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() > 1:
        try:
            Watch(limit).start()
        except RuntimeError as error:  # too many threads, or too little memory
            warn(f"the watchdog cannot start, so a hang will not be detected: {error}")


class Watch(threading.Thread):
    """See the module.

    Args:
      limit_seconds: how long a rank may wait in one collective.
    """

    def __init__(self, limit_seconds: float):
        super().__init__(name="watch-mpidist", daemon=True)
        self._limit = limit_seconds
        self._pid = os.getpid()
        self._silent_until = 0.0
        self._missed_since: float | None = None
        # Calls that another rank was seen to have left
        self._left: set[tuple[Consensus, int]] = set()
        self._looked = time.monotonic()
        self._stops: list[tuple[float, float]] = []  # when they ended, and how long
        self._deadlocks = DeadlockDetector()
        # Once, as MPI does not say it after its end
        self._may_communicate = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def run(self) -> None:
        """Check all communicators until MPI or the program ends."""
        survives = can_survive()
        while os.getpid() == self._pid and not MPI.Is_finalized():
            pause = min(_LOOK_SECONDS, self._limit / 4)
            if survives:
                _look_for_dead(pause)
            else:
                time.sleep(pause)
            self.note_stop(pause, time.monotonic())
            # A check must never end the program or this thread
            with contextlib.suppress(Exception):
                self.look_at_all(survives)

    def look_at_all(self, survives: bool) -> None:
        """Check once; `survives`: whether MPI continues when a rank dies."""
        for pending in list(Pending.in_use):
            self.look_at_pending(pending, time.monotonic())

        def look(consensus: Consensus) -> None:
            self.look(consensus, time.monotonic())
            if not survives:
                self.look_for_ended(consensus, time.monotonic())

        Consensus.look_at_all(look)
        if self._may_communicate:
            self._deadlocks.look(time.monotonic())

    def note_stop(self, pause: float, now: float) -> None:
        """Record how long this process was stopped since the last check, if it was.

        A batch system may stop all ranks of a job and continue them later (SIGSTOP and
        SIGCONT). That is not a hang, so this time does not count.
        """
        gap = now - self._looked - pause
        self._looked = now
        if gap > _STOP_SECONDS:
            del self._stops[:-_MOST_STOPS]
            self._stops.append((now, gap))

    def waited(self, begun: float, now: float) -> float:
        """Return for how many seconds this process has run since it began to wait."""
        stopped = sum(seconds for when, seconds in self._stops if when > begun)
        return max(0.0, now - begun - stopped)

    def look_at_pending(self, pending: Pending, now: float) -> None:
        """End the job if MPI has waited too long outside recorded calls."""
        waited = self.waited(pending.begun, now)
        if waited > self._limit:
            who = f"rank {pending.rank} of {pending.size}"
            what = f"{pending.operation} (at {pending.site})"
            end_job(_limit_text(who, waited, what, _UNKNOWN))

    def look(self, consensus: Consensus, now: float) -> None:
        """Check the current wait of a communicator, if any."""
        entry = consensus.recorder.last()
        if entry is None or entry.ended is not None:
            return
        waited = self.waited(entry.begun, now)
        missing = consensus.comparison.missing()
        if waited > self._limit:
            end_job(_hang_text(consensus, entry, waited, _reason(consensus)))
        self._look_for_departure(consensus, entry)
        former = consensus.recorder.before_last()
        busy = 0.0 if former is None else entry.begun - (former.ended or former.begun)
        is_slow = waited > max(_SLOW_SECONDS, _SLOW_TIMES * busy)
        # Who has ended is not slow, nor who still works when others have ended
        if ended_processes(consensus.pids) or entry.operation == END:
            return
        if is_slow and missing and now > self._silent_until:
            self._silent_until = now + _SAY_AGAIN_SECONDS
            come = set(range(consensus.size)) - set(missing)
            if min(come) == consensus.rank:
                _say(_slow_text(consensus, entry, waited, busy, missing), logs.warning)

    def _look_for_departure(self, consensus: Consensus, entry: Entry) -> None:
        """End the job if this rank waits inside MPI for one that has left.

        Outside MPI the rank checks by itself, so it gets some time to do so.
        """
        if not self._may_communicate:
            return
        reason = consensus.departures.find()
        call = consensus, entry.number
        if reason is not None and call in self._left:
            end_job(_left_text(consensus, entry, reason))
        if reason is not None:
            self._left.add(call)

    def look_for_ended(self, consensus: Consensus, now: float) -> None:
        """End the job if a process of this node has ended before its time.

        At the end of the program all ranks synchronise, see `exit_handling`.
        Launchers get some time to report more, and to end the job themselves.
        """
        gone = ended_processes(consensus.pids)
        if not gone or MPI.Is_finalized():
            return
        if self._missed_since is None:
            self._missed_since = now
        elif now - self._missed_since > _LAUNCHER_SECONDS:
            end_job(_ended_text(consensus, gone))


def _look_for_dead(seconds: float) -> None:
    """Ask MPI repeatedly, for this time, which ranks have died."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(_LOOK_FOR_DEAD_SECONDS, seconds))
        FailureDetector.poll()


def _slow_text(
    consensus: Consensus, entry: Entry, waited: float, busy: float, missing: list[int]
) -> str:
    return (
        f"mpidist: {name_ranks(missing)} slow: rank {consensus.rank} has waited "
        f"{waited:.1f} s in {entry.operation} (called at {entry.site}), after "
        f"{busy:.1f} s of its own work"
    )


def _ended_text(consensus: Consensus, gone: list[int]) -> str:
    has = "has" if len(gone) == 1 else "have"
    entry = consensus.recorder.last()
    call = "" if entry is None else f", whose last call is {entry.operation}"
    return (
        f"mpidist: {name_ranks(gone)} of {consensus.size} {has} ended (killed, crashed "
        f"or by os._exit), detected by rank {consensus.rank}{call}. The job ends"
    )


def _left_text(consensus: Consensus, entry: Entry, reason: str) -> str:
    return (
        f"mpidist: rank {consensus.rank} of {consensus.size} waits inside MPI, in "
        f"{entry.operation} (call {entry.number}, at {entry.site}), for a rank that "
        f"does not arrive: {reason}. The job ends"
    )


def _reason(consensus: Consensus) -> str:
    if consensus.by_threads:
        return missing_threads(consensus.by_threads)
    if missing := consensus.comparison.missing():
        return f"{name_ranks(missing)} did not arrive"
    # All have arrived, and this rank waits for their data
    silent = consensus.waiting.missing() or stopped_processes(consensus.pids)
    if silent:
        return f"{name_ranks(silent)} no longer answered: died, stopped or cut off"
    if missing is None:
        return _UNKNOWN
    return "all ranks had arrived; one may have died or been stopped in the call"


def _hang_text(consensus: Consensus, entry: Entry, waited: float, reason: str) -> str:
    who = f"rank {consensus.rank} of {consensus.size}"
    what = f"{entry.operation} (call {entry.number}, at {entry.site})"
    return _limit_text(who, waited, what, reason)


def _limit_text(who: str, waited: float, what: str, reason: str) -> str:
    return (
        f"mpidist: {who} has waited {waited:.1f} s in {what}, more than "
        f"{HANG_SECONDS.name} allows: {reason}. The job ends"
    )


def end_job(text: str) -> None:
    """Log the reason, and end all ranks of the job, from any thread."""
    _say(text)
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        # Abort itself may hang
        timer = threading.Timer(_ABORT_SECONDS, os._exit, [1])
        timer.daemon = True
        timer.start()
        abort_job()
    os._exit(1)


def abort_job() -> NoReturn:
    """End all ranks of the job. MPICH under srun informs srun, and returns from it."""
    if not is_last():
        MPI.COMM_WORLD.Abort(1)
    os._exit(1)


def _say(text: str, log: Callable[[str, str], None] = logs.report) -> None:
    """Log a text, without waiting for ever for a pipe that is not read."""
    saying = threading.Thread(target=log, args=("resilience", text), daemon=True)
    saying.start()
    saying.join(_SAY_SECONDS)


# A rank asks after so long a wait, and again after this part of what it has waited
_FIRST_SECONDS = 1.0
_AGAIN_PART = 8
_MOST_ASKED = 8  # ranks at a time
_MOST_STEPS = 32
_random = random.Random()  # not the program's generator


class _Step(NamedTuple):
    """The wait of some ranks in a call.

    Args:
      communicator: a number that is the same on its ranks alone.
      call: the number of the call.
      text: for the error.
    """

    communicator: int
    call: int
    text: str


class _Probe(NamedTuple):
    """A question to the ranks that the last step needs.

    Args:
      thread: which thread they need, by its name in `ThreadOrderedLock`.
      sender: the rank that asks.
      steps: of which each one is needed by the one before it.
    """

    thread: str
    sender: int
    steps: list[_Step]


class _Making(NamedTuple):
    """The answer of a rank whose thread waits in MPI, where a strategy is made.

    Args:
      call: see `_Step`, of the rank that has asked.
      members: the ranks in COMM_WORLD that it needs.
      text: for the error.
    """

    call: int
    members: Sequence[int]
    text: str


class _Wait(NamedTuple):
    """A wait of a thread of this rank.

    Args:
      step: see there.
      thread: see `_Probe`.
      missing: the ranks that it needs.
    """

    step: _Step
    thread: str
    missing: list[int]


class _Verdict(NamedTuple):
    """A deadlock that was found.

    Args:
      reason: for the error.
      communicators: those of its steps.
    """

    reason: str
    communicators: set[int]


class DeadlockDetector:
    """Finds ranks that wait for each other in different communicators.

    It exchanges probes with the watchdogs of other ranks. One thread may use it.

    Two strategies that are called in another order on two ranks let each rank wait for
    the other, in a call of the one and of the other strategy. Each such wait is a step:
    ranks have arrived in a call, and need a certain thread of the others. A rank whose
    watchdog receives the steps that led to it, and whose thread has not arrived there
    because it waits in another communicator, appends that step and sends all to the
    ranks that it needs. If a step comes twice, none of its threads can ever continue.
    (This is the edge-chasing algorithm of Chandy, Misra and Haas for waits that need
    all.)

    There are no false alarms. A thread that is needed and computes answers nothing.
    Neither does one that waits with a deadline. And a thread that waits continues only
    when the threads that it needs arrive, whatever other threads of their ranks do: the
    ranks agree on the thread that makes each call.
    """

    def __init__(self) -> None:
        self._due: dict[tuple[Consensus, int], float] = {}

    def look(self, now: float) -> None:
        """Answer the probes of other ranks, and send those that are due."""
        Consensus.look_at_all(self._receive)
        former, self._due = self._due, {}
        Consensus.look_at_all(lambda c: self._ask(c, former, now))

    def _ask(
        self,
        consensus: Consensus,
        former: dict[tuple[Consensus, int], float],
        now: float,
    ) -> None:
        """Send a probe if this is the first rank that waits in a call."""
        entry, wait = consensus.recorder.last(), _describe_wait(consensus)
        if entry is None or wait is None:
            return
        call = consensus, wait.step.call
        due = former.get(call, entry.begun + _FIRST_SECONDS)
        is_first = all(rank in wait.missing for rank in range(consensus.rank))
        if now >= due and is_first:  # of those that have arrived
            _send(consensus, wait, [])
            due = now + max(_FIRST_SECONDS, (now - entry.begun) / _AGAIN_PART)
        self._due[call] = due

    def _receive(self, consensus: Consensus) -> None:
        while (data := consensus.departures.receive_probe()) is not None:
            message = pickle.loads(data)
            if isinstance(message, _Verdict):
                _condemn(message, known_by=consensus)
            elif isinstance(message, _Making):
                _compare(consensus, message)
            else:
                _answer(consensus, message)


def _answer(consensus: Consensus, probe: _Probe) -> None:
    """Pass on a probe if the thread that is needed here waits elsewhere."""
    calls = {other: other.calls for other in Consensus.in_use}
    thread, last = _ident_of(consensus, probe.thread), probe.steps[-1]
    for pending in (p for p in Pending.in_use if p.thread == thread and p.members):
        here = f"rank {MPI.COMM_WORLD.Get_rank()} waits in {pending.operation} at "
        making = _Making(last.call, pending.members, here + pending.site)
        if consensus.calls < last.call:
            consensus.departures.send_probe(pickle.dumps(making), [probe.sender])
    where = _find_wait(thread, [])
    wait = None if where is None else _describe_wait(where)
    if where is None or wait is None or wait.step.call != calls[where]:
        return  # it does not wait, or did so in another call a moment ago
    # Only now, while it is known to wait: has it not arrived before?
    if consensus.calls >= last.call:
        return
    known = [step[:2] for step in probe.steps]
    if wait.step[:2] in known:
        cycle = probe.steps[known.index(wait.step[:2]) :]
        reason = _describe([step.text for step in cycle])
        _condemn(_Verdict(reason, {step.communicator for step in cycle}))
    elif len(known) < _MOST_STEPS:
        _send(where, wait, probe.steps)


def _compare(consensus: Consensus, making: _Making) -> None:
    """Raise if a rank that this one needs waits until this one makes a strategy, too.

    Only its thread that waits could, if all others wait for that one.
    """
    wait, rank = _describe_wait(consensus), consensus.members[consensus.rank]
    if wait is None or wait.step.call != making.call or rank not in making.members:
        return
    if is_only_thread(consensus.departures.waiter):
        reason = _describe([wait.step.text, making.text])
        _condemn(_Verdict(reason, {wait.step.communicator}))


def _describe(waits: list[str]) -> str:
    return (
        f"the ranks wait for each other for ever: {'; '.join(waits)}. Every rank must "
        "make and call its strategies in the same order"
    )


def _condemn(verdict: _Verdict, known_by: Consensus | None = None) -> None:
    """Raise a DivergenceError in all threads that wait in communicators of a cycle.

    Args:
      verdict: what to raise.
      known_by: the communicator whose ranks all know of it.
    """
    found = [c for c in Consensus.in_use if _key(c) in verdict.communicators]
    found = [c for c in found if c.departures.deadlock is None]
    for consensus in found:  # before a thread of this rank raises
        consensus.broken = consensus.broken or verdict.reason
    for consensus in found:
        consensus.departures.deadlock = verdict.reason
        if consensus is not known_by:
            others = [rank for rank in range(consensus.size) if rank != consensus.rank]
            consensus.departures.send_probe(pickle.dumps(verdict), others)


def _describe_wait(consensus: Consensus) -> _Wait | None:
    """Return the wait of a thread of this rank; None if it has ended."""
    thread = _name_of(consensus, consensus.departures.waiter)
    entry, missing = consensus.recorder.last(), consensus.comparison.missing()
    if thread is None or entry is None or not missing:
        return None
    come = [rank for rank in range(consensus.size) if rank not in missing]
    text = (
        f"{_named(consensus, come)} waits in {entry.operation} at {entry.site} "
        f"(call {entry.number} of strategy {consensus.recorder.channel}) for "
        f"{_named(consensus, missing)}"
    )
    return _Wait(_Step(_key(consensus), entry.number, text), thread, missing)


def _send(consensus: Consensus, wait: _Wait, steps: list[_Step]) -> None:
    """Send the steps, and this one, to ranks that it needs."""
    asked = _random.sample(wait.missing, min(len(wait.missing), _MOST_ASKED))
    probe = _Probe(wait.thread, consensus.rank, [*steps, wait.step])
    consensus.departures.send_probe(pickle.dumps(probe), asked)


def _find_wait(thread: int | None, seen: list[int]) -> Consensus | None:
    """Return the communicator in which a thread waits, or a thread that it waits for.

    Args:
      thread: its identifier.
      seen: the threads that wait for it.
    """
    if thread is None or thread in seen:
        return None
    for consensus in Consensus.in_use:
        if consensus.departures.waiter == thread:
            return consensus
        if (name := consensus.lock.awaited_by(thread)) is not None:
            return _find_wait(_ident_of(consensus, name), [*seen, thread])
    with ThreadFrames() as frames:
        joined = joined_threads(thread, frames)
    found = (_find_wait(t.ident, [*seen, thread]) for t in joined)
    return next(filter(None, found), None)


def _ident_of(consensus: Consensus, name: str) -> int | None:
    """Return the identifier of the thread that a communicator knows by this name.

    Or of the one that alone could start it; None if there are several.
    """
    if name == "":
        return consensus.lock.creator
    threads = threading.enumerate()
    named = [t.ident for t in threads if consensus.lock.name_of(t) == name]
    if named:
        return named[0]
    starters = [t.ident for t in threads if may_start_threads(t)]
    return starters[0] if len(starters) == 1 else None


def _name_of(consensus: Consensus, ident: int) -> str | None:
    """Return the inverse of `_ident_of`."""
    if ident == consensus.lock.creator:
        return ""
    threads = (t for t in threading.enumerate() if t.ident == ident)
    return next(map(consensus.lock.name_of, threads), None)


def _key(consensus: Consensus) -> int:
    return hash62(repr((consensus.recorder.channel, consensus.members)))


def _named(consensus: Consensus, ranks: list[int]) -> str:
    """Name ranks of a communicator by their number in the job."""
    return name_ranks([consensus.members[rank] for rank in ranks])
