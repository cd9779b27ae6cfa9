"""The tf.distribute programming model for MPI clusters, without TensorFlow.

One MPI rank is one replica: one GPU (CuPy arrays) or one CPU share (NumPy arrays).
"""

from __future__ import annotations

from mpidist import launch
from mpidist._version import __version__
from mpidist.context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from mpidist.cross_device_ops import CrossDeviceOps, MpiAllReduce
from mpidist.data.dataset import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Dataset,
)
from mpidist.data.distributed import DistributedDataset, InputContext
from mpidist.data.iterator import DistributedIterator, Optional
from mpidist.data.iterator_v1 import InputIterator
from mpidist.data.spec import TensorSpec
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveError,
    ContextError,
    DataError,
    DeadlineError,
    DivergenceError,
    DTypeError,
    LaunchError,
    MismatchError,
    MpidistError,
    OutOfRangeError,
    RemoteError,
    UnsupportedError,
)
from mpidist.extended import MultiStepContext, StrategyExtended
from mpidist.mirrored_strategy import MirroredStrategy
from mpidist.options import (
    AutoShardPolicy,
    CommunicationImplementation,
    CommunicationOptions,
    InputOptions,
    InputReplicationMode,
    Options,
    ReduceOp,
    RunOptions,
    VariableAggregation,
    VariableSynchronization,
)
from mpidist.reductions import (
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from mpidist.strategy import Strategy, ValueContext
from mpidist.strategy_v1 import StrategyV1
from mpidist.values import DistributedValues, IndexedSlices, Mirrored, PerReplica
from mpidist.variables import Variable

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AutoShardPolicy",
    "CollectiveError",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ContextError",
    "CrossDeviceOps",
    "DTypeError",
    "DataError",
    "Dataset",
    "DeadlineError",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "DivergenceError",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "INFINITE_CARDINALITY",
    "InputContext",
    "InputIterator",
    "InputOptions",
    "InputReplicationMode",
    "LaunchError",
    "Mirrored",
    "MirroredStrategy",
    "MismatchError",
    "MpiAllReduce",
    "MultiStepContext",
    "MpidistError",
    "NcclAllReduce",
    "Optional",
    "Options",
    "OutOfRangeError",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "RemoteError",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "StrategyV1",
    "UnsupportedError",
    "TensorSpec",
    "UNKNOWN_CARDINALITY",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

launch.abort_on_exception()
launch.leave_together()
