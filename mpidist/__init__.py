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
)
from mpidist.extended import StrategyExtended
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
from mpidist.strategy import MirroredStrategy, Strategy, ValueContext
from mpidist.values import DistributedValues, Mirrored, PerReplica
from mpidist.variables import Variable

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AutoShardPolicy",
    "CollectiveError",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ContextError",
    "DTypeError",
    "DataError",
    "Dataset",
    "DeadlineError",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "DivergenceError",
    "INFINITE_CARDINALITY",
    "InputContext",
    "InputIterator",
    "InputOptions",
    "InputReplicationMode",
    "LaunchError",
    "Mirrored",
    "MirroredStrategy",
    "MismatchError",
    "MpidistError",
    "Optional",
    "Options",
    "OutOfRangeError",
    "PerReplica",
    "ReduceOp",
    "RemoteError",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
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
