"""What one replica reads of a distributed dataset, step after step.

Nothing here communicates, so it may run in the thread that reads ahead.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mpidist.data import sharding
from mpidist.data.iter_dataset import UNKNOWN_CARDINALITY, IterDataset, count_rows
from mpidist.data.iterator_state import Origin
from mpidist.data.map_dataset import (
    INFINITE_CARDINALITY,
    Epoch,
    MapDataset,
    OpenSources,
)
from mpidist.data.sources import as_element
from mpidist.errors import ArgumentError, DataError
from mpidist.options import AutoShardPolicy, InputOptions
from mpidist.util import nest

if TYPE_CHECKING:
    from mpidist.comm.replica_group import ReplicaGroup

__all__ = [
    "Feed",
    "Group",
    "Plan",
    "Portion",
    "count_grouped",
    "count_readers",
    "count_steps",
    "divide",
    "is_global",
    "start_reader",
]


_END = object()
# Small batches are read together: that is faster, and needs little memory. How many
# bytes, and steps; whichever pair allows more steps
_GROUPS = ((8 << 20, 16), (2 << 20, 64))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What this replica reads: equal on all replicas but for the pipeline.

    Args:
      pipeline: of batches.
      is_global: whether batches are global ones, of which this replica takes a slice.
      is_batched: whether all replicas' elements are batches.
      cardinality: how many steps all replicas take, or INFINITE_ or
        UNKNOWN_CARDINALITY.
      origin: by which states of this dataset are known.
      options: see `InputOptions`.
      serial: which dataset of the strategy this is.
    """

    extended: ReplicaGroup
    pipeline: MapDataset | IterDataset
    is_global: bool
    is_batched: bool
    cardinality: int
    origin: Origin
    options: InputOptions
    serial: int

    @property
    def is_open_ended(self) -> bool:
        """Whether replicas must tell each other at each step if they have a batch."""
        return self.cardinality == UNKNOWN_CARDINALITY


class Portion(NamedTuple):
    """What a replica gets at one step.

    Args:
      batch: its batch.
      kind: arrays of no rows like those of the batch; None where nobody asks.
      rows: how many rows the batch had before it was divided.
    """

    batch: Any
    kind: Any = None
    rows: int | None = None


Group = list[Portion | Exception | None]


class Feed(Protocol):
    """One replica's batches of one epoch, read in order.

    By one thread at a time, unless `count_readers` says otherwise.
    """

    @property
    def group(self) -> int:
        """How many steps are best read at a time."""

    @property
    def is_slow_to_start(self) -> bool:
        """Whether to read fewer steps at first, so that the first ones are there soon.

        For functions of the user, which may take any time.
        """

    @property
    def may_change_thread(self) -> bool:
        """Whether batches may be read by one thread and then by another."""

    def read(self, step: int) -> Portion | None:
        """Return the batch of a step, None after the last one."""

    def read_group(self, step: int, count: int) -> Group:
        """Return the batches of a step and those after it: of `count` steps.

        The list ends early with an error, which the last step in it has met.
        """

    def end(self) -> None:
        """Say that all was read, and perhaps will be again."""

    def skip(self, steps: int) -> int:
        """Epoch over the first steps; return how many of them there are."""

    def close(self) -> None:
        """Let go of what is being read."""


def start_reader(plan: Plan, epoch: Epoch) -> Feed:
    """Return this replica's batches of one epoch."""
    if isinstance(plan.pipeline, IterDataset):
        return _StreamFeed(plan, plan.pipeline, epoch)
    return _RowsFeed(plan, plan.pipeline, epoch)


def count_readers(plan: Plan) -> int:
    """Return in how many threads `Feed.read` may be called; a stream needs one."""
    pipeline = plan.pipeline
    return 1 if isinstance(pipeline, IterDataset) else pipeline.parallel_calls


class _RowsFeed:
    """Batches that are read by their number, in any thread; also again."""

    def __init__(self, plan: Plan, pipeline: MapDataset, epoch: Epoch):
        self._plan = plan
        self._pipeline = pipeline
        self._epoch = epoch
        self._open_sources = OpenSources(pipeline)
        replicas = plan.extended.num_replicas if plan.is_global else 1
        self.group = count_grouped(pipeline, replicas)
        self.is_slow_to_start = pipeline.is_mapped
        # Functions of the user may communicate, and ask in which context they are
        self.may_change_thread = not pipeline.is_mapped

    def read(self, step: int) -> Portion | None:
        """See `Feed.read`."""
        return self._open_sources.run(lambda: self._read(step))

    def read_group(self, step: int, count: int) -> Group:
        """See `Feed.read_group`."""
        length, stop = self._pipeline.length, step + count
        steps = range(step, stop if length is None else min(stop, length))
        if len(steps) > 1 and not self._plan.is_open_ended:
            return self._open_sources.run(lambda: self._load_group(steps))
        return _read_singly(self, steps or [step])

    def _load_group(self, steps: range) -> Group:
        extended = self._plan.extended
        share = (
            (extended.num_replicas, extended.replica_id)
            if self._plan.is_global
            else (1, 0)
        )
        try:
            batches = self._pipeline.local_batches(self._epoch, steps, *share)
        except Exception:  # of which step? One by one it is seen
            return _read_singly(self, steps)
        found: Group = []
        try:
            found.extend(map(Portion, batches))
        except Exception as error:
            found.append(error)
        return found

    def _read(self, step: int) -> Portion | None:
        plan = self._plan
        length = self._pipeline.length
        is_over = length is not None and step >= length
        if not plan.is_open_ended:
            batch = self._pipeline.empty_batch(self._epoch) if is_over else None
            return Portion(batch if is_over else self._load(step))
        if is_over:
            return None
        batch = self._load(step)
        return Portion(batch, _kind(as_element(batch)))

    def end(self) -> None:
        """See `Feed.end`."""
        self._open_sources.end()

    def skip(self, steps: int) -> int:
        """See `Feed.skip`."""
        length = self._pipeline.length
        return steps if length is None else min(steps, length)

    def close(self) -> None:
        """See `Feed.close`."""
        self._open_sources.close()

    def _load(self, step: int) -> Any:
        if not self._plan.is_global:
            return self._pipeline.element(self._epoch, step)
        extended = self._plan.extended
        return self._pipeline.local_batch(
            self._epoch, step, extended.num_replicas, extended.replica_id
        )


