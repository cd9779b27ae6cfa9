"""Reading one replica's batches ahead, in threads. Nothing here communicates."""

from __future__ import annotations

import collections
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mpidist.data.distributed.reader import Feed, Group, Plan, Portion, start_reader
from mpidist.data.map_dataset import Epoch, MapDataset
from mpidist.data.sources import BufferedSource
from mpidist.device import arrays, host_to_device, streams
from mpidist.util import nest

__all__ = ["ReadAhead", "can_fail", "hand_out", "place", "start"]


# Small batches that are read together: reading them takes unlike times
_GROUPS = 2
# What takes less is read by the thread that needs it: handing it over from another
# thread would take about as long
_SHORT_SECONDS = 1e-3
# After so many groups that another thread has read, this one tries again; after twice
# as many next time, unless it has read so many in the meantime
_FEWEST_BETWEEN_TRIALS, _MOST_BETWEEN_TRIALS = 16, 1024
_STEADY = 16


class _Turns:
    """Whether groups are read by the thread that needs them: those read quickly are."""

    def __init__(self, may_be_own: bool):
        self._may_be_own = may_be_own
        self._wait = 0  # groups of other threads until the next trial
        self._gap = _FEWEST_BETWEEN_TRIALS
        self._short = 0  # own reads that were short, one after the other

    def is_own(self) -> bool:
        """Return whether the next group is read by this thread."""
        return self._may_be_own and self._wait == 0

    def note_own(self, seconds: float) -> None:
        """Take note of how long this thread has read a group."""
        if seconds <= _SHORT_SECONDS:
            self._short += 1
            if self._short >= _STEADY:
                self._gap = _FEWEST_BETWEEN_TRIALS
            return
        self._short = 0
        self._wait = self._gap
        self._gap = min(2 * self._gap, _MOST_BETWEEN_TRIALS)

    def note_other(self) -> None:
        """Take note of a group that is left to another thread."""
        self._wait = max(0, self._wait - 1)


