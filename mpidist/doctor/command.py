"""`python -m mpidist doctor`: examines, and prints."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
from pathlib import Path

from mpidist.doctor.examination import STARTING, Request, examine
from mpidist.doctor.finding import Finding, Status, worst
from mpidist.doctor.launch_checks import is_silent
from mpidist.doctor.report import to_json, to_text
from mpidist.doctor.supervisor import Watched, watch

__all__ = ["run"]

_ALLOWED = "MPIDIST_ALLOW_SINGLETON"
# mpirun kills the ranks that still run when one ends with an error, and says 9
_OTHERS_END_SECONDS = 0.5


def run(request: Request, json_file: str | None) -> int:
    """Examine, print a table on rank 0, and return the exit status. Collective.

    Args:
      request: what to examine.
      json_file: where to write JSON, "-" for the standard output, None for a table.
    """
    watched = watch(functools.partial(examine, request))
    if not _is_speaker(watched):
        if watched.has_failed:
            _complain(watched)
        return 0  # the one that speaks says so too; launchers end jobs on the first
    if watched.has_failed and watched.stage == STARTING:
        again = functools.partial(examine, request, no_mpi=watched.rows[-1])
        watched = watch(again)
    return _print(watched.rows, watched.size, json_file)


def _is_speaker(watched: Watched) -> bool:
    """Return whether this process prints: rank 0, or who the launcher says would be."""
    if watched.size is not None and watched.size > 1:
        return watched.rank == 0
    return os.environ.get(_ALLOWED) == "1" or not is_silent(os.environ)


def _complain(watched: Watched) -> None:
    """Write one line on a failure here, which the others may not hear of."""
    who = f"process {os.getpid()}" if watched.rank is None else f"rank {watched.rank}"
    row = watched.rows[-1]
    line = f"mpidist doctor: {who} on {socket.gethostname()}: {row.what}: {row.found}\n"
    with contextlib.suppress(OSError):
        sys.stderr.write(line)
        sys.stderr.flush()


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
    if status and size is not None and size > 1:
        time.sleep(_OTHERS_END_SECONDS)
    return status
