"""`mpidist doctor`: checks the machine or allocation of a job."""

from __future__ import annotations

import argparse

from mpidist.tools.cli import arguments

__all__ = ["add"]

_DOCTOR = """Check the machine or allocation of a job.

Run it like the job, or alone; without problems it takes at most a minute:
  mpirun -n 8 python -m mpidist doctor --paths /data/train.h5 /scratch/checkpoints
Checks Python, MPI and the launcher, nodes and cores, GPUs, HDF5, files, their locks,
and the speed of all_reduce, on all ranks. Writes small files to the paths, and removes
them."""
_DOCTOR_END = """Exit status: 0 if all rows are OK or WARN; 1 if one is FAIL; 2 if the
arguments are invalid. (Launchers may return another number than 1.)"""


def add(commands: arguments.Commands) -> None:
    """Add the command."""
    parser = arguments.add_command(
        commands,
        "doctor",
        _doctor,
        "check the machine or allocation of a job",
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
    """Run the checks, and print their results."""
    if given.child:
        from mpidist.tools.doctor.children import serve

        serve()
    from mpidist.tools.doctor.runner import run

    return run(list(dict.fromkeys(given.paths)), given.seconds, given.json)
