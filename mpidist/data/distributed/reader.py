"""Readers of one replica's batches of a distributed dataset.

Nothing here communicates, so that it can run in prefetching threads.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
from mpidist.data.sharding import WHOLE, BatchShare, largest_share
from mpidist.errors import ArgumentError, DataError
from mpidist.options import AutoShardPolicy, InputOptions
from mpidist.util import nest

if TYPE_CHECKING:
    from mpidist.comm.replica_group import ReplicaGroup

__all__ = [
    "BatchReader",
    "Kinds",
    "StepGroup",
    "ReadPlan",
    "LocalBatch",
    "steps_per_read",
    "count_steps",
    "divide",
    "is_global",
    "start_host_reader",
]


# Not None: a generator may yield that.
_END = object()
# Small batches are read in groups, which costs fewer calls and agreements. Limits in
# bytes and steps; the pair that allows more steps counts
_GROUPS = ((8 << 20, 16), (2 << 20, 64))


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
        # Own batches are not divided.
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


StepGroup = list[LocalBatch | Exception | None]


class BatchReader(Protocol):
    """Reads one replica's batches of one epoch, in order.

    In one thread at a time, unless `ReadPlan.threads` are more.
    """

    @property
    def group_size(self) -> int:
        """The best number of steps to read at a time."""

    @property
    def is_slow_to_start(self) -> bool:
        """Whether to start with small groups, so that the first batch is early.

        For user functions, which may be slow.
        """

    @property
    def may_change_thread(self) -> bool:
        """Whether successive batches may be read by different threads."""

    @property
    def kinds(self) -> Kinds | None:
        """Of the batches so far, if functions make them; replicas compare these."""

    def read(self, step: int) -> LocalBatch | None:
        """Return the batch of a step; None at the end of the data."""

    def read_group(self, step: int, count: int) -> StepGroup:
        """Return the batches of `count` steps from `step` on.

        If a step fails, its error is the last item of a shorter list.
        """

    def end(self) -> None:
        """End the epoch, but keep files open for the next one."""

    def skip(self, steps: int) -> int:
        """Skip the first steps; return how many there were."""

    def close(self) -> None:
        """Close the files."""


def start_host_reader(plan: ReadPlan, epoch: Epoch) -> BatchReader:
    """Return a reader of this replica's batches in host memory."""
    if isinstance(plan.pipeline, IterDataset):
        return _IterReader(plan, plan.pipeline, epoch)
    return _MapReader(plan, plan.pipeline, epoch)


class _MapReader:
    """Reads batches of a map-style dataset by index, in any thread, repeatably."""

    def __init__(self, plan: ReadPlan, pipeline: MapDataset, epoch: Epoch):
        self._plan = plan
        self._pipeline = pipeline
        self._epoch = epoch
        # Files stay open until the last read of any thread has ended.
        self._open_sources = OpenSources(pipeline)
        self.group_size = plan.group_size
        self.is_slow_to_start = pipeline.is_mapped
        # User functions may communicate or use thread-local context
        self.may_change_thread = not pipeline.is_mapped
        self._is_mapped = pipeline.is_mapped
        self.kinds: Kinds | None = None
        self._last_dtypes: Any = ()  # of the last batch that was compared

    def read(self, step: int) -> LocalBatch | None:
        """See `BatchReader.read`."""
        with one_dtype():
            return self._open_sources.run(lambda: self._read(step))

    def read_group(self, step: int, count: int) -> StepGroup:
        """See `BatchReader.read_group`."""
        length, stop = self._pipeline.length, step + count
        # Beyond the end there is nothing to read in a group.
        steps = range(step, stop if length is None else min(stop, length))
        # Open-ended datasets exchange templates at each step, so they read singly.
        if len(steps) > 1 and not self._plan.is_open_ended:
            with one_dtype():
                return self._open_sources.run(lambda: self._load_group(steps))
        # After the end of this replica's data, `read` returns a batch without rows
        return _read_singly(self, steps or [step])

    def _load_group(self, steps: range) -> StepGroup:
        try:
            batches = self._pipeline.local_batches(self._epoch, steps, self._plan.share)
        except Exception:  # read singly to find out which step fails
            return _read_singly(self, steps)
        # Views of one large read; an error of a later step does not lose those before.
        group: StepGroup = []
        try:
            group.extend(LocalBatch(self._alike(batch)) for batch in batches)
        except Exception as error:
            group.append(error)
        return group

    def _read(self, step: int) -> LocalBatch | None:
        plan = self._plan
        length = self._pipeline.length
        # Other replicas still have data: this one gives batches of zero rows.
        is_over = length is not None and step >= length
        if not plan.is_open_ended:
            batch = self._pipeline.empty_batch(self._epoch) if is_over else None
            return LocalBatch(self._alike(batch if is_over else self._load(step)))
        if is_over:
            return None
        batch = self._alike(self._load(step))
        # A replica without data learns from the template what its empty batch looks
        # like.
        return LocalBatch(batch, _template_of(as_element(batch)))

    def end(self) -> None:
        """See `BatchReader.end`."""
        self._open_sources.end()

    def skip(self, steps: int) -> int:
        """See `BatchReader.skip`."""
        length = self._pipeline.length
        return steps if length is None else min(steps, length)

    def close(self) -> None:
        """See `BatchReader.close`."""
        self._open_sources.close()

    def _alike(self, batch: Any) -> Any:
        """Return a batch, or raise if functions make another dtype than before.

        A replica's rows must have the dtypes that they have on any number of replicas.
        """
        if self._is_mapped and (dtypes := _flat_dtypes(batch)) != self._last_dtypes:
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
        return self._pipeline.local_batch(self._epoch, step, self._plan.share)


