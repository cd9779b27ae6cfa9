"""Decoded chunks that are kept as long as rows are still wanted from them."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from mpidist.data.parallel import share_calls

__all__ = ["BlockCache"]

T = TypeVar("T")
Key = tuple[int, ...]


class BlockCache:
    """Blocks by key, loaded in threads; those not used for the longest time go first.

    Args:
      threads: how many load at the same time; with one the caller's does.
      capacity_bytes: of the blocks that are kept beyond those just asked for.
    """

    def __init__(self, threads: int, capacity_bytes: int):
        self.threads = threads
        self.capacity_bytes = capacity_bytes
        self._blocks: collections.OrderedDict[Key, Future[Any]] = (
            collections.OrderedDict()
        )
        self._bytes = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def get(self, keys: Sequence[Key], load: Callable[[Key], Any]) -> dict[Key, Any]:
        """Return the blocks of several keys.

        Args:
          keys: in any order.
          load: returns the block of a key that is missing; called in threads.
        """
        missing: list[tuple[Key, Future[Any]]] = []
        with self._lock:
            found = {}
            for key in keys:
                if key not in self._blocks:
                    self._blocks[key] = Future()
                    missing.append((key, self._blocks[key]))
                self._blocks.move_to_end(key)
                found[key] = self._blocks[key]
        list(self.parallel(lambda item: self._fulfil(item[0], item[1], load), missing))
        try:
            return {key: future.result() for key, future in found.items()}
        finally:
            self._evict(found)

    def parallel(self, fn: Callable[[Any], T], items: Iterable[Any]) -> Iterable[T]:
        """Return `fn` of each item, computed in threads, of which one is this one."""
        items = list(items)
        if self.threads == 1 or len(items) < 2:
            return map(fn, items)
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads - 1, "mpidist-read")
            pool = self._pool
        return share_calls(fn, items, pool, self.threads - 1)

    def clear(self) -> None:
        """Drop all blocks, and end the threads."""
        with self._lock:
            self._blocks.clear()
            self._bytes = 0
        self.end_threads()

    def end_threads(self) -> None:
        """End the threads; another `get` starts them again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def _fulfil(
        self, key: Key, future: Future[Any], load: Callable[[Key], Any]
    ) -> None:
        try:
            block = load(key)
        except BaseException as error:
            with self._lock:  # the next one who asks tries again
                self._blocks.pop(key, None)
            future.set_exception(error)
        else:
            with self._lock:
                self._bytes += block.nbytes
            future.set_result(block)

    def _evict(self, in_use: Iterable[Key]) -> None:
        used = set(in_use)
        with self._lock:
            while self._bytes > self.capacity_bytes and self._blocks:
                oldest, block = next(iter(self._blocks.items()))
                if oldest in used or not block.done():
                    break
                self._bytes -= block.result().nbytes
                del self._blocks[oldest]
