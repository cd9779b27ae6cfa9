"""Transport selection: which transport a call uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from mpidist.comm.consensus.barrier import NodeBarrier
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.device_info import GpuFacts
from mpidist.comm.transports.base import Transport
from mpidist.comm.transports.device import DeviceMpiTransport, DeviceTransport
from mpidist.comm.transports.hierarchical import HierarchicalTransport
from mpidist.comm.transports.ipc import SLOTS, IpcTransport, share_buffers
from mpidist.comm.transports.mpi import MpiTransport
from mpidist.comm.transports.nccl import NcclTransport, connect
from mpidist.comm.transports.ordered import OrderedTransport
from mpidist.comm.transports.ring import RingTransport
from mpidist.comm.transports.shared import SharedTransport
from mpidist.comm.transports.staging import StagingTransport
from mpidist.comm.transports.tuning import (
    BySizeTransport,
    Count,
    Table,
    all_by,
    default_device_table,
    default_table,
    no_count,
)
from mpidist.device import arrays, kernels
from mpidist.errors import ArgumentError, CollectiveError, LaunchError
from mpidist.options import CommunicationImplementation


class Choices(NamedTuple):
    """Transports for one kind of memory, and the choice among them.

    Args:
      by_name: all of them; "mpi" stands for MPI's own calls.
      default: the transport without a user's request.
      by_request: by the user's request, and whether sums must be in rank order.
    """

    by_name: Mapping[str, Transport]
    default: BySizeTransport
    by_request: Mapping[tuple[CommunicationImplementation, bool], BySizeTransport]


def choose(
    by_name: Mapping[str, Transport],
    ordered: Sequence[str],
    table: Table,
    count: Count = no_count,
) -> Choices:
    """Return the choice of transports.

    Args:
      by_name: all of them.
      ordered: the names of those that add in rank order, the best first; at least one
        must exist.
      table: see `BySizeTransport`. All ranks pass the same.
      count: see there.

    Raises:
      LaunchError: the table names a transport that does not exist here.
    """
    used = {name for rows in table.values() for _, name in rows}
    if unknown := used - set(by_name):
        raise LaunchError(
            f"the tuning table names {sorted(unknown)}, but only {sorted(by_name)} "
            "exist here; run `python -m mpidist tune` again"
        )

    def counted(name: str) -> BySizeTransport:
        return BySizeTransport({name: by_name[name]}, all_by([(0, name)]), count)

    default = BySizeTransport(by_name, table, count)
    there = [counted(name) for name in ordered if name in by_name]
    in_order = default
    if not default.is_ordered:
        in_order = next(transport for transport in there if transport.is_ordered)
    # If the user requests MPI
    direct = [counted(name) for name in ("device", "ordered") if name in by_name]
    auto, mpi, nccl = CommunicationImplementation
    return Choices(
        by_name,
        default,
        {
            (auto, False): default,
            (auto, True): in_order,
            (mpi, False): counted("mpi"),
            (mpi, True): direct[0],
            # On GPUs only
            (nccl, False): counted("nccl") if "nccl" in by_name else default,
            (nccl, True): in_order,
        },
    )


class TransportSelector:
    """The transports of one strategy, and the choice among them. Collective to create.

    Args:
      consensus: of all ranks.
      barrier: that of the ranks of this node; borrowed. None on all ranks if no ranks
        share memory.
      table: see `BySizeTransport`; None for `default_table`. All ranks pass the same.
      library: what `MPI.Get_library_version()` begins with.
      gpus: of all ranks, for a strategy on GPUs; the table then applies to GPUs.
      has_nccl: whether NCCL may be used (by one communicator only).

    Raises:
      LaunchError: the table names a transport that does not exist here.
    """

    def __init__(
        self,
        consensus: Consensus,
        barrier: NodeBarrier | None = None,
        table: Table | None = None,
        library: str = "",
        gpus: GpuFacts | None = None,
        has_nccl: bool = True,
    ):
        transports: dict[str, Transport] = {"mpi": MpiTransport(consensus)}
        # Transports in shared memory of a node
        self.intra_node: SharedTransport | None = None
        self._hierarchical: HierarchicalTransport | None = None
        if barrier is not None and barrier.size == consensus.size:
            self.intra_node = SharedTransport(consensus, barrier)
        elif barrier is not None:
            self.intra_node = self._hierarchical = HierarchicalTransport(
                consensus, barrier
            )
        self._ordered = OrderedTransport(consensus)
        transports["ordered"] = self._ordered
        # A ring pays off between nodes only; inside of one, shared memory is faster
        if consensus.size > 1 and (barrier is None or self._hierarchical is not None):
            transports["ring"] = RingTransport(consensus)
        in_node = "mpi" if self.intra_node is None else self.intra_node.name
        if self.intra_node is not None:
            transports[in_node] = self.intra_node
        self.default_table = host_table = default_table(
            in_node, library, consensus.size
        )
        # If replicas are on GPUs, the given table applies to GPUs; the host uses the
        # default
        if gpus is None and table is not None:
            host_table = table
        # Copies of GPU arrays through the host are counted once, there
        staged = choose(transports, [in_node, "ordered"], host_table)
        self.count = consensus.recorder.count
        own = self._host = choose(
            transports, [in_node, "ordered"], host_table, self.count
        )
        self._device: Choices | None = None
        self._gpus: DeviceTransports | None = None
        if gpus is not None:
            self._gpus = DeviceTransports(consensus, barrier, staged, gpus, has_nccl)
            by_name = self._gpus.by_name
            self.default_table = default_device_table(by_name)
            own = choose(by_name, ORDERED, table or self.default_table, self.count)
            self._device = own
        self.table = self.default_table if table is None else table
        self.by_name, self.default = own.by_name, own.default

    def pick(
        self,
        implementation: CommunicationImplementation,
        is_ordered: bool,
        is_device: bool,
    ) -> BySizeTransport:
        """Return the transport for a call.

        Args:
          implementation: the user's request.
          is_ordered: whether sums must be added in rank order.
          is_device: whether the arrays are on GPUs.
        """
        choices = self._device if is_device else self._host
        assert choices is not None
        return choices.by_request[implementation, is_ordered]

    def narrowing(
        self, implementation: CommunicationImplementation, is_ordered: bool
    ) -> Transport | None:
        """Return the transport that sends compressed numbers; None on one node.

        Args:
          implementation: the user's request.
          is_ordered: see `pick`.
        """
        is_direct = implementation is CommunicationImplementation.MPI
        if self.intra_node is None or is_direct:
            return self._ordered
        has_order = self._hierarchical is not None and is_ordered
        return self._ordered if has_order else self._hierarchical

    def to_device(self, array: Any) -> Any:
        """Return a NumPy array on this rank's GPU; this is a strategy on GPUs."""
        assert self._gpus is not None
        return arrays.to_device(array, f"GPU:{self._gpus.index}")

    def with_alltoallv(self, is_device: bool) -> MpiTransport | None:
        """Return a transport with `alltoallv`; None if MPI cannot move GPU arrays."""
        choices = self._device if is_device else self._host
        assert choices is not None
        transport = choices.by_name.get("device" if is_device else "mpi")
        if transport is None or not transport.can_exchange:
            return None
        return cast(MpiTransport, transport)

    def require_nccl(self, asked_for: str) -> None:
        """Raise a LaunchError if NCCL cannot be used."""
        if "nccl" in self.by_name:
            return
        reason = "replicas are on CPUs"
        if self._gpus is not None:
            reason = self._gpus.missing["nccl"]
        raise LaunchError(f"{asked_for} cannot be used: {reason}; omit it to use MPI")

    def require_reachable(self, array: Any, name: str) -> None:
        """Raise if no transport can move an array.

        Raises:
          ArgumentError: it is on a GPU, but replicas are not, or on another GPU.
        """
        if not arrays.is_device_array(array):
            return
        if self._gpus is None:
            raise ArgumentError(
                f"{name} is on a GPU, but this strategy's replicas are on CPUs: create "
                "the strategy with devices=['GPU:0'] (or None), or pass "
                "cupy.asnumpy(...)"
            )
        own = self._gpus.index
        # An array without elements is not moved, so its device does not matter
        if array.size and array.device.id != own:
            raise ArgumentError(
                f"{name} is on GPU:{array.device.id}, but this replica computes on "
                f"GPU:{own}"
            )

    def close(self) -> None:
        """Free memory and communicators. Collective."""
        if self._gpus is not None:
            self._gpus.close()
        if self._hierarchical is not None:
            self._hierarchical.close()


