"""A barrier in shared memory, with pages that every rank writes and all ranks read.

A rank arrives by incrementing its own counter, the epoch, and waits until the others
have done so: a third of a microsecond, where MPI's small collectives take one to three.
Data written to a rank's page before the barrier are visible to all ranks after it.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpidist.comm.consensus.pending import Pending, gather_likely_equal
from mpidist.comm.consensus.waiting import (
    Departures,
    WaitTimeoutError,
    least_pause,
    pause_seconds,
)
from mpidist.util.available_memory import (
    LINE_BYTES,
    PAGE_BYTES,
    available_cores,
    round_up,
)

_ALIASED_BYTES = 4096  # see `_lay_out`
_SLOTS = 3
_SPINS = 1000  # of 50 nanoseconds
_YIELD_SECONDS = 1e-4


@functools.cache
def memory_fence() -> Callable[[], None]:
    """Return what orders this process's loads and stores: MPI_Win_sync.

    MPI promises that for windows in shared memory (MPI-4.1, section 12.7). MPICH and
    Open MPI execute a full fence of the processor (on Arm, `dmb ish`), which orders all
    memory, so one small window of this process is enough. It stays until the end. It
    has to be of shared memory: Open MPI's windows over RDMA have no fence.
    """
    window = MPI.Win.Allocate_shared(LINE_BYTES, 1, comm=MPI.COMM_SELF)
    window.Lock_all(MPI.MODE_NOCHECK)  # MPI_Win_sync needs an epoch
    return window.Sync


class NodeBarrier:
    """A barrier for ranks that share memory. Collective to create.

    One thread at a time may use it. After a timeout it cannot be used any more.

    Args:
      comm: the ranks; borrowed.
      memory: `count_bytes` bytes that they share, all zero.
      page_bytes: how much each rank can write for one barrier.
      slot_bytes: of each of three more pieces of memory of each rank, see `slots`.
      names: the ranks' numbers in error messages.
      yield_cpu: whether to yield the core to other threads while waiting.
      departures: detects ranks that have left a collective, or died.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        memory: npt.NDArray[np.uint8],
        page_bytes: int,
        slot_bytes: int = 0,
        names: Sequence[int] | None = None,
        yield_cpu: bool = False,
        departures: Departures | None = None,
    ):
        self._comm = comm
        self._departures = departures
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._names = list(range(self.size) if names is None else names)
        self.page_bytes, self.slot_bytes = round_up(page_bytes), round_up(slot_bytes)
        pieces = _lay_out(self.page_bytes, self.slot_bytes)
        self._fence = memory_fence()
        with Pending("making a barrier", comm):
            usable = gather_likely_equal(comm, available_cores())
            cores = len(set().union(*usable))
        parts = np.split(memory, self.size)
        parts[self.rank][:] = 0  # page faults of this rank's part happen now
        counts = [words_of(part[:8]) for part in parts]
        self._mine = counts[self.rank]
        self._others = [
            (name, counts[rank])
            for rank, name in enumerate(self._names)
            if rank != self.rank
        ]
        # The rank that arrived last at the last barrier; -1 for this one
        self.last_rank = -1
        self._counts = counts
        # A double buffer: `epoch & 1` selects the page. A rank that arrives at the next
        # barrier has read the pages of the last one, so that they may be overwritten
        page, next_page, *slots = ([p[piece] for p in parts] for piece in pieces)
        self.page_pairs = [page, next_page]
        # For blocks of large arrays; transports use them in rotation
        self.slots = slots
        # The first words of the pages, as integers
        self.word_pairs = [
            [words_of(page) for page in pages] for pages in self.page_pairs
        ]
        self.epoch = 0
        self.cores = cores  # of all ranks together
        self._has_cores = self.size <= cores
        self._least_pause = least_pause(self.size / cores)
        self._spins = _SPINS if self._has_cores and not yield_cpu else 0

    @staticmethod
    def count_bytes(ranks: int, page_bytes: int, slot_bytes: int = 0) -> int:
        """Return how much memory a barrier of so many ranks needs."""
        last = _lay_out(round_up(page_bytes), round_up(slot_bytes))[-1].stop
        return ranks * round_up(last, PAGE_BYTES)

    def wait(
        self,
        deadline: float | None = None,
        yield_cpu: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Wait until all ranks have arrived. Collective.

        Args:
          deadline: on time.monotonic's clock; may differ between ranks.
          yield_cpu: whether to yield the core to other threads while waiting.
          meanwhile: called repeatedly during longer waits.

        Raises:
          WaitTimeoutError: the deadline has passed; its argument is the list of missing
            ranks.
          RankLostError: a rank has died.
          CollectiveError: see `Departures.require_none`.
        """
        self.epoch = epoch = self.epoch + 1
        self._fence()
        self._mine[0] = epoch
        self.last_rank, begun = -1, 0.0
        for name, count in self._others:
            if count[0] < epoch:
                self.last_rank = name  # all before it have arrived
                begun = begun or time.monotonic()
                self._wait(count, epoch, begun, deadline, yield_cpu, meanwhile)
        self._fence()

    def _wait(
        self,
        count: Any,
        epoch: int,
        begun: float,
        deadline: float | None,
        yield_cpu: bool,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        # Spin first: if every rank has a core, the others arrive within microseconds
        for _ in range(0 if yield_cpu else self._spins):
            if count[0] >= epoch:
                return
        start = now = time.monotonic()
        try:
            while count[0] < epoch:
                # Let other threads on this core run, then MPI, which may have messages
                # to forward
                if self._has_cores and now - start < _YIELD_SECONDS:
                    os.sched_yield()  # no sleep is as short
                else:
                    time.sleep(pause_seconds(now - begun, self._least_pause))
                    self._progress_mpi(is_endless=deadline is None)
                    if meanwhile is not None:
                        meanwhile()
                now = time.monotonic()
                if deadline is not None and now > deadline:
                    raise WaitTimeoutError(self._missing(epoch))
        finally:
            if self._departures is not None:
                self._departures.waiter = 0

    def _progress_mpi(self, is_endless: bool) -> None:
        """Let MPI make progress; raise if a rank has died or has left a collective."""
        if self._departures is None:
            self._comm.Iprobe()
        else:
            self._departures.require_none()
            self._departures.waiter = threading.get_ident() if is_endless else 0

    def missing(self) -> list[int]:
        """Return the ranks that have not arrived at the last barrier. Any thread."""
        return self._missing(self.epoch)

    def _missing(self, epoch: int) -> list[int]:
        named = zip(self._names, self._counts, strict=True)
        return [name for name, count in named if count[0] < epoch]

    def close(self) -> None:
        """Let go of the memory. Not collective."""
        del self._mine, self._others, self._counts, self.word_pairs, self.page_pairs
        del self.slots


def _lay_out(page_bytes: int, slot_bytes: int) -> list[slice]:
    """Return the offsets of two pages and three slots after the first line.

    Large arrays usually begin near a multiple of 4 KiB. Processors first compare the
    last 12 bits of addresses. A read from such an array then falsely conflicts with a
    write to a copy that begins at nearly the same 12 bits (4K aliasing), which takes
    three times as long. So copies begin in the middle of a page.
    """
    pieces, end = [], LINE_BYTES
    for size in (page_bytes, page_bytes, *[slot_bytes] * _SLOTS):
        start = round_up(end, _ALIASED_BYTES) + _ALIASED_BYTES // 2
        end = start + size
        pieces.append(slice(start, end))
    return pieces


def words_of(memory: Any) -> memoryview:
    """Return memory as integers of 64 bits, which Python reads faster than NumPy's."""
    return memoryview(memory.view(np.int64))
