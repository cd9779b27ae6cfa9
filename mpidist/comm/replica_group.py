"""The replicas of one strategy, their collectives, and the lines that describe them."""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from mpi4py import MPI

from mpidist._version import __version__
from mpidist.comm.collectives.arguments import to_arrays
from mpidist.comm.collectives.operations import Collectives
from mpidist.comm.collectives.plans import Results
from mpidist.comm.consensus.comparison import SharedMemoryComparison
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.failures import can_survive
from mpidist.comm.consensus.flight_recorder import Recorder
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.comm.consensus.waiting import least_pause
from mpidist.comm.cross_device_ops import CrossDeviceOps, MpiAllReduce
from mpidist.comm.device_info import GpuFacts, GpuRequest, find_facts
from mpidist.comm.packing import Axis
from mpidist.comm.shared_memory.node import NodeMemory, make_barrier
from mpidist.comm.shared_memory.symmetric import SymmetricMemory
from mpidist.comm.topology import Topology
from mpidist.comm.transports.selector import TransportSelector
from mpidist.comm.transports.tuning import (
    Layout,
    Table,
    short_name,
    table_path,
    tables_in_use,
)
from mpidist.device import arrays
from mpidist.device.binding import use_gpu
from mpidist.errors import CollectiveError, MismatchError
from mpidist.options import CommunicationOptions
from mpidist.reductions import ReduceOp
from mpidist.util import logs, nest, validation
from mpidist.util.available_memory import as_text
from mpidist.util.buffers import Field
from mpidist.util.forks import is_forked
from mpidist.util.settings import BANNER, TIMELINE, require_settings

T = TypeVar("T")
_COLLECT_AT = 64
# The number of a communicator and its members: the same on all of its ranks
_Key = tuple[int, tuple[int, ...]]


@dataclasses.dataclass
class _Resources:
    """A strategy's MPI resources, which its ranks must free collectively.

    If a strategy was not finalized, they are freed when all its ranks have dropped it
    and create another strategy: only then do all of them communicate.
    """

    owner: weakref.ref[ReplicaGroup]
    topology: Topology
    consensus: Consensus
    node_memory: NodeMemory
    # Functions to call when the strategy is closed, in the same order on all ranks
    closing: list[Callable[[], None]]
    ops: CrossDeviceOps | None = None
    channel: CommunicatorResources | None = None

    in_use: ClassVar[dict[_Key, _Resources]] = {}
    _collect_at: ClassVar[int] = _COLLECT_AT

    def free(self) -> None:
        """Free all; a second call does nothing. Collective."""
        if (
            self.consensus.failures.ranks or is_forked()
        ):  # they cannot be freed together
            self.topology.closed = True
        if not self.topology.closed:
            while self.closing:
                self.closing[-1]()
            self.node_memory.close()
            self.consensus.close()
            if self.ops is not None:
                self.ops.close()
            try:
                if self.channel is not None:
                    self.channel.close()
            finally:  # its errors are raised on all ranks
                self.topology.close(self.consensus.drain())
        self._forget()

    def abandon(self) -> None:
        """Leave what ranks cannot free together, as they cannot communicate."""
        self.node_memory.close()
        for consensus in list(Consensus.in_use):  # those of threads, too
            if consensus.failures is self.consensus.failures:
                consensus.departures.keep_messages()
                consensus.close()
        self.topology.closed = True
        self._forget()

    def _forget(self) -> None:
        kept = _Resources.in_use.items()
        _Resources.in_use = {key: r for key, r in kept if r is not self}

    @classmethod
    def list_dropped(cls) -> list[tuple[_Key, bool]]:
        """Return which strategies this rank has dropped, and whether each can be freed.

        Those that are broken on some rank cannot.
        """
        if len(cls.in_use) >= cls._collect_at:
            gc.collect()  # strategies are in reference cycles
            alive = sum(r.owner() is not None for r in cls.in_use.values())
            cls._collect_at = max(_COLLECT_AT, 2 * alive)
        return [
            (key, resources.consensus.broken is None)
            for key, resources in cls.in_use.items()
            if resources.owner() is None
        ]

    @classmethod
    def free_dropped(cls, dropped: Sequence[Sequence[tuple[_Key, bool]]]) -> None:
        """Free strategies that all their ranks have dropped. Collective."""
        by_key: dict[_Key, list[bool]] = {}
        for key, is_usable in itertools.chain.from_iterable(dropped):
            by_key.setdefault(key, []).append(is_usable)
        for key, can_free in sorted(by_key.items()):
            _, members = key
            if len(can_free) == len(members) and key in cls.in_use:
                resources = cls.in_use[key]
                resources.free() if all(can_free) else resources.abandon()


