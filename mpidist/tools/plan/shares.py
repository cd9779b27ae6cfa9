"""What each rank gets of a dataset in an epoch: how many rows, at which steps."""

from __future__ import annotations

from typing import NamedTuple

from mpidist.data.batching import Batch
from mpidist.data.dataset import Dataset
from mpidist.data.distributed import reader
from mpidist.data.distributed.reader import divide, is_global
from mpidist.data.map_dataset import Pass
from mpidist.options import AutoShardPolicy
from mpidist.tools.plan.dry_rows import DryRows

__all__ = ["ORDER", "Share", "shares_of"]

ORDER = Pass()  # the first epoch, which has as many rows as any


class Share(NamedTuple):
    """One rank's batches, asked for as `feed` does in a job.

    Args:
      pipeline: of batches.
      source: where its rows come from.
      replicas: over how many ranks each batch is divided; 1 for batches of its own.
      replica: which of the parts is this rank's.
      is_in_order: whether rows come as they lie in the files.
      reads_example: whether a row is read before the first step.
    """

    pipeline: Batch
    source: DryRows
    replicas: int
    replica: int
    is_in_order: bool
    reads_example: bool

    @property
    def steps(self) -> int:
        """How many batches there are."""
        steps = self.pipeline.length
        assert steps is not None
        return steps

    def positions(self, step: int) -> range:
        """Return which elements before batching this rank gets at a step."""
        if not 0 <= step < self.steps:
            return range(0)
        return self.pipeline.positions(ORDER, step, self.replicas, self.replica)

    @property
    def sizes(self) -> tuple[int, int]:
        """How many rows this rank gets of each batch but the last, and of that."""
        return len(self.positions(0)), len(self.positions(self.steps - 1))

    @property
    def rows(self) -> int:
        """How many rows this rank gets in an epoch."""
        each, last = self.sizes
        return each * max(0, self.steps - 1) + last

    def count_empty(self, steps: int) -> int:
        """Return in how many of the job's steps this rank gets no rows."""
        each, last = self.sizes
        full = max(0, self.steps - 1)
        return steps - (full if each else 0) - (1 if last else 0)

    @property
    def group(self) -> int:
        """How many steps are read at a time."""
        return reader.count_grouped(self.pipeline, self.replicas)

    def begin(self) -> None:
        """Count from here on, and ask for what is read before the first step."""
        self.source.restart()
        if self.reads_example:
            self.pipeline.example(ORDER)

    def ask(self, steps: range) -> None:
        """Ask the source for the rows of some steps."""
        for first in range(steps.start, steps.stop, self.group):
            several = range(first, min(first + self.group, steps.stop))
            self.pipeline.parts(ORDER, several, self.replicas, self.replica)


def shares_of(
    dataset: Dataset, policy: AutoShardPolicy, ranks: int, is_in_order: bool
) -> list[Share]:
    """Return what each rank gets of batches of `DryRows`, shuffled or in order.

    Raises:
      ArgumentError: the policy is FILE, and there are fewer files than ranks.
    """
    is_own = policy is AutoShardPolicy.FILE
    shares = []
    # With OFF all ranks get the same
    for rank in range(1 if policy is AutoShardPolicy.OFF else ranks):
        mine = divide(dataset.pipeline, policy, ranks, rank)
        assert isinstance(mine, Batch)
        (source,) = mine.sources
        assert isinstance(source, DryRows)
        part = (ranks, rank) if is_global(policy) else (1, 0)
        shares.append(Share(mine, source, *part, is_in_order, reads_example=is_own))
    return shares * (ranks // len(shares))
