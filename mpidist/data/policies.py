"""Which rows and batches the workers get by each `AutoShardPolicy`."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.data.pipeline import INFINITE_CARDINALITY, Pipeline
from mpidist.data.stream import UNKNOWN_CARDINALITY, Stream
from mpidist.errors import ArgumentError
from mpidist.input_options import AutoShardPolicy

__all__ = ["count_steps", "divide", "is_global"]


def is_global(policy: AutoShardPolicy) -> bool:
    """Return whether workers read slices of batches that are the same for all."""
    return policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)


def divide(
    pipeline: Pipeline | Stream, policy: AutoShardPolicy, workers: int, worker: int
) -> Pipeline | Stream:
    """Return what one worker reads: its own batches, or global ones.

    Raises:
      ArgumentError: FILE, but the rows are in no files, or in too few.
    """
    if is_global(policy):
        return pipeline
    if policy is AutoShardPolicy.OFF:
        return pipeline.rebatch(workers)
    files = pipeline.file_count
    if files == 0 or isinstance(pipeline, Stream):
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
