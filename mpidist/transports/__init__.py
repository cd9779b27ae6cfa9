"""Ways to move bytes between ranks, all with the contract of `Transport`."""

from __future__ import annotations

from mpidist.agree import Agreement
from mpidist.transports.base import Transport
from mpidist.transports.mpi import MpiTransport
from mpidist.transports.staging import StagingTransport

__all__ = ["MpiTransport", "StagingTransport", "Transport", "choose"]


def choose(agreement: Agreement, device: str) -> Transport:
    """Return the transport for arrays on `device`, the same kind on every rank."""
    direct = MpiTransport(agreement)
    return StagingTransport(direct) if device.startswith("GPU") else direct
