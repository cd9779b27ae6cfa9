"""Threads of one process use one communicator in the same order on all ranks.

Two threads may start their collectives in different orders on different ranks. A
communicator does not distinguish threads, so a call could match one of the other
thread. Here one thread at a time may communicate, and if different threads are first on
different ranks, the ranks choose the same one to go first. (MPI_THREAD_SERIALIZED is
enough.)
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from types import FrameType
from typing import Any

import numpy as np

from mpidist.errors import ContextError
from mpidist.util.cpython import SHUTDOWN_CODE, WORK_CODE, ThreadFrames
from mpidist.util.serialization import hash62

# How the names of counters begin that count the steps of iterators
STEP = "the step in epoch"
_LOOK_AGAIN_SECONDS = 0.05
_NAMELESS = "a thread without a name"
_BITS = (1 << 62) - 1
_get_ident = threading.get_ident
# Numbers of events, in the order in which they happen, in any thread
tickets = itertools.count(1)


class ThreadOrderedLock:
    """A lock that can be passed to a given thread; acquired for each collective.

    NumPy ignores floating-point errors in the thread that holds it: an exception or a
    warning on one rank, after the ranks have agreed, would leave the others waiting.

    Args:
      on_end: called at the end of each collective.
      check: called at the end of each collective with what it raised, or None; returns
        what is to be raised.
      on_error: called with what a collective raised, before another one can begin.

    Attributes:
      state: what is known of each thread.
      first: the state of the first thread, whose name is "": while the lock has it, no
        other thread can get it, unlike the identifier of a thread that has ended.
      can_fail: whether all ranks compare their calls next, so that an error of the
        thread that holds the lock can be exchanged instead.
    """

    def __init__(
        self,
        on_end: Callable[[], None] | None = None,
        check: Callable[[BaseException | None], BaseException | None] | None = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._on_end = on_end
        self._check = check
        self._on_error = on_error
        self.state = ThreadState()
        self.restore((self.state.__dict__, threading.current_thread()))
        # Names that several threads have had at the same time: they may denote
        # different threads on other ranks, even after all but one have ended
        self._ambiguous: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Release the lock in a forked process, where other threads do not exist."""
        lock: Any = threading.RLock()
        self._lock = lock
        self._condition = threading.Condition(lock)
        self._acquire, self._release = lock.acquire, lock.release
        self._next: str | None = None
        self._entered = 0
        self.can_fail = True
        self.holder = 0  # the thread that holds it
        self._yielding: dict[int, str | None] = {}  # see `awaited_by`
        self._handling: Any = None  # of floating-point errors, outside the lock

    def thread(self) -> str:
        """Return this thread's name, the same on all ranks; "" for the first thread."""
        if self.is_creator():
            return ""
        return threading.current_thread().name or _NAMELESS

    def is_creator(self) -> bool:
        """Return whether this is the first thread."""
        return self.state.__dict__ is self.first

    @property
    def creator(self) -> int:
        """The identifier of the first thread; 0 if it has ended."""
        thread = self._first_thread
        return thread.ident or 0 if thread.is_alive() else 0

    def ambiguity(self, operation: str) -> ContextError | None:
        """Return an error if the name of this thread does not identify it on all ranks.

        Another thread of this rank has the same name, or had it during a call.

        Args:
          operation: the call that this thread makes.
        """
        thread = threading.current_thread()
        if self.is_creator():
            return None
        if sum(t.name == thread.name for t in threading.enumerate()) > 1:
            self._ambiguous.add(thread.name)
        if thread.name not in self._ambiguous:
            return None
        return ContextError(
            f"{operation} was called in a thread named {thread.name!r}, but another "
            "thread of the rank has the same name; give each thread that communicates "
            "a unique name, the same on all ranks"
        )

    def adopt(self) -> tuple[dict[str, Any], threading.Thread]:
        """Make the calling thread the first one; return the former, for `restore`."""
        former = self.first, self._first_thread
        self.restore((self.state.__dict__, threading.current_thread()))
        return former

    def restore(self, first: tuple[dict[str, Any], threading.Thread]) -> None:
        """Make the thread the first one that was that before `adopt`."""
        self.first, self._first_thread = first

    @contextlib.contextmanager
    def stand_in(self) -> Iterator[None]:
        """Let this thread communicate as the first thread, which waits meanwhile.

        Changes of its `state` apply to the first thread.
        """
        own, first = self.state.__dict__, self.first
        if own is first:
            yield
            return
        kept = dict(own)
        own.update(first)
        former = self.adopt()
        try:
            yield
        finally:
            self.restore(former)
            first.update(own)
            own.update(kept)

    def __enter__(self) -> None:
        try:
            self._acquire()
            state = _handling()
            if self._next is not None:
                while not self._entered and self._next not in (None, self.thread()):
                    self._condition.wait()
            if not self._entered:
                self.holder = _get_ident()
                self._handling = state
                self.can_fail = True
                _set_handling(_IGNORED)
            self._entered += 1
        except BaseException:  # of a signal handler
            self._undo_enter()
            raise

    def _undo_enter(self) -> None:
        """Give back what an interrupted `__enter__` has taken."""
        if not self._lock._is_owned():
            return
        if self._entered:  # as often as `__exit__` will
            _, owner = self._lock._release_save()
            self._lock._acquire_restore((self._entered, owner))
        else:
            self._let_go()

    def _let_go(self) -> None:
        if self.holder:
            _set_handling(self._handling)
        self._entered = self.holder = 0
        self._lock._release_save()

    def free(self, error: BaseException) -> None:
        """Release the lock if an interrupted `__exit__` has left this thread with it.

        Args:
          error: what has interrupted it.
        """
        if self._lock._is_owned():
            if not self.can_fail and self._on_error is not None:
                self._on_error(error)
            if self._on_end is not None:
                self._on_end()
            self._next = None
            self._condition.notify_all()
            self._let_go()

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        try:
            if self._entered == 1:
                if error is not None and self._on_error is not None:
                    self._on_error(error)
                if self._on_end is not None:
                    self._on_end()
                if self._next is not None:
                    self._next = None
                    self._condition.notify_all()
        finally:  # also when a signal handler raises here
            try:
                if self._entered == 1:
                    self.holder = 0
                    _set_handling(self._handling)
            finally:
                self._entered -= 1
                self._release()
        if self._check is not None:
            cause = self._check(error)
            if cause is not None and cause is not error:
                raise cause from error

    def let_run(self, thread: str, timeout: float | None = None) -> bool:
        """Release the lock until `thread` has held it, or cannot any more.

        It cannot if it does not exist and no other thread could start it. Returns False
        if `timeout` seconds have passed. The caller holds the lock before and after.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        entered, self._entered = self._entered, 0
        mine = self.holder, self._handling
        self._next = thread
        self._yielding[_get_ident()] = thread if timeout is None else None
        self._condition.notify_all()
        try:
            while self._next == thread and self.can_come(thread):
                if time.monotonic() > end:
                    return False
                self._condition.wait(_LOOK_AGAIN_SECONDS)
        finally:
            if self._next == thread:
                self._next = None
                self._condition.notify_all()
            self._yielding.pop(_get_ident())
            self._entered = entered
            self.holder, self._handling = mine
        return True

    def awaited_by(self, thread: int) -> str | None:
        """Return which thread a thread waits for in `let_run`, without a timeout."""
        return self._yielding.get(thread)

    def can_come(self, thread: str) -> bool:
        """Return whether another thread of this name may call now or later."""
        names, may_start_more = self.others()
        return thread in names or (thread != "" and may_start_more)

    def others(self) -> tuple[frozenset[str], bool]:
        """Return which other threads may call, and whether they may start more.

        By their names; threads that wait for this one cannot.
        """
        this, threads = threading.current_thread(), threading.enumerate()
        with ThreadFrames() as frames:
            others = [t for t in threads if not _is_or_awaits(t, this, frames)]
        names = frozenset(map(self.name_of, others))
        return names, any(map(may_start_threads, others))

    def name_of(self, thread: threading.Thread) -> str:
        """Return the name of any thread, as `thread` does of this one."""
        return "" if thread is self._first_thread else thread.name or _NAMELESS


def may_start_threads(thread: threading.Thread) -> bool:
    """Return whether a thread may start others that communicate.

    Daemons, and our own readers, do not.
    """
    return not (thread.daemon or thread.name.startswith("mpidist-"))


def is_only_thread(ident: int) -> bool:
    """Return whether all threads that may call anything wait for this one."""
    threads = threading.enumerate()
    this = next((t for t in threads if t.ident == ident), None)
    free = filter(may_start_threads, threads)
    with ThreadFrames() as frames:
        return this is not None and all(_is_or_awaits(t, this, frames) for t in free)


def joined_threads(
    thread: int | None, frames: Mapping[int, FrameType]
) -> list[threading.Thread]:
    """Return the threads whose end a thread waits for, without a limit.

    By `Thread.join`, by `Future.result`, or as Python's end waits for threads.

    Args:
      thread: the identifier of the waiting thread.
      frames: see `ThreadFrames`.
    """
    for frame in _callers(frames.get(thread or 0)):
        code, variables = frame.f_code, frame.f_locals
        if code is threading.Thread.join.__code__ and variables.get("timeout") is None:
            return [variables["self"]]
        if code is Future.result.__code__ and variables.get("timeout") is None:
            return _threads_that_run(variables["self"], frames)
        if code is SHUTDOWN_CODE:
            main = threading.main_thread()
            return [t for t in threading.enumerate() if not t.daemon and t is not main]
    return []


def _is_or_awaits(
    thread: threading.Thread,
    other: threading.Thread,
    frames: Mapping[int, FrameType],
    depth: int = 10,
) -> bool:
    if thread is other or depth == 0:
        return thread is other
    joined = joined_threads(thread.ident, frames)
    return any(_is_or_awaits(t, other, frames, depth - 1) for t in joined)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        # Locals are a copy that is made when they are read: only of a known function
        if frame.f_code in _waiting_codes:
            yield frame
        frame = frame.f_back


def _threads_that_run(
    future: Any, frames: Mapping[int, FrameType]
) -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        for frame in _callers(frames.get(thread.ident or 0))
        if frame.f_code is WORK_CODE and frame.f_locals["self"].future is future
    ]


_waiting_codes = {
    threading.Thread.join.__code__,
    Future.result.__code__,
    WORK_CODE,
    SHUTDOWN_CODE,
}


class ProgressCounters(threading.local):
    """Counters by name, which must be equal on all ranks at each collective.

    Ranks may continue without communication within an agreed group of steps; the next
    collective of any kind still detects a rank that is ahead. Each thread has its own
    counters, since its progress during another thread's call is not deterministic.
    """

    def __init__(self) -> None:  # each thread's first use calls this
        self._counts: dict[str, int] = {}
        # The sum of (count + 1) * key over the names, in 62 bits: the same in every
        # process for the same counters
        self.digest = 0

    def set(self, name: str, count: int) -> None:
        """Set a counter, of at least 0."""
        steps = count - self._counts.get(name, -1)
        self._counts[name] = count
        self.digest = (self.digest + steps * _key(name)) & _BITS

    def add(self, name: str, count: int) -> None:
        """Increase a counter, which begins with 0."""
        self.set(name, self._counts.get(name, 0) + count)

    def remove(self, name: str) -> None:
        """Remove a counter, if there is one."""
        if name in self._counts:
            self.set(name, -1)
            del self._counts[name]

    def forget(self, start: str) -> None:
        """Remove the counters whose names start with `start`."""
        for name in [name for name in self._counts if name.startswith(start)]:
            self.remove(name)

    def describe(self) -> dict[str, str]:
        """Return each count by its name, as text."""
        return {name: str(count) for name, count in self._counts.items()}


class ThreadState(ProgressCounters):
    """The counters of a thread, its scopes, and the errors that it must announce."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        # The depth of the scope that other ranks have left by an error, and the error
        self.unwinding: tuple[int, Exception] | None = None
        # The ticket of when the thread last began to compare calls, or learnt that all
        # ranks know of an error
        self.event = 0
        # An error after a comparison, which the scope that it ends will announce
        self.unannounced: BaseException | None = None


@functools.lru_cache(maxsize=64)
def _key(name: str) -> int:
    return hash62(name) | 1  # odd: no multiple below 2 ** 62 is 0


# NumPy 2 keeps the handling of floating-point errors in a private context variable,
# which is set in a tenth of the time that entering `np.errstate` takes. NumPy 1 has
# `np.seterr`, for each thread. Tried on NumPy 1.26.4 and 2.4.6.
def _find_variable() -> tuple[contextvars.ContextVar[Any], Any] | None:
    """Return NumPy's variable, and its value while errors are ignored."""
    outside = contextvars.copy_context()
    with np.errstate(all="ignore"):
        inside = contextvars.copy_context()
    for variable, value in inside.items():
        if variable not in outside or outside[variable] is not value:
            return variable, value
    return None


_found = contextvars.Context().run(_find_variable)
# `_handling()` returns what `_set_handling` takes
_handling: Callable[[], Any]
_set_handling: Callable[[Any], Any]
if _found is None:
    _IGNORED: Any = dict.fromkeys(("divide", "over", "under", "invalid"), "ignore")
    _handling, _set_handling = np.geterr, lambda state: np.seterr(**state)
else:
    _variable, _IGNORED = _found
    _handling, _set_handling = _variable.get, _variable.set
