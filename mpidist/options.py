"""Enumerations and options of variables, reductions and `run`, as tf.distribute's."""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
from typing import Any, TypeVar

from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.util import validation
from mpidist.util.validation import shown

K = TypeVar("K", bound=enum.Enum)


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are synchronized; AUTO means ON_WRITE.

    ON_WRITE keeps the copies equal at each assignment; ON_READ lets each replica change
    its own copy and reduces the copies when the variable is read in cross-replica
    context. `Variable` refuses NONE.

    Example:
      >>> with strategy.scope():
      ...     seen = mpidist.Variable(
      ...         0,
      ...         synchronization=mpidist.VariableSynchronization.ON_READ,
      ...         aggregation=mpidist.VariableAggregation.SUM,
      ...     )
      >>> _ = strategy.run(lambda: seen.assign_add(1))  # each replica its own copy
      >>> print(seen.numpy())
      2
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3

    @classmethod
    def parse(cls, synchronization: Any) -> VariableSynchronization:
        """Return ON_WRITE or ON_READ for a member or its value; None means AUTO.

        Raises:
          ArgumentError: NONE, or not a member.
        """
        member = cls.AUTO if synchronization is None else _member(cls, synchronization)
        if member is None or member is cls.NONE:
            raise ArgumentError(
                "synchronization must be a VariableSynchronization, AUTO, ON_WRITE or "
                f"ON_READ, not {shown(synchronization)}"
            )
        return cls.ON_WRITE if member is cls.AUTO else member


