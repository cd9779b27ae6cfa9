"""Prefetching of one replica's batches, in threads. Nothing here communicates."""

from __future__ import annotations

import collections
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mpidist.data.distributed.reader import (
    BatchReader,
    Kinds,
    LocalBatch,
    ReadPlan,
    StepGroup,
    start_host_reader,
)
from mpidist.data.map_dataset import Epoch, MapDataset
from mpidist.data.sources import BufferedSource
from mpidist.device import arrays, host_to_device, streams
from mpidist.util import nest

__all__ = [
    "Prefetcher",
    "device_put",
    "empty_on_device",
    "start_reader",
]


# Step groups in flight beyond the next one, since their read times vary
_GROUPS = 2
# Shorter reads are done inline: the hand-over from another thread takes about as long
_SHORT_SECONDS = 1e-3
# After a slow inline read, this many groups are read in threads before the next trial;
# the number doubles with each slow trial, until _STEADY inline reads were short
_FEWEST_BETWEEN_TRIALS, _MOST_BETWEEN_TRIALS = 16, 1024
_STEADY = 16


class _InlineReads:
    """Decides whether the next step group is read inline, by the calling thread."""

    def __init__(self, may_be_own: bool):
        self._is_allowed = may_be_own
        self._wait = 0  # threaded groups until the next trial
        self._gap = _FEWEST_BETWEEN_TRIALS
        self._short = 0  # consecutive short inline reads

    def is_next(self) -> bool:
        """Return whether the next group is read inline."""
        return self._is_allowed and self._wait == 0

    def record_inline(self, seconds: float) -> None:
        """Record the duration of an inline read."""
        if seconds <= _SHORT_SECONDS:
            self._short += 1
            if self._short >= _STEADY:
                self._gap = _FEWEST_BETWEEN_TRIALS
            return
        self._short = 0
        self._wait = self._gap
        self._gap = min(2 * self._gap, _MOST_BETWEEN_TRIALS)

    def record_threaded(self) -> None:
        """Record that another thread reads a group."""
        self._wait = max(0, self._wait - 1)


