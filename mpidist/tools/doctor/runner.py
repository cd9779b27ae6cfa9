"""`python -m mpidist doctor`: runs the checks, and prints their results.

All checks run in child processes, so that a crash or hang does not affect this process:
each local check in its own child, then MPI with the checks of all ranks (`ranks`),
because MPI may end a process that starts it, or never return. This process prints on
rank 0, or if there is no MPI, and kills its children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from mpidist.launch.launchers import NO_MPI, OPEN_MPI, has_pmix, is_silent
from mpidist.tools.doctor import checks
from mpidist.tools.doctor.children import Child, run_named
from mpidist.tools.doctor.paths import try_alone
from mpidist.tools.doctor.rows import FAIL, Failure, Row, to_json, to_text, worst
from mpidist.util.files import replace_file

_STARTING = "starting MPI"
_SIGNALS = signal.SIGTERM, signal.SIGINT
_MARGIN_SECONDS = 10.0
# How long other ranks may take to report, as a multiple of the time for each check
_LINGERING = 7
_REMEDIES = {
    _STARTING: "use the mpirun of the MPI library that mpi4py loads, or srun with "
    "the --mpi= that it was built for (pmix for Open MPI, pmi2 for MPICH); check that "
    "all ranks run the same program and that their nodes can connect to each other",
    "ending": "check that all ranks end",
}


def run(paths: Sequence[str], seconds: float, json_file: str | None) -> int:
    """Run all checks, print on rank 0, and return the exit status. Collective.

    Args:
      paths: of the job's files.
      seconds: how long each check may take.
      json_file: where to write JSON, "-" for stdout; None prints a table.
    """
    for number in _SIGNALS:
        signal.signal(number, _terminate)
    runner = _Runner(paths, seconds, json_file)
    # Results are printed before children are closed, since launchers kill soon
    with contextlib.ExitStack() as children:
        try:
            return runner.end(runner.run(children))
        except _TerminatedError as error:
            runner.fail(f"ended by {error}, which the launcher or a user sent")
            return runner.end(None)
        finally:
            _ignore_signals()


class _TerminatedError(BaseException):
    """A signal that asks this process to end."""


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Raise on the first signal, and ignore later ones."""
    _ignore_signals()
    raise _TerminatedError(signal.Signals(number).name)


