"""One replica's batches of a distributed dataset.

They are read, ahead in threads, and copied to the device. Nothing here communicates.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidist.data.distributed.shared_caches import has_caches
from mpidist.data.elements import as_element, dtype_text, one_dtype, plain_array
from mpidist.data.iter_dataset import UNKNOWN_CARDINALITY, IterDataset, count_rows
from mpidist.data.iterator import Origin
from mpidist.data.map_dataset import (
    INFINITE_CARDINALITY,
    Epoch,
    MapDataset,
    OpenSources,
)
from mpidist.data.sources import BufferedSource
from mpidist.device import arrays, host_to_device, streams
from mpidist.errors import ArgumentError, DataError
from mpidist.options import AutoShardPolicy, InputOptions
from mpidist.util import nest
from mpidist.util.shares import WHOLE, BatchShare, largest_share

if TYPE_CHECKING:
    from mpidist.comm.replica_group import ReplicaGroup

# Not None: a generator may yield that.
_END = object()
# Small batches are read in groups, which costs fewer calls and agreements. Limits in
# bytes and steps; the pair that allows more steps counts
_GROUPS = ((8 << 20, 16), (2 << 20, 64))
# Step groups in flight beyond the next one, since their read times vary
_PENDING_GROUPS = 2
# Shorter reads are done inline: the hand-over from another thread takes about as long
_SHORT_SECONDS = 1e-3
# After a slow inline read, this many groups are read in threads before the next trial;
# the number doubles with each slow trial, until _STEADY inline reads were short
_FEWEST_BETWEEN_TRIALS, _MOST_BETWEEN_TRIALS = 16, 1024
_STEADY = 16


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """How a dataset is read; equal on all replicas except for the pipeline.

    Args:
      pipeline: dataset of batches.
      is_global: whether batches are global, and this replica takes a slice of each.
      is_batched: whether all replicas' elements are batches.
      cardinality: number of steps of all replicas, or INFINITE_ or
        UNKNOWN_CARDINALITY.
      origin: identifies iterator states of this dataset.
      options: see `InputOptions`.
      serial: number of this dataset among those of the strategy.
    """

    extended: ReplicaGroup
    pipeline: MapDataset | IterDataset
    is_global: bool
    is_batched: bool
    cardinality: int
    origin: Origin
    options: InputOptions
    serial: int

    @functools.cached_property
    def name(self) -> str:
        """What messages call this dataset; the same on all replicas."""
        return f"dataset {self.serial}"

    @functools.cached_property
    def share(self) -> BatchShare:
        """Which rows of each batch of the pipeline this replica takes."""
        if not self.is_global:
            return WHOLE
        where = self.extended.num_replicas, self.extended.replica_id
        return BatchShare(*where, self.options.balance_batches)

    @functools.cached_property
    def has_cache(self) -> bool:
        """Whether the ranks of a node share elements that one of them has read."""
        return has_caches(self.pipeline)

    @functools.cached_property
    def is_open_ended(self) -> bool:
        """Whether replicas must exchange at each step whether they have a batch."""
        return self.cardinality == UNKNOWN_CARDINALITY

    @functools.cached_property
    def threads(self) -> int:
        """How many threads may read; an iterable dataset allows one."""
        pipeline = self.pipeline
        return 1 if isinstance(pipeline, IterDataset) else pipeline.parallel_calls

    @functools.cached_property
    def group_size(self) -> int:
        """The best number of steps to read at a time."""
        if isinstance(self.pipeline, IterDataset):
            return 1
        replicas = self.extended.num_replicas if self.is_global else 1
        return steps_per_read(self.pipeline, replicas)

    @functools.cached_property
    def may_put_fail(self) -> bool:
        """Whether `device_put` may fail on any replica; equal on all replicas."""
        kinds = {name.partition(":")[0] for name in self.extended.topology.devices}
        return self.options.experimental_fetch_to_device and kinds != {"CPU"}


class LocalBatch(NamedTuple):
    """One replica's part of a step.

    Args:
      batch: the rows of this replica.
      template: arrays like those of the batch, without rows; None if not needed.
      rows: number of rows of the global batch, if known.
    """

    batch: Any
    template: Any = None
    rows: int | None = None


class Kinds(NamedTuple):
    """The structure and the dtypes of batches that a function has made."""

    spec: nest.Spec
    dtypes: tuple[str, ...]


class UnreadError(Exception):
    """A step of a group cannot be read; earlier steps of the group may be readable."""


# The last item may be the error of its step
StepGroup = list[LocalBatch | Exception | None]


class BatchReader(abc.ABC):
    """Reads one replica's batches of one epoch, in order.

    In one thread at a time, unless `ReadPlan.threads` are more.
    """

    # The best number of steps to read at a time
    group_size = 1
    # Whether to start with small groups, so that the first batch is early: for user
    # functions, which may be slow
    is_slow_to_start = False
    # Whether successive batches may be read by different threads
    may_change_thread = False
    # Of the batches so far, if functions make them; replicas compare these
    kinds: Kinds | None = None

    @abc.abstractmethod
    def read(self, step: int) -> LocalBatch | None:
        """Return the batch of a step; None at the end of the data."""

    def read_group(self, step: int, count: int) -> StepGroup:
        """Return the batches of `count` steps from `step` on, or of fewer.

        If a step fails, its error is the last item of a shorter list.
        """
        return _read_singly(self, [step])

    @abc.abstractmethod
    def skip(self, steps: int) -> int:
        """Skip the first steps; return how many there were."""

    def end(self) -> None:
        """End the epoch, but keep files open for the next one."""
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Close the files."""