class ReplicaGroup:
    """Communicators, device and collectives of a strategy. Collective to create.

    Args:
      devices: see `MirroredStrategy`.
      cross_device_ops: the reductions; None for direct MPI.
      communicator: the ranks; None for COMM_WORLD.
      gpu_request: the user's options for GPUs.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communicator: MPI.Intracomm | None = None,
        gpu_request: GpuRequest | None = None,
    ):
        self.topology = Topology.create(communicator)
        self.consensus = Consensus(self.topology.comm, failures=self.topology.failures)
        self.consensus.pids = self.topology.pids
        self.consensus.departures.least_pause = least_pause(
            1 / self.topology.core_share
        )
        self.node_memory = NodeMemory(self.topology, self.consensus)
        self.symmetric_memory = SymmetricMemory(self.consensus, self.topology.node)
        self.replica_id = self.topology.rank
        self.num_replicas = self.topology.size
        self._numbers = itertools.count()
        self._variables: weakref.WeakValueDictionary[int, Any]
        self._variables = weakref.WeakValueDictionary()
        self.closing: list[Callable[[], None]] = []
        # Values of the default strategy's one replica are no `PerReplica`
        self.is_default = False
        # Told of each batch of a distributed dataset, by the iterators in `data`
        self.batch_watchers: weakref.WeakSet[Any] = weakref.WeakSet()
        # Distributed datasets and their iterators, which checkpoints ask for places
        self.inputs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._resources = _Resources(
            weakref.ref(self),
            self.topology,
            self.consensus,
            self.node_memory,
            self.closing,
        )
        self.sides: Any = None  # see gradient_buckets
        self.timeline: Any = None  # see monitor.timeline
        self.gpus: GpuFacts | None = None
        try:
            self._set_up(devices, cross_device_ops, gpu_request)
        except Exception as error:  # it is raised on all ranks
            cause = self.consensus.failures.check(error)
            self.consensus.close()
            if self._resources.channel is not None:
                self._resources.channel.close()
            self.topology.close()
            if cause is not error and cause is not None:
                raise cause from error
            raise

    def _set_up(
        self,
        devices: Sequence[str] | None,
        cross_device_ops: CrossDeviceOps | None,
        gpu_request: GpuRequest | None,
    ) -> None:
        call = "MirroredStrategy"

        def prepare() -> tuple[str, CrossDeviceOps]:
            if gpu_request is not None:  # else it is made by `import mpidist`
                validation.switch("allow_shared_gpu", gpu_request.allow_shared)
                if gpu_request.cuda_aware is not None:
                    validation.switch("cuda_aware", gpu_request.cuda_aware)
                require_settings(os.environ)
            device = self.topology.bind_device(devices)
            ops = MpiAllReduce() if cross_device_ops is None else cross_device_ops
            validation.instance("cross_device_ops", ops, CrossDeviceOps)
            ops.require_unbound()
            return device, ops

        self.device, self.cross_device_ops = self.consensus.run(
            call,
            prepare,
            same=lambda made: (
                ("cross_device_ops", made[1].describe()),
                ("the kind of device", made[0].partition(":")[0]),
            ),
        )
        node = self.topology.node
        place = self.device, node.Get_size()
        mine = place, _Resources.list_dropped(), str(TIMELINE.read_or_default() or "")
        gathered = self.consensus.gather_objects(call, lambda: mine)
        _Resources.free_dropped([dropped for _, dropped, _ in gathered])
        everyone = [place for place, _, _ in gathered]
        self.timeline_folder = next((folder for *_, folder in gathered if folder), "")
        self.topology.devices = tuple([device for device, _ in everyone])
        ranks = collections.Counter([size for _, size in everyone])
        sizes = [size for size in sorted(ranks) for _ in range(ranks[size] // size)]
        self.topology.node_sizes = tuple(sizes)
        if self._gpu_index is not None:
            request = gpu_request or GpuRequest()
            self.gpus = find_facts(self.consensus, self._gpu_index, request)
        channel = self._resources.channel = CommunicatorResources(
            call, self.consensus, self.topology, self.symmetric_memory, self.gpus
        )
        self.layout = channel.layout
        self.collectives = channel.collectives
        # In place of MPI's own, which need no object
        is_plain = type(self.cross_device_ops) is MpiAllReduce
        self._prepare = None if is_plain else self.cross_device_ops.prepare
        self._prepare_sum = None if is_plain else self.cross_device_ops.prepare_sum
        # All ranks bind the same class, so all can, or none can
        self.consensus.run(
            call, self.cross_device_ops.bind, self.collectives, self.topology
        )
        self._resources.ops = self.cross_device_ops
        # From now on freed when all ranks have dropped the strategy
        key = self.consensus.recorder.channel, self.consensus.members
        _Resources.in_use[key] = self._resources

    @staticmethod
    def end_all(kept: ReplicaGroup) -> None:
        """End all strategies but one at the end of MPI. Not collective.

        Communicators stay, but no thread uses them or memory of the node any more.
        """
        for resources in list(_Resources.in_use.values()):
            if resources.owner() is not kept and not resources.topology.closed:
                resources.node_memory.close()
                resources.consensus.close()
                resources.topology.closed = True

    def recorders_beside(self) -> list[Recorder]:
        """Return the recorders of other threads' communicators. Not collective."""
        return [] if self.sides is None else list(self.sides.recorders())

    def new_number(self) -> int:
        """Return the number of a variable that is to be. Not collective.

        Variables are created in the same order on all replicas, so the numbers agree.
        """
        return next(self._numbers)

    def register(self, variable: Any, number: int) -> None:
        """Register a variable, which has its value. Not collective."""
        self._variables[number] = variable

    @property
    def variables(self) -> dict[int, Any]:
        """The variables that still exist in this process, by their number."""
        return dict(self._variables.items())

    def close(self, operation: str) -> None:
        """Free communicators and caches, for a public call. Collective.

        A second call does nothing. If a rank calls another collective instead, all
        ranks raise, and the strategy can still be used.
        """
        if not (self.topology.closed or is_forked()):
            try:
                self.consensus.require_same(operation)
            except MismatchError:  # all ranks are here; they differ in earlier steps
                pass
            except CollectiveError:
                # After an interruption or a death the ranks cannot be compared
                if self.consensus.is_usable:
                    raise
        self._resources.free()

    def reduce(
        self,
        operation: str,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Return the elementwise reduction of `value`, for any public call."""
        if self.topology.closed:
            self.topology.require_open()
        return self.collectives.all_reduce(
            operation, reduce_op, value, options, self._prepare
        )

    def reduce_own(self, operation: str, reduce_op: str, value: Any) -> Any:
        """Return the reduction of numbers of this library, not of the user's.

        Such as counts of rows: no option, compression or CrossDeviceOps changes them.
        """
        self.topology.require_open()
        return self.collectives.all_reduce(operation, reduce_op, value)

    def reduce_over_axis(
        self, operation: str, reduce_op: ReduceOp | str, value: Any, axis: Axis
    ) -> Any:
        """Return the reduction of `value` over an axis and all replicas."""
        self.topology.require_open()
        return self.collectives.reduce_over_axis(
            operation, reduce_op, value, axis, prepare_sum=self._prepare_sum
        )

    def gather(
        self,
        operation: str,
        value: Any,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Return the concatenation of `value` over all replicas, for a public call."""
        if self.topology.closed:
            self.topology.require_open()
        return self.collectives.all_gather(operation, value, axis, options)

    def symmetric_like(self, operation: str, value: Any) -> Any:
        """Return arrays of zeros in shared memory, for a public call. Collective."""
        self.topology.require_open()
        with self.consensus.call(operation) as call:
            leaves, spec, inputs = call.reserve(to_arrays, value)
            fields = [Field(tuple(a.shape), a.dtype) for a in inputs]
            self.consensus.require_same(
                CallSignature(operation, (), spec, tuple(fields))
            )
            # Shared memory helps only with several ranks on the node, and only on the
            # host.
            if self.topology.has_neighbours and self.device.startswith("CPU"):
                made = self.symmetric_memory.allocate(operation, fields)
            else:
                made = call.finish(lambda: [self.zeros(*field) for field in fields])
        # JAX arrays are read-only, so they cannot be used here
        inputs = [
            own if arrays.is_jax_array(leaf) else arrays.like_foreign(own, leaf)
            for own, leaf in zip(made, leaves)
        ]
        return nest.unflatten(spec, inputs)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return zeros on this rank's device."""
        return arrays.to_device(np.zeros(shape, dtype), self.device)

    def use_device(self) -> None:
        """Make this rank's GPU, if it has one, the current one of this thread."""
        if self._gpu_index is not None:
            use_gpu(self._gpu_index)

    @property
    def _gpu_index(self) -> int | None:
        kind, _, index = self.device.partition(":")
        return int(index) if kind == "GPU" else None

    def broadcast_from_first(self, operation: str, value: Any) -> Any:
        """Return replica 0's nest of arrays on every replica. Collective."""
        self.topology.require_open()
        return self.collectives.broadcast(operation, value, root=0)


# Payload limits for all ranks of a node in total, and for each rank: with more ranks,
# each rank reads more
_PAYLOADS_BYTES = 256 << 10
_LEAST_PAYLOAD_BYTES = 2048
_HEADER_BYTES = 64


class CommunicatorResources:
    """The barrier, the transports and the collectives of a communicator.

    Collective to make.

    Args:
      operation: the public call, for messages.
      consensus: of all ranks, on the communicator; borrowed. If all ranks share memory,
        it compares there from now on.
      topology: the nodes of these ranks.
      symmetric: the arrays that lie in memory of the node.
      gpus: of all ranks, where replicas are on GPUs.
      is_background: whether a thread uses it in addition to other resources of these
        ranks: it yields the core while waiting, and does not use NCCL.
      results: see `Collectives`.

    Raises, on all ranks:
      LaunchError: the file of measured transports cannot be used.
    """

    def __init__(
        self,
        operation: str,
        consensus: Consensus,
        topology: Topology,
        symmetric: SymmetricMemory,
        gpus: GpuFacts | None = None,
        *,
        is_background: bool = False,
        results: Results | None = None,
    ):
        # The payloads of all ranks together are bounded: each rank reads all of them.
        payload_bytes = max(_PAYLOADS_BYTES // consensus.size, _LEAST_PAYLOAD_BYTES)
        self._consensus = consensus
        self._barrier = None
        if topology.has_neighbours:
            self._barrier = make_barrier(
                operation,
                consensus,
                topology.node,
                _HEADER_BYTES + payload_bytes,
                yield_cpu=is_background,
            )
        # From here on signatures are compared in shared memory. All ranks switch here,
        # at the same point between two collectives.
        if self._barrier is not None and topology.is_one_node:
            consensus.comparison.close()
            consensus.comparison = SharedMemoryComparison(self._barrier, payload_bytes)
        kind = "CPU" if gpus is None else "GPU"
        library = short_name(MPI.Get_library_version())
        self.layout = Layout(library, topology.node_sizes, kind)
        table = None
        if consensus.size > 1:
            # Rank 0 reads the file for all: tables that differed would let ranks choose
            # different transports, and wait for each other for ever.
            table = consensus.root_only(
                operation, lambda: dict(tables_in_use()).get(self.layout)
            )
        if consensus.rank == 0 and consensus.size > 1:
            source = "default" if table is None else f"tuning file {table_path()}"
            logs.debug("comm", f"transports of {self.layout}: {source}")
        self._transports = consensus.run(
            operation,
            lambda: TransportSelector(
                consensus,
                self._barrier,
                table,
                library,
                gpus,
                has_nccl=not is_background,
            ),
        )
        self.collectives = Collectives(
            consensus, self._transports, symmetric, results or Results()
        )

    def close(self) -> None:
        """Free memory and communicators. Collective."""
        # The transports first: they use the barrier's memory.
        try:
            self._transports.close()
        finally:  # its errors are raised on all ranks
            if self._barrier is not None:
                self._barrier.close()


_shown: set[str] = set()


def show_once(group: ReplicaGroup, kind: str, describe: Callable[[], str]) -> None:
    """Log a line on rank 0, for the first strategy of several ranks that asks for it.

    Not collective. MPIDIST_BANNER=0 turns it off.

    Args:
      group: of the replicas.
      kind: of the line; each is logged once.
      describe: returns the text.
    """
    if group.num_replicas == 1 or kind in _shown:
        return
    _shown.add(kind)
    # Values other than 0 and 1 were refused when the strategy was created
    if group.replica_id == 0 and BANNER.read_or_default():
        logs.info("comm", describe())


def banner(group: ReplicaGroup) -> str:
    """Return the line for a strategy. Not collective."""
    nodes = len(group.topology.node_sizes)
    library = short_name(MPI.Get_library_version())
    parts = [
        f"{group.num_replicas} replicas on {nodes} node{'s' * (nodes > 1)}",
        library,
        "CPU" if group.gpus is None else _describe_gpus(group.gpus),
        f"all_reduce by {_describe_table(group.collectives.transports.table)}",
    ]
    if group.gpus is not None:
        is_aware = "" if group.gpus.support.is_aware else "not "
        parts.append(f"MPI is {is_aware}CUDA-aware ({group.gpus.support.why})")
    survives = "continues, with run_elastic," if can_survive() else "ends"
    parts.append(f"the job {survives} if a rank dies")
    return f"mpidist {__version__}: {'; '.join(parts)}"


def _describe_gpus(gpus: GpuFacts) -> str:
    names = ", ".join(sorted({gpu.name for gpu in gpus.identities}))
    return f"GPU ({names}{', shared' if gpus.is_shared else ''})"


def _describe_table(table: Table) -> str:
    """Return the transports by size: "mpi, hierarchical from 64 KiB"."""
    (_, first), *rest = table["allreduce"]
    return ", ".join([first, *(f"{name} from {as_text(edge)}" for edge, name in rest)])