# Those that add in the order of the ranks, the best first
ORDERED = ["ipc", "device", "staging", "ordered"]

_CALL = "MirroredStrategy: transports of GPUs"
_SLOT_BYTES = 16 << 20


class DeviceTransports:
    """All usable transports of GPUs. Collective to create.

    Args:
      consensus: of all ranks.
      barrier: that of the ranks of this node, if they share memory; borrowed.
      host: the transports of arrays on the host.
      gpus: of all ranks.
      has_nccl: whether NCCL may be used.

    Attributes:
      by_name: the transports.
      index: of this rank's GPU.
      missing: why a named transport does not exist.
    """

    def __init__(
        self,
        consensus: Consensus,
        barrier: NodeBarrier | None,
        host: Choices,
        gpus: GpuFacts,
        has_nccl: bool,
    ):
        self._consensus = consensus
        self.index = gpus.index
        self.missing: dict[str, str] = {}
        self._ipc: IpcTransport | None = None
        self._nccl: NcclTransport | None = None
        self.by_name: dict[str, Transport] = {
            "staging": StagingTransport(host.default),
            "ordered": StagingTransport(host.by_name["ordered"]),
            "mpi": StagingTransport(host.by_name["mpi"]),
        }
        self._make_device(consensus, gpus)
        self._make_ipc(consensus, barrier)
        self._make_nccl(consensus, gpus, has_nccl)

    def _make_device(self, consensus: Consensus, gpus: GpuFacts) -> None:
        if not gpus.support.is_aware:
            self.missing["device"] = gpus.support.why
            return
        reason = ""
        try:
            # Errors of one rank must be known before the collective
            kernels.load()
            adder = DeviceTransport(consensus)
        except Exception as error:
            reason = f"rank {consensus.rank}: {error}"
        reasons = list(filter(None, consensus.gather_objects(_CALL, lambda: reason)))
        if reasons:
            self.missing["device"] = reasons[0]
        else:
            self.by_name["device"] = adder
            self.by_name["mpi"] = DeviceMpiTransport(consensus, adder)

    def _make_ipc(self, consensus: Consensus, barrier: NodeBarrier | None) -> None:
        if consensus.size == 1:
            self.missing["ipc"] = "there is one replica"
        elif barrier is None or barrier.size < consensus.size:
            self.missing["ipc"] = "the ranks are on several nodes"
        else:
            buffers, reason = share_buffers(consensus, SLOTS * _SLOT_BYTES)
            if buffers is None:
                self.missing["ipc"] = reason
            else:
                self._ipc = IpcTransport(consensus, barrier, buffers)
                self.by_name["ipc"] = self._ipc

    def _make_nccl(self, consensus: Consensus, gpus: GpuFacts, has_nccl: bool) -> None:
        reason = "another communicator of these ranks may use it"
        if has_nccl:
            reason = gpus.no_nccl
        if not reason:
            self._nccl, reason = connect(consensus)
        if self._nccl is None:
            self.missing["nccl"] = reason
        else:
            self.by_name["nccl"] = self._nccl

    def close(self) -> None:
        """Free memory and communicators. Collective.

        Raises, on all ranks:
          CollectiveError: a rank cannot free its memory.
        """
        own = [
            transport for transport in (self._ipc, self._nccl) if transport is not None
        ]
        reason = ""
        for transport in own:
            try:
                transport.close()
            except Exception as error:
                reason = reason or f"rank {self._consensus.rank}: {error}"
        reasons = [reason]
        if own and self._consensus.can_free:
            with Pending("freeing memory of GPUs", self._consensus.comm):
                reasons = self._consensus.comm.allgather(reason)
        for reason in filter(None, reasons):
            raise CollectiveError(f"memory of GPUs cannot be freed: {reason}")
