"""Reading one replica's batches ahead, in threads. Nothing here communicates."""

from __future__ import annotations

import collections
from concurrent.futures import Future, ThreadPoolExecutor

from mpidist.data.distributed.feed import Feed, Group, Portion

__all__ = ["ReadAhead"]

# Small batches that are read together: reading them takes unlike times
_GROUPS = 2


class ReadAhead:
    """The batches of a feed, each asked for once, in order.

    Args:
      feed: what is read.
      depth: how many batches are in the making beyond those to be taken next; 0 reads a
        batch when it is asked for, without a thread.
      threads: how many threads read.
      steps: how many steps there are, if this is known; else negative.
    """

    def __init__(self, feed: Feed, depth: int, threads: int, steps: int):
        self._feed = feed
        self._depth = depth
        self._steps = steps
        self._ahead: collections.deque[Future[Group]] = collections.deque()
        self._at_hand: collections.deque[Portion | Exception | None] = (
            collections.deque()
        )
        self._reader = ThreadPoolExecutor(threads, "mpidist-input") if depth else None

    @property
    def group(self) -> int:
        """How many steps are read at a time."""
        return self._feed.group if self._reader else 1

    def read(self, step: int) -> Portion | None:
        """Return the batch of a step, None after the last one, or raise its error."""
        if self._reader is None:
            return self._feed.read(step)
        portion = self._fetch(step, self._reader).popleft()
        if isinstance(portion, Exception):
            raise portion
        return portion

    def can_read_group(self, step: int) -> bool:
        """Return whether a step and those read with it are at hand; waits for them."""
        assert self._reader is not None
        portions = self._fetch(step, self._reader)
        return not any(isinstance(portion, Exception) for portion in portions)

    def skip(self, steps: int) -> int:
        """See `Feed.skip`."""
        if self._reader is None:
            return self._feed.skip(steps)
        return self._reader.submit(self._feed.skip, steps).result()

    def end(self) -> None:
        """End the threads; all was read, and perhaps will be again."""
        self._stop()
        self._feed.end()

    def close(self, wait: bool = True) -> None:
        """End the threads, and let go of what is being read."""
        self._stop(wait)
        self._feed.close()

    def _stop(self, wait: bool = True) -> None:
        self._at_hand.clear()
        self._ahead.clear()
        if self._reader is not None:
            self._reader.shutdown(wait=wait, cancel_futures=True)
            self._reader = None

    def _fetch(
        self, step: int, reader: ThreadPoolExecutor
    ) -> collections.deque[Portion | Exception | None]:
        """Return what is at hand, at least the batch of a step."""
        if not self._at_hand:
            group = self._feed.group
            while len(self._ahead) <= max(_GROUPS, -(-self._depth // group)):
                start = step + len(self._ahead) * group
                if 0 <= self._steps <= start:
                    break
                # The threads must not know this object: then it can be forgotten
                self._ahead.append(reader.submit(self._feed.read_group, start))
            self._at_hand.extend(self._ahead.popleft().result())
        return self._at_hand