class _Runner:
    """The checks of one process that the launcher started."""

    def __init__(self, paths: Sequence[str], seconds: float, json_file: str | None):
        self._paths, self._seconds, self._json_file = paths, seconds, json_file
        self._stage = "checking this process"
        self._rows: list[Row] = []
        self._failed: Row | None = None
        self._rank: int | None = None
        self._size: int | None = None
        self._printed_status: int | None = None

    def run(self, children: contextlib.ExitStack) -> int | None:
        """Run all checks; return the status that the ranks agreed on. Collective.

        Args:
          children: for the child that is a rank, which outlives this call: some
            launchers end the job when a rank ends.
        """
        rows = run_named(checks.LOCAL_CHECKS, self._seconds)
        facts = {0: checks.find_facts(os.environ)}
        self._rows = checks.evaluate({0: rows}, facts)
        self._stage = _STARTING
        failed = {row.what for row in rows if row.status is FAIL}
        # Only files need deflate
        broken = [n for n in checks.NEEDED if n in failed and n != "deflate"]
        status, is_job_ending = None, False
        if broken:
            why = f"not tested: {', '.join(broken)} cannot be imported"
            self.fail(why, "see the other rows")
        else:
            arguments = self._paths, self._seconds, rows, dict(os.environ)
            child = Child(_examine_ranks, *arguments, is_rank=True)
            try:
                status = self._follow(children.enter_context(child))
            except EOFError as error:
                self.fail(str(error))
                is_job_ending = has_pmix(os.environ)  # Open MPI's mpirun ends it
        if self._stage == _STARTING and self._prints() and not is_job_ending:
            memory = {"memory": (checks.check_memory, 1)}
            self._rows += run_named(memory, self._seconds)
            self._stage = "trying paths"
            self._rows += try_alone(self._paths, self._seconds)
        return status

    def _follow(self, child: Child) -> int | None:
        """Receive the reports of a rank; return the status that the ranks agreed on.

        Raises:
          EOFError: the child has ended before its result.
        """
        seconds = 4 * self._seconds + _MARGIN_SECONDS
        deadline = time.monotonic() + seconds
        status: int | None = None
        while True:
            try:
                kind, value = child.receive(deadline - time.monotonic())
            except TimeoutError:
                self.fail(f"no end in {seconds:.3g} s")
                return status
            if kind == "stage":
                self._stage, seconds = value
                deadline = time.monotonic() + seconds
            elif kind == "joined":
                self._rank, self._size = value
            elif kind == "rows":
                self._rows = value
            elif kind == "print":
                child.send(self._print())
            elif kind == "status":
                status = value
                if checks.is_hydra():  # see `ranks`: the child finalizes MPI after this
                    sys.stdout.flush()
                    os._exit(value)
            else:
                if isinstance(value, Failure):
                    self.fail(*_split(value) if self._stage == _STARTING else (value,))
                return status

    def fail(self, found: str, remedy: str = "") -> None:
        remedy = remedy or _REMEDIES.get(self._stage, "read the messages on stderr")
        self._failed = Row(FAIL, found, remedy, self._stage)
        self._rows.append(self._failed)

    def end(self, status: int | None) -> int:
        """Print what has not been printed; return the exit status."""
        is_open = status is None and self._printed_status is None
        if is_open and self._prints():
            return self._print()
        if self._failed is not None:
            self._complain(self._failed)
            if is_open:
                self._linger()
        if is_open:
            return 0  # or launchers end all ranks, and rank 0 has not printed yet
        return 1 if status is None else status

    def _prints(self) -> bool:
        """Return whether this process prints: rank 0, by MPI or by the launcher."""
        if self._size is not None and self._size > 1:
            return self._rank == 0
        return not is_silent(os.environ)

    def _complain(self, row: Row) -> None:
        """Write one line on what failed in a process that does not print the table."""
        who = f"process {os.getpid()}" if self._rank is None else f"rank {self._rank}"
        where = f"{who} on {socket.gethostname()}"
        with contextlib.suppress(OSError):
            sys.stderr.write(f"mpidist doctor: {where}: {row.what}: {row.found}\n")
            sys.stderr.flush()

    def _linger(self) -> None:
        """Wait, as mpirun may end the job, before rank 0 has printed.

        It does so when a process ends without finalizing MPI; Open MPI's also if that
        has not started MPI, but others have.
        """
        if self._rank is not None or OPEN_MPI.is_here(os.environ):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_LINGERING * self._seconds)

    def _print(self) -> int:
        rows, path = self._rows, self._json_file
        text = to_text(rows) if path is None else to_json(rows, self._size)
        status = int(worst(rows) is FAIL)
        try:
            if path in (None, "-"):
                if hasattr(sys.stdout, "reconfigure"):
                    sys.stdout.reconfigure(errors="backslashreplace")
                print(text, flush=True)
            else:
                with replace_file(Path(str(path))) as file:
                    file.write(f"{text}\n".encode())
        except OSError as error:
            print(f"python -m mpidist doctor: error: {error}", file=sys.stderr)
            status = 1
        self._printed_status = status
        return status


def _split(failure: str) -> tuple[str, str]:
    """Return why MPI did not start, and the remedy, which a LaunchError has in it."""
    found, _, remedy = failure.partition("; start the job with ")
    if remedy:
        return f"{found}.", f"start the job with {remedy}"
    return failure, f"{NO_MPI}; the loader must find libmpi (LD_LIBRARY_PATH)"


def _examine_ranks(*arguments: Any) -> None:
    """Import `ranks`, which starts MPI: not in the process that survives."""
    from mpidist.launch import mpi_defaults  # noqa: F401 - before MPI starts
    from mpidist.tools.doctor.ranks import examine_ranks

    examine_ranks(*arguments)