def _start_host_reader(plan: ReadPlan, epoch: Epoch) -> BatchReader:
    if isinstance(plan.pipeline, IterDataset):
        return _IterReader(plan, plan.pipeline, epoch)
    return _MapReader(plan, plan.pipeline, epoch)


class _MapReader(BatchReader):
    """Reads batches of a map-style dataset by index, in any thread, repeatably."""

    def __init__(self, plan: ReadPlan, pipeline: MapDataset, epoch: Epoch):
        self._plan = plan
        self._pipeline = pipeline
        self._epoch = epoch
        # Files stay open until the last read of any thread has ended.
        self._open_sources = OpenSources(pipeline)
        self.group_size = plan.group_size
        self._is_mapped = self.is_slow_to_start = pipeline.is_mapped
        # User functions may communicate or use thread-local context
        self.may_change_thread = not self._is_mapped
        # Only functions make rows of unlike dtypes
        self._strict = one_dtype if self._is_mapped else contextlib.nullcontext
        self._share = plan.share
        self._length = pipeline.length
        self._last_dtypes: Any = ()  # of the last batch that was compared

    def read(self, step: int) -> LocalBatch | None:
        with self._strict():
            return self._open_sources.run(lambda: self._read(step))

    def read_group(self, step: int, count: int) -> StepGroup:
        length, stop = self._length, step + count
        # Beyond the end there is nothing to read in a group.
        steps = range(step, stop if length is None else min(stop, length))
        # Open-ended datasets exchange templates at each step, so they read singly.
        if len(steps) > 1 and not self._plan.is_open_ended:
            with self._strict():
                return self._open_sources.run(lambda: self._load_group(steps))
        # After the end of this replica's data, `read` returns a batch without rows
        return _read_singly(self, steps or [step])

    def _load_group(self, steps: range) -> StepGroup:
        try:
            batches = self._pipeline.local_batches(self._epoch, steps, self._share)
        except Exception:  # read singly to find out which step fails
            return _read_singly(self, steps)
        # Views of one large read; an error of a later step does not lose those before.
        group: StepGroup = []
        try:
            alike = map(self._alike, batches) if self._is_mapped else batches
            group.extend(map(LocalBatch, alike))
        except Exception as error:
            group.append(error)
        return group

    def _read(self, step: int) -> LocalBatch | None:
        is_open_ended, length = self._plan.is_open_ended, self._length
        is_over = length is not None and step >= length
        if is_over and is_open_ended:
            return None
        # Other replicas still have data: this one gives batches of zero rows
        batch = self._pipeline.empty_batch(self._epoch) if is_over else self._load(step)
        # A replica without data learns from the template what its empty batch is like
        template = _template_of(as_element(batch)) if is_open_ended else None
        return LocalBatch(self._alike(batch) if self._is_mapped else batch, template)

    def end(self) -> None:
        self._open_sources.end()

    def skip(self, steps: int) -> int:
        return steps if self._length is None else min(steps, self._length)

    def close(self) -> None:
        self._open_sources.close()

    def _alike(self, batch: Any) -> Any:
        """Return a batch, or raise if functions make another dtype than before.

        A replica's rows must have the dtypes that they have on any number of replicas.
        """
        if (dtypes := _flat_dtypes(batch)) != self._last_dtypes:
            kinds = _kinds_of(batch)
            self.kinds = self.kinds or kinds
            if kinds != self.kinds:
                raise DataError(
                    "the batches of a dataset must be alike, but a function makes "
                    f"{', '.join(kinds.dtypes)} for one and "
                    f"{', '.join(self.kinds.dtypes)} for another; convert them in map()"
                )
            self._last_dtypes = dtypes or self._last_dtypes
        return batch

    def _load(self, step: int) -> Any:
        if not self._plan.is_global:
            return self._pipeline.element(self._epoch, step)
        return self._pipeline.local_batch(self._epoch, step, self._share)


