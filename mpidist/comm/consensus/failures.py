"""Detection of dead ranks: with ULFM, or on this node by their processes.

ULFM is MPI's User-Level Failure Mitigation. Under `mpirun --with-ft ulfm`, Open MPI
does not end a job when a rank dies. Calls that need the dead rank raise, but other
ranks would wait for the ranks that raised. So, when a rank of a strategy has died, all
communicators of the strategy are revoked (MPI_Comm_revoke) and waits in shared memory
end: all ranks raise. Without ULFM the launcher ends the job, some launchers late: the
watchdog looks for processes on this node that have ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.signatures import name_ranks
from mpidist.errors import DeadlineError, RankLostError
from mpidist.launch.launchers import is_elastic

_CLASSES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
# How long MPI may need to report which rank died, after it reports a death
_HEAR_SECONDS = 10.0
_PAUSE_SECONDS = 0.005
_LONG_PAUSE_SECONDS = 0.001


def can_survive() -> bool:
    """Return whether MPI continues when a rank dies; the same on all ranks of a job."""
    return is_elastic(os.environ) and MPI.Query_thread() == MPI.THREAD_MULTIPLE


def _is_loss(error: BaseException) -> bool:
    if not isinstance(error, MPI.Exception) or not can_survive():
        return False
    # Other errors of MPI are faults of the program, and no rank is lost.
    return error.Get_error_class() in _CLASSES


def has_failed_ranks() -> bool:
    """Return whether any rank of the job has died and others continued."""
    return can_survive() and MPI.COMM_WORLD.Get_failed().Get_size() > 0


def is_last() -> bool:
    """Return whether all other ranks of the job have died.

    Then MPI_Abort of Open MPI 5 makes mpirun end with 0, but an exit code is kept.
    """
    if not has_failed_ranks():
        return False
    return MPI.COMM_WORLD.Get_failed().Get_size() == MPI.COMM_WORLD.Get_size() - 1


def agree(comm: MPI.Intracomm, is_well: bool, limit_seconds: float = math.inf) -> bool:
    """Return whether `is_well` is true on all surviving ranks. Collective.

    Works with dead ranks and on a revoked communicator: MPI_Comm_agree gives all ranks
    the same answer, or the same error (some rank did not know of a death).

    Raises:
      DeadlineError: other ranks did not arrive within `limit_seconds`.
    """
    start = now = time.monotonic()
    while True:
        # Without acknowledging, MPI_Comm_agree fails as long as a failed rank is
        # unknown here.
        comm.Ack_failed()
        # In and out: MPI replaces it by the AND over all survivors.
        flag = np.array([is_well], np.intc)
        request = comm.Iagree(flag)
        try:
            while not request.Test():
                # Sleep longer the longer it takes: at first microseconds, to answer
                # fast, then long pauses, to leave the core to others.
                time.sleep(min((now - start) / 4, _LONG_PAUSE_SECONDS))
                now = time.monotonic()
                if now - start > limit_seconds:
                    raise DeadlineError(f"waited {now - start:.1f} s for other ranks")
            return bool(flag[0])
        except MPI.Exception as error:
            # A further rank died during the agreement. All survivors see that, so all
            # try again.
            if not _is_loss(error):
                raise


class FailureDetector:
    """Detects ranks that have died, and revokes their communicators.

    Attributes:
      is_needed: whether MPI continues when ranks die, and there are several ranks.
      ranks: the ranks of the communicator that are known to have died.
      at_end: functions to call, in this order, when all survivors have left their
        collectives, to free memory. They do not communicate.

    Creating one is collective: Open MPI 5 crashes if a communicator is revoked while
    another rank is still creating it.

    Args:
      comm: of all ranks, new; not freed by this.
    """

    in_use: ClassVar[list[FailureDetector]] = []  # those of more than one rank
    # While a communicator is revoked it must not be freed
    _guard: ClassVar[threading.Lock] = threading.Lock()
    _polling: ClassVar[threading.Lock] = threading.Lock()
    _is_over: ClassVar[bool] = False

    def __init__(self, comm: MPI.Intracomm):
        self.ranks: tuple[int, ...] = ()
        self.at_end: list[Callable[[], None]] = []
        self._comms = [comm]
        self._callbacks: list[Callable[[], None]] = []
        self.is_needed = comm.Get_size() > 1 and can_survive()
        # All ranks must have made it before any may revoke it: see above.
        if self.is_needed:
            agree(comm, True)
        # MPI names failed processes by their rank in the world.
        world = comm.group.Translate_ranks(None, MPI.COMM_WORLD.group)
        self._ranks = {number: rank for rank, number in enumerate(world)}
        if self.is_needed:
            FailureDetector.in_use.append(self)

    def close(self) -> None:
        """Unregister; a second call does nothing. Not collective."""
        # May be called twice: by error paths and by the normal end.
        if self in FailureDetector.in_use:
            FailureDetector.in_use.remove(self)

    def add(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """Add a new communicator of some of these ranks, and return it.

        Collective over it.
        """
        if self.is_needed:
            agree(comm, True)
        with FailureDetector._guard:
            self._comms.append(comm)
            # A death was noticed between the Dup and here: revoke at once, or the
            # others would wait in the new communicator.
            if self.ranks:
                comm.Revoke()
        return comm

    def free(self, comm: MPI.Intracomm) -> None:
        """Free a communicator, added or not. Collective over it."""
        with FailureDetector._guard:
            if comm in self._comms:
                self._comms.remove(comm)
        # MPI_Comm_free would wait for dead ranks, so the memory is not freed.
        if not self.ranks:
            with Pending("freeing a communicator", comm):
                comm.Free()

    def on_failure(self, fn: Callable[[], None]) -> None:
        """Call a function, from any thread, once a rank has died; now if one has."""
        with FailureDetector._guard:
            is_late = bool(self.ranks)
            if self.is_needed and not is_late:
                self._callbacks.append(fn)
        if is_late:
            fn()

    @staticmethod
    def poll() -> None:
        """Ask MPI which ranks have died; revoke their communicators. Any thread."""
        if not FailureDetector.in_use:
            return
        dead: set[int] = set()
        # `stop_polling` takes the same lock: no poll is inside MPI while it is
        # finalized.
        with FailureDetector._polling:
            if not FailureDetector._is_over and not MPI.Is_finalized():
                MPI.COMM_SELF.Iprobe()  # MPI detects failures while it makes progress
                group = MPI.COMM_WORLD.Get_failed()
                dead.update(group.Translate_ranks(None, MPI.COMM_WORLD.group))
                # MPI groups are handles that leak unless they are freed.
                group.Free()
        if dead:
            # A copy of the list: another thread may close one meanwhile.
            for failures in list(FailureDetector.in_use):
                failures._note(dead)

    @staticmethod
    def stop_polling() -> None:
        """Never poll MPI again: another thread is about to finalize it."""
        with FailureDetector._polling:
            FailureDetector._is_over = True

    def _note(self, dead: set[int]) -> None:
        ranks = tuple(sorted(self._ranks[n] for n in dead & self._ranks.keys()))
        with FailureDetector._guard:
            is_first = bool(ranks) and not self.ranks
            self.ranks = ranks
            if is_first:
                # Revoking ends the waits of ranks that are inside a collective with the
                # dead.
                for comm in self._comms:
                    comm.Revoke()
            # Later ones are called by `on_failure`
            callbacks = list(self._callbacks)
        # Outside of the lock: callbacks may use communicators.
        if is_first:
            for fn in callbacks:
                fn()

    def require_none(self, cause: BaseException | None = None) -> None:
        """Raise a RankLostError if a rank has died, from `cause`."""
        if self.ranks:
            raise self.error() from cause

    def error(self) -> RankLostError:
        """Return the error that names the ranks that have died."""
        names = name_ranks(list(self.ranks))
        have = "have" if len(self.ranks) > 1 else "has"
        error = RankLostError(
            f"{names} of {len(self._ranks)} {have} died (killed, crashed, or the node "
            "failed), so this strategy cannot communicate any more"
        )
        error.ranks = self.ranks
        return error

    def check(self, error: BaseException | None) -> BaseException | None:
        """Return a RankLostError if a rank has died, whatever `error` is; else `error`.

        For the end of each collective: in Open MPI 5, a collective interrupted by a
        death or MPI_Comm_revoke may return without an error, with invalid data.
        """
        # MPI reported a death, but not yet the rank.
        if error is not None and _is_loss(error):
            self.wait_for_names()
        elif self.is_needed and not self.ranks:
            FailureDetector.poll()
            # Another rank may have noticed first and revoked, before MPI informed this
            # rank.
            with FailureDetector._guard:
                is_revoked = any(comm.Is_revoked() for comm in self._comms)
            if is_revoked:
                self.wait_for_names()
        return self.error() if self.ranks else error

    def wait_for_names(self) -> None:
        """Wait until MPI reports which rank has died, if it can.

        Another rank that noticed earlier may have revoked a communicator.
        """
        if not self.is_needed:
            return
        end = time.monotonic() + _HEAR_SECONDS
        FailureDetector.poll()
        while not self.ranks and time.monotonic() < end:
            time.sleep(_PAUSE_SECONDS)
            FailureDetector.poll()


_NAMESPACE = "/proc/self/ns/pid"
_descriptors: dict[int, int] = {}  # by process id
_is_stopped = False


def monitor_processes(comm: MPI.Intracomm, node: MPI.Intracomm) -> dict[int, int]:
    """Return the process ids of the other ranks of a node, by their rank. Collective.

    An empty dict if they cannot be monitored: not on Linux >= 5.3, or ranks are in
    containers with separate process namespaces.

    Args:
      comm: the communicator of the rank numbers.
      node: the ranks that share memory with this one.
    """
    namespace, own = 0, os.getpid()
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            namespace = os.stat(_NAMESPACE).st_ino
    everyone = np.empty((node.Get_size(), 3), np.int64)
    node.Allgather(np.array([comm.Get_rank(), own, namespace]), everyone)
    if namespace == 0 or (everyone[:, 2] != namespace).any():
        return {}
    pids = {rank: pid for rank, pid, _ in everyone.tolist() if pid != own}
    try:
        for pid in pids.values():
            if pid not in _descriptors:  # while it is open, the number is not reused
                _descriptors[pid] = os.pidfd_open(pid)
    except OSError:  # not allowed, or too many
        return {}
    return pids


def ended_processes(pids: dict[int, int]) -> list[int]:
    """Return the ranks whose processes have ended, given what is monitored.

    None after `expect_exits`.
    """
    if _is_stopped:
        return []
    ranks = {_descriptors[pid]: rank for rank, pid in pids.items()}
    poll = select.poll()
    for descriptor in ranks:
        poll.register(descriptor, select.POLLIN)
    return sorted(ranks[descriptor] for descriptor, _ in poll.poll(0))


def stopped_processes(pids: dict[int, int]) -> list[int]:
    """Return the ranks whose processes are stopped, by SIGSTOP or a debugger."""
    halted = []
    for rank, pid in pids.items():
        with contextlib.suppress(OSError):
            # The state follows the name, which may contain anything: proc(5)
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            if state and state[0] in (b"T", b"t"):
                halted.append(rank)
    return sorted(halted)


def expect_exits() -> None:
    """From now on, treat process exits as normal: the program is shutting down."""
    global _is_stopped
    _is_stopped = True
