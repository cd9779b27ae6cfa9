"""Detection of deadlocks: ranks that wait for each other in different communicators.

Two strategies that are called in another order on two ranks let each rank wait for the
other, in a call of the one and of the other strategy. Each such wait is a step: ranks
have arrived in a call, and need a certain thread of the others. A rank whose watchdog
receives the steps that led to it, and whose thread has not arrived there because it
waits in another communicator, appends that step and sends all to the ranks that it
needs. If a step comes twice, none of its threads can ever continue. (This is the
edge-chasing algorithm of Chandy, Misra and Haas for waits that need all.)

There are no false alarms. A thread that is needed and computes answers nothing. Neither
does one that waits with a deadline. And a thread that waits continues only when the
threads that it needs arrive, whatever other threads of their ranks do: the ranks agree
on the thread that makes each call.
"""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Sequence
from typing import NamedTuple

from mpi4py import MPI

from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.signatures import name_ranks
from mpidist.comm.consensus.thread_order import (
    is_only_thread,
    joined_threads,
    may_start_threads,
)
from mpidist.util.frames import ThreadFrames
from mpidist.util.hashing import hash62

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
    """Exchanges probes with the watchdogs of other ranks. One thread may use it."""

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
    """Raise a DivergenceError in all threads that wait in communicators of a cycle."""
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
    return name_ranks([consensus.members[rank] for rank in ranks])
