"""The commands: `python -m mpidist COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]

_PLAN = """Show what each rank of a job will read: rows, bytes, files, steps.

Runs in one process, without MPI, and reads where the rows lie, not the rows. The
numbers are those of the first epoch of
  Dataset.from_hdf5(FILES, DATASETS).shuffle(SEED).batch(N)
given to Strategy.experimental_distribute_dataset on R ranks."""
_TUNE = """Measure which way of communication is the fastest for which size.

Runs on as many ranks per node, and nodes, as the jobs it is for:
  mpirun -n 8 python -m mpidist tune
The machine should do nothing else. What it finds is written to a file, from which
strategies with that layout and MPI library take it."""
_REPORT = """Show where the time of a job went, as a page for a browser.

The folder is that of a timeline: of a job that ran with MPIDIST_TIMELINE=FOLDER, or in
strategy.timeline(FOLDER). It may run still, or have been killed. The page is one file
that needs no network:
  python -m mpidist report FOLDER -o report.html --trace trace.json.gz
The trace is for https://ui.perfetto.dev or chrome://tracing: what each rank did when,
all on one clock."""
_REPORT_END = """Exit status: 0; 1 if there is no timeline, or a file cannot be written;
2 if the arguments cannot be used."""
_TOP = """Show how far a job with a timeline is, and where its time goes.

Runs without MPI, as on a login node that sees the folder of MPIDIST_TIMELINE:
  python -m mpidist top FOLDER"""
_DIFF = """Compare what the flight recorders of all ranks hold.

Where the variable MPIDIST_DUMPS names a folder, each rank keeps its last 1,000
collectives there, and leaves them if the job does not end well. This names the first
call that differs between ranks, and the ranks that did not come to the last one."""
_DIFF_END = """Exit status: 0 if all ranks did the same and ended it; 1 if not; 2 if the
dumps cannot be read."""
_DOCTOR = """Say what is wrong with the place where a job is to run.

Runs as the job would, or alone, for a minute at most if all is well:
  mpirun -n 8 python -m mpidist doctor --paths /data/train.h5 /scratch/checkpoints
Looks at Python, MPI and the launcher, nodes and cores, GPUs, HDF5, files, their locks,
and the speed of all_reduce, on all ranks. Small files are written where the paths are,
and removed."""
_DOCTOR_END = """Exit status: 0 if all rows are OK or WARN; 1 if one is FAIL; 2 if the
arguments cannot be used. (Launchers may give another number than 1.)"""
_PLAN_END = """Exit status: 0 if there is a plan; 1 if a file or a dataset is missing,
cannot be read, or does not fit the others; 2 if the arguments cannot be used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status."""
    parser = argparse.ArgumentParser("python -m mpidist")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    plan_help = "show what each rank of a job will read, without MPI"
    plan = _add_command(commands, "plan", _plan, plan_help, _PLAN, _PLAN_END)
    plan.set_defaults(usage_error=plan.error)
    _add_plan_arguments(plan)
    tune_help = "measure which way of communication is the fastest, under mpirun"
    _add_tune_arguments(_add_command(commands, "tune", _tune, tune_help, _TUNE))
    diff_help = "name the first collective in which ranks differed, without MPI"
    diff = _add_command(commands, "diff", _diff, diff_help, _DIFF, _DIFF_END)
    diff.add_argument("dumps", nargs="+", type=Path, help="folders, or files")
    report_help = "show where the time of a job went, without MPI"
    _add_report_arguments(
        _add_command(commands, "report", _report, report_help, _REPORT, _REPORT_END)
    )
    top_help = "show how far a job is, without MPI"
    _add_top_arguments(_add_command(commands, "top", _top, top_help, _TOP))
    doctor_help = "say what is wrong with the place where a job is to run"
    _add_doctor_arguments(
        _add_command(commands, "doctor", _doctor, doctor_help, _DOCTOR, _DOCTOR_END)
    )
    given = parser.parse_args(arguments)
    status: int = given.run(given)
    return status


def _add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    end: str = "",
) -> argparse.ArgumentParser:
    """Return the parser of a command, which `run` does and gives its exit status."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=end,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        help="the file; by default $MPIDIST_TRANSPORTS, or "
        "mpidist/transports.json in $XDG_CONFIG_HOME or ~/.config",
    )
    add(
        "--largest-bytes",
        type=_positive,
        default=64 << 20,
        metavar="N",
        help="up to which size to measure (default 64 MiB)",
    )
    add("--repetitions", type=_positive, default=9, metavar="N", help="(default 9)")


def _tune(given: argparse.Namespace) -> int:
    """Measure, and print the table."""
    from mpidist.launch import mpi_defaults  # noqa: F401, I001 - before MPI is imported
    from mpidist.resilience import exit_handling
    from mpidist.comm.transports.tuning_table import table_path
    from mpidist.tools.tune import tune

    exit_handling.abort_on_exception()
    path = given.output or table_path()
    found = tune(path, given.largest_bytes, given.repetitions)
    if found["rank"] == 0:
        print(f"{path}: {found['layout']}")
        for method, rows in found["table"].items():
            text = ", ".join(f"from {edge:,} bytes {name}" for edge, name in rows)
            print(f"{method}: {text}")
    return 0


def _diff(given: argparse.Namespace) -> int:
    """Compare dumps, and return the exit status."""
    from mpidist.errors import DataError
    from mpidist.resilience.flight_analysis import compare, read_flights

    try:
        lines, is_same = compare(read_flights(given.dumps))
    except DataError as error:
        print(f"python -m mpidist diff: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0 if is_same else 1


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a timeline")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the page (default report.html)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the events of all ranks, too; compressed if it ends in .gz",
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
        print(f"python -m mpidist report: error: {error}", file=sys.stderr)
        return 1
    return 0


def _add_top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a timeline")
    parser.add_argument("--once", action="store_true", help="show it once, and end")
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=2.0,
        metavar="N",
        help="between two looks (default 2)",
    )


def _top(given: argparse.Namespace) -> int:
    """Show a job until it ends, and return the exit status."""
    from mpidist.monitor.top import top

    return top(given.folder, None if given.once else given.seconds)


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="HDF5 file, or a pattern in quotes")
    add("--batch", type=_positive, required=True, metavar="N", help="global batch size")
    add("--ranks", type=_positive, required=True, metavar="R", help="of the job")
    add(
        "--datasets",
        nargs="+",
        default=[],
        metavar="NAME",
        help="HDF5 datasets; else those of the first file with equally many rows",
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
        type=_not_negative,
        metavar="CHUNKS",
        help="as of Dataset.shuffle; 0 permutes exactly",
    )
    add("--ranks-per-node", type=_positive, metavar="K", help="adds a line on nodes")
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
    except (ArgumentError, DataError) as error:
        print(f"python -m mpidist plan: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, DataError) else 2
    print(to_json(plan) if given.json else to_text(plan))
    return 0


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--paths",
        nargs="+",
        default=["."],
        type=_path,
        metavar="PATH",
        help="folders and files of the job (default: the current folder)",
    )
    add(
        "--json",
        nargs="?",
        const="-",
        type=_path,
        metavar="FILE",
        help="print JSON instead of a table, or write it to FILE",
    )
    add(
        "--seconds",
        type=_seconds,
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


def _path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must name a path, not ''")
    return text


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number <= 3600:
        raise argparse.ArgumentTypeError(f"must be > 0 and <= 3600, not {text}")
    return number


def _positive(text: str) -> int:
    return _at_least(1, text)


def _not_negative(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"must be >= {least}, not {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
