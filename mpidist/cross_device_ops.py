"""CrossDeviceOps: how a strategy reduces and broadcasts values over its replicas.

An object of one of these classes is given to one `MirroredStrategy`, which then uses it
for `reduce`, `all_reduce`, `reduce_to`, and for variables. With one process per
replica, every replica is a destination of every result.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist import arrays, nest
from mpidist.calls import Call
from mpidist.collectives import Collectives
from mpidist.errors import (
    ArgumentError,
    ContextError,
    LaunchError,
)
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.topology import Topology
from mpidist.transports.hierarchical import HierarchicalTransport
from mpidist.values import ArrayView, DistributedValues, Mirrored, PerReplica

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "MpiAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
]

Pairs = Sequence[tuple[Any, Any]]
_DEFAULT = CommunicationOptions()


class CrossDeviceOps:
    """Base of ways to reduce; a subclass overrides the `*_implementation` methods.

    An implementation gets a `PerReplica` (or several) whose component is this replica's
    array, after structures, shapes and dtypes were found to agree, and returns the
    reduced array, or a `Mirrored` of it, on every replica. It may call `super()`'s: the
    base class reduces by direct MPI.
    """

    _collectives: Collectives | None = None
    _topology: Topology | None = None

    def bind(self, collectives: Collectives, topology: Topology) -> None:
        """Make this object a strategy's own. The strategy calls it. Collective.

        Raises:
          ContextError: it belongs to another strategy already.
        """
        if self._collectives is not None:
            raise ContextError(
                f"this {type(self).__name__} belongs to another strategy already; make "
                "one for each"
            )
        self._collectives = collectives
        self._topology = topology

    def unbound(self) -> CrossDeviceOps:
        """Return a copy that belongs to no strategy."""
        twin = copy.copy(self)
        twin._collectives = twin._topology = None
        return twin

    def close(self) -> None:
        """Free what `bind` made. The strategy calls it. Collective."""

    @property
    def collectives(self) -> Collectives:
        """The collectives of the strategy that this object belongs to.

        Raises:
          ContextError: it belongs to none.
        """
        if self._collectives is None:
            raise ContextError(
                f"give this {type(self).__name__} to a strategy first: "
                "MirroredStrategy(cross_device_ops=...)"
            )
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
          reduce_op: SUM or MEAN.
          per_replica_value: a `PerReplica`, or an array as this replica's contribution.
          destinations: where to put the result: a device string, several, or a
            distributed value that lies there. Here it lies on every replica.
          options: see `CommunicationOptions`.

        Raises, on all replicas: see `ReplicaContext.all_reduce`; ArgumentError also for
          bad or empty destinations.
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

        Raises, on all replicas: like `reduce`; ArgumentError also for what is not a
          list of pairs.
        """
        pairs = value_destination_pairs
        return self._reduce_pairs("batch_reduce", reduce_op, pairs, options)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Return replica 0's value on every replica, as `Mirrored`. Collective."""
        check = functools.partial(_require_destinations, destinations)
        self.collectives.agreement.prepare("broadcast", check)
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
        call = Call(type(self).__qualname__, (("reduce_op", op.name),), spec, described)
        with self.collectives.agreement.turns:
            # Another replica's implementation may have failed, or do otherwise
            self.collectives.agreement.require_same(call)
            return self.collectives.reduce_arrays(op, values, options)

    def reduce_checked(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """Call the implementation for arrays that are known to agree. Collective."""
        return self.collectives.agreement.block(
            type(self).__qualname__, lambda: self._implement(op, values, options)
        )

    def _implement(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        rank = self.collectives.agreement.rank
        per_replica = [PerReplica((value,), (rank,)) for value in values]
        destinations = tuple(f"replica:{r}" for r in range(self.collectives.size))
        if len(values) == 1:
            results: Sequence[Any] = [
                self.reduce_implementation(op, per_replica[0], destinations, options)
            ]
        else:
            pairs = [(value, destinations) for value in per_replica]
            results = self.batch_reduce_implementation(op, pairs, options)
        return [arrays.to_array(result) for result in results]

    def _reduce_pairs(
        self,
        operation: str,
        reduce_op: ReduceOp | str,
        pairs: Pairs,
        options: CommunicationOptions | None,
    ) -> list[Any]:
        collectives = self.collectives
        values = collectives.agreement.prepare(operation, lambda: _values_of(pairs))
        results = collectives.all_reduce(
            operation, reduce_op, values, options, self.reduce_checked
        )
        return [self._mirrored(result) for result in results]

    def _mirrored(self, result: Any) -> Any:
        if isinstance(result, DistributedValues):
            return result
        return Mirrored((result,), (self.collectives.agreement.rank,))


class MpiAllReduce(CrossDeviceOps):
    """The default: MPI all-reduces packs of arrays where they lie."""

    def reduce_checked(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """See `CrossDeviceOps.reduce_checked`."""
        return self.collectives.reduce_arrays(op, values, options, self.sum_arrays)

    def sum_arrays(
        self, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """Return the sums of contiguous arrays that are known to agree. Collective."""
        return self.collectives.sum_arrays(values, options)


class HierarchicalCopyAllReduce(MpiAllReduce):
    """Reduce inside each node, all-reduce between nodes, broadcast inside each node.

    Args:
      num_packs: into how many packs arrays of one dtype are put; 0 sends each alone.

    Raises:
      ArgumentError: num_packs is negative.
    """

    def __init__(self, num_packs: int = 1):
        self._num_packs = _checked_packs(num_packs)
        self._transport: HierarchicalTransport | None = None

    def bind(self, collectives: Collectives, topology: Topology) -> None:
        """See `CrossDeviceOps.bind`."""
        super().bind(collectives, topology)
        _require_host(self, collectives)
        self._transport = HierarchicalTransport(collectives.agreement, topology.node)

    def close(self) -> None:
        """See `CrossDeviceOps.close`."""
        if self._transport is not None:
            self._transport.close()

    def sum_arrays(
        self, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """See `MpiAllReduce.sum_arrays`."""
        options = _with_packs(options, self._num_packs, values)
        return self.collectives.sum_arrays(values, options, self._transport)


class NcclAllReduce(MpiAllReduce):
    """NVIDIA's NCCL, which needs one GPU per replica.

    Args:
      num_packs: into how many packs arrays of one dtype are put; 0 sends each alone.

    Raises:
      ArgumentError: num_packs is negative.
      LaunchError: when it is given to a strategy whose replicas cannot use NCCL.
    """

    def __init__(self, num_packs: int = 1):
        self._num_packs = _checked_packs(num_packs)

    def bind(self, collectives: Collectives, topology: Topology) -> None:
        """See `CrossDeviceOps.bind`."""
        raise LaunchError(
            f"NcclAllReduce cannot be used: replicas are on {topology.devices}, and "
            "this version has no NCCL transport; leave cross_device_ops out to use MPI"
        )


class ReductionToOneDevice(MpiAllReduce):
    """Reduce to one replica, and broadcast from there.

    Args:
      reduce_to_device: the replica to reduce to, by its number, or by a device string,
        which means the first replica on such a device; by default replica 0.
      accumulation_fn: called there, as `accumulation_fn(arrays)` with the list of all
        replicas' arrays in their order, instead of adding them up. MEAN divides what it
        returns by the number of replicas.
    """

    def __init__(
        self,
        reduce_to_device: int | str | None = None,
        accumulation_fn: Callable[[list[Any]], Any] | None = None,
    ):
        self._device = reduce_to_device
        self._accumulate = accumulation_fn
        self._root = 0

    def bind(self, collectives: Collectives, topology: Topology) -> None:
        """See `CrossDeviceOps.bind`."""
        super().bind(collectives, topology)
        _require_host(self, collectives)
        self._root = _replica_on(self._device, topology.devices)

    def sum_arrays(
        self, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """See `MpiAllReduce.sum_arrays`."""
        return [self._sum(value) for value in values]

    def _sum(self, value: Any) -> Any:
        agreement = self.collectives.agreement
        everyone = np.empty((agreement.size, *value.shape), value.dtype)
        if agreement.size > 1:
            agreement.comm.Gather(value, everyone, self._root)
        else:
            everyone[0] = value
        total = agreement.root_only(
            "ReductionToOneDevice", lambda: self._combine(list(everyone)), self._root
        )
        return np.asarray(total)

    def _combine(self, values: list[Any]) -> Any:
        if self._accumulate is None:
            return np.sum(values, axis=0, dtype=values[0].dtype)
        total = np.asarray(self._accumulate(values))
        if total.shape != values[0].shape:
            raise ArgumentError(
                f"accumulation_fn returned shape {total.shape} for arrays of shape "
                f"{values[0].shape}"
            )
        return total.astype(values[0].dtype, copy=False)


def _checked_packs(num_packs: int) -> int:
    if num_packs < 0:
        raise ArgumentError(f"num_packs must be >= 0, not {num_packs}")
    return num_packs


def _with_packs(
    options: CommunicationOptions, num_packs: int, values: Sequence[Any]
) -> CommunicationOptions:
    """Return options with the pack size that gives `num_packs` packs."""
    if options.bytes_per_pack or num_packs == 1:
        return options
    total = sum(value.nbytes for value in values)
    size = max(1, -(-total // num_packs)) if num_packs else 1
    return CommunicationOptions(size, options.timeout_seconds, options.implementation)


def _require_host(ops: CrossDeviceOps, collectives: Collectives) -> None:
    if collectives.transport.device:
        raise LaunchError(
            f"{type(ops).__name__} reduces arrays on the host only; leave "
            "cross_device_ops out for a strategy on GPUs"
        )


def _replica_on(device: int | str | None, devices: Sequence[str]) -> int:
    """Return the number of the replica that `device` means."""
    if device is None:
        return 0
    if isinstance(device, int) and 0 <= device < len(devices):
        return device
    if device in devices:
        return list(devices).index(str(device))
    raise ArgumentError(
        f"reduce_to_device is {device!r}, but the replicas are on {list(devices)}"
    )


def _values_of(pairs: Pairs) -> list[Any]:
    """Return the values of `(value, destinations)` pairs, which are checked."""
    if not isinstance(pairs, list | tuple):
        raise ArgumentError(f"value_destination_pairs must be a list, not {pairs!r}")
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ArgumentError(
                "each element of value_destination_pairs must be a tuple of size 2, "
                f"not {pair!r}"
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
            "destinations must be a device string, a list of them that is not empty, "
            f"or a value that lies there, not {destinations!r}"
        )
