"""The files of the flight recorder: rings of calls, and what the calls are.

A ring has `CALLS` rows of `WORDS` integers of 64 bits: the number of the call, from 1;
its kind, a line of the other file, from 0; when it began, and when it ended or 0, in
nanoseconds on the clock of time.monotonic. The other file has a line of JSON of the
rank, and then one for each kind. Their names have the number of the communicator, which
others of other ranks may have too, and the rank in the world.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "BEGUN",
    "CALLS",
    "ENDED",
    "KIND",
    "NUMBER",
    "WORDS",
    "calls_path",
    "ring_path",
]

CALLS = 1000
WORDS = 4
NUMBER, KIND, BEGUN, ENDED = range(WORDS)


def ring_path(folder: Path, channel: int, rank: int) -> Path:
    """Return the file of a ring."""
    return folder / f"channel-{channel}-rank-{rank:05}.ring"


def calls_path(folder: Path, channel: int, rank: int) -> Path:
    """Return the file of what the calls are."""
    return folder / f"channel-{channel}-rank-{rank:05}.jsonl"
