"""How ranks find out if all are about to do the same: by MPI, or on a node's board."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus.barrier import Board
from mpidist.comm.consensus.waiting import Departures, Waiting

__all__ = ["BoardComparison", "Comparison", "MpiComparison", "Telling"]

_HEADER_BYTES = 32  # a number, whether the rank has failed, and a place
_ALIGNMENT_BYTES = 16
_KNOWN = 1000  # kinds of payloads whose places are remembered


class Telling(NamedTuple):
    """What a rank tells the others in a comparison, and how it waits for them.

    Args:
      number: of 62 bits.
      has_failed: whether this rank cannot go on.
      payload: contiguous arrays of at most `Comparison.payload_bytes`, each counted as
        a multiple of 16 bytes.
      deadline: on time.monotonic's clock.
      is_patient: whether to leave the core to other threads while waiting.
      place: of 62 bits; it may differ, see `Comparison.is_same_place`.
    """

    number: int
    has_failed: bool = False
    payload: Sequence[Any] = ()
    deadline: float | None = None
    is_patient: bool = False
    place: int = 0


class Comparison(Protocol):
    """One way to compare numbers; every method but `payloads` is collective."""

    # Whether all told the same place last time, and not 0
    is_same_place: bool
    payload_bytes: int  # how much every rank can tell the others along with its number

    def is_same(self, telling: Telling) -> bool:
        """Return whether all ranks tell the same number, and none has failed.

        Raises:
          LateError: the deadline is over; says who was not heard of.
        """

    def exchange(self, number: int, array: Any) -> list[Any] | None:
        """Return the arrays of all ranks, None if `is_same` would return False.

        They are valid until the next comparison.

        Args:
          number: of 62 bits.
          array: a payload.
        """

    def missing(self) -> list[int] | None:
        """Return the ranks that this one waits for, if it is known. Any thread."""

    def payloads(self, like: Sequence[Any]) -> Iterator[list[Any]]:
        """Yield for each array of the last payload those of all ranks, by rank.

        They are valid until the next comparison.

        Args:
          like: arrays of the same shapes and dtypes in the same order.
        """


class MpiComparison:
    """Compares by an MPI_Iallreduce of 40 bytes, without a payload."""

    is_same_place = False
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

    def missing(self) -> list[int] | None:
        """See `Comparison.missing`."""
        return self._waiting.missing()

    def exchange(self, number: int, array: Any) -> list[Any] | None:
        """See `Comparison.exchange`; no array but one without bytes can come here."""
        is_same = self.is_same(Telling(number))
        return [array] * self._comm.Get_size() if is_same else None

    def payloads(self, like: Sequence[Any]) -> Iterator[list[Any]]:
        """See `Comparison.payloads`."""
        return iter(())


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
        self._known: dict[Any, list[list[Any]]] = {}

    def is_same(self, telling: Telling) -> bool:
        """See `Comparison.is_same`."""
        board, payload = self._board, telling.payload
        turn = (board.meetings + 1) & 1
        for array, places in zip(payload, self._places(payload), strict=True):
            places[turn][board.rank][...] = array
        words, place = board.both_words[turn], telling.place
        mine = words[board.rank]
        mine[1], mine[2] = telling.has_failed, place
        is_same = self._compare(
            words, telling.number, telling.deadline, telling.is_patient
        )
        self.is_same_place = place != 0 and all(word[2] == place for word in words)
        return is_same

    def missing(self) -> list[int] | None:
        """See `Comparison.missing`."""
        return self._board.missing()

    def exchange(self, number: int, array: Any) -> list[Any] | None:
        """See `Comparison.exchange`."""
        places = self._known.get((array.dtype, array.shape))
        if places is None:
            (places,) = self._places((array,))
        board = self._board
        turn = (board.meetings + 1) & 1
        parts = places[turn]
        parts[board.rank][...] = array
        words = board.both_words[turn]
        words[board.rank][1] = False
        return parts if self._compare(words, number) else None

    def _compare(
        self,
        words: Sequence[Any],
        number: int,
        deadline: float | None = None,
        is_patient: bool = False,
    ) -> bool:
        """Meet, and compare this number and whether ranks have failed."""
        words[self._board.rank][0] = number
        self._board.meet(deadline, is_patient)
        return all(not (word[0] != number or word[1]) for word in words)

    def payloads(self, like: Sequence[Any]) -> Iterator[list[Any]]:
        """See `Comparison.payloads`."""
        turn = self._board.meetings & 1
        for places in self._places(like):
            yield places[turn]

    def _places(self, payload: Sequence[Any]) -> Sequence[list[list[Any]]]:
        """Return for each array where it is: on both pages of each rank, as arrays."""
        if len(payload) != 1:
            return list(self._find_places(payload))
        kind = payload[0].dtype, payload[0].shape
        if kind not in self._known:
            if len(self._known) > _KNOWN:
                self._known.clear()
            (self._known[kind],) = self._find_places(payload)
        return [self._known[kind]]

    def _find_places(self, payload: Sequence[Any]) -> Iterator[list[list[Any]]]:
        start = _HEADER_BYTES
        for array in payload:
            stop = start + array.nbytes
            dtype, shape = array.dtype, array.shape
            yield [
                [page[start:stop].view(dtype).reshape(shape) for page in pages]
                for pages in self._board.both_pages
            ]
            start = -(-stop // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
