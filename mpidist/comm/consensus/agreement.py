"""Failing on all ranks at once.

Every collective of mpidist starts with one small MPI_Allreduce of the same form, in
which each rank tells what it is about to do, or that it has failed. So ranks that do
different things, or of which one cannot go on, find out before any data move, and all
raise. In the good case this costs the latency of a 24-byte Allreduce.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

from mpi4py import MPI

from mpidist.comm.consensus.barrier import Board
from mpidist.comm.consensus.calls import Call, digest, plain_call
from mpidist.comm.consensus.comparison import (
    Claim,
    Comparison,
    GatherComparison,
    MaximumComparison,
    Payload,
    PayloadComparison,
)
from mpidist.comm.consensus.diagnostics import (
    forget_locals,
    left,
    no_such_thread,
    not_arrived,
    not_finished,
    raise_by,
    record_of,
)
from mpidist.comm.consensus.failures import Losses
from mpidist.comm.consensus.flight_recorder import Recorder
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.threads import ProgressCounters, ThreadState, Turns
from mpidist.comm.consensus.waiting import Departures, LateError, Waiting
from mpidist.errors import CollectiveError, DeadlineError, MpidistError
from mpidist.util.forks import FORKED, call_in_child
from mpidist.util.tracebacks import fold

__all__ = ["Agreement"]

T = TypeVar("T")
_MOST_GATHERED = 16  # ranks


class Agreement:
    """The agreement of all ranks of one communicator, which must be private to it.

    Args:
      comm: the communicator.
      comparison: how ranks are compared; by MPI if it is None.
      losses: of these ranks; None for those of `comm` alone.
    """

    # Those of this process in the order of their making, which is that of all ranks
    in_use: ClassVar[list[Agreement]] = []
    made: ClassVar[int] = 0  # of more than one rank

    def __init__(
        self,
        comm: MPI.Intracomm,
        comparison: Comparison | None = None,
        losses: Losses | None = None,
    ):
        self.comm = comm
        self.losses = losses or Losses(comm)
        self._own_losses = None if losses else self.losses
        self.departures = Departures(comm)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        if comparison is None:
            # With more ranks, what each receives would take longer than the latency
            is_small = self.size <= _MOST_GATHERED
            kind = GatherComparison if is_small else MaximumComparison
            comparison = kind(comm, self.departures)
        self.comparison: Comparison = comparison
        self.calls = 0
        self.broken: str | None = None
        self.pids: dict[int, int] = {}  # of ranks that can be watched
        self._agreed_id = 0  # of an error that is raised on all ranks
        self._waiting = Waiting(comm, self.departures)
        # Ranks may have made unlike numbers, of other communicators
        with Pending("making a communicator's agreement", comm):
            channel = comm.allreduce(Agreement.made, MPI.MAX)
        self.recorder = Recorder(channel, comm)
        self._begin = self.recorder.begin
        check = self.losses.check if self.losses.is_needed else None
        self.turns = Turns(self.recorder.end, check, self._on_error)
        self.progress = ProgressCounters()
        self._thread = ThreadState()
        if self.size > 1:
            Agreement.made = channel + 1
            Agreement.in_use.append(self)

    def close(self) -> None:
        """Forget it, before its communicator is freed."""
        if self in Agreement.in_use:
            Agreement.in_use.remove(self)
        self.recorder.close(self.broken is not None or self.losses.ranks != ())
        if self._own_losses is not None:
            self._own_losses.close()

    def require_same(
        self,
        call: Call,
        error: Exception | None = None,
        timeout: float | None = None,
        is_patient: bool = False,
        payload: Payload | None = None,
        address: int = 0,
    ) -> bool:
        """Return when all ranks are in the same call and none failed. Collective.

        Returns whether all have passed the same `address`, other than 0.

        Args:
          call: what this rank is about to do.
          error: the reason why this rank cannot, if so.
          timeout: seconds to wait for the other ranks; None for ever.
          is_patient: whether to leave the core to other threads while waiting.
          payload: see `exchange`.
          address: see `Comparison.agrees`.

        Raises, on all ranks:
          The error of a rank that passed one (each failed rank raises its own, the
            others a copy of the first).
          DivergenceError: the operations differ.
          MismatchError: the operations agree, but not the rest of the call.
          DeadlineError: on the ranks that waited for more than `timeout`.
        """
        if self._thread.unwinding is not None:
            raise self._thread.unwinding[1]
        if self.size == 1:
            if error is not None:
                raise error
            return address != 0
        with self.turns:
            thread = self.turns.thread()
            if thread and error is None:
                error = self.turns.ambiguity(call.operation)
            claim = Claim(call, thread, error, timeout, is_patient, payload, address)
            claim = self._ready(claim)
            if not self._is_agreed(claim):
                self._settle(claim)
            return self.comparison.is_same_address

    def compare(
        self, call: Call, number: int, address: int = 0, timeout: float | None = None
    ) -> bool:
        """Do what `require_same` does, for a call whose digest is `number`. Collective.

        For calls that are repeated: it takes less time.
        """
        if timeout is not None or self.size == 1 or not self._is_plain():
            return self.require_same(call, timeout=timeout, address=address)
        self.calls += 1
        self._begin(self.calls, call, number)
        number ^= self.progress.digest
        comparison = self.comparison
        if not comparison.agrees(number, address=address):
            self._settle(Claim(call, address=address))
        return comparison.is_same_address

    def exchange(
        self,
        call: Call,
        number: int,
        payload: Payload,
        timeout: float | None = None,
    ) -> Sequence[Sequence[Any]]:
        """Do what `compare` does, and return the arrays of all ranks. Collective.

        Args:
          call: see `compare`.
          number: its digest.
          payload: this rank's arrays.
          timeout: see `require_same`.

        Returns, for each array, that of every rank: valid until the next comparison.
        Raises, on all ranks: what `payload.fill` raises; see also `require_same`.
        """
        comparison = self.comparison
        assert isinstance(comparison, PayloadComparison)
        if timeout is not None or not self._is_plain():
            self.require_same(call, timeout=timeout, payload=payload)
            return comparison.payload(payload.pages)
        try:
            is_large = payload.fill(comparison.next_page(payload.pages))
        except Exception as error:
            self.require_same(call, error)
            raise
        self.calls += 1
        self._begin(self.calls, call, number)
        if not comparison.agrees(number ^ self.progress.digest, is_large):
            self._settle(Claim(call, payload=payload, is_large=is_large))
        return comparison.payload(payload.pages)

    def _is_plain(self) -> bool:
        """Return whether nothing can keep this rank from telling a call's number."""
        if self.broken is not None or self.losses.ranks:
            return False
        return self._thread.unwinding is None and self.turns.is_creator()

    def _settle(self, claim: Claim) -> None:
        """Raise what keeps the ranks apart, or let another thread go first."""
        is_agreed = False
        while not is_agreed:
            first = self._resolve(claim)
            if first != claim.thread and not self.turns.yield_to(first, claim.timeout):
                # Take the missing thread's place, to tell the others
                error = no_such_thread(claim.call, self.rank, first)
                claim = claim._replace(thread=first, error=error)
            claim = self._ready(claim)
            is_agreed = self._is_agreed(claim)

    def _ready(self, claim: Claim) -> Claim:
        """Return a claim whose payload is written, or with the error that prevents it.

        Raises what keeps this rank from communicating. Nothing may be written then:
        other ranks may still be reading what this one told them before.
        """
        if self.losses.ranks:
            raise self.losses.error() from claim.error
        self._require_unbroken(claim.error)
        if claim.payload is None or claim.error is not None:
            return claim
        assert isinstance(self.comparison, PayloadComparison)
        pages, fill = claim.payload
        try:
            return claim._replace(is_large=fill(self.comparison.next_page(pages)))
        except Exception as error:
            return claim._replace(error=error)

    def _is_agreed(self, claim: Claim) -> bool:
        """Tell the other ranks, and return whether all said the same."""
        call, thread, error, timeout, is_patient, _, address, is_large = claim
        if thread:
            call = call._replace(options=(*call.options, ("thread", thread)))
        number = digest(call.without_step())
        self.calls += 1
        self._begin(self.calls, call, number)
        number ^= self.progress.digest ^ call.step_digest()
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            return self.comparison.agrees(
                number, is_large, error is not None, address, deadline, is_patient
            )
        except LateError as late:
            self._break_off(late, call.operation, timeout)

    def _require_unbroken(self, error: Exception | None) -> None:
        """Raise `error`, or a CollectiveError, if this rank cannot communicate."""
        if self.broken is not None:
            raise error or CollectiveError(
                f"this strategy cannot communicate any more: {self.broken}"
            )

    def _on_error(self, error: BaseException) -> None:
        """Mark the strategy as broken unless all ranks raise this error.

        Else the others are in the middle of this collective, or in the next one, and
        another call of this rank would be taken for theirs.
        """
        agreed, self._agreed_id = self._agreed_id, 0
        unwinding = self._thread.unwinding
        if id(error) == agreed or (unwinding is not None and error is unwinding[1]):
            return
        self.leave(error)

    @contextlib.contextmanager
    def same_on_all(self) -> Iterator[None]:
        """Return a context for checks of what all ranks have alike, in a collective.

        An error in it is raised on all ranks, so it breaks nothing.
        """
        try:
            yield
        except MpidistError as error:
            self.note_agreed(error)
            raise

    def note_agreed(self, error: BaseException) -> None:
        """Note that this error leaves the collective on all ranks."""
        self._agreed_id = id(error)

    def leave(self, error: BaseException) -> None:
        """Mark the strategy as broken, as this rank alone left a collective."""
        if self.size == 1 or self.broken is not None:
            return
        if self.losses.is_needed:
            self.losses.check(error)
            if self.losses.ranks:
                return
        reason = self.departures.find()
        if reason is None:
            self._break(left(self.rank, error, self.recorder.last()))
        else:
            self.broken = reason

    def _break(self, reason: str, is_deadline: bool = False) -> None:
        """Mark the strategy as broken on this rank, and let the others know."""
        self.broken = reason
        self.departures.announce(reason, is_deadline)

    def raise_together(
        self, operation: str, error: Exception | None, timeout: float | None = None
    ) -> None:
        """Raise on all ranks if any rank has an error. Collective."""
        self.require_same(Call(operation), error, timeout)

    def block(self, operation: str, fn: Callable[[], T]) -> T:
        """Return `fn()`, which all ranks run, and may communicate. Collective.

        All ranks leave it together: an error that `fn` raises on one rank is raised on
        all, also on those that wait in a collective inside it.
        """
        self.enter_block()
        error: BaseException | None = None
        try:
            result = fn()
        except BaseException as caught:
            fold(caught)  # what other ranks show of it
            error = caught
        try:
            self.leave_block(operation, error)
        except BaseException as raised:
            forget_locals(raised)
            raise
        finally:
            del error
        return result

    def enter_block(self) -> None:
        """Begin what `leave_block` ends, where a function for `block` is unhandy."""
        self._thread.depth += 1

    def leave_block(
        self,
        operation: str,
        error: BaseException | None,
        timeout: float | None = None,
    ) -> None:
        """Leave a block with this rank's error, if any, as `block` does. Collective.

        `timeout` is that of `require_same`.

        What is no Exception, such as a KeyboardInterrupt, is raised here alone. If not
        all ranks leave by one, their next collective is an error on all.
        """
        state = self._thread
        state.depth -= 1
        if error is not None and not isinstance(error, Exception):
            self.progress.add("the number of interrupted calls", 1)
            raise error
        if state.unwinding is not None:
            # The others left it when this rank was inside
            depth, reason = state.unwinding
            if depth == state.depth:
                state.unwinding = None
            raise error or reason
        if error is None and timeout is None and self.size > 1:
            with self.turns:
                self.compare(*plain_call(operation))
        else:
            self.raise_together(operation, error, timeout)

    def prepare(self, operation: str, fn: Callable[[], T]) -> T:
        """Return `fn()`, which must not communicate; its error is raised on all ranks.

        Not collective in itself: the collective `operation` must follow, in which the
        other ranks learn of the error.
        """
        try:
            return fn()
        except Exception as error:
            try:
                self.raise_together(operation, error)
            except Exception as raised:
                forget_locals(raised)
                raise
            raise
        except BaseException as error:
            self.leave(error)
            raise

    def root_only(self, operation: str, fn: Callable[[], T], root: int = 0) -> T:
        """Return what `fn()` returns on rank `root`, which alone calls it. Collective.

        Raises: what `fn` raises, on all ranks.
        """
        payload, error = b"", None
        if self.rank == root:
            try:
                payload = pickle.dumps(fn())
            except Exception as caught:
                error = caught
        with self.turns:
            self.require_same(Call(operation, (("root", root),)), error)
            if self.size > 1:
                self.departures.require_none()
                payload = self.comm.bcast(payload, root)
        return pickle.loads(payload)  # type: ignore[no-any-return]

    def gather(self, operation: str, value: T) -> list[T]:
        """Return each rank's `value`, a small object, by rank: pickled. Collective."""
        payload = self.prepare(operation, lambda: pickle.dumps(value))
        with self.turns:
            self.require_same(Call(operation))
            if self.size == 1:
                return [value]
            self.departures.require_none()
            return [pickle.loads(data) for data in self.comm.allgather(payload)]

    def wait(
        self,
        request: MPI.Request,
        deadline: float,
        operation: str,
    ) -> None:
        """Wait for an MPI request until `deadline`, on time.monotonic's clock.

        Raises:
          DeadlineError: names the ranks that were not heard of. The communicator
            cannot be used afterwards.
        """
        start = time.monotonic()
        try:
            self._waiting.wait(request, deadline, self.calls)
        except LateError as late:
            self._break_off(late, operation, deadline - start)

    def meet(self, board: Board, operation: str, deadline: float | None) -> None:
        """Meet the other ranks on a board, until `deadline`, in a collective.

        Raises:
          DeadlineError: see `wait`.
        """
        start = time.monotonic() if deadline else 0.0
        try:
            board.meet(deadline)
        except LateError as late:
            self._break_off(late, operation, (deadline or start) - start)

    def give_up(self, operation: str, deadline: float) -> NoReturn:
        """Raise a DeadlineError, where nobody knows who is missing; see `wait`."""
        reason = not_finished(self.rank, operation, deadline)
        self._break(reason, is_deadline=True)
        raise DeadlineError(reason)

    def _break_off(
        self, late: LateError, operation: str, seconds: float | None
    ) -> NoReturn:
        reason = not_arrived(self.rank, operation, seconds, *late.args)
        self._break(reason, is_deadline=True)
        raise DeadlineError(reason) from None

    def _resolve(self, claim: Claim) -> str:
        """Return the thread whose turn it is, or raise what keeps the ranks apart."""
        depth = self._thread.depth
        record = record_of(claim, self.progress.describe(), self.rank, depth)
        self.departures.require_none()
        records = self.comm.allgather(record)
        if any(r.thread != records[0].thread for r in records):
            return str(records[0].thread)
        try:
            raise_by(records, claim.error, self.rank, self.calls)
        except Exception as raised:
            # Some ranks have left blocks in which others are: those must follow
            outermost = min(r.depth for r in records)
            if outermost < depth:
                self._thread.unwinding = (outermost, raised)
            self.note_agreed(raised)
            raise


def _disown() -> None:
    """Let a forked process have no part in any collective, nor wait for a thread."""
    for agreement in Agreement.in_use:
        agreement.broken = FORKED
        agreement.turns.reset()


call_in_child(_disown)
