"""The transports of arrays on GPUs, as far as MPI, drivers and hardware have them."""

from __future__ import annotations

from mpidist.agreement.agree import Agreement
from mpidist.agreement.board import Board
from mpidist.agreement.pending import Pending
from mpidist.errors import CollectiveError
from mpidist.gpu import kernels
from mpidist.gpu.facts import GpuFacts
from mpidist.gpu.ipc import share_buffers
from mpidist.transports.base import Transport
from mpidist.transports.device import DeviceMpiTransport, DeviceTransport
from mpidist.transports.ipc import SLOTS, IpcTransport
from mpidist.transports.nccl import NcclTransport, connect
from mpidist.transports.staging import StagingTransport
from mpidist.transports.ways import Ways

__all__ = ["ORDERED", "DeviceTransports"]

# Those that add in the order of the ranks, the best first
ORDERED = ["ipc", "device", "staging", "ordered"]

_CALL = "MirroredStrategy: transports of GPUs"
_SLOT_BYTES = 16 << 20


class DeviceTransports:
    """All that can be used. Collective to make.

    Args:
      agreement: of all ranks.
      board: where the ranks of this node meet, if they share memory; borrowed.
      host: the transports of arrays on the host.
      gpus: of all ranks.
      has_nccl: whether NCCL may be used.

    Attributes:
      by_name: the transports.
      index: of this rank's GPU.
      missing: why there is no transport of a name.
    """

    def __init__(
        self,
        agreement: Agreement,
        board: Board | None,
        host: Ways,
        gpus: GpuFacts,
        has_nccl: bool,
    ):
        self._agreement = agreement
        self.index = gpus.index
        self.missing: dict[str, str] = {}
        self._ipc: IpcTransport | None = None
        self._nccl: NcclTransport | None = None
        self.by_name: dict[str, Transport] = {
            "staging": StagingTransport(host.default),
            "ordered": StagingTransport(host.by_name["ordered"]),
            "mpi": StagingTransport(host.by_name["mpi"]),
        }
        self._make_device(agreement, gpus)
        self._make_ipc(agreement, board)
        self._make_nccl(agreement, gpus, has_nccl)

    def _make_device(self, agreement: Agreement, gpus: GpuFacts) -> None:
        if not gpus.support.is_aware:
            self.missing["device"] = gpus.support.why
            return
        reason = ""
        try:
            # What keeps a rank from these it must not learn in a collective
            kernels.load()
            adder = DeviceTransport(agreement)
        except Exception as error:
            reason = f"rank {agreement.rank}: {error}"
        reasons = [text for text in agreement.gather(_CALL, reason) if text]
        if reasons:
            self.missing["device"] = reasons[0]
        else:
            self.by_name["device"] = adder
            self.by_name["mpi"] = DeviceMpiTransport(agreement, adder)

    def _make_ipc(self, agreement: Agreement, board: Board | None) -> None:
        if agreement.size == 1:
            self.missing["ipc"] = "there is one replica"
        elif board is None or board.size < agreement.size:
            self.missing["ipc"] = "the ranks are on several nodes"
        else:
            buffers, reason = share_buffers(agreement, SLOTS * _SLOT_BYTES)
            if buffers is None:
                self.missing["ipc"] = reason
            else:
                self._ipc = IpcTransport(agreement, board, buffers)
                self.by_name["ipc"] = self._ipc

    def _make_nccl(self, agreement: Agreement, gpus: GpuFacts, has_nccl: bool) -> None:
        reason = "another communicator of these ranks may use it"
        if has_nccl:
            reason = gpus.no_nccl
        if not reason:
            self._nccl, reason = connect(agreement)
        if self._nccl is None:
            self.missing["nccl"] = reason
        else:
            self.by_name["nccl"] = self._nccl

    def close(self) -> None:
        """Free memory and communicators. Collective.

        Raises, on all ranks:
          CollectiveError: on one of them that cannot be done.
        """
        own = [way for way in (self._ipc, self._nccl) if way is not None]
        reason = ""
        for transport in own:
            try:
                transport.close()
            except Exception as error:
                reason = reason or f"rank {self._agreement.rank}: {error}"
        reasons = [reason]
        if own and self._agreement.broken is None:
            with Pending("freeing memory of GPUs", self._agreement.comm):
                reasons = self._agreement.comm.allgather(reason)
        for found in filter(None, reasons):
            raise CollectiveError(f"memory of GPUs cannot be freed: {found}")