class VariableAggregation(enum.Enum):
    """How values that replicas assign to one variable are combined.

    SUM adds them, MEAN averages them, ONLY_FIRST_REPLICA takes replica 0's. NONE
    refuses assignments in replica context.

    Example:
      >>> with strategy.scope():
      ...     w = mpidist.Variable(0.0, aggregation=mpidist.VariableAggregation.SUM)
      >>> _ = strategy.run(lambda: w.assign_add(np.array(0.5)))
      >>> print(w.numpy())
      1.0
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3

    @classmethod
    def parse(cls, aggregation: Any) -> VariableAggregation:
        """Return the member for a member or its value; NONE for None.

        Raises:
          ArgumentError: not a member.
        """
        member = cls.NONE if aggregation is None else _member(cls, aggregation)
        if member is None:
            raise ArgumentError(
                f"aggregation must be a VariableAggregation, not {shown(aggregation)}"
            )
        return member


def _member(kind: type[K], value: Any) -> K | None:
    try:
        return kind(value)
    except Exception:  # `repr` of any object may fail
        return None


class CommunicationImplementation(enum.Enum):
    """Which library moves data between replicas.

    AUTO lets mpidist choose: if all replicas are on one node, it uses shared memory.
    MPI calls MPI directly on the arrays. NCCL uses NVIDIA's library for arrays on GPUs;
    each replica needs its own GPU, and all replicas raise LaunchError if NCCL cannot be
    used. (TensorFlow's RING is absent: an MPI library picks its own algorithm.)

    Example:
      >>> options = mpidist.CommunicationOptions(implementation="mpi")
      >>> options.implementation is mpidist.CommunicationImplementation.MPI
      True
    """

    AUTO = "AUTO"
    MPI = "MPI"
    NCCL = "NCCL"

    @classmethod
    def parse(
        cls, implementation: CommunicationImplementation | str
    ) -> CommunicationImplementation:
        """Return the member that `implementation` is or names (in any case)."""
        if isinstance(implementation, cls):
            return implementation
        name = implementation.upper() if isinstance(implementation, str) else ""
        if name not in cls.__members__:
            known = ", ".join(cls.__members__)
            raise ArgumentError(
                f"implementation must be one of {known}, not {shown(implementation)}"
            )
        return cls[name]


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of one collective.

    Args:
      bytes_per_pack: arrays of one dtype are sent together in packs of up to this many
        bytes; 0 sends them in one pack. Never changes a result: it is ignored for sums
        of floating numbers whose last bits would depend on it, as between nodes
        without `reproducible`.
      timeout_seconds: how long to wait for the other replicas; None waits for ever.
        After a timeout every waiting replica raises `DeadlineError`, and the strategy
        cannot communicate any more.
      implementation: a `CommunicationImplementation` or its name.
      reproducible: whether elementwise reductions add in the order of the replicas, so
        that every bit of a result is the same in each run, with each implementation and
        pack size. (On one node this always holds.)
      compression: "float16" or "bfloat16" sends the real floating numbers of
        elementwise reductions in this dtype to other nodes (implementation MPI: to
        other ranks) and adds them in float32: half the bytes of float32. Shared memory
        inside a node is not compressed. With u = 2**-11 (float16) or 2**-8 (bfloat16),
        the error of a sum is at most 2.01 * u times the sum of magnitudes; for float16
        add 2**-24 for each number of magnitude 6e-5 or less. In float16, numbers and
        sums above 65504 become inf. bfloat16 needs the package ml_dtypes.

    If replicas pass different options to one call, all raise MismatchError.

    Raises:
      ArgumentError: bytes_per_pack < 0; timeout_seconds <= 0; an unknown implementation
        or compression; bfloat16 without ml_dtypes.
      ArgumentTypeError: bytes_per_pack is not an integer, timeout_seconds not a number,
        or reproducible not a bool.

    Example:
      >>> options = mpidist.CommunicationOptions(timeout_seconds=60.0)
      >>> def total(x):
      ...     return mpidist.get_replica_context().all_reduce("SUM", x, options)
      >>> strategy.run(total, args=(np.ones(2),)).values
      (array([2., 2.]),)
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    reproducible: bool = False
    compression: str | None = None

    def __post_init__(self) -> None:
        seconds = self.timeout_seconds
        if seconds is not None:
            seconds = validation.number("timeout_seconds", seconds, "> 0", " or None")
        # Python's own types, since the ranks compare them as text
        checked = {
            "bytes_per_pack": validation.integer(
                "bytes_per_pack", self.bytes_per_pack, 0
            ),
            "timeout_seconds": seconds,
            "implementation": CommunicationImplementation.parse(self.implementation),
            "reproducible": validation.switch("reproducible", self.reproducible),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_compression()

    def _check_compression(self) -> None:
        compression = self.compression
        is_text = compression is None or isinstance(compression, str)
        if not is_text or compression not in (None, "float16", "bfloat16"):
            raise ArgumentError(
                "compression must be None, 'float16' or 'bfloat16', not "
                f"{shown(compression)}"
            )
        if compression == "bfloat16" and importlib.util.find_spec("ml_dtypes") is None:
            raise ArgumentError(
                "compression='bfloat16' needs the package ml_dtypes, which is not "
                "installed; use 'float16', or pip install ml_dtypes"
            )


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`. TensorFlow's concern compilation, which is not done
    here: both are accepted and change nothing.

    Example:
      >>> strategy.run(np.ones, args=(2,), options=mpidist.RunOptions()).values
      (array([1., 1.]),)
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            validation.switch(field.name, getattr(self, field.name))


MOST_BUFFERED = 1 << 16  # elements that are read ahead


class AutoShardPolicy(enum.IntEnum):
    """How `Strategy.experimental_distribute_dataset` divides a dataset over workers.

    AUTO and DATA give each worker its slice of every global batch.

    FILE gives worker w the files w, w + workers, w + 2 * workers, ... of the dataset;
    it opens no others. The rows come in the order of these files. Every step (shuffle,
    take, repeat, ...) applies to these rows alone, and a batch size of n becomes
    ceil(n / workers). Workers that run out of rows get batches of zero rows.

    OFF gives every worker all rows, in batches of ceil(n / workers) rows. For a dataset
    that is not distributed it means that each rank reads all of it.

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
      experimental_fetch_to_device: copy batches to the replica's device. Copies to a
        GPU start when a batch is read and overlap with computation; the arrays belong
        to the stream that is current when `next` is called.
      experimental_replication_mode: only PER_WORKER: every worker is one replica.
      experimental_place_dataset_on_device: run the pipeline on the device; only False.
      experimental_per_replica_buffer_size: how many batches a thread reads ahead; 0
        reads each batch on demand. A size above 0 is raised to the `num_parallel_calls`
        of maps over batches, one thread each. A GPU needs memory for one batch more, in
        page-locked memory of the host and on the GPU.
      balance_batches: divide the rows of each batch so that replicas differ by one at
        most: 4 rows over 3 replicas are 2, 1 and 1, and by TensorFlow's rule 2, 2 and
        0. Not part of TensorFlow.

    Raises:
      ArgumentError: a buffer size < 0 or > 65536; placing the dataset on the device.
      ArgumentTypeError: the buffer size is not an integer, or a flag is not a bool.

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
    balance_batches: bool = False

    def __post_init__(self) -> None:
        name = "experimental_per_replica_buffer_size"
        size = self.experimental_per_replica_buffer_size
        size = validation.integer(name, size, 0, most=MOST_BUFFERED)
        object.__setattr__(self, name, size)
        for name in ("experimental_fetch_to_device", "balance_batches"):
            validation.switch(name, getattr(self, name))
        if self.experimental_replication_mode is not InputReplicationMode.PER_WORKER:
            raise ArgumentError(
                "experimental_replication_mode must be InputReplicationMode."
                f"PER_WORKER, not {shown(self.experimental_replication_mode)}: "
                "every worker is one replica"
            )
        name = "experimental_place_dataset_on_device"
        if validation.switch(name, self.experimental_place_dataset_on_device):
            raise ArgumentError(
                "experimental_place_dataset_on_device=True is not possible: HDF5 is "
                "read on the host; leave it False"
            )


@dataclasses.dataclass
class Options:
    """Options of a dataset, for `Dataset.with_options`, which copies them.

    Args:
      auto_shard_policy: how the dataset is divided over the workers.
        `experimental_distribute.auto_shard_policy`, TensorFlow's name, is the same
        option.

    Raises, also when the policy is set later:
      ArgumentTypeError: it is not an AutoShardPolicy.
      AttributeError: another option is set.

    Example:
      >>> options = mpidist.Options(mpidist.AutoShardPolicy.DATA)
      >>> mpidist.Dataset.range(4).with_options(options).options().auto_shard_policy
      <AutoShardPolicy.DATA: 2>
      >>> policy = mpidist.AutoShardPolicy.OFF
      >>> options.experimental_distribute.auto_shard_policy = policy
      >>> options
      Options(auto_shard_policy=<AutoShardPolicy.OFF: -1>)
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO

    @property
    def experimental_distribute(self) -> Options:
        """The options of the division over workers: these, as there are no others."""
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "auto_shard_policy":
            raise AttributeError(
                f"a dataset has no option {name!r}; the only option is "
                "auto_shard_policy"
            )
        if not isinstance(value, AutoShardPolicy):
            raise ArgumentTypeError(
                f"auto_shard_policy must be an AutoShardPolicy, not {shown(value)}"
            )
        object.__setattr__(self, name, value)
