"""Enumerations and options of input, with tf.distribute's names and defaults."""

from __future__ import annotations

import dataclasses
import enum

from mpidist import checks
from mpidist.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "MOST_BUFFERED",
    "AutoShardPolicy",
    "InputOptions",
    "InputReplicationMode",
    "Options",
]

MOST_BUFFERED = 1 << 16  # elements that are read ahead


class AutoShardPolicy(enum.IntEnum):
    """How `Strategy.experimental_distribute_dataset` divides a dataset over workers.

    AUTO and DATA give each worker its slice of every global batch.

    FILE gives worker w the files w, w + workers, w + 2 * workers, ... of the dataset,
    so that it opens no other. Its rows come in the order of its files; every step
    (shuffle, take, repeat, ...) is done on these rows alone, and a batch size of n
    becomes ceil(n / workers). Workers whose rows run out get batches of zero rows.

    OFF gives every worker all rows, in batches of ceil(n / workers) rows. It also says
    of a dataset that is not distributed that each rank is to read all of it.

    Example:
      >>> options = mpidist.Options(mpidist.AutoShardPolicy.OFF)
      >>> rows = mpidist.Dataset.range(4).batch(4).with_options(options)
      >>> for batch in strategy.experimental_distribute_dataset(rows):
      ...     print(strategy.gather(batch, axis=0))
      [0 1 0 1]
      [2 3 2 3]
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2


class InputReplicationMode(enum.Enum):
    """How an input function is replicated: one input pipeline per worker.

    Example:
      >>> mode = mpidist.InputReplicationMode.PER_WORKER
      >>> options = mpidist.InputOptions(experimental_replication_mode=mode)
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """Options of a distributed dataset.

    Args:
      experimental_fetch_to_device: copy batches to the replica's device. To a GPU that
        starts when they are read, beside its computations; the arrays belong to the
        stream that is current where `next` is called.
      experimental_replication_mode: only PER_WORKER has a meaning here, where every
        worker is one replica.
      experimental_place_dataset_on_device: run the pipeline on the device; only False.
      experimental_per_replica_buffer_size: how many batches are read ahead, in a
        thread; 0 reads each batch when it is asked for. More than 0 are at least as
        many as the `num_parallel_calls` of maps over batches, each read in a thread.
        For a GPU there is room for one batch more, in page-locked memory of the host
        and again in the GPU's.

    Raises:
      ArgumentError: a buffer size < 0 or > 65536; the dataset is to be placed on the
        device.
      ArgumentTypeError: a buffer size that is no integer; neither True nor False.

    Example:
      >>> data = mpidist.Dataset.from_tensor_slices(np.arange(4)).batch(4)
      >>> options = mpidist.InputOptions(experimental_per_replica_buffer_size=0)
      >>> for batch in strategy.experimental_distribute_dataset(data, options):
      ...     print(strategy.reduce("SUM", batch, axis=0))
      6
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode = (
        InputReplicationMode.PER_WORKER
    )
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        name = "experimental_per_replica_buffer_size"
        size = self.experimental_per_replica_buffer_size
        size = checks.integer(name, size, 0, most=MOST_BUFFERED)
        object.__setattr__(self, name, size)
        checks.switch("experimental_fetch_to_device", self.experimental_fetch_to_device)
        if self.experimental_replication_mode is not InputReplicationMode.PER_WORKER:
            raise ArgumentError(
                "experimental_replication_mode must be InputReplicationMode."
                f"PER_WORKER, not {checks.shown(self.experimental_replication_mode)}: "
                "every worker is one replica"
            )
        name = "experimental_place_dataset_on_device"
        if checks.switch(name, self.experimental_place_dataset_on_device):
            raise ArgumentError(
                "experimental_place_dataset_on_device=True is not possible: HDF5 is "
                "read on the host; leave it False"
            )


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a dataset, for `Dataset.with_options`.

    Args:
      auto_shard_policy: how the dataset is divided over the workers.

    Example:
      >>> options = mpidist.Options(mpidist.AutoShardPolicy.DATA)
      >>> mpidist.Dataset.range(4).with_options(options).options().auto_shard_policy
      <AutoShardPolicy.DATA: 2>
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO

    def __post_init__(self) -> None:
        if not isinstance(self.auto_shard_policy, AutoShardPolicy):
            raise ArgumentTypeError(
                "auto_shard_policy must be an AutoShardPolicy, not "
                f"{checks.shown(self.auto_shard_policy)}"
            )