class _StreamFeed:
    """Batches that come one after the other; after an error there are no more."""

    group = 1
    is_slow_to_start = False
    may_change_thread = False

    def __init__(self, plan: Plan, stream: IterDataset, epoch: Epoch):
        self._plan = plan
        self._elements = stream.iterate(epoch)
        self._has_rows = plan.is_batched and not stream.may_be_scalars
        self._kind: Any = None

    def read(self, step: int) -> Portion | None:
        """See `Feed.read`."""
        element = next(self._elements, _END)
        if element is _END:
            return None
        element = as_element(element)
        kind = _kind(element)
        self._kind = kind if self._kind is None else _require_like(kind, self._kind)
        rows = count_rows(element) if self._has_rows else None
        if self._plan.is_global:
            element = self._slice(element, rows or 0)
        return Portion(element, kind, rows)

    def read_group(self, step: int, count: int) -> Group:
        """See `Feed.read_group`."""
        return _read_singly(self, [step])

    def end(self) -> None:
        """See `Feed.end`."""
        self.close()

    def skip(self, steps: int) -> int:
        """See `Feed.skip`."""
        return sum(1 for _ in itertools.islice(self._elements, steps))

    def close(self) -> None:
        """See `Feed.close`."""
        self._elements = iter(())  # a generator that nobody holds is closed

    def _slice(self, batch: Any, rows: int) -> Any:
        extended = self._plan.extended
        mine = sharding.replica_slice(rows, extended.num_replicas, extended.replica_id)
        return nest.map_leaves(lambda a: a[mine], batch)


def count_grouped(pipeline: MapDataset, replicas: int) -> int:
    """Return how many steps to read at a time: more than one of small batches.

    Args:
      pipeline: of batches.
      replicas: over how many replicas each batch is divided.
    """
    row_bytes, rows = pipeline.row_bytes, pipeline.batch_size
    # Of functions that are called in several threads, each call is worth its own
    if row_bytes is None or rows is None or pipeline.parallel_calls > 1:
        return 1
    step_bytes = max(1, row_bytes * -(-rows // replicas))
    return max(1, *(min(most // step_bytes, steps) for most, steps in _GROUPS))


def _read_singly(feed: Feed, steps: Iterable[int]) -> Group:
    """Return the batches of some steps, up to one that cannot be read."""
    found: Group = []
    for step in steps:
        try:
            found.append(feed.read(step))
        except Exception as error:
            found.append(error)
            break
    return found


def _kind(element: Any) -> Any:
    """Return arrays without rows like those of `element` (scalars stay scalars)."""

    def without_rows(a: Any) -> Any:
        return np.zeros((0, *a.shape[1:]) if a.ndim else (), a.dtype)

    return nest.map_leaves(without_rows, element)


def _require_like(kind: Any, before: Any) -> Any:
    """Return `kind`, or raise if structure, dtypes or dimensions have changed."""
    leaves, spec = nest.flatten(kind)
    leaves_before, spec_before = nest.flatten(before)
    if spec != spec_before:
        raise DataError(
            f"the batches of a dataset must be alike, but the structure {spec} follows "
            f"{spec_before}"
        )
    names = nest.leaf_names(spec, "batch")
    for name, a, b in zip(names, leaves, leaves_before, strict=True):
        if (a.dtype, a.ndim) != (b.dtype, b.ndim):
            raise DataError(
                "the batches of a dataset must be alike, but in one that follows the "
                f"first {name} is {a.dtype.name} of {a.ndim} dimensions instead of "
                f"{b.dtype.name} of {b.ndim}"
            )
    return kind


def is_global(policy: AutoShardPolicy) -> bool:
    """Return whether workers read slices of batches that are the same for all."""
    return policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)


def divide(
    pipeline: MapDataset | IterDataset,
    policy: AutoShardPolicy,
    workers: int,
    worker: int,
) -> MapDataset | IterDataset:
    """Return what one worker reads: its own batches, or global ones.

    Raises:
      ArgumentError: FILE, but the rows are in no files, or in too few.
    """
    if is_global(policy):
        return pipeline
    if policy is AutoShardPolicy.OFF:
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
    """Return how many steps all workers take: until the longest dataset ends."""
    if UNKNOWN_CARDINALITY in lengths:
        return UNKNOWN_CARDINALITY
    return INFINITE_CARDINALITY if INFINITE_CARDINALITY in lengths else max(lengths)
