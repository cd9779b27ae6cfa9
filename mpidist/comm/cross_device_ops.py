"""CrossDeviceOps: how a strategy reduces and broadcasts values over its replicas.

A `MirroredStrategy` uses the object for `reduce`, `all_reduce`, `reduce_to`, and for
variables. With one process per replica, every replica is a destination of every result.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.comm.collectives.operations import Collectives
from mpidist.comm.collectives.reduce import Reduction
from mpidist.comm.consensus.public_calls import announce_errors
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.comm.topology import Topology, parse_devices
from mpidist.comm.transports.base import Transport
from mpidist.comm.transports.staging import StagingTransport
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ContextError, LaunchError
from mpidist.options import CommunicationOptions
from mpidist.reductions import ReduceOp
from mpidist.util import nest, validation
from mpidist.util.representation import one_line
from mpidist.values import ArrayView, DistributedValues, Mirrored, PerReplica

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
          >>> mine = np.array([strategy.rank + 7])
          >>> ops.broadcast(mine, destinations="CPU:0") + 0
          array([7])
        """

        def broadcast() -> Any:
            _require_destinations(destinations)
            return self.broadcast_implementation(tensor, destinations)

        return self._mirrored(self.collectives.consensus.run("broadcast", broadcast))

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
        signature = CallSignature(
            type(self).__qualname__, (("reduce_op", op.name),), spec, described
        )
        # Another replica's implementation may have failed, or call something else
        call = self.collectives.consensus.call(signature, options.timeout_seconds)
        return self.collectives.reduce_large(call, op, values, options)

    def prepare(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> Reduction:
        """Return what calls the implementation, once the ranks agree."""
        run, name = self.collectives.consensus.run, type(self).__qualname__
        return _Deferred(run, name, self._implement, op, values, options)

    def prepare_sum(
        self, values: Sequence[Any], options: CommunicationOptions
    ) -> Reduction:
        """Return what sums contiguous arrays over all replicas; see `prepare`."""
        return self.prepare(ReduceOp.SUM, values, options)

    def _implement(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        rank = self.collectives.consensus.rank
        # This rank's component alone, as `run` gives it to a replica function.
        per_replica = [PerReplica((value,), (rank,)) for value in values]
        destinations = tuple(f"replica:{r}" for r in range(self.collectives.size))
        results: Sequence[Any]
        if len(values) == 1:
            value = per_replica[0]
            results = [self.reduce_implementation(op, value, destinations, options)]
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
        # Our own class needs no call of user code, so its plans can be cached.
        is_plain = type(self) is MpiAllReduce
        prepare = None if is_plain else self.prepare
        with collectives.consensus.call(operation) as call:
            values = call.reserve(_values_of, pairs)
            results = collectives.all_reduce(
                operation, reduce_op, values, options, prepare
            )
        return [self._mirrored(result) for result in results]

    def _mirrored(self, result: Any) -> Any:
        if isinstance(result, DistributedValues):
            return result
        return Mirrored((result,), (self.collectives.consensus.rank,))


announce_errors(
    CrossDeviceOps,
    ("reduce", "batch_reduce", "broadcast"),
    lambda ops: ops.collectives.consensus,
)


class MpiAllReduce(CrossDeviceOps):
    """The default: MPI all-reduces packs of arrays on their device."""

    is_sum = True  # whether `prepare_sum` only adds arrays

    def prepare(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> Reduction:
        """See `reduce.prepare_reduction`."""
        return self.collectives.prepare_reduction(
            op, values, options, self.prepare_sum, self.is_sum
        )

    def prepare_sum(
        self, values: Sequence[Any], options: CommunicationOptions
    ) -> Reduction:
        """See `CrossDeviceOps.prepare_sum`."""
        return self.collectives.sum_of(values, options)


class _Deferred:
    """A reduction by a function; see `reduce.Reduction`."""

    address = 0

    def __init__(self, fn: Callable[..., list[Any]], *arguments: Any):
        self._run = functools.partial(fn, *arguments)

    def run(self, is_symmetric: bool = False) -> list[Any]:
        """See `reduce.Reduction`."""
        return self._run()


def _own(array: Any) -> Any:
    is_read_only = isinstance(array, np.ndarray) and not array.flags.writeable
    return array.copy() if is_read_only else array


def _values_of(pairs: Pairs) -> list[Any]:
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
        is_good = not isinstance(destinations, str) or destinations != ""
    elif isinstance(destinations, list | tuple):
        is_good = bool(destinations) and all(isinstance(d, str) for d in destinations)
    else:
        is_good = hasattr(destinations, "__array__")  # a tensor: where it lies
    if not is_good:
        raise ArgumentError(
            "destinations must be a device string, a non-empty list of them, or a "
            f"distributed value, not {validation.shown(destinations)}"
        )


class _PackedAllReduce(MpiAllReduce):
    """By a transport of its own where that can, in some number of packs."""

    _transport: Transport | None = None  # None: as the options say

    def __init__(self, num_packs: int = 1):
        self._num_packs = validation.integer("num_packs", num_packs, 0)

    def prepare_sum(
        self, values: Sequence[Any], options: CommunicationOptions
    ) -> Reduction:
        """See `MpiAllReduce.prepare_sum`."""
        # The user's own pack size comes first.
        if self._num_packs != 1 and not options.bytes_per_pack:
            total = sum(value.nbytes for value in values)
            size = max(1, -(-total // self._num_packs)) if self._num_packs else 1
            options = dataclasses.replace(options, bytes_per_pack=size)
        return self.collectives.sum_of(values, options, self._transport)


class HierarchicalCopyAllReduce(_PackedAllReduce):
    """Reduce inside each node, all-reduce between nodes, broadcast inside each node.

    Args:
      num_packs: the number of packs for arrays of one dtype; 0 sends each alone.

    Raises:
      ArgumentError: num_packs is negative.
      LaunchError: on all replicas, when given to a strategy on nodes with too little
        shared memory.

    Arrays on GPUs are copied through host memory.

    Example:
      >>> ops = mpidist.HierarchicalCopyAllReduce()
      >>> by_node = mpidist.MirroredStrategy(cross_device_ops=ops)
      >>> by_node.reduce("SUM", np.ones(2))
      array([2., 2.])
    """

    def bind(self, collectives: Collectives, topology: Topology) -> None:
        """See `CrossDeviceOps.bind`."""
        super().bind(collectives, topology)
        transports = collectives.transports
        if transports.intra_node is None and topology.has_neighbours:
            raise LaunchError(
                "HierarchicalCopyAllReduce cannot be used: the node has too little "
                "shared memory (in a container, raise it with --shm-size)"
            )
        self._transport = transports.intra_node
        # Arrays on GPUs pass through the host to be added there.
        if transports.default.device and transports.intra_node is not None:
            self._transport = StagingTransport(transports.intra_node)


class NcclAllReduce(_PackedAllReduce):
    """Reduce arrays on GPUs with NVIDIA's NCCL; each replica needs its own GPU.

    Arrays on the host are reduced by MPI.

    Args:
      num_packs: the number of packs for arrays of one dtype; 0 sends each alone.

    Raises:
      ArgumentError: num_packs is negative.
      LaunchError: on all replicas, when given to a strategy on CPUs, with a shared GPU,
        or without NCCL.

    Example:
      >>> ops = mpidist.NcclAllReduce(num_packs=2)
      >>> mpidist.MirroredStrategy(["CPU:0"], cross_device_ops=ops)
      Traceback (most recent call last):
      mpidist.errors.LaunchError: NcclAllReduce cannot be used: ...
    """

    def bind(self, collectives: Collectives, topology: Topology) -> None:
        """See `CrossDeviceOps.bind`."""
        super().bind(collectives, topology)
        # All ranks know whether NCCL can be used, so all raise, or none does.
        collectives.transports.require_nccl("NcclAllReduce")
        self._transport = collectives.transports.by_name["nccl"]


class ReductionToOneDevice(MpiAllReduce):
    """Reduce to one replica, and broadcast from there.

    Args:
      reduce_to_device: the replica to reduce to: its number, or a device string, which
        means the first replica on that device; by default replica 0.
      accumulation_fn: called on that replica instead of adding, as
        `accumulation_fn(arrays)` with the list of all replicas' arrays in order. It
        returns an array of their shape, which MEAN divides by the number of replicas.

    Raises, on all replicas, when it is given to a strategy:
      ArgumentError: no replica is on `reduce_to_device`.

    Arrays on GPUs are copied through host memory; `accumulation_fn` gets them on its
    GPU. Reductions raise, on all replicas, what `accumulation_fn` raises, and
    ArgumentError for another shape.

    Example:
      >>> largest = mpidist.ReductionToOneDevice(
      ...     accumulation_fn=lambda arrays: np.max(arrays, axis=0)
      ... )
      >>> maximum = mpidist.MirroredStrategy(cross_device_ops=largest)
      >>> maximum.reduce("SUM", np.array([maximum.rank, 5]))
      array([1, 5])
    """

    def __init__(
        self,
        reduce_to_device: int | str | None = None,
        accumulation_fn: Callable[[list[Any]], Any] | None = None,
    ):
        self._device = reduce_to_device
        if not isinstance(reduce_to_device, str):
            name, also = "reduce_to_device", ", a device or None"
            self._device = validation.optional_integer(name, reduce_to_device, 0, also)
        self._accumulate = validation.optional_function(
            "accumulation_fn", accumulation_fn
        )
        self.is_sum = accumulation_fn is None
        self._root = 0

    def describe(self) -> str:
        """See `CrossDeviceOps.describe`."""
        return f"{super().describe()}({self._device!r})"

    def bind(self, collectives: Collectives, topology: Topology) -> None:
        """See `CrossDeviceOps.bind`."""
        super().bind(collectives, topology)
        self._root = _replica_on(self._device, topology.devices)

    def prepare(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> Reduction:
        """See `CrossDeviceOps.prepare`."""
        if not (op.adds or self.is_sum):
            raise ArgumentError(f"accumulation_fn replaces SUM and MEAN, not {op.name}")
        run, name = self.collectives.consensus.run, type(self).__qualname__
        return _Deferred(run, name, super().prepare(op, values, options).run)

    def prepare_sum(
        self, values: Sequence[Any], options: CommunicationOptions
    ) -> Reduction:
        """See `MpiAllReduce.prepare_sum`."""
        if options.compression is not None:
            raise ArgumentError(
                "ReductionToOneDevice does not support compression: omit "
                f"compression={options.compression!r}"
            )
        hosts = [arrays.to_host(value) for value in values]
        # Only the root needs the buffers, but buffers on all ranks keep the code
        # symmetric.
        ranks = self.collectives.consensus.size
        gathered = [np.empty((ranks, *host.shape), host.dtype) for host in hosts]
        totals = [np.empty(host.shape, host.dtype) for host in hosts]
        return _Deferred(self._sums, values, hosts, gathered, totals)

    def _sums(self, *arguments: Any) -> list[Any]:
        return list(map(self._sum, *arguments))

    def _sum(self, value: Any, host: Any, everyone: Any, total: Any) -> Any:
        consensus = self.collectives.consensus
        request = consensus.comm.Igather(host, everyone, self._root)
        consensus.wait(request, None, "ReductionToOneDevice")

        def combine() -> None:
            there = [arrays.to_device_like(part, value) for part in everyone]
            total[...] = arrays.to_host(self._combine(there))

        consensus.root_only("ReductionToOneDevice", combine, self._root)
        if consensus.size > 1:
            transport = self.collectives.transports.with_alltoallv(is_device=False)
            assert transport is not None
            transport.broadcast(total, self._root, None)
        return arrays.to_device_like(total, value)

    def _combine(self, values: list[Any]) -> Any:
        if self._accumulate is None:
            return functools.reduce(operator.add, values)
        total = arrays.namespace(values[0]).asarray(self._accumulate(values))
        if total.shape != values[0].shape:
            raise ArgumentError(
                f"accumulation_fn returned shape {total.shape} for arrays of shape "
                f"{values[0].shape}"
            )
        return total.astype(values[0].dtype, copy=False)


def _replica_on(device: int | str | None, devices: Sequence[str]) -> int:
    if device is None:
        return 0
    if isinstance(device, int) and 0 <= device < len(devices):
        return device
    if isinstance(device, str):
        with contextlib.suppress(ValueError):  # the one below names the argument
            kind, index = parse_devices([device])[0]
            return list(devices).index(f"{kind}:{index}")
    raise ArgumentError(
        f"reduce_to_device is {device!r}, but the replicas are on {list(devices)}"
    )
