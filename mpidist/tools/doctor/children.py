"""Child processes in which checks run, so that a check can crash or hang safely.

A file system whose server is down blocks a process for ever, and a broken driver ends
it. So each such check is a function call in a Python process of its own, whose stdin is
a socket. On that the child receives
the call, and sends messages `(kind, value)`: ("step", text) says what it does next, in
case that it blocks; the last one is ("result", value). Then it waits for the socket to
be closed, as it may hold locks for that long.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from mpidist.launch.commands import python_child
from mpidist.tools.doctor.rows import Failure, Row, as_rows, describe_error

_CODE = "from mpidist.tools.doctor import children; children.serve()"
# In a child: what the check has to undo at the end, and its socket
cleanups = contextlib.ExitStack()
_socket: Connection[Any, Any] | None = None
_END_SECONDS = 1.0
# A check may compute for so many times as long as it may be blocked
_COMPUTING_TIMES = 10
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


class Child:
    """A function call in a child process. Close it, which kills its process group.

    Args:
      function: of a module; it is pickled by name.
      arguments: of the function.
      is_rank: whether the child starts MPI in this process's place, for which it
        inherits the launcher's descriptors.

    What the child writes to stdout goes to stderr.
    """

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, is_rank: bool = False
    ):
        self._connection, theirs = Pipe()
        # Libraries that load MPI must not start it
        others = {} if is_rank else {"MPI4PY_RC_INITIALIZE": "false"}
        self._process = subprocess.Popen(
            python_child(_CODE, "doctor"),
            env={**os.environ, **others},
            stdin=theirs.fileno(),
            stdout=2,
            close_fds=not is_rank,
            start_new_session=True,
        )
        theirs.close()
        self._started = time.monotonic()
        self._has_answered = False
        self.send((os.getpid(), is_rank))
        self.send((function, arguments))

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the child end if it has answered, else kill its process group."""
        self._connection.close()
        if not self._has_answered or not self._has_ended():
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._has_ended()

    def send(self, message: Any) -> None:
        """Send a message, unless the child has ended, which `receive` reports."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def receive(self, seconds: float) -> tuple[str, Any]:
        """Return the next message, kind and value.

        Raises:
          EOFError: the child has ended; says how.
          TimeoutError: there was no message in time.
        """
        try:
            if not self._connection.poll(max(0.0, seconds)):
                raise TimeoutError
            kind, value = self._connection.recv()
        except (EOFError, ConnectionError):
            raise EOFError(self._how_it_ended()) from None
        self._has_answered = kind == "result"
        return kind, value

    def result(self, seconds: float) -> Any:
        """Return what the function returned, or a Failure.

        Time in which the child computes, or waits for a processor that others use, does
        not count, so that a busy machine is not reported as a dead file system.

        Args:
          seconds: since the start of the child.
        """
        step, end = "", self._started + seconds
        while True:
            try:
                kind, value = self.receive(end - time.monotonic())
            except EOFError as error:
                return Failure(str(error))
            except TimeoutError:
                computed, queued = _scheduled(self._process.pid)
                computed = min(computed, _COMPUTING_TIMES * seconds)
                end = self._started + seconds + computed + queued
                if time.monotonic() >= end:
                    return Failure(f"no answer in {seconds:.3g} s{step}")
            else:
                if kind == "result":
                    return value
                step = f", {value}"

    def _has_ended(self) -> bool:
        """Wait a moment for the end; a child that is blocked in the kernel has none."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        return self._process.returncode is not None

    def _how_it_ended(self) -> str:
        if not self._has_ended():
            return "the process closed its connection"
        code = self._process.returncode
        if code < 0:
            return f"the process was ended by {signal.Signals(-code).name}"
        return f"the process ended with {code}"


def run_checks(calls: Iterable[tuple[Any, ...]], seconds: float) -> list[Any]:
    """Run checks at the same time, each in a child process.

    Args:
      calls: function and arguments of each check.
      seconds: how long each may be blocked.

    Returns: what each function returned, or a Failure.
    """
    with contextlib.ExitStack() as children:
        started = [children.enter_context(Child(*call)) for call in calls]
        return [child.result(seconds) for child in started]


def run_named(calls: Mapping[str, tuple[Any, ...]], seconds: float) -> list[Row]:
    """Like `run_checks`: return the rows of checks, by their subjects."""
    results = zip(calls, run_checks(calls.values(), seconds), strict=True)
    return [row for what, result in results for row in as_rows(what, result)]


def _scheduled(pid: int) -> tuple[float, float]:
    """Return the seconds that a process has computed, and waited for a processor.

    Both are 0 where the system does not say.
    """
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            computed, queued = file.read().split()[:2]
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(computed) / 1e9, int(queued) / 1e9


def end_with_parent(number: int) -> None:
    """Let the system send this process a signal when its parent ends; 0 for none."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)


def send(kind: str, value: Any) -> None:
    """Send a message to the parent of this child."""
    if _socket is not None:
        _socket.send((kind, value))


def receive() -> Any:
    """Return the next message of this child's parent."""
    assert _socket is not None
    return _socket.recv()


def serve() -> NoReturn:
    """Receive a call, run it, and send its result: the main program of a child."""
    global _socket
    sys.argv[0] = "mpidist"  # for advice: how to start the doctor
    try:
        # Keep stdin for messages, and what libraries print out of them
        _socket = Connection(os.dup(0))
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        end_with_parent(signal.SIGTERM)
        parent, is_rank = receive()
        if is_rank:  # MPI may handle other signals
            end_with_parent(signal.SIGKILL)
        if os.getppid() == parent:
            send("result", _call())
            # The parent's end closes the socket, and must not interrupt the clean-up
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            receive()
    except (EOFError, OSError, KeyboardInterrupt):
        cleanups.close()
    finally:
        os._exit(0)


def _call() -> Any:
    """Receive a call, whose modules are imported by that, and return its result."""
    try:
        function, arguments = receive()
        return function(*arguments)
    except Exception as error:
        return Failure(describe_error(error))
