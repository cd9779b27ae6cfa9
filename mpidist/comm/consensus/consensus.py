"""Collective error checking: all ranks raise, or none does.

Every collective of mpidist starts with one small exchange of a fixed form. In it, each
rank sends the digest of the call that it is about to make, or a flag that it has
failed. If calls differ, or a rank has failed, all ranks detect it before any data move,
and all raise. If all agree, the cost is one latency.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus import diagnostics
from mpidist.comm.consensus.barrier import NodeBarrier
from mpidist.comm.consensus.comparison import (
    FAILED,
    LARGE,
    Comparison,
    Pages,
    Payload,
    PayloadComparison,
    Proposal,
    comparison_by_mpi,
)
from mpidist.comm.consensus.failures import FailureDetector
from mpidist.comm.consensus.flight_recorder import Recorder
from mpidist.comm.consensus.pending import Pending, highest
from mpidist.comm.consensus.signatures import (
    CallReport,
    CallSignature,
    call_site,
    digest,
)
from mpidist.comm.consensus.thread_order import STEP, ThreadOrderedLock, tickets
from mpidist.comm.consensus.waiting import (
    Departures,
    Requests,
    RequestWaiter,
    WaitTimeoutError,
)
from mpidist.errors import CollectiveError, ContextError, DeadlineError, MpidistError
from mpidist.util.forks import FORKED, call_in_child
from mpidist.util.last_resort import MoreStack, add_frames, spare
from mpidist.util.serialization import hash62
from mpidist.util.tracebacks import hide_internal_frames

Fields = Sequence[tuple[str, Any]]  # names and values that must be equal on all ranks
FINALIZED = "the strategy was finalized and cannot be used any more"
_MOST_BARE = 256  # calls without arguments that are kept
_MOST_NOTED = 100  # places where something was made
T = TypeVar("T")
_get_ident = threading.get_ident
# An error's attributes, without the code of its class, which may fail
_attributes = BaseException.__dict__["__dict__"].__get__
_KNOWN = "_mpidist_known"  # that all ranks know of the error, and since when


class Consensus:
    """Collective error checking for one communicator, which nothing else may use.

    Args:
      comm: the communicator.
      comparison: how ranks are compared; by MPI if it is None.
      failures: the failure detector of these ranks; None creates one for `comm`.
    """

    # Those of this process, in order of creation, which is the same on all ranks
    in_use: ClassVar[list[Consensus]] = []
    made: ClassVar[int] = 0  # of more than one rank
    # A number of the job, once its ranks have agreed on it
    job: ClassVar[int] = hash62(f"{os.uname().nodename} {os.getpid()} {time.time_ns()}")
    # The lock prevents closing while another thread reads the list
    _looking: ClassVar[threading.RLock] = threading.RLock()

    def __init__(
        self,
        comm: MPI.Intracomm,
        comparison: Comparison | None = None,
        failures: FailureDetector | None = None,
    ):
        self.comm = comm
        self.failures = failures or FailureDetector(comm)
        self._own_failures = None if failures else self.failures
        # Ranks may have made different numbers of communicators
        with Pending("making a communicator's consensus", comm):
            channel, Consensus.job = highest(comm, Consensus.made, Consensus.job)
        self.departures = Departures(comm, channel, self.failures)
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        if comparison is None:
            comparison = comparison_by_mpi(comm, self.departures)
        self.comparison = comparison
        self.calls = 0
        # The ranks' last calls while they wait for different threads
        self.by_threads: Sequence[CallReport] = ()
        self.broken: str | None = None
        self._can_drain = False  # see `close`
        self.pids: dict[int, int] = {}  # of ranks that can be monitored
        self._made_at: dict[str, str] = {}  # see `note_made`
        self.waiting = RequestWaiter(comm, self.departures)
        self.recorder = Recorder(channel, comm, Consensus.job)
        self.begin, self.note = self.recorder.begin, self.recorder.note_arrivals
        check = self.failures.check if self.failures.is_needed else None
        self.lock = ThreadOrderedLock(self.recorder.end, check, self._on_error)
        self.progress = self._thread = self.lock.state
        # The operation whose ranks have to agree next: see `Call.reserve`
        self.reserved = ""
        self._bare: dict[str, Call] = {}
        if self.size > 1:
            Consensus.made = channel + 1
            Consensus.in_use.append(self)
        self.failures.on_failure(self._lose_ranks)

    def note_made(self, name: str) -> None:
        """Note where the user's code makes what messages call `name`."""
        if len(self._made_at) == _MOST_NOTED:
            self._made_at.clear()
        self._made_at[name] = call_site()

    def retire(self) -> None:
        """Take no part in the end of the program. Not collective."""
        with Consensus._looking:
            if self in Consensus.in_use:
                Consensus.in_use.remove(self)

    def close(self) -> None:
        """Unregister this object, before its communicator is freed.

        Any later call raises a ContextError.
        """
        self.retire()
        self.comparison.close()
        self.recorder.close(self.broken is not None)
        if self._own_failures is not None:
            self._own_failures.close()
        self._can_drain, self.broken = self.broken is None, FINALIZED

    @functools.cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks in COMM_WORLD."""
        group = self.comm.group
        return tuple(group.Translate_ranks(None, MPI.COMM_WORLD.group))

    @property
    def can_free(self) -> bool:
        """Whether the ranks can free memory together, in or after `close`."""
        return self._can_drain if self.broken is FINALIZED else self.broken is None

    @property
    def is_usable(self) -> bool:
        """Whether all ranks can communicate: none left a call alone, or has died."""
        return self.broken is None

    def require_open(self) -> None:
        """Raise a ContextError if `close` was called."""
        if self.broken is FINALIZED:
            raise ContextError(FINALIZED)

    def drain(self) -> bool:
        """Return whether `comm` can be freed: see `RequestWaiter.drain`. Collective."""
        return self.can_free and (self.size == 1 or self.waiting.drain())

    @classmethod
    def look_at_all(cls, look: Callable[[Consensus], None]) -> None:
        """Call `look` with each object in use, from any thread."""
        for consensus in list(cls.in_use):
            with cls._looking:
                if consensus in cls.in_use:
                    look(consensus)

    def call(self, call: CallSignature | str, timeout: float | None = None) -> Call:
        """Return a kind of collective, to be opened by `with`. Not collective.

        Inside, in this order: reserve what may fail on one rank, agree, move data.

        Args:
          call: what must be equal on all ranks; or the name of the operation alone.
          timeout: seconds to wait for the other ranks; None waits for ever.
        """
        if isinstance(call, CallSignature):
            return Call(self, call, timeout)
        if timeout is not None:
            return Call(self, CallSignature(call), timeout)
        bare = self._bare.get(call)
        if bare is None:
            if len(self._bare) >= _MOST_BARE:
                self._bare.clear()
            bare = self._bare[call] = Call(self, CallSignature(call), None)
        return bare

    def require_same(
        self,
        call: CallSignature | str,
        error: Exception | None = None,
        timeout: float | None = None,
        yield_cpu: bool = False,
        payload: Payload | None = None,
        address: int = 0,
        is_late: bool = False,
    ) -> bool:
        """Wait until all ranks are in the same call and none has failed. Collective.

        Returns whether all passed the same `address`, other than 0.

        Args:
          call: the call of this rank; or the name of its operation.
          error: the error that prevents it, if any.
          timeout: seconds to wait for the other ranks; None waits for ever.
          yield_cpu: whether to leave the core to other threads while waiting.
          payload: see `Call.exchange`.
          address: see `Comparison.agrees`.
          is_late: whether the other ranks may have ended this call already.

        Raises, on all ranks:
          The error of a failed rank (each failed rank raises its own; the others raise
          a copy of the first).
          DivergenceError: the operations differ.
          MismatchError: the operations agree, but not the rest of the call.
          DeadlineError: on the ranks that waited for more than `timeout`.
        """
        self.reserved = ""
        if self._thread.unwinding is not None:
            raise self._thread.unwinding[1]
        if isinstance(call, str):
            call = CallSignature(call)
        if self.size == 1:
            if error is not None or self.broken is not None:
                raise error or ContextError(FINALIZED)
            return address != 0
        with self.lock:
            thread = self.lock.thread()
            if thread and error is None:
                error = self.lock.ambiguity(call.operation)
            fields = call, thread, error, timeout, yield_cpu, payload, address
            proposal = self._ready(Proposal(*fields, is_late=is_late))
            if not self._is_agreed(proposal):
                self.settle(proposal)
            return self.comparison.is_same_address

    def is_plain(self) -> bool:
        """Return whether this rank may send the digest of a call at once."""
        if self.broken is not None or spare.memory is None:
            return False
        lock = self.lock  # this thread holds it
        state = lock.state.__dict__
        is_bound = state["unwinding"] or state["unannounced"]
        return state is lock.first and not is_bound

    def settle(self, proposal: Proposal) -> None:
        """Raise on differing calls, or let another thread go first."""
        is_agreed = False
        while not is_agreed:
            first, timeout = self._resolve(proposal), proposal.timeout
            if first != proposal.thread and not self.lock.let_run(first, timeout):
                # Join in place of the missing thread, to report that it is missing
                error = diagnostics.late_thread(proposal.call, self.rank, first)
                proposal = proposal._replace(thread=first, error=error)
            proposal = self._ready(proposal)
            is_agreed = self._is_agreed(proposal)
        self.by_threads = ()

    def _ready(self, proposal: Proposal) -> Proposal:
        """Write the payload; return the proposal, with the error if that failed.

        Raises if this rank cannot communicate. Nothing is written then: other ranks may
        still be reading its earlier data.
        """
        self.failures.require_none(proposal.error)
        spare.restore()
        swallowed, self._thread.unannounced = self._thread.unannounced, None
        if swallowed is not None and proposal.error is None:
            self.mark_broken(swallowed)
        if self.broken is FINALIZED:
            raise proposal.error or ContextError(FINALIZED)
        if self.broken is not None:
            raise proposal.error or CollectiveError(
                f"this strategy cannot communicate any more: {self.broken}"
            )
        if proposal.payload is None or proposal.error is not None:
            return proposal
        assert isinstance(self.comparison, PayloadComparison)
        pages, fill = proposal.payload
        try:
            return proposal._replace(is_large=fill(pages.own[self.comparison.turn(1)]))
        except Exception as error:
            return proposal._replace(error=error)

    def _is_agreed(self, proposal: Proposal) -> bool:
        """Exchange digests; return whether all ranks have sent the same."""
        call, thread, error, timeout, yield_cpu, _, address, is_large, _ = proposal
        if thread:
            call = call._replace(options=(*call.options, ("thread", thread)))
        number = digest(call.without_step())
        self.begin(self.calls + 1, call, number)
        number ^= self.progress.digest ^ call.step_digest()
        words = number, LARGE * is_large if error is None else FAILED, address
        deadline = None if timeout is None else time.monotonic() + timeout
        self.count_comparison()
        try:
            is_agreed = self.comparison.agrees(words, deadline, yield_cpu)
            return self.note(is_agreed, self.comparison)
        except WaitTimeoutError as late:
            self._break_off(late, call.operation, timeout)

    def count_comparison(self) -> None:
        """Record that a comparison begins: from now on other ranks may go on."""
        self.reserved, self.lock.can_fail = "", False
        self.calls += 1
        self._thread.event = next(tickets)

    def _on_error(self, error: BaseException) -> None:
        """Mark the strategy as broken unless all ranks raise this error.

        Otherwise other ranks are in this collective or the next one, and would match
        the next call of this rank with theirs.
        """
        unwinding = self._thread.unwinding
        if self.lock.can_fail and isinstance(error, Exception):
            return  # who has called this announces it
        is_reason = unwinding is not None and error is unwinding[1]
        if not (is_reason or self.is_known(error, self._thread.event - 1)):
            self.mark_broken(error)

    @contextlib.contextmanager
    def collective_errors(self) -> Iterator[None]:
        """Return a context for errors of all ranks: the strategy stays usable."""
        try:
            yield
        except MpidistError as error:
            self.mark_known(error)
            raise

    def mark_known(self, error: BaseException) -> None:
        """Record that all ranks know of an error, by which this one leaves its call."""
        self._thread.event = event = next(tickets)
        _attributes(error)[_KNOWN] = self.recorder.channel, event

    def is_known(self, error: BaseException, since: int) -> bool:
        """Return whether all ranks know of an error.

        Args:
          error: on its way to the user.
          since: the ticket after which they would have learnt of it.
        """
        channel, event = _attributes(error).get(_KNOWN, (-1, 0))
        return bool(channel == self.recorder.channel and event > since)

    def announce_once(self, operation: str, error: Exception) -> None:
        """Announce an error unless all ranks know of it; see `announce`."""
        if not self.is_known(error, self._thread.event - 1):
            self.announce(operation, error)

    def announce(
        self, operation: str, error: BaseException, is_late: bool = False
    ) -> None:
        """Exchange this rank's error in place of the next comparison. Collective.

        An error that is no Exception, such as KeyboardInterrupt, is not exchanged: the
        ranks' next calls differ, unless it comes up on all.

        Args:
          operation: the public call, for messages.
          error: which the caller raises afterwards.
          is_late: see `require_same`.

        Raises another error than `error`, from which all ranks suffer.
        """
        if self.size == 1 or self.broken is not None:
            return
        if not isinstance(error, Exception):
            self.progress.add("the number of interrupted calls", 1)
            self.mark_known(error)
            return
        spare.release_after(error)
        trace = error.__traceback__
        try:
            with MoreStack():
                self.require_same(operation, error, is_late=is_late)
        except BaseException as raised:
            if raised is not error:
                raise
            # Without the frames of the exchange, which refer to the error
            BaseException.with_traceback(error, trace)

    def escaped(
        self, operation: str, error: BaseException, since: int, depth: int
    ) -> None:
        """Announce what escapes from a public collective, unless all ranks know of it.

        Args:
          operation: the public call, for messages.
          error: which the caller raises afterwards.
          since: a ticket of the begin of the call.
          depth: this thread's `depth` there.

        Raises another error than `error`, from which all ranks suffer.
        """
        state = self._thread
        state.depth = depth
        if self.size == 1 or self.broken is not None or self.is_known(error, since):
            return
        is_late = state.event > since
        if not is_late or isinstance(error, MpidistError):
            # Most errors of this package come from values that all ranks have
            self.announce(operation, error, is_late and not depth)
        elif depth:  # the scope that it leaves exchanges it, if the program lets it
            state.unannounced = error
        else:
            self.mark_broken(error)

    def mark_broken(self, error: BaseException) -> None:
        """Mark the strategy as broken: this rank alone has left a collective."""
        if self.size == 1 or self.broken is not None:
            return
        if self.failures.check(error) is not error:  # all survivors get to know
            return
        if (reason := self.departures.find()) is None:
            self._break(diagnostics.left(self.rank, error, self.recorder.last()))
        else:
            self.broken = reason

    def _lose_ranks(self) -> None:
        """Mark the strategy as broken: ranks have died. Any thread."""
        if self.broken is None:
            self.broken = str(self.failures.error())

    def _break(self, reason: str, is_deadline: bool = False) -> None:
        """Mark the strategy as broken on this rank, and notify the others."""
        self.broken = reason
        self.departures.leave(reason, is_deadline)

    def run(
        self,
        operation: str,
        fn: Callable[..., T],
        *args: Any,
        same: Callable[[T], CallSignature | Fields] | None = None,
        yield_cpu: bool = False,
    ) -> T:
        """Return `fn(*args)`, which all ranks call, and may communicate. Collective.

        An error that `fn` raises on one rank is raised on all ranks, including those
        that wait in a collective inside `fn`.

        Args:
          operation: the public call, for messages.
          fn: may be a user's.
          *args: its arguments.
          same: given the result, returns what must be equal on all ranks.
          yield_cpu: for functions of different duration, see `require_same`.
        """
        state = self._thread.__dict__
        depth, call, error, limit = state["depth"], None, None, 0
        try:
            try:
                if self.broken is not None:
                    self.require_open()
                state["depth"] = depth + 1
                result = fn(*args)
                call = None if same is None else signature_of(operation, same(result))
            except BaseException as caught:
                hide_internal_frames(caught)  # other ranks show its traceback
                error = caught
                limit = add_frames(error)
            begun = state["event"]
            try:
                state["depth"] = depth + 1  # whatever was interrupted
                is_alone = self.size == 1 and call is None and not yield_cpu
                if not is_alone or error is not None or state["unwinding"]:
                    self.leave_scope(operation, error, call=call, yield_cpu=yield_cpu)
            except BaseException as raised:
                self.escaped(operation, raised, begun, depth)
                diagnostics.forget_locals(raised)
                raise
        finally:
            state["depth"] = depth
            if limit:  # see `Call.__exit__`
                with contextlib.suppress(RecursionError):
                    sys.setrecursionlimit(limit)
            del error
        return result

    def enter_scope(self) -> None:
        """Enter a collective scope; `leave_scope` leaves it."""
        if self.broken is not None:
            self.require_open()
        self._thread.depth += 1

    def leave_scope(
        self,
        operation: str,
        error: BaseException | None,
        timeout: float | None = None,
        call: CallSignature | None = None,
        yield_cpu: bool = False,
    ) -> None:
        """Leave a collective scope with this rank's error, if any. Collective.

        `timeout`, `yield_cpu`: see `require_same`; `call`: what else must be equal on
        all ranks.

        A BaseException that is not an Exception, such as KeyboardInterrupt, is raised
        on this rank only. Unless all ranks leave by one, their next collective raises
        on all.
        """
        state = self._thread
        state.depth -= 1
        if error is not None and not isinstance(error, Exception):
            state.unannounced = None
            self.announce(operation, error)
            raise error
        if state.unwinding is not None:
            # The other ranks have left this scope by an error
            depth, reason = state.unwinding
            if depth == state.depth:
                state.unwinding = None
                self.progress.forget(STEP)
            self.mark_known(error or reason)
            raise error or reason
        try:
            if error is not None:
                with MoreStack():
                    self.require_same(operation, error, timeout, yield_cpu)
            elif timeout is not None or call or yield_cpu:
                self.require_same(call or operation, None, timeout, yield_cpu)
            elif self.size > 1:
                with self.call(operation) as bare:
                    bare.agree()
        except Exception:
            # All ranks raise, perhaps in other steps of a loop that they have left
            self.progress.forget(STEP)
            raise

    def root_only(
        self, operation: str, fn: Callable[[], T], root: int = 0, agreed: Fields = ()
    ) -> T:
        """Return the result of `fn()`, called on rank `root` only. Collective.

        Args:
          operation: the public call, for messages.
          fn: returns an object that can be pickled.
          root: the same on all ranks.
          agreed: names and values that must be equal on all ranks, too.

        Raises, on all ranks, what `fn` raises.
        """
        payload, error = b"", None
        if self.rank == root:
            try:
                payload = pickle.dumps(fn())
            except Exception as caught:
                error = caught
        with self.lock:
            call = CallSignature(operation, (("root", root), *agreed))
            self.require_same(call, error)
            if self.size > 1:
                sent = self.comm, payload, root
                payload = broadcast_bytes(*sent, self.wait, operation)
        return pickle.loads(payload)  # type: ignore[no-any-return]

    def gather_objects(
        self, operation: str, make: Callable[[], T], senders: int = 0
    ) -> list[T]:
        """Return what `make()` returns on each rank. Collective.

        Objects that are equal on all ranks are not sent: their digests travel with the
        agreement.

        Args:
          operation: the public call, for messages.
          make: returns a small object that can be pickled; may be slow.
          senders: so many of the ranks, the first ones, have anything to send; 0 stands
            for all. Equal on all ranks.

        Raises, on all ranks, what `make` raises on any.
        """
        call = self.call(operation)
        try:  # without the lock
            payload = pickle.dumps(make())
        except BaseException as error:
            call.fail(error)
        senders = min(senders, self.size) or self.size
        with call:
            everyone = [payload] * senders
            if not call.agree(hash62(payload)) and self.size > 1:
                sent = self.comm, payload, self.wait, operation, senders
                everyone = _all_gather_bytes(*sent)
        return [pickle.loads(data) for data in everyone]

    def wait(self, request: Requests, deadline: float | None, operation: str) -> None:
        """Wait for requests of MPI until `deadline`, on time.monotonic's clock.

        Raises:
          DeadlineError: names the missing ranks; the communicator is unusable then.
        """
        start = time.monotonic()
        try:
            self.waiting.wait(request, deadline, 2 * self.calls + 1)
        except WaitTimeoutError as late:
            self._break_off(late, operation, (deadline or start) - start)

    def wait_at(
        self, barrier: NodeBarrier, operation: str, deadline: float | None
    ) -> None:
        """Like `wait`, at a barrier of this node."""
        start = time.monotonic() if deadline else 0.0
        try:
            if barrier.size == self.size:
                barrier.wait(deadline)
            else:  # ranks of other nodes should know that this one waits
                self.waiting.wait_at(barrier, deadline, 2 * self.calls + 1)
        except WaitTimeoutError as late:
            self._break_off(late, operation, (deadline or start) - start)

    def give_up(self, operation: str, deadline: float) -> NoReturn:
        """Raise a DeadlineError if the missing ranks are unknown; see `wait`."""
        reason = diagnostics.not_finished(self.rank, operation, deadline)
        self._break(reason, is_deadline=True)
        raise DeadlineError(reason)

    def _break_off(
        self, late: WaitTimeoutError, operation: str, seconds: float | None
    ) -> NoReturn:
        reason = diagnostics.not_arrived(self.rank, operation, seconds, *late.args)
        self._break(reason, is_deadline=True)
        raise DeadlineError(reason) from None

    def _resolve(self, proposal: Proposal) -> str:
        """Return the thread whose turn it is, or raise on differing calls."""
        depth, counts = self._thread.depth, self.progress.describe()
        others = self.lock.others()
        record = diagnostics.report_of(proposal, counts, self.rank, depth, others)
        sent = self.comm, pickle.dumps(record), self.wait, proposal.call.operation
        records = list(map(pickle.loads, _all_gather_bytes(*sent)))
        self.by_threads = ()
        if any(r.thread != records[0].thread for r in records):
            first = diagnostics.first_thread(records)
            if first is not None:
                self.by_threads = records
                return first
        try:
            args = proposal.error, self.rank, self.calls, self._made_at
            diagnostics.raise_difference(records, *args)
        except Exception as raised:
            # Some ranks have left scopes that others are still in: these must follow
            outermost = min(r.depth for r in records)
            if outermost < depth:
                self._thread.unwinding = (outermost, raised)
            # Some ranks have ended the call that others could not end
            if any(r.is_late for r in records) and not all(r.is_late for r in records):
                self.broken = diagnostics.left_late(records)
            self.mark_known(raised)
            raise


class Call:
    """A kind of collective call, which threads open each time that they make it.

    Its lock keeps other threads out until it is closed, and NumPy's floating-point
    errors off. What escapes from it, other than errors that all ranks raise, marks the
    strategy as broken. See `Consensus.call`.
    """

    __slots__ = ("_consensus", "_lock", "_number", "_timeout", "signature")

    def __init__(
        self, consensus: Consensus, signature: CallSignature, timeout: float | None
    ):
        self._consensus = consensus
        self._lock = consensus.lock
        assert signature.step < 0, signature
        self._timeout = timeout
        self._number = digest(signature)
        self.signature = signature

    def __enter__(self) -> Call:
        self._lock.__enter__()
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if error is None:
            forgotten = self._consensus.reserved
            self._lock.__exit__(None, None, None)
            assert not forgotten, self.signature
            return
        limit = add_frames(error)
        try:
            if isinstance(error, Exception) and self._lock.can_fail:
                self._consensus.announce_once(self.signature.operation, error)
        except BaseException as another:
            self._lock.__exit__(type(another), another, trace)
            raise
        self._lock.__exit__(kind, error, trace)
        if limit:  # where these frames are beyond it, the public call restores it
            with contextlib.suppress(RecursionError):
                sys.setrecursionlimit(limit)

    def reserve(self, fn: Callable[..., T], *args: Any) -> T:
        """Return `fn(*args)`, which must not communicate.

        An error of it is raised on all ranks, in the agreement that must follow.
        """
        assert self._lock.holder == _get_ident(), self.signature
        self._lock.can_fail = True
        result = fn(*args)
        if self._consensus.size > 1:  # one rank alone need not agree
            self._consensus.reserved = self.signature.operation
        return result

    def fail(self, error: BaseException) -> NoReturn:
        """Raise this rank's error on all ranks, in place of the agreement."""
        if isinstance(error, Exception):
            self._consensus.announce(self.signature.operation, error)
        else:
            self._consensus.mark_broken(error)
        raise error

    def agree(self, address: int = 0) -> bool:
        """Go on once all ranks are in this call. Collective.

        Returns whether all passed the same `address`, other than 0.

        Raises, on all ranks: see `Consensus.require_same`.
        """
        consensus, timeout = self._consensus, self._timeout
        assert self._lock.holder == _get_ident(), self.signature
        if timeout is not None or consensus.size == 1 or not consensus.is_plain():
            return consensus.require_same(
                self.signature, timeout=timeout, address=address
            )
        consensus.begin(consensus.calls + 1, self.signature, self._number)
        number = self._number ^ consensus.progress.digest
        comparison = consensus.comparison
        # As `count_comparison`, without a call
        consensus.reserved, self._lock.can_fail = "", False
        consensus.calls += 1
        consensus.progress.event = next(tickets)
        if not consensus.note(comparison.agrees((number, 0, address)), comparison):
            consensus.settle(Proposal(self.signature, address=address))
        return comparison.is_same_address

    def exchange(
        self, pages: Pages, fill: Callable[[Sequence[Any]], bool]
    ) -> Sequence[Sequence[Any]]:
        """Like `agree`; also return the arrays of all ranks. Collective.

        Args:
          pages: see `Payload`.
          fill: see there.

        Returns, for each array, those of all ranks, valid until the next agreement.
        Raises, on all ranks: what `fill` raises; see also `Consensus.require_same`.
        """
        consensus, timeout = self._consensus, self._timeout
        comparison = consensus.comparison
        assert self._lock.holder == _get_ident(), self.signature
        assert isinstance(comparison, PayloadComparison)
        if timeout is not None or not consensus.is_plain():
            payload = Payload(pages, fill)
            consensus.require_same(self.signature, timeout=timeout, payload=payload)
            return pages.everyone[comparison.turn(0)]
        turn = comparison.turn(1)
        is_large = fill(pages.own[turn])
        consensus.begin(consensus.calls + 1, self.signature, self._number)
        consensus.recorder.count(comparison.name, pages.size_bytes)
        number = self._number ^ consensus.progress.digest
        words = number, LARGE * is_large, 0
        # As `count_comparison`, without a call
        consensus.reserved, self._lock.can_fail = "", False
        consensus.calls += 1
        consensus.progress.event = next(tickets)
        if not consensus.note(comparison.agrees(words), comparison):
            payload = Payload(pages, fill)
            consensus.settle(
                Proposal(self.signature, payload=payload, is_large=is_large)
            )
            turn = comparison.turn(0)
        return pages.everyone[turn]

    def step(self, name: str) -> Call:
        """Return a later agreement of the same operation, while this call is open."""
        call = CallSignature(self.signature.operation, (("step", name),))
        return Call(self._consensus, call, self._timeout)

    def finish(self, fn: Callable[..., T], *args: Any) -> T:
        """Like `reserve`, for work after data have moved; ranks agree. Collective.

        It takes one more agreement: where that matters, reserve memory before.
        """
        result = self.reserve(fn, *args)
        self.step("finishing").agree()
        return result


