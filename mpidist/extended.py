"""StrategyExtended: what libraries built on a strategy need beside its public calls."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpidist import nest
from mpidist.agree import Agreement
from mpidist.calls import Call
from mpidist.collectives import Collectives
from mpidist.context import (
    ReplicaContext,
    enter,
    regroup,
    require_cross_replica,
    select_replica,
)
from mpidist.errors import ContextError
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.packing import Axis
from mpidist.topology import Topology
from mpidist.variables import Variable

if TYPE_CHECKING:
    from mpidist.strategy import Strategy

__all__ = ["StrategyExtended"]

T = TypeVar("T")
_SAMPLED_BYTES = 1 << 16


class StrategyExtended:
    """The working parts of one strategy. `strategy.extended` gives it."""

    def __init__(
        self,
        strategy: Strategy,
        topology: Topology,
        agreement: Agreement,
        collectives: Collectives,
        device: str,
    ):
        self.strategy = strategy
        self.topology = topology
        self.agreement = agreement
        self.collectives = collectives
        self.device = device
        self.replica_id = topology.rank
        self.num_replicas = topology.size
        self._replica_context = ReplicaContext(strategy, topology.rank)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of this process's replica, as a one-tuple."""
        return (self.device,)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device on which this process keeps variables, as a one-tuple."""
        return (self.device,)

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether shapes may not change from step to step: never required."""
        return False

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process is the one that writes what all have: rank 0."""
        return self.replica_id == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this process is the one that writes summaries: rank 0."""
        return self.replica_id == 0

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `fn` in replica context on every replica; `Strategy.run` says the rest.

        Collective: returns, or raises, on all replicas.
        """
        self.topology.require_open()
        require_cross_replica(self.strategy, "call_for_each_replica")
        return self.agreement.block("run", lambda: self._replica(fn, args, kwargs))

    def _replica(
        self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None
    ) -> Any:
        args, kwargs = select_replica((tuple(args), dict(kwargs or {})))
        with enter(self.strategy, self._replica_context):
            result = fn(*args, **kwargs)
        return regroup(result, self.replica_id, self.num_replicas)

    def merge_call(
        self,
        context: ReplicaContext,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `merge_fn` in cross-replica context; `ReplicaContext.merge_call`."""
        self.topology.require_open()
        self.agreement.require_same(Call("merge_call"))

        def merge() -> Any:
            merged_args, merged_kwargs = regroup(
                (tuple(args), dict(kwargs or {})), self.replica_id, self.num_replicas
            )
            with enter(self.strategy):
                return merge_fn(self.strategy, *merged_args, **merged_kwargs)

        return select_replica(self.agreement.block("the end of merge_call", merge))

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Run `fn(var, *args, **kwargs)` on every replica's own copy of `var`.

        In `fn` assignments change this replica's copy without communication, so what it
        computes must be the same on every replica: pass reduced values. Distributed
        values in `args` become this replica's component.

        Args:
          var: a variable of this strategy.
          fn: called as `fn(var, *args, **kwargs)` in cross-replica context.
          args: a tuple or list, nested.
          kwargs: likewise.
          group: True returns None (TensorFlow's grouped op), False what `fn` returned.

        Raises:
          ContextError: in replica context (there, use `merge_call`), or a variable of
            another strategy.
        """
        require_cross_replica(self.strategy, "update")
        if (
            not isinstance(var, Variable)
            or var.distribute_strategy is not self.strategy
        ):
            raise ContextError(f"update: {var!r} is not a variable of this strategy")
        args, kwargs = select_replica((tuple(args), dict(kwargs or {})))
        with enter(self.strategy, updating=True):
            result = fn(var, *args, **kwargs)
        return None if group else result

    def reduce(
        self,
        operation: str,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Return the elementwise reduction of `value`, for any public call."""
        self.topology.require_open()
        return self.collectives.all_reduce(operation, reduce_op, value, options)

    def reduce_over_axis(
        self, operation: str, reduce_op: ReduceOp | str, value: Any, axis: Axis
    ) -> Any:
        """Return the reduction of `value` over an axis and all replicas."""
        self.topology.require_open()
        return self.collectives.reduce_over_axis(operation, reduce_op, value, axis)

    def gather(
        self,
        operation: str,
        value: Any,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Return the concatenation of `value` over all replicas, for a public call."""
        self.topology.require_open()
        return self.collectives.all_gather(operation, value, axis, options)

    def together(self, call: Call, fn: Callable[[], T]) -> T:
        """Return `fn()`; what it raises on one replica is raised on all. Collective."""
        self.topology.require_open()
        result = self.agreement.prepare(call.operation, fn)
        self.agreement.require_same(call)
        return result

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """See `ReplicaContext.all_reduce`."""
        return self.reduce("all_reduce", reduce_op, value, options)

    def all_gather(
        self, value: Any, axis: int, options: CommunicationOptions | None = None
    ) -> Any:
        """See `ReplicaContext.all_gather`."""
        return self.gather("all_gather", value, axis, options)

    def broadcast_from_first(self, operation: str, value: Any) -> Any:
        """Return replica 0's nest of arrays on every replica. Collective."""
        self.topology.require_open()
        return self.collectives.broadcast(operation, value, root=0)

    def require_equal(self, operation: str, value: Any) -> None:
        """Raise if the arrays of `value` are not equal on all replicas. Collective.

        Of large arrays a sample is compared.
        """
        self.topology.require_open()
        leaves, spec = nest.flatten(value)
        described = tuple((a.dtype.name, a.shape, f"crc {_sample(a)}") for a in leaves)
        self.agreement.require_same(Call(operation, (), spec, described))


def _sample(array: Any) -> str:
    """Return a checksum of an array, or of evenly spaced elements of a large one."""
    flat = np.asarray(array).reshape(-1)
    step = max(1, flat.nbytes // _SAMPLED_BYTES)
    return f"{zlib.crc32(np.ascontiguousarray(flat[::step]).tobytes()):08x}"
