"""The flight recorder: the last collectives of each rank, also of one that was killed.

Each communicator has a ring of the last 1,000 calls, of four words each. Where the
variable MPIDIST_DUMPS names a folder, the ring is a file there that is mapped into
memory, so that it outlives the process however that ends; beside it is a file of JSON
lines, of what the calls are. Both are removed when the program ends well.
`python -m mpidist diff` compares those of all ranks.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpi4py import MPI

from mpidist.agreement.calls import Call, is_own_code
from mpidist.agreement.flight_files import (
    BEGUN,
    CALLS,
    ENDED,
    KIND,
    NUMBER,
    WORDS,
    calls_path,
    ring_path,
)

__all__ = ["Entry", "Recorder"]

_DUMPS = "MPIDIST_DUMPS"
_BYTES = 8 * WORDS * CALLS
_MOST_KINDS = 100_000  # that are known again
_now = time.monotonic_ns
_getframe = sys._getframe
_PACK_INTO = struct.Struct(f"{WORDS}q").pack_into


class Entry(NamedTuple):
    """One call.

    Args:
      number: counted from 1, the same on all ranks.
      operation: what the user called.
      site: the file and line where.
      begun: when, in seconds on time.monotonic's clock.
      ended: when it was over; None if it is not.
    """

    number: int
    operation: str
    site: str
    begun: float
    ended: float | None


class Recorder:
    """The last calls on one communicator. One thread at a time writes, any may read.

    Where the folder cannot be written, there is a RuntimeWarning and no file.

    Args:
      channel: the number of the communicator, the same on all ranks.
      comm: the communicator.
    """

    def __init__(self, channel: int, comm: MPI.Intracomm):
        self.channel, self._rank = channel, comm.Get_rank()
        self._file_number = MPI.COMM_WORLD.Get_rank()
        self._folder = None
        if comm.Get_size() > 1 and os.environ.get(_DUMPS):
            self._folder = Path(os.environ[_DUMPS])
        self._kinds: dict[Any, int] = {}
        self._made = 0  # kinds, of which the last are known
        self._texts: dict[int, tuple[Call, str]] = {}
        self._codes: list[Any] = []
        self._depths: dict[int, int] = {}
        self._place = -WORDS
        self._calls: Any = None
        self._buffer: Any = bytearray(_BYTES)
        if self._folder is not None:
            world = comm.group.Translate_ranks(None, MPI.COMM_WORLD.group)
            try:
                self._buffer = self._open(self._folder, world)
            except OSError as error:
                warnings.warn(
                    f"the calls of rank {self._rank} are not kept in {_DUMPS}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._words = memoryview(self._buffer).cast("q")

    def _open(self, folder: Path, members: Sequence[int]) -> mmap.mmap:
        """Make the files; return the ring."""
        folder.mkdir(parents=True, exist_ok=True)
        with ring_path(folder, self.channel, self._file_number).open("wb+") as ring:
            ring.truncate(_BYTES)
            mapped = mmap.mmap(ring.fileno(), _BYTES)
        path = calls_path(folder, self.channel, self._file_number)
        self._calls = path.open("w", buffering=1)
        header = {
            "format": 1,
            "channel": self.channel,
            "rank": self._rank,
            "members": list(members),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "monotonic_ns": time.monotonic_ns(),
            "time": time.time(),
        }
        self._calls.write(json.dumps(header) + "\n")
        return mapped

    def begin(self, number: int, call: Call, digest: int) -> None:
        """Note that this rank is about to make a call.

        Args:
          number: counted from 1, the same on all ranks.
          call: says what it is.
          digest: stands for the call.
        """
        begun = _now()
        try:
            frame = _getframe(self._depths[digest])  # the user's, where it was before
            kind = self._kinds[digest, id(frame.f_code), frame.f_lasti]
        except (KeyError, ValueError):
            kind = self._note(call, digest)
        place = self._place + WORDS
        place = 0 if place == WORDS * CALLS else place
        _PACK_INTO(self._buffer, 8 * place, number, kind, begun, 0)
        self._place = place  # not before: other threads look there

    def end(self) -> None:
        """Note that the call is over."""
        if self._place >= 0:
            self._words[self._place + ENDED] = _now()

    def _note(self, call: Call, digest: int) -> int:
        """Return the number of a kind of call that may come for the first time."""
        depth, frame = 2, _getframe(2)
        while frame.f_back is not None and is_own_code(frame.f_code):
            depth, frame = depth + 1, frame.f_back
        if len(self._texts) >= _MOST_KINDS:
            self._forget_kinds()
        self._depths[digest] = depth - 1  # as `begin` counts
        key = digest, id(frame.f_code), frame.f_lasti
        kind = self._kinds.get(key)
        if kind is not None:
            return kind
        kind = self._kinds[key] = self._made
        self._made += 1
        site = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self._texts[kind] = call, site
        self._codes.append(frame.f_code)  # kept, so that its id stays its own
        if self._calls is not None:
            agreed = call.describe()
            text = {"operation": call.operation, "site": site, "agreed": agreed}
            self._calls.write(json.dumps(text) + "\n")
        return kind

    def _forget_kinds(self) -> None:
        """Forget all kinds of calls but those that the ring has."""
        self._kinds.clear()
        self._depths.clear()
        self._codes.clear()
        kept = set(self._words[KIND::WORDS])
        self._texts = {k: text for k, text in self._texts.items() if k in kept}

    def last(self) -> Entry | None:
        """Return the last call, if there was one."""
        place = self._place
        return None if place < 0 else self._entry(place)

    def before_last(self) -> Entry | None:
        """Return the call before the last one."""
        place = (self._place - WORDS) % (WORDS * CALLS)
        return self._entry(place) if self._words[place + NUMBER] else None

    def _entry(self, place: int) -> Entry:
        words = self._words[place : place + WORDS]
        call, site = self._texts[words[KIND]]
        ended = words[ENDED]
        return Entry(
            words[NUMBER],
            call.operation,
            site,
            words[BEGUN] / 1e9,
            ended / 1e9 if ended else None,
        )

    def close(self, is_kept: bool) -> None:
        """Let go of the files; remove them unless they are to be kept."""
        if self._calls is not None:
            self._calls.close()
            self._calls = None
            if not is_kept:
                assert self._folder is not None
                for path in (ring_path, calls_path):
                    path(self._folder, self.channel, self._file_number).unlink(True)
