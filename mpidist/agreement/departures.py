"""Ranks that have left a collective alone: the others must not wait for them.

A rank may leave a collective by an exception of its own: its deadline is over, a signal
handler raises, there is no memory. From then on its place in the sequence of calls is
unknown, so nothing more can be communicated. It sends the reason to all other ranks,
which look for such messages wherever they wait for longer than a moment.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidist.errors import CollectiveError, DeadlineError

__all__ = ["Departures"]

_TAG = 2  # `waiting` has another one
_MOST_BYTES = 2000  # so small a message is sent at once, whether or not it is received


class Departures:
    """Who has left a collective of one communicator, which is of no use any more then.

    Args:
      comm: the communicator; its tag 2 is used for nothing else.
    """

    def __init__(self, comm: MPI.Intracomm):
        self._comm = comm
        self._others = [r for r in range(comm.Get_size()) if r != comm.Get_rank()]
        self._sent: list[Any] = []  # MPI may still read these
        self._found: str | None = None
        self._lock = threading.Lock()

    def announce(self, reason: str, is_deadline: bool) -> None:
        """Send the other ranks the reason why this one has left. Not collective."""
        data = f"{int(is_deadline)}{reason}".encode(errors="replace")[:_MOST_BYTES]
        buffer = np.frombuffer(data, np.uint8)
        requests = [self._comm.Isend(buffer, rank, _TAG) for rank in self._others]
        self._sent.append((buffer, requests))

    def find(self) -> str | None:
        """Return the reason of a rank that has left, if one has. Any thread."""
        with self._lock:
            message = None if self._found else self._comm.Improbe(tag=_TAG)
            if message is not None:
                buffer = np.zeros(_MOST_BYTES, np.uint8)
                message.Recv(buffer)
                self._found = buffer.tobytes().rstrip(b"\0").decode(errors="replace")
        return self._found and self._found[1:]

    def require_none(self) -> None:
        """Raise if another rank has left.

        Raises:
          DeadlineError: it had waited for longer than its deadline.
          CollectiveError: it left for another reason.
        """
        reason = self.find()
        if reason is not None:
            assert self._found is not None
            kind = DeadlineError if self._found[0] == "1" else CollectiveError
            raise kind(f"this strategy cannot communicate any more: {reason}")
