"""How ranks compare digests of calls: by MPI, or in shared memory."""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus.barrier import NodeBarrier, words_of
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.comm.consensus.waiting import Departures, RequestWaiter
from mpidist.util.available_memory import round_up

# A digest, the state of the rank, an address, and the time since its last comparison
_HEADER_BYTES = 32
_RANK_BITS = 20
ALIGNMENT_BYTES = 16  # of arrays on a page
# The state of a rank in a comparison: 0, or one of these
FAILED = 1  # it cannot continue
LARGE = 2  # its payload has integers so large that their sums may overflow
Words = tuple[int, int, int]
_MOST_GATHERED = 16  # ranks; with more, what each gets takes longer than the latency
# Only a rank that comes later than this looks whether others have given up: others need
# time to wait, and to tell it. Who blocks in MPI looks again before that
_LATE_NS = 100_000
# A message of this size between nodes takes about as long as an empty one
GATHERED_BYTES = 256


class Pages(NamedTuple):
    """Arrays of one kind of call in a double buffer of pages.

    Args:
      own: this rank's arrays, on either page.
      everyone: for each array, those of all ranks, on either page.
      size_bytes: of this rank's arrays.
    """

    own: Sequence[Sequence[Any]]
    everyone: Sequence[Sequence[Sequence[Any]]]
    size_bytes: int = 0


class Payload(NamedTuple):
    """Data that travel with a comparison.

    Args:
      pages: where.
      fill: writes into this rank's arrays, and returns whether there are integers so
        large that their sums may overflow.
    """

    pages: Pages
    fill: Callable[[Sequence[Any]], bool]


class Proposal(NamedTuple):
    """The call that this rank is about to make, or the error that prevents it."""

    call: CallSignature
    thread: str = ""  # which of the rank's threads makes the call
    error: Exception | None = None
    timeout: float | None = None
    yield_cpu: bool = False
    payload: Payload | None = None
    address: int = 0
    is_large: bool = False  # see `Payload.fill`
    is_late: bool = False  # see `Consensus.require_same`


class Comparison(Protocol):
    """Compares numbers of all ranks."""

    # Whether all passed the same address last time, and not 0
    is_same_address: bool
    # Whether some rank's payload had large integers last time
    is_any_large: bool
    payload_bytes: int  # how many bytes every rank can send along with its number
    name: str  # of the transport that a payload travels by

    def agrees(
        self, words: Words, deadline: float | None = None, yield_cpu: bool = False
    ) -> bool:
        """Return whether all ranks pass the same number, and none failed. Collective.

        Args:
          words: this rank's number of 62 bits; its state (0, FAILED, or LARGE); an
            address of 62 bits, see `is_same_address`.
          deadline: on time.monotonic's clock.
          yield_cpu: whether to leave the core to other threads while waiting.

        Raises:
          WaitTimeoutError: the deadline has passed; lists the missing ranks.
        """

    def missing(self) -> list[int] | None:
        """Return the ranks for which this one waits; None if unknown. Any thread."""

    def close(self) -> None:
        """Free MPI resources, before the communicator is freed."""

    def last_rank(self) -> int:
        """Return the rank that arrived last; -1 if unknown or this one.

        Undefined if ranks arrived at about the same time.
        """


class MaximumComparison:
    """Compares by an MPI_Iallreduce of 48 bytes, without a payload: for many ranks."""

    is_same_address = False
    is_any_large = False
    payload_bytes = 0
    name = "mpi"

    def __init__(self, comm: MPI.Intracomm, departures: Departures):
        self._comm = comm
        self._rank = comm.Get_rank()
        self._left_ns = time.monotonic_ns()
        self._waiting = RequestWaiter(comm, departures)
        self._departures = departures
        self._calls = 0
        self._mine = np.zeros(6, np.int64)
        self._highest = np.zeros(6, np.int64)

    def agrees(
        self, words: Words, deadline: float | None = None, yield_cpu: bool = False
    ) -> bool:
        self._calls += 1
        mine, highest = self._mine, self._highest
        number, state, address = words
        # All ranks left the last comparison at about the same time, so the one with the
        # longest time since then arrived last
        away = (time.monotonic_ns() - self._left_ns) // 1000 << _RANK_BITS | self._rank
        mine[:] = number, -number, address, -address, state == FAILED, away
        # Never a blocking call: it would not match one of a rank with a deadline
        request = self._comm.Iallreduce(mine, highest, MPI.MAX)
        self._waiting.wait(request, deadline, 2 * self._calls, yield_cpu)
        self._left_ns = time.monotonic_ns()
        # A rank that arrived earlier may have left since; later calls would wait for it
        self._departures.require_none()
        self.is_same_address = bool(address != 0 and highest[2] == -highest[3])
        return bool(highest[4] == 0 and highest[0] == -highest[1])

    def last_rank(self) -> int:
        rank = int(self._highest[5]) & ((1 << _RANK_BITS) - 1)
        return -1 if rank == self._rank else rank

    def missing(self) -> list[int] | None:
        return self._waiting.missing()

    def close(self) -> None:
        """See `Comparison.close`: there is nothing to free."""