def signature_of(operation: str, agreed: CallSignature | Fields) -> CallSignature:
    """Return what must be equal on all ranks, for an operation."""
    if isinstance(agreed, CallSignature):
        return agreed
    return CallSignature(operation, tuple(agreed))


def _disown() -> None:
    """Exclude a forked process from all collectives; release its locks."""
    Consensus._looking = threading.RLock()
    for consensus in Consensus.in_use:
        consensus.broken = FORKED
        consensus.lock.reset()


call_in_child(_disown)


# `Consensus.wait`
Wait = Callable[[MPI.Request, None, str], None]


def broadcast_bytes(
    comm: MPI.Intracomm, data: bytes, root: int, wait: Wait, operation: str
) -> Any:
    """Return the bytes of rank `root`, as an array, for an operation. Collective."""
    size, received = np.array([len(data)]), np.frombuffer(data, np.uint8)
    wait(comm.Ibcast(size, root), None, operation)
    if comm.Get_rank() != root:
        received = np.empty(size[0], np.uint8)
    wait(comm.Ibcast([received, MPI.BYTE], root), None, operation)
    return received


def _all_gather_bytes(
    comm: MPI.Intracomm, data: bytes, wait: Wait, operation: str, senders: int = 0
) -> list[Any]:
    """Return the bytes of the first `senders` ranks, or of all, as arrays. Collective.

    The sizes that others than the senders send do not grow with the number of ranks.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    senders = senders or size
    sizes = np.zeros(size, np.int64)
    data = data if rank < senders else b""
    if senders == size:
        wait(comm.Iallgather(np.array([len(data)]), sizes), None, operation)
    else:
        own = np.zeros(senders, np.int64)
        own[rank : rank + 1] = len(data)  # nowhere, on the other ranks
        wait(comm.Iallreduce(own, sizes[:senders], MPI.SUM), None, operation)
    edges = list(itertools.accumulate(sizes.tolist(), initial=0))
    received = np.empty(edges[-1], np.uint8)
    spec = [received, sizes.tolist(), MPI.BYTE]
    wait(comm.Iallgatherv([data, MPI.BYTE], spec), None, operation)
    # Not np.split, which calls several functions for each rank
    pairs = itertools.pairwise(edges[: senders + 1])
    return [received[start:end] for start, end in pairs]
