"""TensorFlow's kinds of CrossDeviceOps: by node, by NCCL, to one device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.comm.collectives.operations import Collectives
from mpidist.comm.collectives.reduce import Prepared
from mpidist.comm.cross_device_ops import MpiAllReduce
from mpidist.comm.topology import Topology, parse_devices
from mpidist.comm.transports.base import Transport
from mpidist.comm.transports.staging import StagingTransport
from mpidist.device import arrays
from mpidist.errors import ArgumentError, LaunchError
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.util import validation

__all__ = ["HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice"]


class HierarchicalCopyAllReduce(MpiAllReduce):
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

    def __init__(self, num_packs: int = 1):
        self._num_packs = validation.integer("num_packs", num_packs, 0)
        self._transport: Transport | None = None

    def bind(self, collectives: Collectives, topology: Topology) -> None:
        """See `CrossDeviceOps.bind`."""
        super().bind(collectives, topology)
        transports = collectives.transports
        if transports.intra_node is None and topology.has_neighbours:
            raise LaunchError(
                "HierarchicalCopyAllReduce cannot be used: the node has too little "
                "shared memory (in a container, raise it with --shm-size)"
            )
        self._transport = transports.intra_node  # None: as the options say
        # Arrays on GPUs pass through the host to be added there.
        if transports.default.device and transports.intra_node is not None:
            self._transport = StagingTransport(transports.intra_node)

    def prepare_sums(
        self, values: Sequence[Any], options: CommunicationOptions
    ) -> Callable[[], list[Any]]:
        """See `MpiAllReduce.prepare_sums`."""
        options = _with_packs(options, self._num_packs, values)
        return self.collectives.reductions.prepare_sums(
            values, options, self._transport
        )


class NcclAllReduce(MpiAllReduce):
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

    def __init__(self, num_packs: int = 1):
        self._num_packs = validation.integer("num_packs", num_packs, 0)

    def bind(self, collectives: Collectives, topology: Topology) -> None:
        """See `CrossDeviceOps.bind`."""
        super().bind(collectives, topology)
        # All ranks know whether NCCL can be used, so all raise, or none does.
        collectives.transports.require_nccl("NcclAllReduce")

    def prepare_sums(
        self, values: Sequence[Any], options: CommunicationOptions
    ) -> Callable[[], list[Any]]:
        """See `MpiAllReduce.prepare_sums`."""
        options = _with_packs(options, self._num_packs, values)
        nccl = self.collectives.transports.by_name["nccl"]
        return self.collectives.reductions.prepare_sums(values, options, nccl)


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
      >>> maximum.reduce("SUM", np.array([maximum.extended.replica_id, 5]))
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
    ) -> Prepared:
        """See `CrossDeviceOps.prepare`."""
        if not (op.adds or self.is_sum):
            raise ArgumentError(f"accumulation_fn replaces SUM and MEAN, not {op.name}")
        _, move = super().prepare(op, values, options)
        # Errors of `accumulation_fn` are raised on all ranks
        run = self.collectives.consensus.run_in_scope
        return 0, lambda is_same: run(type(self).__qualname__, move, is_same)

    def prepare_sums(
        self, values: Sequence[Any], options: CommunicationOptions
    ) -> Callable[[], list[Any]]:
        """See `MpiAllReduce.prepare_sums`."""
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
        return lambda: list(map(self._sum, values, hosts, gathered, totals))

    def _sum(self, value: Any, host: Any, everyone: Any, total: Any) -> Any:
        consensus = self.collectives.consensus
        if consensus.size > 1:
            request = consensus.comm.Igather(host, everyone, self._root)
            consensus.wait(request, None, "ReductionToOneDevice")
        else:
            everyone[0] = host

        # Runs on the root alone; root_only raises its error on all.
        def combine() -> None:
            there = [arrays.to_device_like(part, value) for part in everyone]
            total[...] = arrays.to_host(self._combine(there))

        consensus.root_only("ReductionToOneDevice", combine, self._root)
        if consensus.size > 1:
            transport = self.collectives.transports.exchange(is_device=False)
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


def _with_packs(
    options: CommunicationOptions, num_packs: int, values: Sequence[Any]
) -> CommunicationOptions:
    """Return options with the pack size that gives `num_packs` packs."""
    # The user's own pack size comes first.
    if options.bytes_per_pack or num_packs == 1:
        return options
    total = sum(value.nbytes for value in values)
    size = max(1, -(-total // num_packs)) if num_packs else 1
    return dataclasses.replace(options, bytes_per_pack=size)


def _replica_on(device: int | str | None, devices: Sequence[str]) -> int:
    """Return the number of the replica on `device`."""
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
