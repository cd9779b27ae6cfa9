"""Compare the clocks of all ranks, by messages.

Each rank's clock has its own origin and rate. Rank 0 sends a message to each rank and
receives the rank's time. The fastest of several round trips counts; half of it is the
maximum error.
"""

from __future__ import annotations

import time

import numpy as np

from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.comm.consensus.tags import Tag
from mpidist.monitor.clock_samples import ClockSample

__all__ = ["compare_clocks"]

_CALL = "comparing clocks"
_FIRST_ROUNDS = 8  # MPI opens connections in the first rounds
_ROUNDS = 24
_MANY_RANKS = 64
_now = time.monotonic_ns


def compare_clocks(consensus: Consensus) -> ClockSample:
    """Return how this rank's clock differs from rank 0's. Collective."""
    if consensus.size == 1:
        return ClockSample(_now(), 0, 0)
    with consensus.lock:
        consensus.require_same(CallSignature(_CALL))
        with Pending(_CALL, consensus.comm):
            return _exchange(consensus)


def _exchange(consensus: Consensus) -> ClockSample:
    comm, size = consensus.comm, consensus.size
    rounds = _FIRST_ROUNDS + (_ROUNDS if size <= _MANY_RANKS else _FIRST_ROUNDS)
    message = np.zeros(3, np.int64)
    if consensus.rank:
        for _ in range(rounds):
            comm.Recv(message, 0, Tag.CLOCK)
            message[0] = _now()
            comm.Send(message, 0, Tag.CLOCK)
        comm.Recv(message, 0, Tag.CLOCK)
        return ClockSample(*message.tolist())
    for rank in range(1, size):
        best = (1 << 62, 0, 0)
        for _ in range(rounds):
            sent = _now()
            comm.Send(message, rank, Tag.CLOCK)
            comm.Recv(message, rank, Tag.CLOCK)
            received, there = _now(), int(message[0])
            # The remote clock was read about half way between sending and receiving
            offset = there - (sent + received) // 2
            best = min(best, (received - sent, there, offset))
        message[:] = best[1], best[2], -(-best[0] // 2)
        comm.Send(message, rank, Tag.CLOCK)
    return ClockSample(_now(), 0, 0)
