"""Call a function in threads, with the results in the order of the arguments."""

from __future__ import annotations

import collections
import contextvars
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any

from mpidist.util import validation
from mpidist.util.available_memory import available_cores

_END = object()
_NAME = "mpidist-map"
_MOST_THREADS = 4096


def count_threads(num_parallel_calls: int | None) -> int:
    """Return the number of threads for `num_parallel_calls` of `Dataset.map`.

    Raises:
      ArgumentError: it is neither None, nor -1, nor positive; or it is > 4096.
      ArgumentTypeError: it is neither None nor an integer.
    """
    also = ", or -1 for one per core, or None"
    count = validation.optional_integer(
        "num_parallel_calls", num_parallel_calls, -1, also
    )
    if count is None:
        return 1
    if count == -1:
        return len(available_cores())
    return validation.integer("num_parallel_calls", count, 1, also, _MOST_THREADS)


def call_all(fn: Callable[[Any], Any], items: Sequence[Any], threads: int) -> list[Any]:
    """Return `fn` of each item, computed by threads that end before it returns.

    Raises: see `share_calls`.
    """
    if min(threads, len(items)) <= 1:
        return [fn(item) for item in items]
    with ThreadPoolExecutor(threads, _NAME) as pool:
        return pool.submit(share_calls, fn, items, pool, threads - 1).result()


def share_calls(
    fn: Callable[[Any], Any], items: Sequence[Any], pool: Executor, helpers: int
) -> list[Any]:
    """Return `fn` of each item, computed by this thread and threads of a pool.

    No call is running any more when it returns or raises.

    Args:
      fn: the function.
      items: its arguments.
      pool: the pool; if all its threads are busy, this thread makes all calls.
      helpers: the most threads of the pool to use.

    Raises: the error of `fn` for the first item, in the order of `items`, that has one.
      Some later items may have been computed by then; no more will be.
    """
    calls = _Calls(fn, items)
    helping = [pool.submit(calls.work) for _ in range(min(helpers, len(items) - 1))]
    calls.work()
    wait([helper for helper in helping if not helper.cancel()])
    return calls.end()


class _Calls:
    """The calls of a function with each item, which threads take one by one."""

    def __init__(self, fn: Callable[[Any], Any], items: Sequence[Any]):
        self._fn: Callable[[Any], Any] | None = fn
        self._items = items
        self._numbers = iter(range(len(items)))
        self._turn = threading.Lock()
        self._results: list[Any] = [None] * len(items)
        self._failures: dict[int, BaseException] = {}

    def work(self) -> None:
        while (i := self._take()) is not None:
            assert self._fn is not None
            try:
                self._results[i] = self._fn(self._items[i])
            except BaseException as error:
                self._failures[i] = error

    def _take(self) -> int | None:
        with self._turn:
            return None if self._failures else next(self._numbers, None)

    def end(self) -> list[Any]:
        """Return the results, or raise the first error. All threads must be done.

        Drops all references: the pool may still refer to this by cancelled calls.
        """
        results, failures = self._results, self._failures
        self._fn, self._items, self._results, self._failures = None, (), [], {}
        if not failures:
            return results
        error = failures[min(failures)]  # all items before it were tried
        failures.clear()
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame: a reference cycle


def call_ahead(
    fn: Callable[[Any], Any], items: Iterable[Any], threads: int
) -> Generator[Any, None, None]:
    """Yield `fn` of each item, computing up to `threads` later ones meanwhile.

    The calling thread iterates over the items; an error of that is raised after the
    results of the items before it. The threads end with the iteration.
    """
    pool = ThreadPoolExecutor(threads, _NAME)
    ahead: collections.deque[Future[Any]] = collections.deque()
    source: Iterator[Any] | None = iter(items)
    try:
        while True:
            while source is not None and len(ahead) <= threads:
                if not _submit_next(pool, fn, source, ahead):
                    source = None
            if not ahead:
                return
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submit_next(
    pool: ThreadPoolExecutor,
    fn: Callable[[Any], Any],
    source: Iterator[Any],
    ahead: collections.deque[Future[Any]],
) -> bool:
    try:
        item = next(source)
    except StopIteration:
        return False
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        ahead.append(failed)
        return False
    ahead.append(pool.submit(contextvars.copy_context().run, fn, item))
    return True


def read_ahead(elements: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield `elements`, reading `count` of them ahead in a thread."""
    reader = ThreadPoolExecutor(1, "mpidist-prefetch")

    def submit() -> Future[Any]:
        context = contextvars.copy_context()
        return reader.submit(lambda: context.run(next, elements, _END))

    try:
        ahead = collections.deque(submit() for _ in range(count))
        while (element := ahead.popleft().result()) is not _END:
            ahead.append(submit())
            yield element
    finally:
        reader.shutdown(wait=True, cancel_futures=True)