class Prefetcher:
    """Reads batches ahead in threads; each batch is requested once, in order.

    Short reads are done inline instead, since handing them over would take longer.

    Args:
      reader: of the batches.
      depth: number of batches to prefetch; 0 reads each batch when it is requested,
        without a thread.
      threads: number of reading threads.
      steps: number of steps of the epoch; negative if unknown.
      first: the first step to be requested.
    """

    def __init__(
        self, reader: BatchReader, depth: int, threads: int, steps: int, first: int
    ):
        self._reader = reader
        self._depth = depth
        self._steps = steps
        self._first = first
        self._requested = first  # all steps before this one were requested
        self._pending: collections.deque[Future[StepGroup]] = collections.deque()
        self._ready: collections.deque[LocalBatch | Exception | None] = (
            collections.deque()
        )
        self._threads = threads if depth else 0
        self._executor: ThreadPoolExecutor | None = None  # started on demand
        self._inline = _InlineReads(threads == 1 and reader.may_change_thread)

    @property
    def kinds(self) -> Kinds | None:
        """See `BatchReader.kinds`."""
        return self._reader.kinds

    @property
    def max_group_size(self) -> int:
        """The largest number of steps in a group."""
        return self._reader.group_size if self._threads else 1

    def group_size(self, step: int) -> int:
        """Return the number of steps in the group that starts at `step`.

        Replicas agree once per group, so it must be equal on all of them: it depends
        on the step alone.
        """
        if self._reader.is_slow_to_start:
            return min(self.max_group_size, max(1, step - self._first))
        return self.max_group_size

    def read(self, step: int) -> LocalBatch | None:
        """Return the batch of a step, or None at the end of the data."""
        if not self._threads:
            return self._reader.read(step)
        local_batch = self._wait_for(step).popleft()
        if isinstance(local_batch, Exception):
            raise local_batch
        return local_batch

    def can_read_group(self, step: int) -> bool:
        """Wait for a step and the rest of its group; return whether none failed."""
        # After an error there are no more batches in a group.
        return not isinstance(self._wait_for(step)[-1], Exception)

    def skip(self, steps: int) -> int:
        """See `BatchReader.skip`."""
        if not self._threads:
            return self._reader.skip(steps)
        return self._start_threads().submit(self._reader.skip, steps).result()

    def end(self) -> None:
        """End the threads, but keep files open for the next epoch."""
        self._stop()
        self._reader.end()

    def close(self, wait: bool = True) -> None:
        """End the threads and close the files."""
        self._stop(wait)
        self._reader.close()

    def _stop(self, wait: bool = True) -> None:
        self._ready.clear()
        self._pending.clear()
        self._threads = 0
        if self._executor is not None:
            self._executor.shutdown(wait=wait, cancel_futures=True)
            self._executor = None

    def _start_threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._threads, "mpidist-input")
        return self._executor

    def _wait_for(self, step: int) -> collections.deque[LocalBatch | Exception | None]:
        """Return the batches that are ready, at least that of `step`."""
        if self._ready:
            return self._ready
        # Batches are used in order: read inline only after all pending groups
        if not self._pending:
            self._requested = step
            if self._inline.is_next():
                self._read_inline()
        self._submit_reads()
        if not self._ready:
            self._ready.extend(self._pending.popleft().result())
        return self._ready

    def _read_inline(self) -> None:
        """Read the next group in the calling thread."""
        count = self.group_size(self._requested)
        start = time.perf_counter()
        self._ready.extend(self._reader.read_group(self._requested, count))
        self._inline.record_inline(time.perf_counter() - start)
        self._requested += count

    def _submit_reads(self) -> None:
        """Submit the next groups to the threads, unless an inline read is next."""
        limit = max(_GROUPS, -(-self._depth // self.group_size(self._requested)))
        while len(self._pending) <= limit and not 0 <= self._steps <= self._requested:
            if self._inline.is_next():
                break  # read inline after the pending groups
            count = self.group_size(self._requested)
            # Without a reference to `self`, which could then not be garbage-collected
            future = self._start_threads().submit(
                self._reader.read_group, self._requested, count
            )
            self._pending.append(future)
            self._requested += count
            self._inline.record_threaded()


def start_reader(plan: ReadPlan, epoch: Epoch) -> BatchReader:
    """Return a reader of this replica's batches; pass each to `device_put`."""
    source = start_host_reader(plan, epoch)
    if not plan.options.experimental_fetch_to_device:
        return source
    stream = streams.copy_stream(plan.extended.device)
    if stream is None:
        return source
    if isinstance(plan.pipeline, MapDataset):
        for rows in plan.pipeline.sources:
            if isinstance(rows, BufferedSource):
                rows.buffers.allocate_by(host_to_device.page_locked(stream))
    return _DeviceReader(source, host_to_device.Uploads(stream))


def device_put(local_batch: LocalBatch | None) -> LocalBatch | None:
    """Return a batch ready for use on the calling thread's stream. Once per batch.

    Raises:
      CuPy's error if the GPU has not enough memory.
    """
    if local_batch is None or not isinstance(local_batch.batch, host_to_device.Upload):
        return local_batch
    return local_batch._replace(batch=host_to_device.take(local_batch.batch))


def empty_on_device(plan: ReadPlan, batch: Any) -> Any:
    """Return a batch without rows on the device of this replica."""
    if not plan.options.experimental_fetch_to_device:
        return batch
    device = plan.extended.device
    return nest.map_leaves(lambda a: arrays.to_device(a, device), batch)


class _DeviceReader:
    """Starts the host-to-device copies of batches, in the thread that read them."""

    may_change_thread = False

    def __init__(self, source: BatchReader, host_to_device: host_to_device.Uploads):
        self.group_size = source.group_size
        self.is_slow_to_start = source.is_slow_to_start
        self._source = source
        self._uploads = host_to_device

    def read(self, step: int) -> LocalBatch | None:
        """See `BatchReader.read`."""
        local_batch = self._source.read(step)
        return None if local_batch is None else self._copy_to_device(local_batch)

    def read_group(self, step: int, count: int) -> StepGroup:
        """See `BatchReader.read_group`."""
        group: StepGroup = []
        for local_batch in self._source.read_group(step, count):
            if not isinstance(local_batch, LocalBatch):  # the end, or an error
                group.append(local_batch)
                continue
            try:
                group.append(self._copy_to_device(local_batch))
            except Exception as error:
                group.append(error)
                break
        return group

    @property
    def kinds(self) -> Kinds | None:
        """See `BatchReader.kinds`."""
        return self._source.kinds

    def _copy_to_device(self, local_batch: LocalBatch) -> LocalBatch:
        return local_batch._replace(batch=self._uploads.upload(local_batch.batch))

    def end(self) -> None:
        """See `BatchReader.end`."""
        self._source.end()
        self._uploads.close()

    def skip(self, steps: int) -> int:
        """See `BatchReader.skip`."""
        return self._source.skip(steps)

    def close(self) -> None:
        """See `BatchReader.close`."""
        self._source.close()
        self._uploads.close()