class _IterReader(BatchReader):
    """Reads batches of an iterable dataset in order, singly; an error ends it."""

    def __init__(self, plan: ReadPlan, stream: IterDataset, epoch: Epoch):
        self._plan = plan
        self._elements = stream.iterate(epoch)
        self._has_rows = plan.is_batched and not stream.may_be_scalars
        self._template: Any = None

    def read(self, step: int) -> LocalBatch | None:
        with one_dtype():
            element = next(self._elements, _END)
        if element is _END:
            return None
        element = as_element(element)
        _kinds_of(element)  # refuses masks
        template = _template_of(element)
        self._template = (
            template
            if self._template is None
            else _require_like(template, self._template)
        )
        rows = count_rows(element) if self._has_rows else None
        if self._plan.is_global:
            element = self._slice(element, rows or 0)
        return LocalBatch(element, template, rows)

    def skip(self, steps: int) -> int:
        # Elements are produced and dropped: a generator cannot seek.
        return sum(1 for _ in itertools.islice(self._elements, steps))

    def close(self) -> None:
        self._elements = iter(())  # dropping the last reference closes a generator

    def _slice(self, batch: Any, rows: int) -> Any:
        part = self._plan.share.of(rows)
        return nest.map_leaves(lambda a: a[part], batch)


def start_reader(plan: ReadPlan, epoch: Epoch) -> BatchReader:
    """Return a reader of this replica's batches; pass each to `device_put`."""
    source = _start_host_reader(plan, epoch)
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


class _DeviceReader(BatchReader):
    """Starts the host-to-device copies of batches, in the thread that read them."""

    def __init__(self, source: BatchReader, host_to_device: host_to_device.Uploads):
        self.group_size = source.group_size
        self.is_slow_to_start = source.is_slow_to_start
        self._source = source
        self._uploads = host_to_device

    def read(self, step: int) -> LocalBatch | None:
        local_batch = self._source.read(step)
        self.kinds = self._source.kinds
        return None if local_batch is None else self._copy_to_device(local_batch)

    def read_group(self, step: int, count: int) -> StepGroup:
        group: StepGroup = []
        host_group = self._source.read_group(step, count)
        self.kinds = self._source.kinds
        for local_batch in host_group:
            if not isinstance(local_batch, LocalBatch):  # the end, or an error
                group.append(local_batch)
                continue
            try:
                group.append(self._copy_to_device(local_batch))
            except Exception as error:
                group.append(error)
                break
        return group

    def _copy_to_device(self, local_batch: LocalBatch) -> LocalBatch:
        return local_batch._replace(batch=self._uploads.upload(local_batch.batch))

    def end(self) -> None:
        self._source.end()
        self._uploads.close()

    def skip(self, steps: int) -> int:
        return self._source.skip(steps)

    def close(self) -> None:
        self._source.close()
        self._uploads.close()


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
        if seconds <= _SHORT_SECONDS:
            self._short += 1
            if self._short >= _STEADY:
                self._gap = _FEWEST_BETWEEN_TRIALS
            return
        self._short = 0
        self._wait = self._gap
        self._gap = min(2 * self._gap, _MOST_BETWEEN_TRIALS)

    def record_threaded(self) -> None:
        self._wait = max(0, self._wait - 1)


