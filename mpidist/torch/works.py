"""Works of torch.distributed, and the thread that runs them.

An operation that its caller waits for at once runs in the caller's thread, others in
one thread for each process group. Both run them in the order of their submission.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import queue
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mpidist.comm.consensus.signatures import user_frame
from mpidist.errors import ContextError, DeadlineError
from mpidist.torch import compat

_PAUSE_SECONDS = 1e-3
_this_thread = threading.local()  # its executor, if it is the thread of one


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
        self.executor: Executor | None = None  # that will run it in its thread

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
        seconds = limit(timeout)
        if self.executor is not None:
            self.executor.run_until(lambda: not self._running.locked())
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
                _executors[self._future] = self.executor
                if not self._running.locked():
                    self._starting.set_result(None)
            return self._future

    def _value(self, _: Any) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._outputs


_executors: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def serve_future(future: Any) -> None:
    """Run what a future waits for, where this is the thread that is to run it.

    That is a callback of another future. Its group's later operations then run inside
    of it, on all ranks in the order in which they were issued.
    """
    executor = getattr(_this_thread, "executor", None)
    # Of a future that was made of others, it is not known what it waits for
    if executor is not None and _executors.get(future, executor) is executor:
        executor.run_until(future.done)


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
        """Run an operation, at once if `may_wait` and no other one is in the way.

        Those that a callback of a future issues run at once, too, before all that wait,
        so that their order is the same on all ranks.
        """
        if getattr(_this_thread, "executor", None) is self:
            self._run(work, run)
            return
        if may_wait and self._begins():
            self._run(work, run)
            self._turn.release()
            self._count_one_less()
            return
        # The thread of the executor runs it, as if it stood in the user's line
        frame = user_frame()
        caller = _caller_at(frame.f_code, frame.f_lineno)
        work.executor = self
        with self._mutex:
            self._waiting += 1
            self._queue.put((work, run, caller))
            if self._thread is None:
                compat.before_futures_wait(serve_future)
                self._thread = threading.Thread(
                    target=self._loop, name=self._name, daemon=True
                )
                self._thread.start()

    def _begins(self) -> bool:
        """Take the turn in this thread, unless operations wait for theirs."""
        with self._mutex:
            if self._waiting:
                return False
            self._waiting = 1
            self._turn.acquire()
        return True

    def _count_one_less(self) -> None:
        with self._mutex:
            self._waiting -= 1

    def _loop(self) -> None:
        _this_thread.executor = self
        while (item := self._queue.get()) is not None:
            # With callbacks of futures, which may communicate
            with self._turn:
                self._run_queued(*item)
            del item  # else it would live until the next operation

    def _run_queued(self, work: Work, run: Callable[[], None], caller: Any) -> None:
        self._run(work, functools.partial(caller, run))
        self._count_one_less()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run operations that wait until something is done, in a callback of another.

        In another thread than this executor's, do nothing.
        """
        if getattr(_this_thread, "executor", None) is not self:
            return
        while not is_done():
            with contextlib.suppress(queue.Empty):
                # It may also be done by another thread, as a message
                item = self._queue.get(timeout=_PAUSE_SECONDS)
                if item is None:
                    self._queue.put(None)  # the end of the program
                    raise ContextError("the process group was destroyed meanwhile")
                self._run_queued(*item)

    def _run(self, work: Work, run: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            run()
        except BaseException as caught:
            error = caught
        work.finish(error)

    def close(self) -> None:
        """Wait for all operations; end the thread."""
        with self._mutex:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()


def limit(timeout: datetime.timedelta | None) -> float | None:
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
