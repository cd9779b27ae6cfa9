"""`mpidist doctor`: what is wrong with the place where a job is to run."""

from __future__ import annotations

import argparse

from mpidist.tools.cli import arguments

__all__ = ["add"]

_DOCTOR = """Say what is wrong with the place where a job is to run.

Runs as the job would, or alone, for a minute at most if all is well:
  mpirun -n 8 python -m mpidist doctor --paths /data/train.h5 /scratch/checkpoints
Looks at Python, MPI and the launcher, nodes and cores, GPUs, HDF5, files, their locks,
and the speed of all_reduce, on all ranks. Small files are written where the paths are,
and removed."""
_DOCTOR_END = """Exit status: 0 if all rows are OK or WARN; 1 if one is FAIL; 2 if the
arguments cannot be used. (Launchers may give another number than 1.)"""


def add(commands: arguments.Commands) -> None:
    """Add the command."""
    parser = arguments.add_command(
        commands,
        "doctor",
        _doctor,
        "say what is wrong with the place where a job is to run",
        _DOCTOR,
        ["mpidist run -n 8 -m mpidist doctor --paths /data/train.h5 /scratch"],
        _DOCTOR_END,
    )
    _add_arguments(parser)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--paths",
        nargs="+",
        default=["."],
        type=arguments.path,
        metavar="PATH",
        help="folders and files of the job (default: the current folder)",
    )
    add(
        "--json",
        nargs="?",
        const="-",
        type=arguments.path,
        metavar="FILE",
        help="print JSON instead of a table, or write it to FILE",
    )
    add(
        "--seconds",
        type=arguments.seconds,
        default=20.0,
        metavar="N",
        help="how long each check may take (default 20)",
    )
    # For processes that the doctor itself starts
    add("--child", action="store_true", help=argparse.SUPPRESS)


def _doctor(given: argparse.Namespace) -> int:
    """Examine, and print what was found."""
    if given.child:
        from mpidist.tools.doctor.children import serve

        serve()
    from mpidist.tools.doctor.runner import Request, run

    return run(Request(tuple(dict.fromkeys(given.paths)), given.seconds, given.json))