class Prefetcher:
    """Reads batches ahead in threads; each batch is requested once, in order.

    Short reads are done inline instead, since handing them over would take longer.

    Attributes:
      reader: of the batches.
      max_group_size: the largest number of steps in a group.

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
        self.reader = reader
        self._depth = depth
        self._steps = steps
        self._first = first
        self._requested = first  # all steps before this one were requested
        self._pending: collections.deque[Future[StepGroup]] = collections.deque()
        self._ready: collections.deque[LocalBatch | Exception | None] = (
            collections.deque()
        )
        self._threads = threads if depth else 0
        self.max_group_size = reader.group_size if self._threads else 1
        self._executor: ThreadPoolExecutor | None = None  # started on demand
        self._inline = _InlineReads(threads == 1 and reader.may_change_thread)

    def group_size(self, step: int) -> int:
        """Return the number of steps in the group that starts at `step`.

        Replicas agree once per group, so it must be equal on all of them: it depends
        on the step alone.
        """
        if self.reader.is_slow_to_start:
            return min(self.max_group_size, max(1, step - self._first))
        return self.max_group_size

    def read(self, step: int) -> LocalBatch | None:
        """Return the batch of a step, or None at the end of the data."""
        if not self._threads:
            return self.reader.read(step)
        local_batch = (self._ready or self._wait_for(step)).popleft()
        if isinstance(local_batch, Exception):
            raise local_batch
        return local_batch

    def require_group(self, step: int) -> None:
        """Wait for a step and the rest of its group.

        Raises:
          UnreadError: one of them cannot be read.
        """
        # After an error there are no more batches in a group
        if isinstance(self._wait_for(step)[-1], Exception):
            raise UnreadError

    def skip(self, steps: int) -> int:
        """Skip the first steps; return how many there were."""
        if not self._threads:
            return self.reader.skip(steps)
        return self._start_threads().submit(self.reader.skip, steps).result()

    def end(self) -> None:
        """End the threads, but keep files open for the next epoch."""
        self._stop()
        self.reader.end()

    def close(self, wait: bool = True) -> None:
        """End the threads and close the files."""
        self._stop(wait)
        self.reader.close()

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
        count = self.group_size(self._requested)
        start = time.perf_counter()
        self._ready.extend(self.reader.read_group(self._requested, count))
        self._inline.record_inline(time.perf_counter() - start)
        self._requested += count

    def _submit_reads(self) -> None:
        """Submit the next groups to the threads, unless an inline read is next."""
        groups = math.ceil(self._depth / self.group_size(self._requested))
        limit = max(_PENDING_GROUPS, groups)
        while len(self._pending) <= limit and not 0 <= self._steps <= self._requested:
            if self._inline.is_next():
                break  # read inline after the pending groups
            count = self.group_size(self._requested)
            # Without a reference to `self`, which could then not be garbage-collected
            future = self._start_threads().submit(
                self.reader.read_group, self._requested, count
            )
            self._pending.append(future)
            self._requested += count
            self._inline.record_threaded()


def steps_per_read(pipeline: MapDataset, replicas: int) -> int:
    """Return how many steps to read at a time: several if batches are small.

    Args:
      pipeline: dataset of batches.
      replicas: number of replicas that share each batch.
    """
    row_bytes, rows = pipeline.row_bytes, pipeline.batch_size
    # With parallel calls, each thread reads a step of its own
    if row_bytes is None or rows is None or pipeline.parallel_calls > 1:
        return 1
    # What one rank reads of a step; its own share decides the size of a group.
    step_bytes = max(1, row_bytes * largest_share(rows, replicas))
    return max(1, *(min(most // step_bytes, steps) for most, steps in _GROUPS))


def _read_singly(reader: BatchReader, steps: Iterable[int]) -> StepGroup:
    group: StepGroup = []
    for step in steps:
        try:
            group.append(reader.read(step))
        except Exception as error:
            group.append(error)
            break
    return group


def _template_of(element: Any) -> Any:
    """Return arrays like those of `element`, without rows (scalars stay scalars)."""

    def without_rows(a: Any) -> Any:
        return np.zeros((0, *a.shape[1:]) if a.ndim else (), a.dtype)

    return nest.map_leaves(without_rows, element)


def _flat_dtypes(batch: Any) -> Any:
    if type(batch) is np.ndarray:
        return batch.dtype
    if type(batch) is tuple and {np.ndarray}.issuperset(map(type, batch)):
        return tuple([a.dtype for a in batch])
    return None


def _kinds_of(batch: Any) -> Kinds:
    leaves, spec = nest.flatten(batch)
    plain = [
        a
        if type(a) is np.ndarray and not a.dtype.hasobject
        else plain_array(a, "an array of a batch")
        for a in leaves
    ]
    return Kinds(spec, tuple(dtype_text(a.dtype) for a in plain))


def _require_like(template: Any, before: Any) -> Any:
    leaves, spec = nest.flatten(template)
    leaves_before, spec_before = nest.flatten(before)
    if spec != spec_before:
        raise DataError(
            f"the batches of a dataset must be alike, but the structure {spec} follows "
            f"{spec_before}"
        )
    names = nest.leaf_names(spec, "batch")
    for name, a, b in zip(names, leaves, leaves_before, strict=True):
        if (dtype_text(a.dtype), a.ndim) != (dtype_text(b.dtype), b.ndim):
            raise DataError(
                "the batches of a dataset must be alike, but in one that follows the "
                f"first {name} is {a.dtype.name} of {a.ndim} dimensions instead of "
                f"{b.dtype.name} of {b.ndim}"
            )
    return template


def is_global(policy: AutoShardPolicy) -> bool:
    """Return whether workers read slices of global batches."""
    return policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)


def divide(
    pipeline: MapDataset | IterDataset,
    policy: AutoShardPolicy,
    workers: int,
    worker: int,
) -> MapDataset | IterDataset:
    """Return the dataset that one worker reads: its own batches, or global ones.

    Raises:
      ArgumentError: the policy is FILE, and the rows are in too few files, or none.
    """
    if is_global(policy):
        return pipeline
    if policy is AutoShardPolicy.OFF:
        own: MapDataset | IterDataset = pipeline.rebatch(workers)
        return own
    files = pipeline.file_count
    if files == 0:
        raise ArgumentError(
            "auto_shard_policy FILE needs a dataset of files, from Dataset.from_hdf5; "
            "use AutoShardPolicy.DATA"
        )
    if files < workers:
        raise ArgumentError(
            "auto_shard_policy FILE needs at least as many files as workers, not "
            f"{files} files for {workers} workers; use AutoShardPolicy.DATA"
        )
    own = pipeline.shard_files(workers, worker).rebatch(workers)
    return own


def count_steps(lengths: Sequence[int]) -> int:
    """Return the number of steps of all workers: until the longest dataset ends."""
    if UNKNOWN_CARDINALITY in lengths:
        return UNKNOWN_CARDINALITY
    # Endless if any is; otherwise those that end earlier give empty batches.
    return INFINITE_CARDINALITY if INFINITE_CARDINALITY in lengths else max(lengths)
