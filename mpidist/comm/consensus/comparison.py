"""How ranks find out if all are about to do the same: by MPI, or on a node's board."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus.barrier import Board
from mpidist.comm.consensus.calls import Call
from mpidist.comm.consensus.waiting import Departures, Waiting

__all__ = [
    "BoardComparison",
    "Claim",
    "Comparison",
    "MpiComparison",
    "Pages",
    "Payload",
    "Telling",
]

_HEADER_BYTES = 32  # a number, what state the rank is in, and a place
_ALIGNMENT_BYTES = 16
# The state is 1 if the rank has failed, and this if its payload has large integers
_LARGE = 2


class Pages(NamedTuple):
    """Arrays of one kind of call on the pages of a board, of which two take turns.

    Args:
      own: this rank's arrays, on the one page and on the other.
      everyone: for each array that of every rank, likewise.
    """

    own: Sequence[Sequence[Any]]
    everyone: Sequence[Sequence[Sequence[Any]]]


class Payload(NamedTuple):
    """What a rank writes for the others before a comparison.

    Args:
      pages: where.
      fill: writes into this rank's arrays, and returns whether there are integers so
        large that their sums may overflow.
    """

    pages: Pages
    fill: Callable[[Sequence[Any]], bool]


class Telling(NamedTuple):
    """What a rank tells the others in a comparison, and how it waits for them.

    Args:
      number: of 62 bits.
      has_failed: whether this rank cannot go on.
      is_large: whether the payload that was written has large integers.
      deadline: on time.monotonic's clock.
      is_patient: whether to leave the core to other threads while waiting.
      place: of 62 bits; it may differ, see `Comparison.is_same_place`.
    """

    number: int
    has_failed: bool = False
    is_large: bool = False
    deadline: float | None = None
    is_patient: bool = False
    place: int = 0


class Claim(NamedTuple):
    """What this rank is about to do, or why it cannot; see `Agreement.require_same`."""

    call: Call
    thread: str = ""  # which of the rank's threads makes the call
    error: Exception | None = None
    timeout: float | None = None
    is_patient: bool = False
    payload: Payload | None = None
    place: int = 0
    is_large: bool = False  # see `Telling`


class Comparison(Protocol):
    """One way to compare numbers."""

    # Whether all told the same place last time, and not 0
    is_same_place: bool
    # Whether some rank's payload had large integers last time
    is_any_large: bool
    payload_bytes: int  # how much every rank can tell the others along with its number

    def is_same(self, telling: Telling) -> bool:
        """Return whether all ranks tell the same number, and none failed. Collective.

        Raises:
          LateError: the deadline is over; says who was not heard of.
        """

    def agrees(self, number: int, is_large: bool = False) -> bool:
        """Do what `is_same` does, for a number and the kind of payload alone."""

    def missing(self) -> list[int] | None:
        """Return the ranks that this one waits for, if it is known. Any thread."""


class MpiComparison:
    """Compares by an MPI_Iallreduce of 40 bytes, without a payload."""

    is_same_place = False
    is_any_large = False
    payload_bytes = 0

    def __init__(self, comm: MPI.Intracomm, departures: Departures):
        self._comm = comm
        self._departures = departures
        self._waiting = Waiting(comm, departures)
        self._calls = 0
        self._mine = np.zeros(5, np.int64)
        self._highest = np.zeros(5, np.int64)

    def is_same(self, telling: Telling) -> bool:
        """See `Comparison.is_same`."""
        self._calls += 1
        number, place = telling.number, telling.place
        mine, highest = self._mine, self._highest
        mine[:] = number, -number, place, -place, telling.has_failed
        # Never a blocking call: it would not match one of a rank with a deadline
        request = self._comm.Iallreduce(mine, highest, MPI.MAX)
        deadline = math.inf if telling.deadline is None else telling.deadline
        self._waiting.wait(request, deadline, self._calls, telling.is_patient)
        # A rank that came before this one may have left since, so what follows would
        # wait for it
        self._departures.require_none()
        self.is_same_place = bool(place != 0 and highest[2] == -highest[3])
        return bool(highest[4] == 0 and highest[0] == -highest[1])

    def agrees(self, number: int, is_large: bool = False) -> bool:
        """See `Comparison.agrees`."""
        return self.is_same(Telling(number))

    def missing(self) -> list[int] | None:
        """See `Comparison.missing`."""
        return self._waiting.missing()


class BoardComparison:
    """Compares what all ranks have written on a board; all must be on one node.

    Args:
      board: borrowed.
      payload_bytes: see `Comparison`; a page has 32 bytes more, or even more.
    """

    def __init__(self, board: Board, payload_bytes: int):
        assert payload_bytes <= board.page_bytes - _HEADER_BYTES
        self._board = board
        self.payload_bytes = payload_bytes
        self.is_same_place = False
        self.is_any_large = False

    def pages(self, kinds: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]) -> Pages:
        """Return where arrays of some dtypes and shapes are on the pages.

        They may have `payload_bytes`, each counted as a multiple of 16.
        """
        everyone = [list(_arrays_on(pages, kinds)) for pages in self._board.both_pages]
        rank = self._board.rank
        return Pages([[parts[rank] for parts in page] for page in everyone], everyone)

    def next_page(self, pages: Pages) -> Sequence[Any]:
        """Return the arrays that this rank may write before the next comparison."""
        return pages.own[(self._board.meetings + 1) & 1]

    def payload(self, pages: Pages) -> Sequence[Sequence[Any]]:
        """Return the arrays of all ranks; they are valid until the next comparison."""
        return pages.everyone[self._board.meetings & 1]

    def is_same(self, telling: Telling) -> bool:
        """See `Comparison.is_same`."""
        state = telling.has_failed | _LARGE * telling.is_large
        board = self._board
        words, place = board.both_words[(board.meetings + 1) & 1], telling.place
        words[board.rank][2] = place
        is_same = self._compare(
            words, telling.number, state, telling.deadline, telling.is_patient
        )
        self.is_same_place = place != 0 and all(word[2] == place for word in words)
        return is_same

    def missing(self) -> list[int] | None:
        """See `Comparison.missing`."""
        return self._board.missing()

    def agrees(self, number: int, is_large: bool = False) -> bool:
        """See `Comparison.agrees`."""
        board = self._board
        words = board.both_words[(board.meetings + 1) & 1]
        words[board.rank][2] = 0  # other ranks may tell a place
        self.is_same_place = False
        return self._compare(words, number, _LARGE if is_large else 0)

    def _compare(
        self,
        words: Sequence[Any],
        number: int,
        state: int,
        deadline: float | None = None,
        is_patient: bool = False,
    ) -> bool:
        """Meet, and compare this number and whether ranks have failed."""
        mine = words[self._board.rank]
        mine[0], mine[1] = number, state
        self._board.meet(deadline, is_patient)
        is_same, is_any_large = True, False
        for word in words:
            if word[0] != number or word[1]:
                is_same = is_same and word[0] == number and word[1] == _LARGE
                is_any_large = True
        self.is_any_large = is_any_large
        return is_same


def _arrays_on(
    pages: Sequence[Any], kinds: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]
) -> Iterator[list[Any]]:
    """Yield, for each kind, such an array on each of some ranks' pages."""
    start = _HEADER_BYTES
    for dtype, shape in kinds:
        stop = start + math.prod(shape) * dtype.itemsize
        yield [page[start:stop].view(dtype).reshape(shape) for page in pages]
        start = -(-stop // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
