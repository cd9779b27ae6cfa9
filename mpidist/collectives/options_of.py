"""What options mean for one call."""

from __future__ import annotations

import time

from mpidist.options import CommunicationImplementation, CommunicationOptions

__all__ = ["deadline_of", "implementation_of", "is_direct"]


def is_direct(options: CommunicationOptions) -> bool:
    """Return whether the user asked for MPI's own collectives."""
    return options.implementation is CommunicationImplementation.MPI


def implementation_of(options: CommunicationOptions) -> CommunicationImplementation:
    """Return by which means data are to move."""
    assert isinstance(options.implementation, CommunicationImplementation)
    return options.implementation


def deadline_of(options: CommunicationOptions) -> float | None:
    """Return until when to wait, on time.monotonic's clock."""
    seconds = options.timeout_seconds
    return None if seconds is None else time.monotonic() + seconds
