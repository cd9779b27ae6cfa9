"""Strategy: the public interface."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from mpidist import context
from mpidist.comm.consensus.public_calls import announce_errors
from mpidist.comm.gradient_buckets import GradientBuckets
from mpidist.comm.packing import Axis
from mpidist.context import Scope, enter, in_replica_of, require_cross_replica
from mpidist.data.dataset import DatasetLike
from mpidist.data.distributed.datasets import DistributedDataset, InputContext
from mpidist.errors import ContextError
from mpidist.launch.slurm import SlurmClusterResolver, below_srun
from mpidist.monitor.statistics import statistics
from mpidist.monitor.timeline import timeline
from mpidist.options import CommunicationOptions, InputOptions, RunOptions
from mpidist.reductions import ReduceOp
from mpidist.strategy.extended import StrategyExtended
from mpidist.strategy.replica_context import ReplicaContext
from mpidist.strategy.variables import Variable
from mpidist.util import near_misses, nest, tracing, validation
from mpidist.util.counters import RUN
from mpidist.util.nest import Nest
from mpidist.util.tracebacks import hide_internal_frames
from mpidist.values import (
    PerReplica,
    ValueContext,
    local_arguments,
    regroup,
    select_replica,
)

T = TypeVar("T")
_Op = ReduceOp | str


class Strategy:
    """How a computation is spread over replicas; here, over the ranks of an MPI job.

    Create a `MirroredStrategy`. All methods except `scope` and
    `experimental_local_results` are collective: all ranks call them in the same order.

    Example:
      >>> isinstance(strategy, mpidist.Strategy)
      True
      >>> strategy.num_replicas_in_sync
      2
    """

    def __init__(self, make_extended: Callable[[Strategy], StrategyExtended]):
        self._extended = make_extended(self)
        replica = ReplicaContext(self, self._extended.replica_id)
        self._in_replica = enter(self, replica)

    @property
    def extended(self) -> StrategyExtended:
        """Further methods, for libraries built on a strategy."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas, which is the number of ranks."""
        return self._extended.num_replicas

    @property
    def rank(self) -> int:
        """The number of this process's replica, its `replica_id_in_sync_group`."""
        return self._extended.replica_id

    @property
    def size(self) -> int:
        """The number of ranks, each of which is one replica."""
        return self._extended.num_replicas

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints, plots and writes for all.

        Example:
          >>> if strategy.is_first:
          ...     print(f"rank {strategy.rank} of {strategy.size}")
          rank 0 of 2
        """
        return self._extended.replica_id == 0

    @property
    def cluster_resolver(self) -> SlurmClusterResolver | None:
        """The resolver of the ranks' addresses under srun; None elsewhere."""
        return below_srun(self._extended.replica_id, self._extended.num_replicas)

    def scope(self) -> Scope:
        """Return a context manager in which this strategy is current.

        In it, variables are created under this strategy, and the context is
        cross-replica. It can be reused and nested. Entering it is not collective;
        creating variables in it is. (Outside all other scopes, the scope of the default
        strategy changes nothing.)

        Raises, on entering, on this replica only:
          ContextError: inside another strategy's scope or a replica function.

        Example:
          >>> with strategy.scope():
          ...     w = mpidist.Variable(np.zeros(3))
          >>> w.distribute_strategy is strategy
          True
        """
        return Scope(self)

    @overload
    def run(
        self,
        fn: Callable[..., Nest],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any: ...
    @overload
    def run(
        self,
        fn: Callable[..., None],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> None: ...
    @overload
    def run(
        self,
        fn: Callable[..., T],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> T | PerReplica[T]: ...
    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Run `fn(*args, **kwargs)` on every replica, in replica context. Collective.

        Args:
          fn: may use `get_replica_context()` and its collectives.
          args: a tuple or list. Distributed values in it, nested or not, are replaced
            by this replica's component; variables stay variables.
          kwargs: likewise.
          options: accepted for TensorFlow compatibility.

        Returns:
          The result of `fn`, with each leaf as a `PerReplica`. None and variables are
          returned unchanged. The default strategy returns the bare result.

        Raises, on all replicas:
          ArgumentError, ArgumentTypeError: an invalid fn, args, kwargs or options.
          ContextError: called from replica context or under another strategy.
          What `fn` raises on any replica, with the same type. The traceback omits
            mpidist's own frames, except `run`; MPIDIST_FULL_TRACEBACKS=1 shows them.

        Example:
          >>> def step(x, scale=1.0):
          ...     return {"sum": np.sum(x) * scale}
          >>> result = strategy.run(step, args=(np.ones(3),), kwargs={"scale": 2.0})
          >>> print(strategy.reduce("SUM", result["sum"]))
          12.0
        """
        extended = self._extended
        counters, trace = extended.consensus.recorder.counters, tracing.active
        depth = context.depth()
        try:
            if extended.topology.closed:
                extended.topology.require_open()
            require_cross_replica(self, "run")
            if extended.before_run is not None:
                extended.before_run()
            if not counters.has_begun:
                counters.begin()
            begun = 0 if trace is None else time.monotonic_ns()
            result = extended.consensus.run(
                "run", self._call_replica, fn, args, kwargs, options
            )
        except BaseException as error:
            context.restore(depth)
            hide_internal_frames(error)
            raise
        if trace is not None:
            trace.span("run", "run", begun, time.monotonic_ns())
        counters.mark(RUN)
        if extended.timeline is not None:
            extended.timeline.compare_clocks_if_due()
        return result

    def _call_replica(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, options: Any
    ) -> Any:
        if not callable(fn) or options is not None:
            validation.function("fn", fn)
            validation.instance("options", options, RunOptions)
        args, kwargs = local_arguments(args, kwargs)
        with self._in_replica:
            result = fn(*args, **kwargs)
        extended = self._extended
        return result if extended.is_default else regroup(result, extended.replica_id)

    @overload
    def reduce(self, reduce_op: _Op, value: Nest, axis: Axis | None = None) -> Any: ...
    @overload
    def reduce(self, reduce_op: _Op, value: PerReplica[T], axis: None = None) -> T: ...
    @overload
    def reduce(
        self, reduce_op: _Op, value: T | PerReplica[T], axis: None = None
    ) -> T: ...
    @overload
    def reduce(self, reduce_op: _Op, value: Any, axis: Axis) -> Any: ...
    def reduce(self, reduce_op: _Op, value: Any, axis: Axis | None = None) -> Any:
        """Return the sum, or another reduction, of `value` over all replicas.

        Collective, from cross-replica (or default) context. Every rank gets the result.

        Args:
          reduce_op: SUM, MEAN, MIN, MAX or PRODUCT, or its name in any case.
          value: a `PerReplica`, or a plain value as this rank's contribution, or a nest
            of them.
          axis: None combines elementwise: shapes are equal, and MEAN divides by the
            number of replicas. With an integer, or several, each replica first reduces
            along these axes; their lengths may differ and may be zero, and MEAN divides
            by the number of elements of all replicas.

        Returns:
          Arrays of a replica's shape without the reduced axes, with the dtype of
          `value`. MEAN of integers is float64; MEAN over an empty axis is nan.

        Raises, on all replicas:
          ArgumentError: an unknown operation; an axis out of range; a sum or product of
            integers that does not fit their dtype; MIN or MAX over an empty axis.
          ArgumentTypeError: reduce_op or axis has an invalid type; `value` is not an
            array or number.
          DTypeError: a dtype that cannot be reduced, such as bool.
          MismatchError: structures, dtypes or shapes differ.
          ContextError: called in replica context or under another strategy.

        Example:
          >>> strategy.reduce("SUM", np.array([1.0, 2.0]))
          array([2., 4.])
          >>> rows = strategy.experimental_distribute_values_from_function(
          ...     lambda context: np.ones(3 - context.replica_id_in_sync_group)
          ... )
          >>> print(strategy.reduce("SUM", rows, axis=0))  # 3 rows and 2 rows
          5.0
        """
        require_cross_replica(self, "reduce")
        if axis is None:
            return self._extended.reduce("reduce", reduce_op, value)
        return self._extended.reduce_over_axis("reduce", reduce_op, value, axis)

    @overload
    def gather(self, value: Nest, axis: int) -> Any: ...
    @overload
    def gather(self, value: PerReplica[T], axis: int) -> T: ...
    @overload
    def gather(self, value: T | PerReplica[T], axis: int) -> T: ...
    def gather(self, value: Any, axis: int) -> Any:
        """Return the replicas' values concatenated along `axis`, on every rank.

        Collective, from cross-replica (or default) context.

        Args:
          value: a `PerReplica`, or a plain array as this rank's contribution, with
            ndim >= 1, or a nest of them. Lengths along `axis` may differ.
          axis: -ndim <= axis < ndim.

        Returns:
          Arrays whose length along `axis` is the sum of the replicas' lengths.

        Raises, on all replicas:
          ArgumentError: a value without dimensions; an axis out of range.
          MismatchError: dtypes, numbers of dimensions, or other dimensions differ.
          ContextError: called in replica context or under another strategy.

        Example:
          >>> rows = strategy.experimental_distribute_values_from_function(
          ...     lambda context: np.full((1, 2), context.replica_id_in_sync_group)
          ... )
          >>> strategy.gather(rows, axis=0)
          array([[0, 0],
                 [1, 1]])
        """
        if in_replica_of(self):
            raise ContextError(
                "gather was called in replica context; use all_gather there"
            )
        require_cross_replica(self, "gather")
        return self._extended.gather("gather", value, axis)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the value that replica `root` passes, on every replica.

        Collective, in any context of this strategy. What the other replicas pass is
        ignored, so they need not know the structure.

        Args:
          value: on replica `root` an array, a number, a variable, a str, bytes, a
            bytearray, a bool or None, or a nest of them (dict, list, tuple). Arrays may
            have any size.
          root: a replica, the same number on all replicas.

        Returns:
          The nest, with new arrays: NumPy's, or CuPy's if `root` has those.

        Raises, on all replicas:
          ArgumentTypeError: an unsupported type in the value, such as an enum, a
            memoryview, or a subclass of dict, list, tuple or ndarray; `root` is not an
            integer.
          ArgumentError: no such replica.
          MismatchError: replicas pass different roots.
          ContextError: called under another strategy.

        Example:
          >>> def settings():
          ...     if strategy.is_first:
          ...         return {"rate": 0.5, "w": np.ones(2)}
          >>> strategy.broadcast(settings())
          {'rate': 0.5, 'w': array([1., 1.])}
        """
        self._require_own("broadcast")
        return self._extended.collectives.broadcast_object("broadcast", value, root)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the value of replica `root`; an alias of `broadcast`. Collective.

        Data are sent as JSON and arrays, never as pickled classes.
        """
        self._require_own("broadcast_object")
        collectives = self._extended.collectives
        return collectives.broadcast_object("broadcast_object", value, root)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the list of all replicas' values, in replica order, on every replica.

        Collective, in any context of this strategy. For small objects, unlike on each
        replica; for arrays, `gather` needs less time and memory.

        Args:
          value: None, a bool, number, str, bytes or array (which comes back as a NumPy
            array), or a dict, list or tuple of these. Convert others, as by
            `dataclasses.asdict`, `str(path)` or `date.isoformat()`.

        Raises, on all replicas:
          ArgumentTypeError: an unsupported type in a replica's value.
          ContextError: called under another strategy.

        Example:
          >>> strategy.gather_objects({"rank": strategy.rank})
          [{'rank': 0}, {'rank': 1}]
        """
        self._require_own("gather_objects")
        return self._extended.collectives.gather_objects("gather_objects", value)

    def barrier(self, timeout_seconds: float | None = None) -> None:
        """Wait until all replicas have called it, in any context of this strategy.

        Use it for work outside mpidist, such as files that another replica writes. It
        does not wait for work on a GPU.

        Args:
          timeout_seconds: how long to wait for the other replicas; None waits for ever.

        Raises, on all replicas:
          ArgumentError, ArgumentTypeError: an invalid timeout.
          ContextError: called under another strategy.
        Raises, on the replicas that waited too long:
          DeadlineError: the strategy cannot be used afterwards.
        """
        self._require_own("barrier")
        consensus = self._extended.consensus
        with consensus.call("barrier") as call:
            options = call.reserve(
                lambda: CommunicationOptions(timeout_seconds=timeout_seconds)
            )
            consensus.require_same("barrier", timeout=options.timeout_seconds)

    def _require_own(self, call: str) -> None:
        """Raise if a collective for any context is not allowed here."""
        if not in_replica_of(self):
            require_cross_replica(self, call)
        self._extended.topology.require_open()

    def symmetric_like(self, value: Any) -> Any:
        """Return arrays of zeros like those of `value`, in memory for fast all-reduces.

        Collective, in any context of this strategy. The arrays are in memory that the
        replicas of a node share, so `all_reduce` and `reduce` of them, or of contiguous
        views of them, need no copy. Write into them as into any array:
        `gradients["w"][...] = x.T @ error`. Each replica writes to its own arrays only,
        and not while an `all_reduce` of them is running. Their memory is freed when no
        replica refers to any of them.

        On a GPU, and if a replica is alone on its node, they are plain arrays.

        Args:
          value: an array, a number, a variable or a nest of them; all replicas pass the
            same structure, shapes and dtypes. Its contents do not matter.

        Returns:
          The structure of `value`, with NumPy or CuPy arrays, or tensors for tensors.

        Raises, on all replicas:
          MismatchError: structures, shapes or dtypes differ.
          ArgumentTypeError: `value` is not an array or number.
          ArgumentError: a node has too little free shared memory.
          ContextError: called under another strategy.

        Example:
          >>> gradients = strategy.symmetric_like({"w": np.ones((2, 3)), "b": 0.5})
          >>> gradients["w"][...] = 2
          >>> strategy.reduce("SUM", gradients)["w"]
          array([[4., 4., 4.],
                 [4., 4., 4.]])
        """
        self._require_own("symmetric_like")
        return self._extended.symmetric_like("symmetric_like", value)

    def gradient_buckets(
        self,
        like: Any,
        reduce_op: ReduceOp | str = ReduceOp.SUM,
        options: CommunicationOptions | None = None,
    ) -> GradientBuckets:
        """Return an object that reduces gradients during a backward pass. Collective.

        Args:
          like: a mapping, list or tuple of arrays or nests, with the shapes and dtypes
            of the gradients; equal on all replicas. Gradients in `symmetric_like`
            arrays are reduced fastest.
          reduce_op: SUM or MEAN.
          options: see `CommunicationOptions`. Buckets have up to `bytes_per_pack`
            bytes, or 8 MiB if that is 0.

        Raises, on all replicas:
          MismatchError: structures, shapes, dtypes, reduce_op or options differ.
          ArgumentError, ArgumentTypeError: an unknown reduce_op; `like` is not a
            mapping, list or tuple of arrays.
          DTypeError: a dtype that cannot be added up.

        Example:
          >>> weights = {"w": np.zeros((3, 2)), "b": np.zeros(2)}
          >>> buckets = strategy.gradient_buckets(weights, "MEAN")
          >>> def backward():
          ...     with buckets:
          ...         buckets.put("w", np.ones((3, 2)))  # as soon as it is computed
          ...         buckets.put("b", np.full(2, 0.5))
          ...     return buckets.result["b"]
          >>> strategy.run(backward).values
          (array([0.5, 0.5]),)
          >>> buckets.close()
        """
        return GradientBuckets(self._extended, like, reduce_op, options)

    @overload
    def experimental_local_results(self, value: Nest) -> tuple[Any, ...]: ...
    @overload
    def experimental_local_results(self, value: PerReplica[T]) -> tuple[T, ...]: ...
    @overload
    def experimental_local_results(self, value: T | PerReplica[T]) -> tuple[T, ...]: ...
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple of the values of this process's replicas: one. Not collective.

        A nest of distributed values gives a one-tuple of that nest with this replica's
        components; a plain value gives `(value,)`. A variable, ON_READ or not, gives
        this replica's own copy, read-only, in any context.

        Example:
          >>> strategy.experimental_local_results(strategy.run(lambda: {"x": 1}))
          ({'x': 1},)
          >>> strategy.experimental_local_results("plain")
          ('plain',)
        """
        return (nest.map_leaves(_local_result, value),)

    unwrap = experimental_local_results

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Return `value_fn(ValueContext)` of every replica as a `PerReplica`.

        Collective. Shapes and dtypes may differ between replicas; a nest gives a nest
        of `PerReplica`.

        Raises, on all replicas: what `value_fn` raises on any.

        Example:
          >>> ids = strategy.experimental_distribute_values_from_function(
          ...     lambda context: context.replica_id_in_sync_group
          ... )
          >>> strategy.reduce("SUM", ids)
          1
        """
        call, extended = "experimental_distribute_values_from_function", self._extended
        require_cross_replica(self, call)
        replica_id = extended.replica_id
        where = ValueContext(replica_id, extended.num_replicas)
        value = extended.consensus.run(
            call, lambda: validation.function("value_fn", value_fn)(where)
        )
        return nest.map_leaves(lambda leaf: PerReplica((leaf,), (replica_id,)), value)

    def experimental_distribute_dataset(
        self, dataset: DatasetLike, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return `dataset` with every global batch divided over the replicas.

        Collective, and so is each step of iterating over the result.

        Args:
          dataset: batched by the GLOBAL batch size. A batch of n rows is cut into
            slices of ceil(n / replicas) rows; the last replicas may get fewer, or none.
          options: see `InputOptions`, such as `balance_batches`.

        Raises, on all replicas:
          ArgumentError: the dataset is not batched.
          DataError: its files cannot be read, or differ between replicas.
        """
        require_cross_replica(self, "experimental_distribute_dataset")
        return DistributedDataset.of_global_batches(self._extended, dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], DatasetLike],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Return the datasets that `dataset_fn(InputContext)` makes on each replica.

        Collective, and so is each step of iterating over the result.

        Args:
          dataset_fn: returns a dataset batched PER REPLICA, which is not divided: shard
            it by the context's `num_input_pipelines` and `input_pipeline_id`. Replicas
            that run out get batches of zero rows until all replicas have run out.
          options: see `InputOptions`.

        Raises, on all replicas: what `dataset_fn` raises on any.
        """
        require_cross_replica(self, "distribute_datasets_from_function")
        return DistributedDataset.from_function(self._extended, dataset_fn, options)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def statistics(self, all_ranks: bool = False) -> Any:
        """Return how this job has spent its time so far, as a dict. Not collective.

        With `all_ranks` it is collective and returns a list with one dict per rank.
        Times are in seconds; `help(mpidist.monitor.statistics)` explains the keys.

        Example:
          >>> sorted(strategy.statistics()["parts"])
          ['checkpoint', 'communication', 'compute', 'input']
        """
        local = statistics(self._extended)
        return self.gather_objects(local) if all_ranks else local

    def statistics_of(self, rows: Any, ddof: int = 0, *, skip_nan: bool = False) -> Any:
        """Return mean, variance, min and max of the rows of all ranks. Collective.

        Returns a `mpidist.statistics.Description`, exact to the last bit, so the same
        on any number of ranks; of a dict or tuple of arrays, one for each, in the same
        structure. `mpidist.statistics` has more statistics.

        Args:
          rows: this rank's rows, of shape (rows, ...), possibly zero; a `PerReplica` of
            them; a dict or tuple of these; or a distributed dataset.
          ddof: the divisor of the variance is the number of rows minus `ddof`.
          skip_nan: whether nan is left out, as missing values.

        Raises, on all ranks: what `Moments.update_state` and `Moments.result` raise.

        Example:
          >>> print(strategy.statistics_of([1.0, 2.0, 6.0]).mean)  # on both replicas
          3.0
        """
        from mpidist.statistics.moments import describe

        return describe(self, rows, ddof, skip_nan)

    def timeline(self, folder: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Return a context in which each rank records a timeline. Collective.

        The files in `folder` are for `python -m mpidist report`, and for Perfetto.
        MPIDIST_TIMELINE=folder records a whole program. Entering and leaving
        are collective. If files cannot be written, a RuntimeWarning says so. A file has
        at most 10 MiB: long jobs record fewer and fewer steps.

        Raises ArgumentTypeError or ArgumentError on all replicas if `folder` is not a
        path.

        Example:
          >>> import tempfile
          >>> with strategy.timeline(tempfile.gettempdir() + "/mpidist-timeline"):
          ...     total = strategy.reduce("SUM", 1.0)
        """
        return timeline(self._extended, folder)

    def experimental_finalize(self) -> list[Any]:
        """Free the communicators and buffers. Collective.

        Any later use raises ContextError. A second call does nothing. Returns [].

        Raises, on all replicas:
          DivergenceError: a replica called another collective.
        """
        require_cross_replica(self, "experimental_finalize")
        self._extended.close("experimental_finalize")
        return []

    if not TYPE_CHECKING:  # or every name would be one
        __getattr__ = near_misses.attribute_hint("strategy")

    def __reduce__(self) -> NoReturn:
        raise ContextError(
            f"a {type(self).__name__} cannot be pickled: its communicators belong to "
            "the ranks of this job; create one in the process that needs it"
        )

    def __repr__(self) -> str:
        where = f"{self.num_replicas_in_sync} on {self._extended.device}"
        return (
            f"<{type(self).__name__}: replica {self._extended.replica_id} of {where}>"
        )


announce_errors(
    Strategy,
    (
        *("run", "reduce", "gather", "broadcast", "broadcast_object", "barrier"),
        *("gather_objects", "symmetric_like", "gradient_buckets", "statistics_of"),
        "experimental_distribute_values_from_function",
        "experimental_distribute_dataset",
        *("distribute_datasets_from_function", "experimental_finalize"),
    ),
    lambda strategy: strategy._extended.consensus,
)
# Aliases are the same functions
Strategy.experimental_distribute_datasets_from_function = (
    Strategy.distribute_datasets_from_function
)


def _local_result(leaf: Any) -> Any:
    return leaf.local if isinstance(leaf, Variable) else select_replica(leaf)
