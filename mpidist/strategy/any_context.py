"""Methods of a strategy that work in cross-replica and in replica context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from mpidist.comm.gradient_buckets import GradientBuckets
from mpidist.context import in_replica_of, require_cross_replica
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.strategy.extended import StrategyExtended

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy

__all__ = ["AnyContextMethods"]


class AnyContextMethods:
    """Methods of a strategy that work in any context of this strategy."""

    _extended: StrategyExtended

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
          ...     is_first = strategy.extended.replica_id == 0
          ...     return {"rate": 0.5, "w": np.ones(2)} if is_first else None
          >>> strategy.broadcast(settings())
          {'rate': 0.5, 'w': array([1., 1.])}
        """
        self._require_own("broadcast")
        return self._extended.collectives.objects.broadcast("broadcast", value, root)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the value of replica `root`; an alias of `broadcast`. Collective.

        Data are sent as JSON and arrays, never as pickled classes.
        """
        self._require_own("broadcast_object")
        objects = self._extended.collectives.objects
        return objects.broadcast("broadcast_object", value, root)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the list of all replicas' values, in replica order, on every replica.

        Collective, in any context of this strategy. For small objects of any kind; for
        arrays, `gather` needs less time and memory.

        Args:
          value: see `broadcast`; arrays come back as NumPy arrays.

        Raises, on all replicas:
          ArgumentTypeError: an unsupported type in a replica's value.
          ContextError: called under another strategy.

        Example:
          >>> strategy.gather_objects({"rank": strategy.extended.replica_id})
          [{'rank': 0}, {'rank': 1}]
        """
        self._require_own("gather_objects")
        return self._extended.collectives.objects.gather("gather_objects", value)

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
        self._extended.barrier(timeout_seconds)

    def _require_own(self, call: str) -> None:
        """Raise if a collective for any context is not allowed here."""
        strategy = cast("Strategy", self)
        if not in_replica_of(strategy):
            require_cross_replica(strategy, call)
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

        """
        return GradientBuckets(self._extended, like, reduce_op, options)
