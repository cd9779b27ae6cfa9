"""`mpidist report`: where the time of a job went, as a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpidist.tools.cli import arguments

__all__ = ["add"]

_REPORT = """Show where the time of a job went, as a page for a browser.

The folder is that of a timeline: of a job that ran with MPIDIST_TIMELINE=FOLDER, or in
strategy.timeline(FOLDER). It may run still, or have been killed. The page is one file
that needs no network. The trace is for https://ui.perfetto.dev or chrome://tracing:
what each rank did when, all on one clock."""
_REPORT_END = """Exit status: 0; 1 if there is no timeline, or a file cannot be written;
2 if the arguments cannot be used."""


def add(commands: arguments.Commands) -> None:
    """Add the command."""
    parser = arguments.add_command(
        commands,
        "report",
        _report,
        "show where the time of a job went, without MPI",
        _REPORT,
        ["mpidist report timeline -o report.html --trace trace.json.gz"],
        _REPORT_END,
    )
    add = parser.add_argument
    arguments.of_files(add("folder", type=Path, metavar="FOLDER", help="of a timeline"))
    arguments.of_files(
        add(
            "-o",
            "--output",
            type=Path,
            default=Path("report.html"),
            metavar="FILE",
            help="the page (default report.html)",
        )
    )
    arguments.of_files(
        add(
            "--trace",
            type=Path,
            metavar="FILE",
            help="write the events of all ranks, too; compressed if it ends in .gz",
        )
    )


def _report(given: argparse.Namespace) -> int:
    """Write the page, and return the exit status."""
    from mpidist.errors import DataError
    from mpidist.monitor.report import report
    from mpidist.monitor.trace_reader import merge
    from mpidist.util.files import replace_file

    try:
        page = report(given.folder)
        with replace_file(given.output) as file:
            file.write(page.encode())
        print(given.output)
        if given.trace is not None:
            print(f"{given.trace}: {merge(given.folder, given.trace):,} events")
    except (DataError, OSError) as error:
        arguments.complain("report", error)
        return 1
    return 0
