"""`mpidist top`: the progress of a running job."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpidist.tools.cli import arguments

__all__ = ["add"]

_TOP = """Show the progress of a job with a timeline, and how it spends its time.

Runs without MPI, on any node that sees the folder of MPIDIST_TIMELINE."""


def add(commands: arguments.Commands) -> None:
    """Add the command."""
    parser = arguments.add_command(
        commands,
        "top",
        _top,
        "show the progress of a running job, without MPI",
        _TOP,
        ["mpidist top timeline"],
    )
    arguments.of_files(
        parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a timeline")
    )
    parser.add_argument("--once", action="store_true", help="show it once, and end")
    parser.add_argument(
        "--seconds",
        type=arguments.seconds,
        default=2.0,
        metavar="N",
        help="interval of updates (default 2)",
    )


def _top(given: argparse.Namespace) -> int:
    """Show a job until it ends, and return the exit status."""
    from mpidist.errors import DataError
    from mpidist.monitor.top import top

    try:
        top(given.folder, None if given.once else given.seconds)
    except (DataError, OSError) as error:
        arguments.complain("top", error)
        return 1
    return 0
