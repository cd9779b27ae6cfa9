"""Works of torch.distributed, and the thread that runs them.

An operation that its caller waits for at once runs in the caller's thread, others in
one thread for each process group. Both run them in the order of their submission.
"""

from __future__ import annotations

import datetime
import functools
import os
import queue
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.signatures import user_frame
from mpidist.comm.consensus.waiting import Departures, abandon
from mpidist.errors import ContextError, DeadlineError, MismatchError

_SPIN_SECONDS, _PAUSE_SECONDS = 1e-4, 1e-3


class Work(dist.Work):
    """An operation of a process group.

    Args:
      outputs: the tensors that it writes.
    """

    def __init__(self, outputs: list[Any]):
        super().__init__()
        self._outputs = outputs
        self._running = threading.Lock()
        self._running.acquire()
        self._mutex = threading.Lock()
        self._error: BaseException | None = None
        self._future: Any = None
        self._starting: Any = None
        self.thread: Any = None  # that will run it, if that is not the caller

    def finish(self, error: BaseException | None = None) -> None:
        """End the operation, by an error of this rank if there is one."""
        with self._mutex:
            self._error = error
            self._running.release()
            starting = self._starting
        if starting is not None:
            starting.set_result(None)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the end; raise the operation's error."""
        seconds = _limit(timeout)
        if self.thread is threading.current_thread() and self._running.locked():
            raise ContextError(
                "a callback of a future waits for an operation that its own thread "
                "would run after it; return the operation's future instead"
            )
        if not self._running.acquire(timeout=-1 if seconds is None else seconds):
            raise DeadlineError(f"the operation has not ended in {seconds:g} s")
        self._running.release()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait for the end."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended."""
        return not self._running.locked()

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the operation's error."""
        return self._error

    def result(self) -> list[Any]:
        """Wait for the end; return the tensors that were written."""
        self.wait()
        return self._outputs

    def get_future(self) -> Any:
        """Return a future of the tensors. An error of the operation is its error."""
        with self._mutex:
            if self._future is None:
                self._starting = torch.futures.Future()
                # What a callback raises becomes the error of its future in C++, too
                self._future = self._starting.then(self._value)
                if not self._running.locked():
                    self._starting.set_result(None)
            return self._future

    def _value(self, _: Any) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._outputs


class Message(Work):
    """A message to or from one rank, which ends when MPI says so.

    Args:
      name: the operation.
      comm: the communicator.
      departures: of its ranks.
      seconds: the timeout of the group.
      outputs: see `Work`.
      request: of MPI; it is running.
      end: called with the status when it has ended.
    """

    def __init__(
        self,
        name: str,
        comm: MPI.Intracomm,
        departures: Departures,
        seconds: float | None,
        outputs: list[Any],
        request: MPI.Request,
        end: Callable[[MPI.Status], None] | None = None,
    ):
        super().__init__(outputs)
        self._name, self._comm, self._departures = name, comm, departures
        self._seconds, self._request, self._end = seconds, request, end
        self._status = MPI.Status()
        self._testing = threading.Lock()

    def is_completed(self) -> bool:
        """Return whether the message has arrived."""
        with self._testing:
            if not super().is_completed():
                self._test()
        return super().is_completed()

    def _test(self) -> None:
        error: Exception | None = None
        try:
            if not self._request.Test(self._status):
                return
            if self._end is not None:
                self._end(self._status)
        except MPI.Exception as caught:
            error = caught
            if caught.Get_error_class() == MPI.ERR_TRUNCATE:
                error = MismatchError(
                    f"{self._name}: more was sent than the tensor has"
                )
        except Exception as caught:
            error = caught
        self.finish(error)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the message; raise if it has another size."""
        if not self.is_completed():
            with Pending(self._name, self._comm):
                self._poll(_limit(timeout) or self._seconds)
        return super().wait()

    def _poll(self, seconds: float | None) -> None:
        begin = now = time.monotonic()
        while not self.is_completed():
            if now - begin < _SPIN_SECONDS:
                os.sched_yield()
            else:
                self._departures.require_none()
                time.sleep(min((now - begin) / 4, _PAUSE_SECONDS))
            now = time.monotonic()
            if seconds is not None and now - begin > seconds:
                abandon(self._request)
                raise DeadlineError(f"{self._name} has not ended in {seconds:g} s")

    def _source_rank(self) -> int:
        return self._status.Get_source()

    source_rank = _source_rank


class Executor:
    """Runs the operations of one process group in the order of their submission.

    Args:
      name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()  # held by the thread that runs an operation
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting = 0
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work, run: Callable[[], None], may_wait: bool) -> None:
        """Run an operation, at once if `may_wait` and no other one is in the way."""
        if may_wait and self._begins():
            self._run(work, run)
            return
        # The thread of the executor runs it, as if it stood in the user's line
        frame = user_frame()
        caller = _caller_at(frame.f_code, frame.f_lineno)
        with self._mutex:
            self._waiting += 1
            self._queue.put((work, run, caller))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, name=self._name, daemon=True
                )
                self._thread.start()
            work.thread = self._thread

    def _begins(self) -> bool:
        """Take the turn in this thread, unless operations wait for theirs."""
        with self._mutex:
            if self._waiting:
                return False
            self._waiting = 1
            self._turn.acquire()
        return True

    def _end(self) -> None:
        # First: where nothing waits, the turn can be taken. And before callbacks of
        # futures, which may communicate
        self._turn.release()
        with self._mutex:
            self._waiting -= 1

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            work, run, caller = item
            self._turn.acquire()
            self._run(work, functools.partial(caller, run))
            del item, work, run  # else they would live until the next operation

    def _run(self, work: Work, run: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            run()
        except BaseException as caught:
            error = caught
        self._end()
        work.finish(error)

    def close(self) -> None:
        """Wait for all operations; end the thread."""
        with self._mutex:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()


def _limit(timeout: datetime.timedelta | None) -> float | None:
    """Return c10d's timeout in seconds: 0 and less are none."""
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return seconds if seconds > 0 else None


@functools.lru_cache(maxsize=1024)
def _caller_at(code: types.CodeType, line: int) -> Callable[[Callable[[], None]], None]:
    """Return a function that calls its argument, as if it stood at a line of code.

    In the thread of an executor, messages, the flight record and tracebacks then name
    the line that has issued the operation.
    """
    place = _call.__code__.replace(
        co_filename=code.co_filename, co_name=code.co_name, co_firstlineno=line
    )
    return types.FunctionType(place, {})


_call: Callable[[Callable[[], None]], None] = lambda run: run()  # noqa: E731
