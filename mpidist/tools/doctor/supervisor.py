"""Watching over the process that examines, which may crash, hang or be ended.

MPI may end a process that starts it, or never come back. So the command forks: the
child examines and tells what it found so far; the parent tells the user.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NoReturn

from mpidist.tools.doctor.finding import Finding, Status, describe_error
from mpidist.tools.doctor.workers import end_with_parent

__all__ = ["Outlet", "Watched", "watch"]

_END_SECONDS = 10.0
_LOOK_SECONDS = 0.05
_KEPT_LINES = 6
_ENDING = (signal.SIGTERM, signal.SIGINT)


class Outlet:
    """What the child tells its parent."""

    def __init__(self, connection: Connection[Any, Any]):
        self._connection = connection

    def stage(self, name: str, seconds: float) -> None:
        """Say what comes now, and how long it may take."""
        self._connection.send(("stage", (name, seconds)))

    def rank(self, rank: int) -> None:
        """Say which rank this is, as soon as MPI has said so."""
        self._connection.send(("rank", rank))

    def size(self, size: int) -> None:
        """Say how many ranks there are."""
        self._connection.send(("size", size))

    def rows(self, rows: list[Finding]) -> None:
        """Say all that was found so far."""
        self._connection.send(("rows", rows))

    def report(self) -> int:
        """Let the parent report the rows, which are all; return the exit status."""
        self._connection.send(("report", None))
        return int(self._connection.recv())

    def status(self, status: int) -> None:
        """Say what exit status all ranks agreed on, before they end MPI.

        MPICH's mpirun kills the processes that still run a moment after another one
        has ended MPI and itself. So there it is the children, whom it does not know,
        that end MPI, when their parents, whom it knows, are gone.
        """
        if not _is_hydra():
            self._connection.send(("status", status))
            return
        end_with_parent(0)
        signal.alarm(int(_END_SECONDS))
        self._connection.send(("status", status))
        with contextlib.suppress(EOFError, OSError):
            self._connection.recv()


class Watched:
    """What came of an examination.

    Args:
      rows: what it found, the last of them perhaps that it failed.
      rank, size: what MPI said; None if it did not get so far.
      stage: what it was at.
      status: the exit status that ranks agreed on; None if they did not get so far.
      has_failed: whether it did not come to its end.
      pid: of the child, as long as it runs.

    To make one, `report` is what writes the rows, and returns an exit status.
    """

    def __init__(self, report: Callable[[Watched], int]) -> None:
        self._report = report
        self.status: int | None = None
        self.pid = 0
        self.rows: list[Finding] = []
        self.rank: int | None = None
        self.size: int | None = None
        self.stage = "the start"
        self.has_failed = False
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._limit = time.monotonic() + _END_SECONDS
        self._seconds = _END_SECONDS

    def close(self) -> None:
        """End the child, if it has not ended: launchers may end the job for that."""
        if self.pid:
            _kill(self.pid)
        self.pid = 0

    def take(self, connection: Connection[Any, Any]) -> None:
        """Take note of a message of the child's `Outlet`, or answer it."""
        kind, value = connection.recv()
        if kind == "report":
            connection.send(self._report(self))
        elif kind == "stage":
            self.stage, self._seconds = value
            self._limit = time.monotonic() + self._seconds
        else:
            setattr(self, kind, value)

    def relay(self, data: bytes) -> None:
        """Write what the child wrote to stderr, and keep the end of it."""
        os.write(2, data)
        self._lines.extend(
            line for line in data.decode(errors="replace").splitlines() if line.strip()
        )

    def is_late(self) -> bool:
        """Return whether the stage has lasted too long."""
        return time.monotonic() > self._limit

    def fail(self, how: str) -> None:
        """Add a row on what went wrong."""
        self.has_failed = True
        said = f"; stderr ends: {' | '.join(self._lines)[-600:]}" if self._lines else ""
        remedy = _REMEDIES.get(self.stage, "see what was written to stderr")
        self.rows.append(Finding(Status.FAIL, self.stage, how + said, remedy))

    def fail_late(self) -> None:
        """Add a row that a stage lasted too long."""
        self.fail(f"no end in {self._seconds:.3g} s")


