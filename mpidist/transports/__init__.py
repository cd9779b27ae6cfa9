"""Ways to move bytes between ranks, all with the contract of `Transport`."""

from __future__ import annotations

from mpidist.agreement.agree import Agreement
from mpidist.agreement.board import Board
from mpidist.transports.base import Transport
from mpidist.transports.mpi import MpiTransport
from mpidist.transports.shared import SharedTransport
from mpidist.transports.staging import StagingTransport

__all__ = [
    "MpiTransport",
    "SharedTransport",
    "StagingTransport",
    "Transport",
    "choose",
    "direct",
]


def choose(agreement: Agreement, device: str, board: Board | None = None) -> Transport:
    """Return the transport for arrays on `device`, the same kind on every rank.

    Args:
      agreement: of all ranks.
      device: of this rank.
      board: of all ranks if they are on one node.
    """
    if board is None:
        return direct(agreement, device)
    shared = SharedTransport(agreement, board)
    return StagingTransport(shared) if device.startswith("GPU") else shared


def direct(agreement: Agreement, device: str) -> Transport:
    """Return the transport that calls MPI; see `choose`."""
    host = MpiTransport(agreement)
    return StagingTransport(host) if device.startswith("GPU") else host