class _IterReader:
    """Reads batches of an iterable dataset in order; an error ends it."""

    group_size = 1
    is_slow_to_start = False
    may_change_thread = False
    kinds = None  # the templates are compared

    def __init__(self, plan: ReadPlan, stream: IterDataset, epoch: Epoch):
        self._plan = plan
        self._elements = stream.iterate(epoch)
        self._has_rows = plan.is_batched and not stream.may_be_scalars
        self._template: Any = None

    def read(self, step: int) -> LocalBatch | None:
        """See `BatchReader.read`."""
        with one_dtype():
            element = next(self._elements, _END)
        if element is _END:
            return None
        element = as_element(element)
        _kinds_of(element)  # refuses masks
        template = _template_of(element)
        self._template = (
            template
            # The first batch sets the template; later ones must be like it.
            if self._template is None
            else _require_like(template, self._template)
        )
        rows = count_rows(element) if self._has_rows else None
        # All rows are produced on every rank; this rank keeps its slice.
        if self._plan.is_global:
            element = self._slice(element, rows or 0)
        return LocalBatch(element, template, rows)

    def read_group(self, step: int, count: int) -> StepGroup:
        """See `BatchReader.read_group`."""
        # One at a time: what follows an error would be lost.
        return _read_singly(self, [step])

    def end(self) -> None:
        """See `BatchReader.end`."""
        self.close()

    def skip(self, steps: int) -> int:
        """See `BatchReader.skip`."""
        # Elements are produced and dropped: a generator cannot seek.
        return sum(1 for _ in itertools.islice(self._elements, steps))

    def close(self) -> None:
        """See `BatchReader.close`."""
        self._elements = iter(())  # dropping the last reference closes a generator

    def _slice(self, batch: Any, rows: int) -> Any:
        own = self._plan.share.of(rows)
        return nest.map_leaves(lambda a: a[own], batch)


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
    """Return the batches of some steps, up to the first error."""
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
        # Zero-dimensional leaves have no rows to leave out.
        return np.zeros((0, *a.shape[1:]) if a.ndim else (), a.dtype)

    return nest.map_leaves(without_rows, element)


def _flat_dtypes(batch: Any) -> Any:
    """Return the dtypes of an array or a tuple of arrays; None for other batches."""
    if type(batch) is np.ndarray:
        return batch.dtype
    if type(batch) is tuple and {np.ndarray}.issuperset(map(type, batch)):
        return tuple([a.dtype for a in batch])
    return None


def _kinds_of(batch: Any) -> Kinds:
    """Return the kinds of a batch, whose leaves lose nothing as arrays."""
    leaves, spec = nest.flatten(batch)
    plain = [
        a if type(a) is np.ndarray else plain_array(a, "an array of a batch")
        for a in leaves
    ]
    return Kinds(spec, tuple(dtype_text(a.dtype) for a in plain))


def _require_like(template: Any, before: Any) -> Any:
    """Return `template`, or raise if structure, dtypes or dimensions have changed."""
    leaves, spec = nest.flatten(template)
    leaves_before, spec_before = nest.flatten(before)
    if spec != spec_before:
        raise DataError(
            f"the batches of a dataset must be alike, but the structure {spec} follows "
            f"{spec_before}"
        )
    names = nest.leaf_names(spec, "batch")
    for name, a, b in zip(names, leaves, leaves_before, strict=True):
        # Lengths may differ, structure may not.
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
        # The whole dataset on each worker, with smaller batches.
        return pipeline.rebatch(workers)
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
    return pipeline.shard_files(workers, worker).rebatch(workers)


def count_steps(lengths: Sequence[int]) -> int:
    """Return the number of steps of all workers: until the longest dataset ends."""
    if UNKNOWN_CARDINALITY in lengths:
        return UNKNOWN_CARDINALITY
    # Endless if any is; otherwise those that end earlier give empty batches.
    return INFINITE_CARDINALITY if INFINITE_CARDINALITY in lengths else max(lengths)
