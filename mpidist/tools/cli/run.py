"""`mpidist run`: starts a job with the right launcher."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from mpidist.tools.cli import arguments

__all__ = ["add"]

_RUN = """Start a job with the right launcher.

It uses the mpirun of the MPI library that mpi4py is linked to, or srun in a Slurm
allocation. Python scripts run with the current Python; other programs run directly.
MPIDIST_... variables are passed to all nodes. Signals and the exit status are those of
the launcher."""
_RUN_END = """Exit status: the launcher's; 2 if nothing was started."""


def add(commands: arguments.Commands) -> None:
    """Add the command."""
    parser = arguments.add_command(
        commands,
        "run",
        _run,
        "start a job with the right mpirun, or srun",
        _RUN,
        [
            "mpidist run -n 4 train.py --epochs 3",
            "mpidist run -n 4 --dry-run -m package.train",
        ],
        _RUN_END,
    )
    add = parser.add_argument
    add(
        "-n",
        "--ranks",
        type=arguments.integer(1, (1 << 31) - 1),
        metavar="N",
        help="number of ranks; in Slurm by default the allocated tasks",
    )
    add("--dry-run", action="store_true", help="print the command line, start nothing")
    add(
        "--oversubscribe",
        action="store_true",
        help="allow more ranks than cores (slow)",
    )
    add("--launcher", choices=["auto", "mpirun", "srun"], default="auto")
    add(
        "--launcher-options",
        type=shlex.split,
        default=[],
        metavar="TEXT",
        help="more options of mpirun or srun, as '--hostfile=hosts'",
    )
    add(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="run a module, as python -m does; the rest are its arguments",
    )
    arguments.of_files(
        add(
            "program",
            nargs=argparse.REMAINDER,
            metavar="PROGRAM",
            help="script or program, and its arguments",
        )
    )


def _run(given: argparse.Namespace) -> int:
    """Replace this process by the launcher; return only if nothing is started."""
    from mpidist.errors import LaunchError
    from mpidist.launch import starting

    words = given.program
    if given.module is not None:
        words = ["-m", *given.module]
    if words[:1] == ["--"]:
        words = words[1:]
    if not words or words == ["-m"]:
        arguments.complain("run", "name a script, a program, or -m and a module")
        return 2
    try:
        request = starting.Request(
            starting.program(words),
            given.ranks,
            given.oversubscribe,
            given.launcher_options,
            given.launcher,
        )
        library = starting.find_library()
        command, notes = starting.start_command(request, library, os.environ)
    except LaunchError as error:
        arguments.complain("run", error)
        return 2
    for note in notes:
        print(f"{arguments.program_name()} run: {note}", file=sys.stderr)
    if given.dry_run:
        print(shlex.join(command))
        return 0
    sys.stderr.flush()
    try:
        # The launcher replaces this process, with signals and exit status
        os.execvp(command[0], command)
    except OSError as error:
        arguments.complain("run", f"{command[0]}: {error}")
        return 2
