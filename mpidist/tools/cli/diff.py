"""`mpidist diff`: the first collective that differed between ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpidist.tools.cli import arguments

__all__ = ["add"]

_DIFF = """Compare the flight recorders of all ranks.

If MPIDIST_DUMPS names a folder, each rank records its last 1,000 collectives there; the
files stay if the job does not end normally. This command names the first call that
differs between ranks, and the ranks that did not reach the last call."""
_DIFF_END = """Exit status: 0 if all ranks made and ended the same calls; 1 if not; 2 if
the dumps cannot be read."""


def add(commands: arguments.Commands) -> None:
    """Add the command."""
    parser = arguments.add_command(
        commands,
        "diff",
        _diff,
        "name the first collective that differed between ranks, without MPI",
        _DIFF,
        ["mpidist diff dumps"],
        _DIFF_END,
    )
    arguments.of_files(
        parser.add_argument("dumps", nargs="+", type=Path, help="folders, or files")
    )


def _diff(given: argparse.Namespace) -> int:
    """Compare dumps, and return the exit status."""
    from mpidist.errors import DataError
    from mpidist.resilience.flight_analysis import compare, read_flights

    try:
        lines, is_same = compare(read_flights(given.dumps))
    except (DataError, OSError) as error:
        arguments.complain("diff", error)
        return 2
    print("\n".join(lines))
    return 0 if is_same else 1
