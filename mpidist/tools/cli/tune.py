"""`mpidist tune`: find the fastest transport for each size."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpidist.tools.cli import arguments

__all__ = ["add"]

_TUNE = """Measure the fastest transport for each size.

Run it on an idle machine, with the same number of nodes and ranks per node as your
jobs. It writes a file that strategies with this layout and MPI library read. It changes
a transport only if another one is faster by more than the noise of the measurement, and
prints times, noise and gain."""
_TUNE_END = """Exit status: 0 if a table was written; 1 with one rank, where nothing is
written; 2 if the arguments are invalid."""


def add(commands: arguments.Commands) -> None:
    """Add the command."""
    parser = arguments.add_command(
        commands,
        "tune",
        _tune,
        "measure the fastest transport for each size, under mpirun",
        _TUNE,
        ["mpidist run -n 8 -m mpidist tune"],
        _TUNE_END,
    )
    _add_arguments(parser)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        help="the file; by default $MPIDIST_TRANSPORTS, or "
        "mpidist/transports.json in $XDG_CONFIG_HOME or ~/.config",
    )
    add(
        "--largest-bytes",
        type=arguments.integer(1, 1 << 40),
        default=64 << 20,
        metavar="N",
        help="largest size to measure (default 64 MiB)",
    )
    add(
        "--repetitions",
        type=arguments.integer(1, 1_000_000),
        default=9,
        metavar="N",
        help="(default 9)",
    )


def _tune(given: argparse.Namespace) -> int:
    """Measure, and print the table."""
    from mpidist.launch import mpi_defaults  # noqa: F401, I001 - before MPI is imported
    from mpidist.resilience import exit_handling
    from mpidist.comm.transports.tuning import table_path
    from mpidist.tools.tune import describe, tune

    exit_handling.abort_on_exception()
    path = given.output or table_path()
    if path is None:
        arguments.complain("tune", "there is no home directory: name a file, --output")
        return 2
    found = tune(path, given.largest_bytes, given.repetitions)
    if "table" not in found:
        arguments.complain(
            "tune",
            "one rank has no transports to compare: mpidist run -n 8 -m mpidist tune",
        )
        return 1
    if found["rank"] == 0:
        print("microseconds of a call, by size of the result")
        print("\n".join(describe(found)))
        print(f"{path}: {found['layout']}")
        for method, rows in found["table"].items():
            text = ", ".join(f"from {edge:,} bytes {name}" for edge, name in rows)
            print(f"{method}: {text}")
    return 0
