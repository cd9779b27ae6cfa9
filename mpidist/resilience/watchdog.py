"""The watchdog: a thread that periodically checks the waits of this rank.

It reports slow ranks, and ends the job if a rank has died, was stopped or never
arrives. It adds no work to the calls: it reads the flight recorder, the ranks that have
arrived in the call, and other waits (`pending`). If MPI continues without dead ranks
(see `failures`), it asks MPI which ranks have died. It sends messages only while a rank
waits for more than a second: see `deadlocks`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from mpi4py import MPI

from mpidist.comm.consensus import process_monitor
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.diagnostics import missing_threads
from mpidist.comm.consensus.failures import FailureDetector, can_survive, is_last
from mpidist.comm.consensus.flight_recorder import Entry
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.signatures import END, name_ranks
from mpidist.resilience.deadlocks import DeadlockDetector
from mpidist.util import logs
from mpidist.util.notices import warn
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
        pause = min(_LOOK_SECONDS, self._limit / 4)
        survives = can_survive()
        while os.getpid() == self._pid and not MPI.Is_finalized():
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
        if process_monitor.ended(consensus.pids) or entry.operation == END:
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
        gone = process_monitor.ended(consensus.pids)
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
    silent = consensus.waiting.missing() or process_monitor.stopped(consensus.pids)
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