_REMEDIES = {
    "starting MPI": "use the mpirun of the MPI library that mpi4py loads, or srun with "
    "the --mpi= that it was built for (pmix for Open MPI, pmi2 for MPICH); see that "
    "all ranks run the same program and that their nodes reach each other",
    "ending MPI": "see that all ranks come to their end",
}


def watch(
    examine: Callable[[Outlet], None], report: Callable[[Watched], int]
) -> Watched:
    """Run `examine` in a forked process, and return what came of it. Close that.

    It ends with that process, or when a stage lasts longer than was said, or when a
    launcher (SIGTERM) or the user wants it to end; from then on these signals are
    ignored, so that the outcome can still be told. Must be called without threads.

    Args:
      examine: looks, and tells an Outlet.
      report: writes all rows, and returns the exit status.
    """
    watched = Watched(report)
    messages, theirs = Pipe()
    errors, their_errors = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        messages.close()
        os.close(errors)
        _run(examine, Outlet(theirs), their_errors, parent)
    theirs.close()
    os.close(their_errors)
    watched.pid = pid
    try:
        with _endable():
            if _follow(watched, pid, messages, errors):
                watched.pid = 0
    except _EndedError as ended:
        watched.fail(f"ended by {ended}, which the launcher or a user sent")
    finally:
        messages.close()
        os.close(errors)
    return watched


def _run(
    examine: Callable[[Outlet], None], outlet: Outlet, errors: int, parent: int
) -> NoReturn:
    """Examine, in the child. What libraries print goes to the parent, as stderr."""
    status = 1
    try:
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for stream in (1, 2):
            os.dup2(errors, stream)
        examine(outlet)
        status = 0
    except Exception as error:
        print(describe_error(error), file=sys.stderr)
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def _follow(
    watched: Watched, pid: int, messages: Connection[Any, Any], errors: int
) -> bool:
    """Take what the child says until it ends, or is late; return whether it ended."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        _drain(watched, messages, errors, 0 if found else _LOOK_SECONDS)
        if found:
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                watched.fail(f"the process was ended by {signal.Signals(-code).name}")
            elif code:
                watched.fail(f"the process ended with {code}")
            return True
        if watched.status is not None and _is_hydra():
            sys.stdout.flush()
            os._exit(watched.status)
        if watched.is_late():
            watched.fail_late()
            return False


def _drain(
    watched: Watched, messages: Connection[Any, Any], errors: int, seconds: float
) -> None:
    """Take all there is to be read."""
    open_ends: list[Any] = [messages, errors]
    while ready := wait(open_ends, seconds):
        seconds = 0
        try:
            if messages in ready:
                watched.take(messages)
        except EOFError:
            open_ends.remove(messages)
        if errors in ready:
            data = os.read(errors, 1 << 16)
            if data:
                watched.relay(data)
            else:
                open_ends.remove(errors)


class _EndedError(BaseException):
    """A signal that asks this process to end."""


@contextlib.contextmanager
def _endable() -> Iterator[None]:
    """Make signals that ask for an end raise an _EndedError, and ignore them later."""

    def end(number: int, frame: FrameType | None) -> None:
        raise _EndedError(signal.Signals(number).name)

    for number in _ENDING:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)


def _is_hydra() -> bool:
    """Return whether MPICH's mpirun, or one like it, started this process."""
    return "PMI_FD" in os.environ and "MPI_LOCALNRANKS" in os.environ


def _kill(pid: int) -> None:
    """End a child, and do not wait for long: what blocks in the system stays."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 1
    while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
        time.sleep(0.002)
