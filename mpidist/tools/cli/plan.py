"""`mpidist plan`: what each rank of a job will read."""

from __future__ import annotations

import argparse

from mpidist.tools.cli import arguments
from mpidist.util.representation import printable

__all__ = ["add"]

_MOST_RANKS = 1 << 17  # each takes some 50 us

_PLAN = """Show what each rank of a job will read: rows, bytes, files, steps.

Runs in one process, without MPI, and reads file metadata, not the rows. The numbers are
those of the first epoch of
  Dataset.from_hdf5(FILES, DATASETS).shuffle(SEED).batch(N)
given to Strategy.experimental_distribute_dataset on R ranks."""
_PLAN_END = """Exit status: 0 if there is a plan; 1 if a file or a dataset is missing,
cannot be read, or does not match the others; 2 if the arguments are invalid."""


def add(commands: arguments.Commands) -> None:
    """Add the command."""
    parser = arguments.add_command(
        commands,
        "plan",
        _plan,
        "show what each rank of a job will read, without MPI",
        _PLAN,
        ["mpidist plan 'train-*.h5' --batch 256 --ranks 8 --shuffle"],
        _PLAN_END,
    )
    parser.set_defaults(usage_error=parser.error)
    _add_arguments(parser)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.of_files(
        add(
            "files", nargs="+", metavar="FILE", help="HDF5 file, or a pattern in quotes"
        )
    )
    add(
        "--batch",
        type=arguments.integer(1),
        required=True,
        metavar="N",
        help="global batch size",
    )
    add(
        "--ranks",
        type=arguments.integer(1, _MOST_RANKS),
        required=True,
        metavar="R",
        help=f"of the job, up to {_MOST_RANKS:,}",
    )
    add(
        "--datasets",
        nargs="+",
        default=[],
        metavar="NAME",
        help="HDF5 datasets; default: those of the first file with equal lengths",
    )
    add(
        "--policy",
        choices=["data", "file", "off"],
        default="data",
        help="the AutoShardPolicy: slices of each batch, whole files, or everything",
    )
    add("--drop-remainder", action="store_true", help="as of Dataset.batch")
    add("--shuffle", action="store_true", help="shuffle the rows before batching")
    add("--seed", type=int, metavar="SEED", help="of the shuffle")
    add(
        "--window-chunks",
        type=arguments.integer(0),
        metavar="CHUNKS",
        help="see Dataset.shuffle; 0 permutes exactly",
    )
    add(
        "--ranks-per-node",
        type=arguments.integer(1),
        metavar="K",
        help="adds a line on nodes",
    )
    add("--json", action="store_true", help="print all numbers as JSON")


def _plan(given: argparse.Namespace) -> int:
    """Print a plan, and return the exit status."""
    if not given.shuffle and not (given.seed is given.window_chunks is None):
        given.usage_error("--seed and --window-chunks need --shuffle")
    # Not before the arguments are known to be good: these take most of a second
    from mpidist.errors import ArgumentError, DataError
    from mpidist.options import AutoShardPolicy
    from mpidist.tools.plan.input_plan import make_plan
    from mpidist.tools.plan.parts import Request
    from mpidist.tools.plan.text import to_json, to_text

    request = Request(
        tuple(given.files),
        given.batch,
        given.ranks,
        datasets=tuple(given.datasets),
        policy=AutoShardPolicy[given.policy.upper()],
        drop_remainder=given.drop_remainder,
        is_shuffled=given.shuffle,
        seed=given.seed,
        window_chunks=given.window_chunks,
        ranks_per_node=given.ranks_per_node,
    )
    try:
        plan = make_plan(request)
    except (ArgumentError, DataError, OSError) as error:
        arguments.complain("plan", error)
        return 2 if isinstance(error, ArgumentError) else 1
    # Names in the files may have control characters
    print(to_json(plan) if given.json else printable(to_text(plan), "\n"))
    return 0
