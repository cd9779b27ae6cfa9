"""What options and axes mean for one call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mpidist.options import CommunicationImplementation, CommunicationOptions

__all__ = [
    "axis_field",
    "option_fields",
    "deadline_of",
    "implementation_of",
    "is_direct",
]


def axis_field(axes: Sequence[Any]) -> tuple[str, Any]:
    """Return the axes as part of a call: one if all leaves have the same."""
    return "axis", axes[0] if len(set(axes)) == 1 else tuple(axes)


def option_fields(options: CommunicationOptions) -> tuple[tuple[str, Any], ...]:
    """Return the options as part of a call: all ranks must have the same."""
    return tuple((f"options.{name}", value) for name, value in vars(options).items())


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
