"""The tags of this library's messages: of one communicator, each for one purpose."""

from __future__ import annotations

import enum


@enum.unique
class Tag(enum.IntEnum):
    """Who sends messages.

    A rank that looks for messages with one tag must not receive others: most of these
    share the communicator of a strategy.
    """

    ANNOUNCEMENT = 1  # `consensus.waiting`: where a rank waits
    DEPARTURE = 2  # the same: why a rank has left
    PROBE = 3  # `resilience.deadlocks`
    BLOCK_PART = 4  # `transports.blocks`
    BLOCK_TOTAL = 5
    RING = 6  # `transports.ring`, between nodes
    RING_IN_NODE = 7
    PIECE = 9  # `transports.mpi`: of large arrays, from each rank to each
    MEETING = 8  # `consensus.waiting`: at the end of the program
    CLOCK = 10  # `monitor.timeline`
