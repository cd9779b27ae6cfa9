"""`python -m mpidist doctor`: examines, and prints."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

from mpidist.tools.doctor.examination import STARTING, Request, examine
from mpidist.tools.doctor.finding import Finding, Status, worst
from mpidist.tools.doctor.launch_checks import is_silent
from mpidist.tools.doctor.report import to_json, to_text
from mpidist.tools.doctor.supervisor import Watched, watch

__all__ = ["run"]

# How long the others may take to say what they found, in terms of each check's time
_LINGERING = 7


def run(request: Request, json_file: str | None) -> int:
    """Examine, print a table on rank 0, and return the exit status. Collective.

    Args:
      request: what to examine.
      json_file: where to write JSON, "-" for the standard output, None for a table.
    """

    def report(watched: Watched) -> int:
        return _print(watched.rows, watched.size, json_file)

    with contextlib.closing(watch(partial(examine, request), report)) as watched:
        if watched.status is not None:
            if watched.has_failed:  # when all was printed
                _complain(watched)
            return watched.status
        if not _is_speaker(watched):
            if _complain(watched):
                _linger(watched, _LINGERING * request.seconds)
            return 0  # or launchers end all, also the one that prints
        if watched.stage != STARTING or not watched.has_failed or _is_hurried(watched):
            return report(watched)
        # Without MPI, what is there can be looked at still
        again = partial(examine, request, no_mpi=watched.rows[-1])
        with contextlib.closing(watch(again, report)) as second:
            return report(second) if second.status is None else second.status


def _is_hurried(watched: Watched) -> bool:
    """Return whether Open MPI's mpirun is about to end the job, as the child died."""
    return not watched.pid and "PMIX_RANK" in os.environ


def _is_speaker(watched: Watched) -> bool:
    """Return whether this process prints: rank 0, or who the launcher says would be."""
    if watched.size is not None and watched.size > 1:
        return watched.rank == 0
    return not is_silent(os.environ)


def _complain(watched: Watched) -> bool:
    """Write one line on what keeps this process from others; return if there is any."""
    who = f"process {os.getpid()}" if watched.rank is None else f"rank {watched.rank}"
    rows = watched.rows[-1:] if watched.has_failed else watched.rows
    row = next(
        (row for row in rows if watched.has_failed or row.what == STARTING), None
    )
    if row is None:
        return False
    line = f"mpidist doctor: {who} on {socket.gethostname()}: {row.what}: {row.found}\n"
    with contextlib.suppress(OSError):
        sys.stderr.write(line)
        sys.stderr.flush()
    return True


def _linger(watched: Watched, seconds: float) -> None:
    """Wait, or mpirun ends the job, also the process that prints.

    It does so when a process ends without ending MPI; Open MPI's also if that has not
    started MPI, but others have.
    """
    if watched.rank is not None or "OMPI_COMM_WORLD_SIZE" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(seconds)


def _print(rows: list[Finding], size: int | None, json_file: str | None) -> int:
    text = to_text(rows) if json_file is None else to_json(rows, size)
    status = 1 if worst(rows) is Status.FAIL else 0
    try:
        if json_file in (None, "-"):
            if hasattr(sys.stdout, "reconfigure"):
                sys.stdout.reconfigure(errors="backslashreplace")
            print(text, flush=True)
        else:
            Path(str(json_file)).write_text(f"{text}\n")
    except OSError as error:
        print(f"python -m mpidist doctor: error: {error}", file=sys.stderr)
        status = 1
    return status
