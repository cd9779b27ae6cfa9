"""ReplicaContext: the current replica, and its collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from mpidist import context
from mpidist.comm.consensus.public_calls import announce_errors
from mpidist.context import is_current
from mpidist.errors import ContextError
from mpidist.options import CommunicationOptions
from mpidist.reductions import ReduceOp
from mpidist.util import near_misses
from mpidist.util.nest import Nest
from mpidist.util.tracebacks import hide_internal_frames

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy

T = TypeVar("T")


class ReplicaContext:
    """The current replica, for code inside `Strategy.run`, and its collectives.

    Use `get_replica_context()` to get it. Its collectives raise ContextError if it is
    not the current context.

    Example:
      >>> def replica_id():
      ...     return mpidist.get_replica_context().replica_id_in_sync_group
      >>> strategy.experimental_local_results(strategy.run(replica_id))  # on replica 0
      (0,)
    """

    def __init__(self, strategy: Strategy, replica_id_in_sync_group: int):
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this replica, which is its MPI rank in the strategy."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, as a one-tuple (deprecated in TensorFlow)."""
        return (self._strategy.extended.device,)

    @overload
    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Nest,
        options: CommunicationOptions | None = None,
    ) -> Any: ...
    @overload
    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: T,
        options: CommunicationOptions | None = None,
    ) -> T: ...
    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Return the elementwise reduction of `value` over all replicas.

        Collective: every replica calls it with the same structure, shapes and dtypes,
        and gets that structure with new arrays of these shapes, equal on all replicas.

        Args:
          reduce_op: SUM, MEAN, MIN, MAX or PRODUCT; MEAN of integers is float64.
          value: an array or number, or a nest of them; or `IndexedSlices`: the rows of
            all replicas are concatenated (MEAN divides them by the number of replicas).
          options: see `CommunicationOptions`; changes the speed, not the result.

        Raises, on all replicas:
          MismatchError: structures, shapes, dtypes or `reduce_op` differ.
          DTypeError: a dtype, such as bool, that cannot be reduced.
          ArgumentError, ArgumentTypeError: an unknown `reduce_op`; `value` is not an
            array or number.
          ArgumentError: a sum or product of integers that does not fit their dtype.
          DivergenceError: a replica called another collective.

        Example:
          >>> def total(x):
          ...     return mpidist.get_replica_context().all_reduce("SUM", x)
          >>> strategy.run(total, args=(np.ones(2),)).values
          (array([2., 2.]),)
        """
        self._require_current("all_reduce")
        extended = self._strategy._extended
        return extended.reduce("all_reduce", reduce_op, value, options)

    @overload
    def all_gather(
        self, value: Nest, axis: int, options: CommunicationOptions | None = None
    ) -> Any: ...
    @overload
    def all_gather(
        self, value: T, axis: int, options: CommunicationOptions | None = None
    ) -> T: ...
    def all_gather(
        self, value: Any, axis: int, options: CommunicationOptions | None = None
    ) -> Any:
        """Return the replicas' values concatenated along `axis`.

        Collective. Lengths along `axis` may differ, and may be zero; the length of the
        result is their sum. The results are new arrays, equal on all replicas.

        Args:
          value: an array with ndim >= 1, or a nest of them.
          axis: the dimension to concatenate along, -ndim <= axis < ndim.
          options: see `CommunicationOptions`.

        Raises, on all replicas:
          MismatchError: dtypes, numbers of dimensions, or other dimensions differ.
          ArgumentError: a value without dimensions; an axis out of range.
          DivergenceError: a replica called another collective.

        Example:
          >>> def gather():
          ...     context = mpidist.get_replica_context()
          ...     n = context.replica_id_in_sync_group + 1
          ...     return context.all_gather(np.arange(n), axis=0)
          >>> strategy.run(gather).values
          (array([0, 0, 1]),)
        """
        self._require_current("all_gather")
        return self._strategy.extended.all_gather(value, axis, options)

    def reduce_scatter(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int = 0,
        lengths: Sequence[int] | None = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Return this replica's part of the reduction of `value` over all replicas.

        Collective. The result is a part of what `all_reduce` returns, cut along
        `axis`, with less communication. Sums are added in the order of the replicas.

        Args:
          reduce_op: see `all_reduce`.
          value: an array with ndim >= 1, or a nest of them, of the same structure,
            shapes and dtypes on all replicas.
          axis: the dimension to cut, -ndim <= axis < ndim.
          lengths: the length along `axis` of each replica's part, the same list on all
            replicas; by default ceil(length / replicas), and less for the last ones.
          options: see `CommunicationOptions`; only `timeout_seconds` is used.

        Raises, on all replicas: what `all_reduce` raises; also
          ArgumentError: a value without dimensions; an axis out of range; lengths that
            do not add up to the length of `value`.

        Example:
          >>> def part():
          ...     return mpidist.get_replica_context().reduce_scatter("SUM", np.ones(3))
          >>> strategy.run(part).values  # on replica 0, of two
          (array([2., 2.]),)
        """
        self._require_current("reduce_scatter")
        return self._strategy.extended.collectives.reduce_scatter(
            "reduce_scatter", reduce_op, value, axis, lengths, options
        )

    def all_to_all(
        self,
        value: Any,
        axis: int = 0,
        lengths: Sequence[int] | None = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Send a part of `value` to each replica; return the parts for this one.

        Collective. The received parts are concatenated along `axis`, in the order of
        the replicas.

        Args:
          value: an array with ndim >= 1, or a nest of them. The length along `axis` may
            differ between replicas, and may be zero.
          axis: the dimension that is cut, -ndim <= axis < ndim.
          lengths: the length along `axis` of the part for each replica; replicas may
            pass different lists. By default ceil(length / replicas), and less for the
            last ones.
          options: see `CommunicationOptions`; only `timeout_seconds` is used.

        Raises, on all replicas:
          MismatchError: dtypes, numbers of dimensions, or other dimensions differ.
          ArgumentError: a value without dimensions; an axis out of range; lengths that
            do not add up to the length of `value`.
          DivergenceError: a replica called another collective.

        Example:
          >>> def exchange():
          ...     context = mpidist.get_replica_context()
          ...     rank = context.replica_id_in_sync_group
          ...     return context.all_to_all(np.array([10, 20]) + rank)
          >>> strategy.run(exchange).values  # on replica 0, of two
          (array([10, 11]),)
        """
        self._require_current("all_to_all")
        return self._strategy.extended.collectives.all_to_all(
            "all_to_all", value, axis, lengths, options
        )

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return `merge_fn(strategy, *args, **kwargs)`, run in cross-replica context.

        Collective: the n-th calls of all replicas belong together. `merge_fn` runs in
        every process and gets this replica's arguments as `PerReplica` values (mirrored
        values and variables unchanged). Each replica gets its component of the result.

        Raises, on all replicas:
          DivergenceError: a replica called another collective, or has left `run`.
          What `merge_fn` raises on any replica.

        Example:
          >>> def step(x):
          ...     context = mpidist.get_replica_context()
          ...     return context.merge_call(lambda s, x: s.reduce("SUM", x), (x,))
          >>> strategy.run(step, args=(np.ones(2),)).values
          (array([2., 2.]),)
        """
        depth = context.depth()
        self._require_current("merge_call")
        try:
            return self._strategy.extended.merge_call(merge_fn, args, kwargs)
        except BaseException as error:
            context.restore(depth)
            hide_internal_frames(error)
            raise

    def _require_current(self, call: str) -> None:
        if not is_current(self):
            raise ContextError(
                f"{call} was called on a replica context that is not the current one; "
                "it belongs inside the function that strategy.run runs"
            )

    if not TYPE_CHECKING:  # or every name would be one
        __getattr__ = near_misses.attribute_hint("context")

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of replica {self._replica_id} of "
            f"{self.num_replicas_in_sync}>"
        )


announce_errors(
    ReplicaContext,
    ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "merge_call"),
    lambda replica: replica._strategy._extended.consensus,
)


class DefaultReplicaContext(ReplicaContext):
    """The context outside all scopes, before `get_strategy` is called there.

    Args:
      strategy: the default one.
      ranks: the number of ranks in the job.
    """

    def __init__(self, strategy: Strategy, ranks: int):
        super().__init__(strategy, 0)
        self._ranks = ranks

    def _require_current(self, call: str) -> None:
        super()._require_current(call)
        if self._ranks > 1:
            raise ContextError(
                f"{call} was called outside strategy.run, where it would use this "
                f"process alone, one of {self._ranks} in this job. Call it in a "
                "function that strategy.run runs; for this process alone, in one that "
                "mpidist.get_strategy().run runs outside all scopes"
            )
