"""`python -m mpidist doctor`: runs the checks, and prints their results.

All checks run in child processes, so that a crash or hang does not affect this process:
each local check in its own child, then MPI with the checks of all ranks (`rank_job`),
because MPI may end a process that starts it, or never return. This process prints on
rank 0, or if there is no MPI, and kills its children.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from mpidist.launch.launchers import NO_MPI
from mpidist.tools.doctor import evaluate
from mpidist.tools.doctor.children import Channel, Child, run_checks
from mpidist.tools.doctor.evaluate import RankFacts
from mpidist.tools.doctor.gpu_checks import find_gpus
from mpidist.tools.doctor.node_checks import find_node, is_hydra, is_silent
from mpidist.tools.doctor.path_checks import try_alone
from mpidist.tools.doctor.process_checks import (
    NEEDED,
    find_hdf5,
    find_python,
    try_import,
)
from mpidist.tools.doctor.results import (
    CheckResult,
    Failure,
    Status,
    to_json,
    to_text,
    worst,
)
from mpidist.util.files import replace_file

__all__ = ["Request", "run"]

_STARTING = "starting MPI"
_MARGIN_SECONDS = 10.0
# How long other ranks may take to report, as a multiple of the time for each check
_LINGERING = 7
_NO_MPI_REMEDY = f"{NO_MPI}; the loader must find libmpi (LD_LIBRARY_PATH)"
_REMEDIES = {
    _STARTING: "use the mpirun of the MPI library that mpi4py loads, or srun with "
    "the --mpi= that it was built for (pmix for Open MPI, pmi2 for MPICH); check that "
    "all ranks run the same program and that their nodes can connect to each other",
    "ending": "check that all ranks end",
}


class Request(NamedTuple):
    """The arguments of the command.

    Args:
      paths: of the job's files.
      seconds: how long each check may take.
      json_file: where to write JSON, "-" for stdout; None prints a table.
    """

    paths: tuple[str, ...]
    seconds: float
    json_file: str | None


def run(request: Request) -> int:
    """Run all checks, print on rank 0, and return the exit status. Collective."""
    runner = _Runner(request)
    # Results are printed before children are closed, since launchers kill soon
    with contextlib.ExitStack() as children, _raise_on_signals():
        try:
            return runner.end(runner.run(children))
        except _TerminatedError as error:
            runner.fail(f"ended by {error}, which the launcher or a user sent")
            return runner.end(None)


class _TerminatedError(BaseException):
    """A signal that asks this process to end."""


@contextlib.contextmanager
def _raise_on_signals() -> Iterator[None]:
    """Raise a _TerminatedError on the first signal, and ignore later ones."""
    numbers = signal.SIGTERM, signal.SIGINT

    def ignore() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    def terminate(number: int, frame: FrameType | None) -> None:
        ignore()
        raise _TerminatedError(signal.Signals(number).name)

    for number in numbers:
        signal.signal(number, terminate)
    try:
        yield
    finally:
        ignore()


class _Runner:
    """The checks of one process that the launcher started."""

    def __init__(self, request: Request):
        self._request = request
        self._stage = "checking this process"
        self._rows: list[CheckResult] = []
        self._failed: CheckResult | None = None
        self._rank: int | None = None
        self._size: int | None = None
        self._printed_status: int | None = None

    def run(self, children: contextlib.ExitStack) -> int | None:
        """Run all checks; return the status that the ranks agreed on. Collective.

        Args:
          children: for the child that is a rank, which outlives this call: some
            launchers end the job when a rank ends.
        """
        facts = self._check_process()
        self._rows = evaluate.evaluate_processes({0: facts})
        self._stage = _STARTING
        status, is_job_ending = None, False
        broken = _broken_packages(facts)
        if broken:
            found = f"not tested: {', '.join(broken)} cannot be imported"
            self.fail(found, "see the rows below")
        else:
            request = self._request
            arguments = request.paths, request.seconds, facts, dict(os.environ)
            child = Child(_examine_ranks, *arguments, is_rank=True)
            try:
                status = self._follow(children.enter_context(child))
            except EOFError as error:
                self.fail(str(error))
                is_job_ending = "PMIX_RANK" in os.environ  # Open MPI's mpirun ends it
        if self._stage == _STARTING and self._prints() and not is_job_ending:
            self._examine_alone(facts)
        return status

    def _check_process(self) -> RankFacts:
        """Return the facts that need no other rank."""
        calls: list[Any] = [(find_hdf5,), (find_gpus,)]
        calls += [(try_import, name) for name in NEEDED]
        hdf5, gpus, *packages = run_checks(calls, self._request.seconds)
        python = find_python(dict(zip(NEEDED, packages, strict=True)))
        return RankFacts(python, hdf5, gpus)

    def _follow(self, child: Child) -> int | None:
        """Receive the reports of a rank; return the status that the ranks agreed on.

        Raises:
          EOFError: the child has ended before its result.
        """
        seconds = 4 * self._request.seconds + _MARGIN_SECONDS
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
                if is_hydra():  # see `rank_job`: the child finalizes MPI after this
                    sys.stdout.flush()
                    os._exit(value)
            else:
                if isinstance(value, Failure):
                    is_starting = self._stage == _STARTING
                    self.fail(value.text, _NO_MPI_REMEDY if is_starting else None)
                return status

    def _examine_alone(self, facts: RankFacts) -> None:
        """Check what needs no MPI, which has failed to start."""
        paths, seconds = self._request.paths, self._request.seconds
        first = [] if self._failed is None else [self._failed]
        self._stage = "trying paths"
        (node,) = run_checks([(find_node,)], seconds)
        facts = dataclasses.replace(facts, node=node)
        self._rows = [*first, *evaluate.evaluate({0: facts}, paths)]
        facts = dataclasses.replace(facts, paths=try_alone(paths, seconds))
        self._rows = [*first, *evaluate.evaluate({0: facts}, paths)]

    def fail(self, found: str, remedy: str | None = None) -> None:
        """Add a row: the current stage has failed."""
        remedy = remedy or _REMEDIES.get(self._stage, "read the messages on stderr")
        self._failed = CheckResult(Status.FAIL, self._stage, found, remedy)
        self._rows.append(self._failed)

    def end(self, status: int | None) -> int:
        """Print what has not been printed; return the exit status.

        Args:
          status: that the ranks agreed on; None if they did not get so far.
        """
        if status is None and self._printed_status is None:
            if self._prints():
                return self._print()
            if self._failed is not None:
                self._complain(self._failed)
                self._linger()
            return 0  # or launchers end all ranks, and rank 0 has not printed yet
        if self._failed is not None:
            self._complain(self._failed)
        return 1 if status is None else status

    def _prints(self) -> bool:
        """Return whether this process prints: rank 0, by MPI or by the launcher."""
        if self._size is not None and self._size > 1:
            return self._rank == 0
        return not is_silent(os.environ)

    def _complain(self, row: CheckResult) -> None:
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
        if self._rank is not None or "OMPI_COMM_WORLD_SIZE" in os.environ:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_LINGERING * self._request.seconds)

    def _print(self) -> int:
        """Print all rows; return the exit status."""
        rows, path = self._rows, self._request.json_file
        text = to_text(rows) if path is None else to_json(rows, self._size)
        status = 1 if worst(rows) is Status.FAIL else 0
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


def _broken_packages(facts: RankFacts) -> list[str]:
    """Return the packages without which MPI is not worth starting."""
    if isinstance(facts.python, Failure):
        return []
    packages = facts.python.packages.items()
    broken = [name for name, version in packages if isinstance(version, Failure)]
    return [name for name in broken if name != "deflate"]  # only files need that


def _examine_ranks(channel: Channel[Any, Any], *arguments: Any) -> None:
    """Import `rank_job`, which starts MPI: not in the process that survives."""
    from mpidist.launch import mpi_defaults  # noqa: F401 - before MPI starts
    from mpidist.tools.doctor.rank_job import examine_ranks

    examine_ranks(channel, *arguments)
