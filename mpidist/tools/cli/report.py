"""`mpidist report`: how a job spent its time, as a page."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mpidist.tools.cli import arguments

__all__ = ["add"]

_REPORT = """Show how a job spent its time, as a page for a browser.

The folder contains the timeline of a job with MPIDIST_TIMELINE=FOLDER or
strategy.timeline(FOLDER). The job may still run, or have been killed. The page is one
file that works offline. The trace, for https://ui.perfetto.dev or chrome://tracing,
has the events of all ranks on a common clock."""
_REPORT_END = """Exit status: 0; 1 if there is no timeline, or a file cannot be written;
2 if the arguments are invalid."""


def add(commands: arguments.Commands) -> None:
    """Add the command."""
    parser = arguments.add_command(
        commands,
        "report",
        _report,
        "show how a job spent its time, without MPI",
        _REPORT,
        ["mpidist report timeline -o report.html --trace trace.json.gz"],
        _REPORT_END,
    )
    parser.set_defaults(usage_error=parser.error)
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
            help="also write the events of all ranks; compressed if it ends in .gz",
        )
    )


def _require_free(given: argparse.Namespace) -> None:
    """Refuse outputs that would overwrite each other, or the timeline."""
    outputs = [path for path in (given.output, given.trace) if path is not None]
    whole = [Path(os.path.realpath(path)) for path in outputs]
    if len({*whole}) < len(whole):
        given.usage_error("--output and --trace name the same file")
    for path in whole:
        is_inside = path.parent == Path(os.path.realpath(given.folder))
        if is_inside and any(map(path.match, ("status-*.json", "timeline-*.json.gz"))):
            given.usage_error(f"{path} is a file of the timeline")


def _report(given: argparse.Namespace) -> int:
    """Write the page, and return the exit status."""
    _require_free(given)
    from mpidist.errors import DataError
    from mpidist.monitor.report import describe, page
    from mpidist.monitor.traces import merge
    from mpidist.util.files import replace_file

    try:
        data = describe(given.folder)
        with replace_file(given.output) as file:
            file.write(page(data).encode())
        print(given.output)
        print(f"{data['subtitle']}: {data['steps']:,} steps")
        print("\n".join(data["findings"]))
        if given.trace is not None:
            print(f"{given.trace}: {merge(given.folder, given.trace):,} events")
    except (DataError, OSError) as error:
        arguments.complain("report", error)
        return 1
    return 0
