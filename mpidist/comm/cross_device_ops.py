"""CrossDeviceOps: how a strategy reduces and broadcasts values over its replicas.

A `MirroredStrategy` uses the object for `reduce`, `all_reduce`, `reduce_to`, and for
variables. With one process per replica, every replica is a destination of every result.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.comm.collectives.operations import Collectives
from mpidist.comm.collectives.reduce import Prepared
from mpidist.comm.consensus.signatures import CallSignature, digest
from mpidist.comm.topology import Topology
from mpidist.device import arrays
from mpidist.errors import (
    ArgumentError,
    ContextError,
)
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.util import nest, validation
from mpidist.util.representation import one_line
from mpidist.values import ArrayView, DistributedValues, Mirrored, PerReplica

__all__ = [
    "CrossDeviceOps",
    "MpiAllReduce",
]

Pairs = Sequence[tuple[Any, Any]]
_DEFAULT = CommunicationOptions()


class CrossDeviceOps:
    """Base class of reductions; a subclass overrides the `*_implementation` methods.

    An implementation gets one or several `PerReplica` values with this replica's array,
    and returns the reduced array, or a `Mirrored` of it, on every replica. Structures,
    shapes and dtypes have been compared before. It may call the base class's method,
    which reduces by MPI. An error on one replica is raised on all. NumPy ignores
    floating-point errors in it: set `np.errstate` where they matter.

    An object belongs to one strategy; before that, its methods raise ContextError.

    Example:
      >>> class Clipped(mpidist.CrossDeviceOps):
      ...     def reduce_implementation(self, *args):
      ...         return np.minimum(super().reduce_implementation(*args), 1.5)
      >>> clipped = mpidist.MirroredStrategy(cross_device_ops=Clipped())
      >>> clipped.reduce("SUM", np.array([0.5, 1.0]))
      array([1. , 1.5])
    """

    _collectives: Collectives | None = None
    _topology: Topology | None = None

    def __repr__(self) -> str:
        return one_line(self, lambda: "of a strategy" if self._topology else "unused")

    def require_unbound(self) -> None:
        """Raise a ContextError if this object belongs to a strategy already."""
        if self._collectives is not None:
            raise ContextError(
                f"this {type(self).__name__} belongs to another strategy already; "
                "create one for each strategy"
            )

    def describe(self) -> str:
        """Return what must be the same on all ranks, as text."""
        return type(self).__qualname__

    def bind(self, collectives: Collectives, topology: Topology) -> None:
        """Bind this object to a strategy. The strategy calls it. Collective."""
        self._collectives = collectives
        self._topology = topology

    def unbound(self) -> CrossDeviceOps:
        """Return a copy that belongs to no strategy."""
        twin = copy.copy(self)
        twin._collectives = twin._topology = None
        return twin

    def close(self) -> None:
        """Free the resources of `bind`. The strategy calls it. Collective."""

    @property
    def collectives(self) -> Collectives:
        """The collectives of the strategy that this object belongs to.

        Raises:
          ContextError: it belongs to no strategy, or to a finalized one.
        """
        if self._collectives is None:
            raise ContextError(
                f"give this {type(self).__name__} to a strategy first: "
                "MirroredStrategy(cross_device_ops=...)"
            )
        self._collectives.consensus.require_open()
        return self._collectives

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Return the reduction of a value over all replicas, as `Mirrored`. Collective.

        Args:
          reduce_op: SUM, MEAN, MIN, MAX or PRODUCT.
          per_replica_value: a `PerReplica`, or an array as this replica's contribution.
          destinations: a device string, several, or a distributed value on these
            devices. The result is on every replica in any case.
          options: see `CommunicationOptions`.

        Raises, on all replicas: see `ReplicaContext.all_reduce`; ArgumentError also for
        invalid or empty destinations.

        Example:
          >>> ops = strategy.extended.cross_device_ops
          >>> ops.reduce("SUM", np.ones(2), destinations="CPU:0") / 2
          array([1., 1.])
        """
        pairs = [(per_replica_value, destinations)]
        return self._reduce_pairs("reduce", reduce_op, pairs, options)[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Pairs,
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Return the reductions of several values, packed together. Collective.

        Like `reduce` for each `(value, destinations)` of a list.

        Raises, on all replicas: like `reduce`; ArgumentError also if
        `value_destination_pairs` is not a list of pairs.

        Example:
          >>> ops = strategy.extended.cross_device_ops
          >>> pairs = [(np.ones(2), "CPU:0"), (np.ones(1), "CPU:0")]
          >>> [total / 2 for total in ops.batch_reduce("SUM", pairs)]
          [array([1., 1.]), array([1.])]
        """
        pairs = value_destination_pairs
        return self._reduce_pairs("batch_reduce", reduce_op, pairs, options)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Return replica 0's value on every replica, as `Mirrored`. Collective.

        Args:
          tensor: an array; every replica passes one of the same shape and dtype.
          destinations: see `reduce`.

        Raises, on all replicas:
          MismatchError: shapes or dtypes differ.
          ArgumentError: invalid or empty destinations.

        Example:
          >>> ops = strategy.extended.cross_device_ops
          >>> mine = np.array([strategy.extended.replica_id + 7])
          >>> ops.broadcast(mine, destinations="CPU:0") + 0
          array([7])
        """
        check = functools.partial(_require_destinations, destinations)
        self.collectives.consensus.guard("broadcast", check)
        return self._mirrored(self.broadcast_implementation(tensor, destinations))

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduce one value; see the class. By default, MPI all-reduces it."""
        value = arrays.to_array(per_replica_value)
        return self.reduce_arrays(reduce_op, [value], options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Pairs,
        options: CommunicationOptions,
    ) -> Sequence[Any]:
        """Reduce several values; see the class. By default, one by one."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Broadcast one value; see the class. By default, by MPI."""
        return self.collectives.broadcast("broadcast", tensor)

    def reduce_arrays(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """Return the reductions of arrays, by MPI; for implementations. Collective."""
        described = tuple((a.dtype.name, a.shape) for a in values)
        spec = nest.flatten(list(values))[1]
        call = CallSignature(
            type(self).__qualname__, (("reduce_op", op.name),), spec, described
        )
        # Another replica's implementation may have failed, or call something else
        return self.collectives.reductions.reduce_large(
            call, digest(call), op, values, options
        )

    def prepare(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> Prepared:
        """Return what calls the implementation, once the ranks agree."""
        # An error of a user's implementation on one rank is raised on all.
        run = self.collectives.consensus.run_in_scope
        name = type(self).__qualname__
        return 0, lambda _: run(name, self._implement, op, values, options)

    def _implement(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        rank = self.collectives.consensus.rank
        # This rank's component alone, as `run` gives it to a replica function.
        per_replica = [PerReplica((value,), (rank,)) for value in values]
        destinations = tuple(f"replica:{r}" for r in range(self.collectives.size))
        if len(values) == 1:
            results: Sequence[Any] = [
                self.reduce_implementation(op, per_replica[0], destinations, options)
            ]
        else:
            pairs = [(value, destinations) for value in per_replica]
            results = self.batch_reduce_implementation(op, pairs, options)
        return [_own(arrays.to_array(result)) for result in results]

    def _reduce_pairs(
        self,
        operation: str,
        reduce_op: ReduceOp | str,
        pairs: Pairs,
        options: CommunicationOptions | None,
    ) -> list[Any]:
        collectives = self.collectives
        values = collectives.consensus.guard(operation, lambda: _values_of(pairs))
        # Our own class needs no call of user code, so its plans can be cached.
        is_plain = type(self) is MpiAllReduce
        prepare = None if is_plain else self.prepare
        results = collectives.reductions.all_reduce(
            operation, reduce_op, values, options, prepare
        )
        return [self._mirrored(result) for result in results]

    def _mirrored(self, result: Any) -> Any:
        if isinstance(result, DistributedValues):
            return result
        return Mirrored((result,), (self.collectives.consensus.rank,))


class MpiAllReduce(CrossDeviceOps):
    """The default: MPI all-reduces packs of arrays on their device.

    Example:
      >>> ops = mpidist.MpiAllReduce()
      >>> direct = mpidist.MirroredStrategy(cross_device_ops=ops)
      >>> direct.reduce("MEAN", np.array([1.0, 3.0]))
      array([1., 3.])
    """

    is_sum = True  # whether `prepare_sums` only adds arrays

    def prepare(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> Prepared:
        """See `Reductions.prepare`."""
        return self.collectives.reductions.prepare(
            op, values, options, self.prepare_sums, self.is_sum
        )

    def prepare_sums(
        self, values: Sequence[Any], options: CommunicationOptions
    ) -> Callable[[], list[Any]]:
        """Reserve memory; return what sums contiguous arrays over all replicas."""
        return self.collectives.reductions.prepare_sums(values, options)


def _own(array: Any) -> Any:
    """Return a writable array; the components of `Mirrored` are read-only."""
    is_read_only = isinstance(array, np.ndarray) and not array.flags.writeable
    return array.copy() if is_read_only else array


def _values_of(pairs: Pairs) -> list[Any]:
    """Return the values of `(value, destinations)` pairs, which are checked."""
    if not isinstance(pairs, list | tuple):
        raise ArgumentError(
            f"value_destination_pairs must be a list, not {validation.shown(pairs)}"
        )
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ArgumentError(
                "each element of value_destination_pairs must be a tuple of size 2, "
                f"not {validation.shown(pair)}"
            )
        _require_destinations(pair[1])
    return [value for value, _ in pairs]


def _require_destinations(destinations: Any) -> None:
    if isinstance(destinations, str | DistributedValues | ArrayView):
        is_good = destinations != "" if isinstance(destinations, str) else True
    elif isinstance(destinations, list | tuple):
        is_good = bool(destinations) and all(isinstance(d, str) for d in destinations)
    else:
        is_good = hasattr(destinations, "__array__")  # a tensor: where it lies
    if not is_good:
        raise ArgumentError(
            "destinations must be a device string, a non-empty list of them, or a "
            f"distributed value, not {validation.shown(destinations)}"
        )