class ReadAhead:
    """The batches of a feed, each asked for once, in order.

    They are read in threads, but for short reads, of which each would take longer to
    hand over than to do.

    Args:
      feed: what is read.
      depth: how many batches are in the making beyond those to be taken next; 0 reads a
        batch when it is asked for, without a thread.
      threads: how many threads read.
      steps: how many steps there are, if this is known; else negative.
      first: the step that is asked for first.
    """

    def __init__(self, feed: Feed, depth: int, threads: int, steps: int, first: int):
        self._feed = feed
        self._depth = depth
        self._steps = steps
        self._first = first
        self._asked = first  # the step up to which all were asked for
        self._ahead: collections.deque[Future[Group]] = collections.deque()
        self._at_hand: collections.deque[Portion | Exception | None] = (
            collections.deque()
        )
        self._threads = threads if depth else 0
        self._reader: ThreadPoolExecutor | None = None  # until it is needed
        self._turns = _Turns(threads == 1 and feed.may_change_thread)

    @property
    def most(self) -> int:
        """How many steps at most are read at a time."""
        return self._feed.group if self._threads else 1

    def group(self, step: int) -> int:
        """Return how many steps are read at a time, from this step on.

        It depends on the number of the step alone, and is equal on all replicas.
        """
        if self._feed.is_slow_to_start:
            return min(self.most, max(1, step - self._first))
        return self.most

    def read(self, step: int) -> Portion | None:
        """Return the batch of a step, None after the last one, or raise its error."""
        if not self._threads:
            return self._feed.read(step)
        portion = self._fetch(step).popleft()
        if isinstance(portion, Exception):
            raise portion
        return portion

    def can_read_group(self, step: int) -> bool:
        """Return whether a step and those read with it are at hand; waits for them."""
        portions = self._fetch(step)
        return not any(isinstance(portion, Exception) for portion in portions)

    def skip(self, steps: int) -> int:
        """See `Feed.skip`."""
        if not self._threads:
            return self._feed.skip(steps)
        return self._pool().submit(self._feed.skip, steps).result()

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
        self._threads = 0
        if self._reader is not None:
            self._reader.shutdown(wait=wait, cancel_futures=True)
            self._reader = None

    def _pool(self) -> ThreadPoolExecutor:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(self._threads, "mpidist-input")
        return self._reader

    def _fetch(self, step: int) -> collections.deque[Portion | Exception | None]:
        """Return what is at hand, at least the batch of a step."""
        if self._at_hand:
            return self._at_hand
        if not self._ahead:
            self._asked = step
            if self._turns.is_own():
                self._read_here()
        self._ask_ahead()
        if not self._at_hand:
            self._at_hand.extend(self._ahead.popleft().result())
        return self._at_hand

    def _read_here(self) -> None:
        """Read the next group in this thread."""
        count = self.group(self._asked)
        start = time.perf_counter()
        self._at_hand.extend(self._feed.read_group(self._asked, count))
        self._turns.note_own(time.perf_counter() - start)
        self._asked += count

    def _ask_ahead(self) -> None:
        """Have other threads read what comes next, unless this one will."""
        most = max(_GROUPS, -(-self._depth // self.group(self._asked)))
        while len(self._ahead) <= most and not 0 <= self._steps <= self._asked:
            if self._turns.is_own():
                break  # once what other threads read has come
            count = self.group(self._asked)
            # The threads must not know this object: then it can be forgotten
            reading = self._pool().submit(self._feed.read_group, self._asked, count)
            self._ahead.append(reading)
            self._asked += count
            self._turns.note_other()


def start(plan: Plan, epoch: Epoch) -> Feed:
    """Return this replica's batches of one epoch; see `hand_out`."""
    source = start_reader(plan, epoch)
    if not plan.options.experimental_fetch_to_device:
        return source
    stream = streams.copy_stream(plan.extended.device)
    if stream is None:
        return source
    if isinstance(plan.pipeline, MapDataset):
        for rows in plan.pipeline.sources:
            if isinstance(rows, BufferedSource):
                rows.buffers.allocate_by(host_to_device.page_locked(stream))
    return _Fetched(source, host_to_device.Uploads(stream))


def hand_out(portion: Portion | None) -> Portion | None:
    """Return what a feed has read, for use in the calling thread. Once per portion.

    Raises: what CuPy does where memory on the GPU does not suffice.
    """
    if portion is None or not isinstance(portion.batch, host_to_device.Upload):
        return portion
    return portion._replace(batch=host_to_device.take(portion.batch))


def can_fail(plan: Plan) -> bool:
    """Return whether `hand_out` may raise on some replica; the same on all replicas."""
    devices = plan.extended.topology.devices
    is_asked_for = plan.options.experimental_fetch_to_device
    return is_asked_for and not all(device.startswith("CPU") for device in devices)


def place(plan: Plan, batch: Any) -> Any:
    """Return a batch of no rows where this replica computes."""
    if not plan.options.experimental_fetch_to_device:
        return batch
    device = plan.extended.device
    return nest.map_leaves(lambda a: arrays.to_device(a, device), batch)


class _Fetched:
    """Starts to copy batches in the thread that has read them."""

    may_change_thread = False

    def __init__(self, source: Feed, host_to_device: host_to_device.Uploads):
        self.group = source.group
        self.is_slow_to_start = source.is_slow_to_start
        self._source = source
        self._uploads = host_to_device

    def read(self, step: int) -> Portion | None:
        """See `Feed.read`."""
        portion = self._source.read(step)
        return None if portion is None else self._send(portion)

    def read_group(self, step: int, count: int) -> Group:
        """See `Feed.read_group`."""
        found: Group = []
        for portion in self._source.read_group(step, count):
            if not isinstance(portion, Portion):  # the end, or an error
                found.append(portion)
                continue
            try:
                found.append(self._send(portion))
            except Exception as error:
                found.append(error)
                break
        return found

    def _send(self, portion: Portion) -> Portion:
        return portion._replace(batch=self._uploads.upload(portion.batch))

    def end(self) -> None:
        """See `Feed.end`."""
        self._source.end()
        self._uploads.close()

    def skip(self, steps: int) -> int:
        """See `Feed.skip`."""
        return self._source.skip(steps)

    def close(self) -> None:
        """See `Feed.close`."""
        self._source.close()
        self._uploads.close()
