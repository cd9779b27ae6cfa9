"""Processes that run checks, so that a check can crash or block without harm.

A file system whose server is gone blocks a process for ever, in a way that no signal
ends; a broken driver ends it. So such calls are made by processes forked for them,
before this one has started MPI, CUDA or a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from mpidist.tools.doctor.finding import Failure, describe_error

__all__ = ["Worker", "cleanups", "end_with_parent"]

# What a function leaves to be done when its worker ends; in the worker
cleanups = contextlib.ExitStack()
_END_SECONDS = 1.0
_LOOK_SECONDS = 0.1
# A check may compute for so many times as long as it may be blocked
_COMPUTING_TIMES = 10
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


class Worker:
    """A forked process that calls functions, one after the other. Close it."""

    # Of this process; what is forked later must not hold them open
    _in_use: ClassVar[list[Connection[Any, Any]]] = []

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._failure: Failure | None = None
        self._asked = (0.0, 0.0, 0.0)  # when, and `_scheduled` then
        self._pid = os.fork()
        if self._pid == 0:
            _serve(theirs, [*Worker._in_use, self._connection])
        theirs.close()
        Worker._in_use.append(self._connection)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin to call a function of a module; `answer` gives the outcome."""
        self._asked = (time.monotonic(), *_scheduled(self._pid))
        with contextlib.suppress(OSError):  # it has ended, as `answer` will see
            self._connection.send((function, arguments))

    def answer(self, deadline: float) -> Any:
        """Return what the function returned, or a Failure.

        The time in which the worker computes, or waits for a processor that others
        use, does not count, so a busy machine is not taken for a dead file system.

        Args:
          deadline: on time.monotonic's clock. A worker that misses it is given up.
        """
        if self._failure is not None:
            return self._failure
        try:
            while True:
                left = self._seconds_left(deadline)
                if self._connection.poll(max(0.0, min(left, _LOOK_SECONDS))):
                    return self._connection.recv()
                if left <= 0:
                    allowed = deadline - self._asked[0]
                    self._failure = Failure(f"no answer in {allowed:.3g} s")
                    break
        except (EOFError, OSError):
            self._failure = Failure(self._how_it_ended())
        return self._failure

    def _seconds_left(self, deadline: float) -> float:
        """Return for how long the worker may still be blocked."""
        asked, *before = self._asked
        computed, queued = (
            max(0.0, now - then) for now, then in zip(_scheduled(self._pid), before)
        )
        if computed > _COMPUTING_TIMES * (deadline - asked):
            return 0.0
        return deadline - time.monotonic() + computed + queued

    def call(self, function: Callable[..., Any], *arguments: Any, by: float) -> Any:
        """Do `ask` and `answer`."""
        self.ask(function, *arguments)
        return self.answer(by)

    def close(self) -> None:
        """End the process, as far as it can be ended."""
        self._connection.close()
        if self._connection in Worker._in_use:
            Worker._in_use.remove(self._connection)
        if self._pid and not _has_ended(self._pid, 0 if self._failure else None)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            _has_ended(self._pid, None)
        self._pid = 0

    def _how_it_ended(self) -> str:
        ended, status = _has_ended(self._pid, None)
        self._pid = 0 if ended else self._pid
        if not ended:
            return "its process hung up"
        if status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        return f"its process ended with {status}"


def _scheduled(pid: int) -> tuple[float, float]:
    """Return for how many seconds a process has computed, and waited to compute.

    Both are 0 where Linux does not tell.
    """
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            computed, queued = file.read().split()[:2]
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(computed) / 1e9, int(queued) / 1e9


def _has_ended(pid: int, seconds: float | None) -> tuple[bool, int]:
    """Return whether a child ends within some time, and its exit code."""
    deadline = time.monotonic() + (_END_SECONDS if seconds is None else seconds)
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found or time.monotonic() >= deadline:
            return bool(found), os.waitstatus_to_exitcode(status)
        time.sleep(0.002)


def end_with_parent(number: int) -> None:
    """Let the system send this process a signal when its parent ends; 0 for none."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)


def _serve(connection: Connection[Any, Any], others: list[Connection[Any, Any]]) -> Any:
    """Call what is asked for, until nobody asks any more. Does not return."""
    try:
        for other in others:
            other.close()
        # Where it waits for a file, it would not see that nobody asks any more
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it has files to remove
        end_with_parent(signal.SIGTERM)
        # Libraries that load MPI must not start it: this process is no rank
        os.environ["MPI4PY_RC_INITIALIZE"] = "false"
        while True:
            function, arguments = connection.recv()
            connection.send(_outcome(function, arguments))
    except (EOFError, OSError, KeyboardInterrupt):
        cleanups.close()
    finally:
        os._exit(0)


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        return Failure(describe_error(error))