class PayloadComparison:  # not an abc.ABC, for which isinstance is slow
    """Compares pages of all ranks; all ranks get all pages.

    Args:
      own: this rank's two pages, a double buffer.
      everyone: those of all ranks, by rank.
      payload_bytes: see `Comparison`; a page has 32 bytes more, or even more.
    """

    def __init__(
        self, own: Sequence[Any], everyone: Sequence[Sequence[Any]], payload_bytes: int
    ):
        assert payload_bytes <= len(own[0]) - _HEADER_BYTES
        self._own = own
        self._everyone = everyone
        self.payload_bytes = payload_bytes
        self.is_same_address = False
        self.is_any_large = False

    def pages(self, kinds: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]) -> Pages:
        """Return where arrays of some dtypes and shapes are on the pages.

        They may have `payload_bytes`, each counted as a multiple of 16.
        """
        own = [[parts[0] for parts in _arrays_on([p], kinds)] for p in self._own]
        everyone = [list(_arrays_on(pages, kinds)) for pages in self._everyone]
        return Pages(own, everyone, sum(array.nbytes for array in own[0]))

    @abc.abstractmethod
    def last_rank(self) -> int:
        """See `Comparison.last_rank`."""

    @abc.abstractmethod
    def turn(self, ahead: int) -> int:
        """Return which page of the double buffer is in use.

        Args:
          ahead: 1 for the next comparison, whose page this rank may write now; 0 for
            the last one, whose pages of all ranks are valid until the next.
        """

    def close(self) -> None:
        return

    def _agree(self, everyone: Sequence[Any], words: Words) -> bool:
        """Return whether all ranks have passed the same number, and none failed."""
        number, _, address = words
        is_same, is_any_large = True, False
        for sent in everyone:
            if sent[0] != number or sent[1]:
                is_same = is_same and sent[0] == number and sent[1] == LARGE
                is_any_large = True
        self.is_any_large = is_any_large
        self.is_same_address = address != 0 and all(w[2] == address for w in everyone)
        return is_same


class GatherComparison(PayloadComparison):
    """Compares by an MPI_Iallgather of pages: a small payload takes no more time.

    Args:
      comm: the ranks.
      departures: of ranks of `comm`.
      payload_bytes: see `Comparison`.
    """

    name = "mpi"

    def __init__(
        self,
        comm: MPI.Intracomm,
        departures: Departures,
        payload_bytes: int = GATHERED_BYTES,
    ):
        self._comm = comm
        self._rank = comm.Get_rank()
        self._left_ns = time.monotonic_ns()
        self._waiting = RequestWaiter(comm, departures)
        self._departures = departures
        self._calls = 0
        size = _HEADER_BYTES + round_up(payload_bytes, ALIGNMENT_BYTES)
        self._send = np.zeros(size, np.uint8)
        self._received = np.zeros((comm.Get_size(), size), np.uint8)
        self._mine: Any = words_of(self._send)
        self._words = list(map(words_of, self._received))
        # No double buffer: what is sent and what is received are separate memory
        super().__init__([self._send], [list(self._received)], payload_bytes)

    def turn(self, ahead: int) -> int:
        return 0

    def agrees(
        self, words: Words, deadline: float | None = None, yield_cpu: bool = False
    ) -> bool:
        self._calls += 1
        mine = self._mine
        mine[0], mine[1], mine[2] = words
        mine[3] = time.monotonic_ns() - self._left_ns  # see MaximumComparison
        # Never a blocking call: it would not match one of a rank with a deadline
        request = self._comm.Iallgather(self._send, self._received)
        self._waiting.wait(request, deadline, 2 * self._calls, yield_cpu)
        self._left_ns = time.monotonic_ns()
        # A rank that arrived earlier may have left since; later calls would wait for it
        if mine[3] > _LATE_NS + min([theirs[3] for theirs in self._words]):
            self._departures.require_none()
        return self._agree(self._words, words)

    def last_rank(self) -> int:
        away = [words[3] for words in self._words]
        rank = away.index(max(away))
        return -1 if rank == self._rank else rank

    def missing(self) -> list[int] | None:
        return self._waiting.missing()


def comparison_by_mpi(comm: MPI.Intracomm, departures: Departures) -> Comparison:
    """Return the comparison by MPI for this number of ranks."""
    is_small = 1 < comm.Get_size() <= _MOST_GATHERED
    return (GatherComparison if is_small else MaximumComparison)(comm, departures)


class SharedMemoryComparison(PayloadComparison):
    """Compares pages in shared memory; all ranks are on one node.

    Args:
      barrier: borrowed.
      payload_bytes: see `Comparison`.
    """

    name = "shared"

    def __init__(self, barrier: NodeBarrier, payload_bytes: int):
        self._barrier = barrier
        own = [pages[barrier.rank] for pages in barrier.page_pairs]
        super().__init__(own, barrier.page_pairs, payload_bytes)

    def turn(self, ahead: int) -> int:
        return (self._barrier.epoch + ahead) & 1

    def missing(self) -> list[int] | None:
        return self._barrier.missing()

    def last_rank(self) -> int:
        return self._barrier.last_rank

    def agrees(
        self, words: Words, deadline: float | None = None, yield_cpu: bool = False
    ) -> bool:
        barrier = self._barrier
        everyone = barrier.word_pairs[(barrier.epoch + 1) & 1]
        mine = everyone[barrier.rank]
        mine[0], mine[1], mine[2] = words
        barrier.wait(deadline, yield_cpu)
        return self._agree(everyone, words)


def _arrays_on(
    pages: Sequence[Any], kinds: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]
) -> Iterator[list[Any]]:
    start = _HEADER_BYTES
    for dtype, shape in kinds:
        stop = start + math.prod(shape) * dtype.itemsize
        yield [page[start:stop].view(dtype).reshape(shape) for page in pages]
        start = round_up(stop, ALIGNMENT_BYTES)
