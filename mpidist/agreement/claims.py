"""What a rank, and a thread of it, is about to do together with others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpidist.agreement.calls import Call

__all__ = ["Claim", "ThreadState"]


class ThreadState(threading.local):
    """Where a thread is: in how many blocks, and which of them it must leave."""

    def __init__(self) -> None:
        self.depth = 0
        # The depth of the blocks that other ranks left by an error, and the error
        self.unwinding: tuple[int, Exception] | None = None


class Claim(NamedTuple):
    """What this rank is about to do, or why it cannot; see `Agreement.require_same`."""

    call: Call
    thread: str = ""  # which of the rank's threads makes the call
    error: Exception | None = None
    timeout: float | None = None
    is_patient: bool = False
    payload: Sequence[Any] = ()
    place: int = 0
