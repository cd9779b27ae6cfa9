# ruff: noqa: I001
# The public names, and the modules that they are in, which `__init__.py` reads, too
from mpidist import errors as errors, statistics as statistics, torch as torch
from mpidist._version import __version__ as __version__
from mpidist.checkpoint.checkpoint import Checkpoint as Checkpoint
from mpidist.checkpoint.manager import (
    CheckpointManager as CheckpointManager,
    latest_checkpoint as latest_checkpoint,
)
from mpidist.comm.cross_device_ops import (
    CrossDeviceOps as CrossDeviceOps,
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    NcclAllReduce as NcclAllReduce,
    ReductionToOneDevice as ReductionToOneDevice,
)
from mpidist.context import (
    experimental_set_strategy as experimental_set_strategy,
    get_replica_context as get_replica_context,
    get_strategy as get_strategy,
    has_strategy as has_strategy,
    in_cross_replica_context as in_cross_replica_context,
)
from mpidist.data.dataset import Dataset as Dataset
from mpidist.data.distributed.converted import as_arrays as as_arrays
from mpidist.data.distributed.datasets import (
    DistributedDataset as DistributedDataset,
    InputContext as InputContext,
)
from mpidist.data.distributed.iterator import DistributedIterator as DistributedIterator
from mpidist.data.elements import TensorSpec as TensorSpec
from mpidist.data.iter_dataset import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
from mpidist.data.iterator import (
    DatasetIterator as DatasetIterator,
    Optional as Optional,
)
from mpidist.data.map_dataset import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from mpidist.errors import (
    ArgumentError as ArgumentError,
    ArgumentTypeError as ArgumentTypeError,
    CheckpointError as CheckpointError,
    CollectiveError as CollectiveError,
    ContextError as ContextError,
    DataError as DataError,
    DeadlineError as DeadlineError,
    DivergenceError as DivergenceError,
    DTypeError as DTypeError,
    LaunchError as LaunchError,
    MismatchError as MismatchError,
    MpidistError as MpidistError,
    OutOfRangeError as OutOfRangeError,
    RankLostError as RankLostError,
    UnsupportedError as UnsupportedError,
)
from mpidist.launch.slurm import SlurmClusterResolver as SlurmClusterResolver
from mpidist.monitor.progress import progress as progress
from mpidist.monitor.timeline import span as span
from mpidist.options import (
    AutoShardPolicy as AutoShardPolicy,
    CommunicationImplementation as CommunicationImplementation,
    CommunicationOptions as CommunicationOptions,
    InputOptions as InputOptions,
    InputReplicationMode as InputReplicationMode,
    Options as Options,
    RunOptions as RunOptions,
    VariableAggregation as VariableAggregation,
    VariableSynchronization as VariableSynchronization,
)
from mpidist.reductions import ReduceOp as ReduceOp
from mpidist.resilience.elastic import run_elastic as run_elastic
from mpidist.resilience.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
    TerminationConfig as TerminationConfig,
)
from mpidist.strategy.extended import (
    MultiStepContext as MultiStepContext,
    StrategyExtended as StrategyExtended,
)
from mpidist.strategy.hdf5_writer import Hdf5Writer as Hdf5Writer
from mpidist.strategy.mirrored_strategy import MirroredStrategy as MirroredStrategy
from mpidist.strategy.replica_context import ReplicaContext as ReplicaContext
from mpidist.strategy.strategy import Strategy as Strategy
from mpidist.strategy.v1 import InputIterator as InputIterator, StrategyV1 as StrategyV1
from mpidist.strategy.variables import Variable as Variable
from mpidist.values import (
    DistributedValues as DistributedValues,
    IndexedSlices as IndexedSlices,
    Mirrored as Mirrored,
    PerReplica as PerReplica,
    ValueContext as ValueContext,
)
