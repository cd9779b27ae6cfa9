"""The commands: `mpidist COMMAND`, or `python -m mpidist COMMAND`.

A command imports what it needs when it runs: help must neither wait for NumPy nor need
MPI. Its docstring is the description that `--help` prints.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.errors import ArgumentError, DataError, LaunchError
from mpidist.util.representation import printable
from mpidist.util.settings import SETTINGS, TRANSPORTS, Setting, resolve, unknown_names

_LARGEST = (1 << 63) - 1  # of the integers in arrays
_MOST_RANKS = 1 << 17  # of a plan: each takes some 50 us
_COMPLETION = """
Completion: mpidist --completion bash >
~/.local/share/bash-completion/completions/mpidist (or zsh, as _mpidist into $fpath)"""
Commands = Any  # argparse has no public name for what `add_subparsers` returns


def main(words: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status.

    Args:
      words: of the command line, by default this process's.
    """
    args = make_parser().parse_args(words)
    try:
        status: int = args.run(args)
    except (ArgumentError, DataError, LaunchError, OSError) as error:
        if args.failed is None:  # may be a job, whose other ranks must end too
            raise
        is_usage = isinstance(error, ArgumentError | LaunchError)
        return _fail(args.command, error, 2 if is_usage else args.failed)
    return status


def _fail(command: str, error: object, status: int) -> int:
    """Write the error of a command to stderr, and return the exit status."""
    text = printable(str(error), "\n")
    print(f"{_program_name()} {command}: error: {text}", file=sys.stderr)
    return status


def _program_name() -> str:
    is_script = Path(sys.argv[0]).name == "mpidist"
    return "mpidist" if is_script else "python -m mpidist"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        _program_name(),
        description="Start, examine and understand jobs of mpidist.",
        epilog=_COMPLETION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--completion",
        choices=["bash", "zsh"],
        action=_PrintCompletion,
        help="print a completion script for a shell, and exit",
    )
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for add in _ADD:
        add(commands)
    return parser


class _PrintCompletion(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            import shtab
        except ImportError:
            reason = "completion needs the package shtab: pip install shtab"
            parser.exit(1, f"{_program_name()}: error: {reason}\n")
        parser.prog = "mpidist"  # what shells complete
        sys.stdout.write(f"{shtab.complete(parser, values)}\n")
        parser.exit()


def _add_command(
    commands: Commands,
    run: Callable[[argparse.Namespace], int],
    failed: int | None = None,
) -> Callable[..., argparse.Action]:
    """Add a command, and return the method that adds arguments to it.

    Args:
      commands: of the main parser.
      run: executes the command and returns the exit status. Its name is the command's,
        and its docstring the help, with an example. The first line is the summary.
      failed: the exit status where data cannot be read; None to raise such errors.
    """
    description, title, rest = (inspect.getdoc(run) or "").partition("Example:")
    summary = description.partition(".\n")[0]
    parser: argparse.ArgumentParser = commands.add_parser(
        run.__name__.strip("_"),
        help=summary[:1].lower() + summary[1:],
        description=description,
        epilog=title + rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, failed=failed, usage_error=parser.error)
    return parser.add_argument


def _of_files(action: argparse.Action) -> None:
    # As shtab's FILE, for which it need not be there
    files = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
    action.complete = files  # type: ignore[attr-defined]  # as shtab has it


def _path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must name a path, not ''")
    return text


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number <= 3600:
        raise argparse.ArgumentTypeError(f"must be > 0 and <= 3600, not {text}")
    return number


def _integer(least: int, most: int = _LARGEST) -> Callable[[str], int]:

    def integer(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            bound = f">= {least}" if number < least else f"<= {most}"
            raise argparse.ArgumentTypeError(f"must be {bound}, not {text}")
        return number

    return integer


def _add_run(commands: Commands) -> None:
    add = _add_command(commands, _run, failed=2)
    ranks = "number of ranks; by default what the batch system allocated"
    add("-n", "--ranks", type=_integer(1, (1 << 31) - 1), metavar="N", help=ranks)
    add("--dry-run", action="store_true", help="print the command line, start nothing")
    oversubscribe = "allow more ranks than cores (slow)"
    add("--oversubscribe", action="store_true", help=oversubscribe)
    add("--launcher", choices=["auto", "mpirun", "srun", "flux"], default="auto")
    add(
        "--launcher-options",
        type=shlex.split,
        default=[],
        metavar="TEXT",
        help="more options of the launcher, as '--hostfile=hosts'",
    )
    add(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="run a module, as python -m does; the rest are its arguments",
    )
    program = "script or program, and its arguments"
    rest = argparse.REMAINDER
    _of_files(add("program", nargs=rest, metavar="PROGRAM", help=program))


def _run(args: argparse.Namespace) -> int:
    """Start a job with the right mpirun, or srun.

    It uses the mpirun of the MPI library that mpi4py is linked to, or srun in a
    Slurm allocation, or flux run in one of Flux. Python scripts run with the current
    Python; other programs run directly. MPIDIST_... variables are passed to all
    nodes. Signals and the exit status are those of the launcher.

    Example:
      mpidist run -n 4 train.py --epochs 3
      mpidist run -n 4 --dry-run -m package.train

    Exit status: the launcher's; 2 if nothing was started.
    """
    from mpidist.launch import starting

    words = args.program if args.module is None else ["-m", *args.module]
    if words[:1] == ["--"]:
        words = words[1:]
    if not words or words == ["-m"]:
        return _fail("run", "name a script, a program, or -m and a module", 2)
    request = starting.Request(
        starting.program(words),
        args.ranks,
        args.oversubscribe,
        args.launcher_options,
        args.launcher,
    )
    library = starting.find_library()
    command, notes = starting.start_command(request, library, os.environ)
    for note in notes:
        print(f"{_program_name()} run: {note}", file=sys.stderr)
    if args.dry_run:
        print(shlex.join(command))
        return 0
    sys.stderr.flush()
    try:
        # The launcher replaces this process, with signals and exit status
        os.execvp(command[0], command)
    except OSError as error:
        return _fail("run", f"{command[0]}: {error}", 2)


def _add_doctor(commands: Commands) -> None:
    add = _add_command(commands, _doctor)
    add(
        "--paths",
        nargs="+",
        default=["."],
        type=_path,
        metavar="PATH",
        help="folders and files of the job (default: the current folder)",
    )
    json = "print JSON instead of a table, or write it to FILE"
    add("--json", nargs="?", const="-", type=_path, metavar="FILE", help=json)
    seconds = "how long each check may take (default 20)"
    add("--seconds", type=_seconds, default=20.0, metavar="N", help=seconds)


def _doctor(args: argparse.Namespace) -> int:
    """Check the machine or allocation of a job.

    Run it like the job, or alone; without problems it takes at most a minute:
      mpirun -n 8 python -m mpidist doctor --paths /data/train.h5 /scratch/checkpoints
    Checks Python, MPI and the launcher, nodes and cores, GPUs, HDF5, files, their
    locks, and the speed of all_reduce, on all ranks. Writes small files to the
    paths, and removes them.

    Example:
      mpidist run -n 8 -m mpidist doctor --paths /data/train.h5 /scratch

    Exit status: 0 if all rows are OK or WARN; 1 if one is FAIL; 2 if the arguments
    are invalid. (Launchers may return another number than 1.)
    """
    from mpidist.tools.doctor.runner import run

    return run(list(dict.fromkeys(args.paths)), args.seconds, args.json)


def _add_plan(commands: Commands) -> None:
    add = _add_command(commands, _plan, failed=1)
    files = "HDF5 file, or a pattern in quotes"
    _of_files(add("files", nargs="+", metavar="FILE", help=files))
    size, ranks = "global batch size", f"of the job, up to {_MOST_RANKS:,}"
    add("--batch", type=_integer(1), required=True, metavar="N", help=size)
    number = _integer(1, _MOST_RANKS)
    add("--ranks", type=number, required=True, metavar="R", help=ranks)
    datasets = "HDF5 datasets; default: those of the first file with equal lengths"
    add("--datasets", nargs="+", default=[], metavar="NAME", help=datasets)
    add(
        "--policy",
        choices=["data", "file", "off"],
        default="data",
        help="the AutoShardPolicy: slices of each batch (default), whole files, or all",
    )
    add("--drop-remainder", action="store_true", help="as of Dataset.batch")
    add("--shuffle", action="store_true", help="shuffle the rows before batching")
    add(
        "--seed",
        type=int,
        metavar="SEED",
        help="of the shuffle; default: each job draws one",
    )
    window = "see Dataset.shuffle; 0 permutes exactly"
    add("--window-chunks", type=_integer(0), metavar="CHUNKS", help=window)
    add("--ranks-per-node", type=_integer(1), metavar="K", help="adds a line on nodes")
    add("--json", action="store_true", help="print all numbers as JSON")


def _plan(args: argparse.Namespace) -> int:
    """Show what each rank of a job will read, without MPI.

    Counts rows, bytes, files and steps, in one process, and reads file metadata, not
    the rows. The numbers are those of the first epoch of
      Dataset.from_hdf5(FILES, DATASETS).shuffle(SEED).batch(N)
    given to Strategy.experimental_distribute_dataset on R ranks.

    Example:
      mpidist plan 'train-*.h5' --batch 256 --ranks 8 --shuffle

    Exit status: 0 if there is a plan; 1 if a file or a dataset is missing, cannot
    be read, or does not match the others; 2 if the arguments are invalid.
    """
    if not args.shuffle and not (args.seed is args.window_chunks is None):
        args.usage_error("--seed and --window-chunks need --shuffle")
    # Not before the arguments are known to be good: this takes most of a second
    from mpidist.tools.plan import Request, make_plan, to_json, to_text

    names = Request.__dataclass_fields__
    plan = make_plan(Request(**{name: getattr(args, name) for name in names}))
    # Names in the files may have control characters
    print(to_json(plan) if args.json else printable(to_text(plan), "\n"))
    return 0


def _add_tune(commands: Commands) -> None:
    add = _add_command(commands, _tune)
    output = (
        "the file; by default $MPIDIST_TRANSPORTS, or mpidist/transports.json in "
        "$XDG_CONFIG_HOME or ~/.config"
    )
    _of_files(add("--output", type=Path, help=output))
    size, largest = _integer(1, 1 << 40), "largest size to measure (default 64 MiB)"
    add("--largest-bytes", type=size, default=64 << 20, metavar="N", help=largest)
    number = _integer(1, 1_000_000)
    add("--repetitions", type=number, default=9, metavar="N", help="(default 9)")
    add("--force", action="store_true", help="write a table of noisy times, too")


def _tune(args: argparse.Namespace) -> int:
    """Measure the fastest transport for each size, under mpirun.

    Run it on an idle machine, with the same number of nodes and ranks per node as
    your jobs. It writes a file that strategies with this layout and MPI library
    read. It changes a transport only if another one is faster by more than the
    noise of the measurement, in both halves of it, and prints times, noise and
    gain. If the times vary by more than 30 %, the machine is busy: nothing is
    written.

    Example:
      mpidist run -n 8 -m mpidist tune

    Exit status: 0 if a table was written; 1 if not: with one rank, or on a busy
    machine; 2 if the arguments are invalid.
    """
    from mpidist.launch import mpi_defaults  # noqa: F401, I001 - before MPI is imported
    from mpidist.resilience import exit_handling
    from mpidist.comm.transports.tuning import table_path
    from mpidist.tools.tune import MOST_NOISE, describe, tune

    exit_handling.abort_on_exception()
    path = args.output or table_path()
    if path is None:
        return _fail("tune", "there is no home directory: name a file, --output", 2)
    most_noise = math.inf if args.force else MOST_NOISE
    result = tune(path, args.largest_bytes, args.repetitions, most_noise)
    if "table" not in result:
        how = "mpidist run -n 8 -m mpidist tune"
        return _fail("tune", f"one rank has no transports to compare: {how}", 1)
    if result["rank"] == 0:
        print("\n".join(describe(result, path)))
    if not result["is_written"]:
        why = f"the times vary by {100 * result['noise']:.0f} %, so the machine is busy"
        then = "nothing was written; run it where nothing else runs, or use --force"
        return _fail("tune", f"{why}: {then}", 1) if result["rank"] == 0 else 1
    return 0


def _add_diff(commands: Commands) -> None:
    add = _add_command(commands, _diff, failed=2)
    _of_files(add("dumps", nargs="+", type=Path, help="folders, or files"))


def _diff(args: argparse.Namespace) -> int:
    """Name the first collective that differed between ranks, without MPI.

    If MPIDIST_DUMPS names a folder, each rank records its last 1,000 collectives
    there; the files stay if the job does not end normally. The command also names
    the ranks that did not reach the last call.

    Example:
      mpidist diff dumps

    Exit status: 0 if all ranks made and ended the same calls; 1 if not; 2 if the
    dumps cannot be read.
    """
    from mpidist.resilience.flight_analysis import compare, read_flights

    lines, is_same = compare(read_flights(args.dumps))
    print("\n".join(lines))
    return 0 if is_same else 1


def _add_report(commands: Commands) -> None:
    add = _add_command(commands, _report, failed=1)
    _of_files(add("folder", type=Path, metavar="FOLDER", help="of a timeline"))
    page, default = "the page (default report.html)", Path("report.html")
    flags = "-o", "--output"
    _of_files(add(*flags, type=Path, default=default, metavar="FILE", help=page))
    trace = "also write the events of all ranks; compressed if it ends in .gz"
    _of_files(add("--trace", type=Path, metavar="FILE", help=trace))


def _report(args: argparse.Namespace) -> int:
    """Show how a job spent its time, without MPI.

    The folder contains the timeline of a job with MPIDIST_TIMELINE=FOLDER or
    strategy.timeline(FOLDER). The job may still run, or have been killed. The page,
    for a browser, is one file that works offline. The trace, for
    https://ui.perfetto.dev or chrome://tracing, has the events of all ranks on a
    common clock.

    Example:
      mpidist report timeline -o report.html --trace trace.json.gz

    Exit status: 0; 1 if there is no timeline, or a file cannot be written; 2 if the
    arguments are invalid.
    """
    _require_free(args)
    from mpidist.monitor.report import describe, page
    from mpidist.monitor.traces import merge
    from mpidist.util.files import replace_file

    data = describe(args.folder)
    with replace_file(args.output) as file:
        file.write(page(data).encode())
    print(args.output)
    print(f"{data['subtitle']}: {data['steps']:,} steps")
    print("\n".join(data["findings"]))
    if args.trace is not None:
        print(f"{args.trace}: {merge(args.folder, args.trace):,} events")
    return 0


def _require_free(args: argparse.Namespace) -> None:
    """Refuse outputs that would overwrite each other, or the timeline."""
    outputs = [path for path in (args.output, args.trace) if path is not None]
    whole = [Path(os.path.realpath(path)) for path in outputs]
    if len({*whole}) < len(whole):
        args.usage_error("--output and --trace name the same file")
    for path in whole:
        is_inside = path.parent == Path(os.path.realpath(args.folder))
        if is_inside and any(map(path.match, ("status-*.json", "timeline-*.json.gz"))):
            args.usage_error(f"{path} is a file of the timeline")


class SettingRow(NamedTuple):
    """One setting.

    Args:
      name: of the variable, or of what the tuning file says.
      value: as text.
      source: "argument", "environment", "tuning file", "default" or "error".
      meaning: what it does, or what is wrong.
    """

    name: str
    value: str
    source: str
    meaning: str


def assignment(text: str) -> tuple[Setting[Any], Any]:
    """Return a setting and its value from "NAME=VALUE"."""
    name, _, value = text.partition("=")
    setting = next((known for known in SETTINGS if known.name == name), None)
    if setting is None:
        reason = unknown_names({name: "?"}).get(name, f"{name!r} is not a setting")
        raise argparse.ArgumentTypeError(reason)
    try:
        return setting, setting.read({name: value})
    except LaunchError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def setting_rows(
    given: Mapping[Setting[Any], Any], environ: Mapping[str, str]
) -> list[SettingRow]:
    """Return all settings, what the tuning file says, and variables that are none.

    Args:
      given: values as of a program's arguments.
      environ: the environment variables.
    """
    rows = []
    for setting in SETTINGS:
        try:
            value, source = resolve(setting, given.get(setting), environ)
        except LaunchError as error:
            text = setting.text(environ) or ""
            rows.append(SettingRow(setting.name, text, "error", str(error)))
            continue
        shown = setting.default_text if source == "default" else _shown(value)
        rows.append(SettingRow(setting.name, shown, source, setting.meaning))
    rows += _tuned(given.get(TRANSPORTS), environ)
    for name, reason in unknown_names(environ).items():
        rows.append(SettingRow(name, environ[name], "error", reason))
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):  # of MPIDIST_LOG
        level, is_json = value
        return ",".join([*([level.lower()] if level else []), *["json"] * is_json])
    if isinstance(value, float):
        return "for ever" if value == float("inf") else f"{value:g}"
    return str(value)


def _tuned(given: Path | None, environ: Mapping[str, str]) -> list[SettingRow]:
    """Return a row for each table of the tuning file, or one on the default."""
    from mpidist.comm.transports.tuning import table_path, tables_in_use
    from mpidist.util.available_memory import as_text

    if given is not None:
        environ = {**environ, TRANSPORTS.name: str(given)}
    path = table_path(environ)
    try:
        tables = tables_in_use(environ)
    except LaunchError as error:
        return [SettingRow("transports", str(path), "error", str(error))]
    rows = []
    for layout, table in tables:
        nodes = " + ".join(map(str, layout.node_sizes))
        text = "; ".join(
            f"{method} by "
            + ", ".join(
                f"{name} from {as_text(edge)}" if edge else name
                for edge, name in entries
            )
            for method, entries in table.items()
        )
        meaning = f"On nodes of {nodes} ranks, {layout.device}, {layout.mpi}: {path}"
        rows.append(SettingRow("transports", text, "tuning file", meaning))
    meaning = f"On all other layouts ({path} has none)."
    return [*rows, SettingRow("transports", "chosen by the layout", "default", meaning)]


def settings_text(rows: list[SettingRow], is_json: bool) -> str:
    """Return rows as paragraphs for a terminal, or as JSON."""
    if is_json:
        return json.dumps([row._asdict() for row in rows], indent=1)
    lines = []
    for name, value, source, meaning in rows:
        lines.append(f"{name} = {value}  ({source})")
        lines.append(textwrap.indent(textwrap.fill(meaning, 84), "    "))
    return printable("\n".join(lines), "\n")


_PAGE = """# Settings

These environment variables configure mpidist. The order of priority is: arguments in
the program, environment variables, the tuning file (written by `mpidist tune`),
defaults. An empty variable counts as not set.

When a strategy is created, an unknown variable that begins with `MPIDIST_`, or an
invalid value, raises an error on all ranks; the message suggests the nearest name.
`mpidist config` (or `python -m mpidist config`) prints each value and its origin.

This page is generated by `python -m mpidist config --markdown`.

| variable | values | default | meaning |
|---|---|---|---|
"""


def settings_page() -> str:
    """Return docs/settings.md."""
    rows = []
    for setting in SETTINGS:
        meaning = setting.meaning
        if setting.argument:
            meaning += f" In a program: `{setting.argument}`."
        cells = (f"`{setting.name}`", setting.allowed, setting.default_text, meaning)
        rows.append(f"| {' | '.join(cells)} |\n")
    readers = "".join(f"- `{s.name}`: `{s.read_by}`\n" for s in SETTINGS)
    return f"{_PAGE}{''.join(rows)}\n## Where they are read\n\n{readers}"


def _add_config(commands: Commands) -> None:
    add = _add_command(commands, _config)
    add("assignments", nargs="*", type=assignment, metavar="NAME=VALUE")
    add("--json", action="store_true", help="print JSON")
    # For docs/settings.md
    add("--markdown", action="store_true", help=argparse.SUPPRESS)


def _config(args: argparse.Namespace) -> int:
    """Print the settings and their origin, without MPI.

    An origin is an argument, the environment, the tuning file, or the default.
    Arguments NAME=VALUE act like arguments in a program.

    Example:
      mpidist config
      mpidist config --json MPIDIST_HANG_SECONDS=60

    Exit status: 0; 1 if a variable is unknown or invalid, so that creating a
    strategy would fail; 2 if the arguments are invalid.
    """
    from mpidist.launch.launchers import is_silent

    if args.markdown:
        print(settings_page(), end="")
        return 0
    rows = setting_rows(dict(args.assignments), os.environ)
    if not is_silent(os.environ):  # under mpirun one rank is enough
        print(settings_text(rows, args.json))
    return int(any(row.source == "error" for row in rows))


def _add_version(commands: Commands) -> None:
    add = _add_command(commands, _version)
    add("--json", action="store_true", help="print JSON")


def _version(args: argparse.Namespace) -> int:
    """Print the installed versions, for bug reports.

    Those of mpidist, Python, the packages that it uses, and MPI, whose library is
    loaded in a process of its own, and not started.

    Example:
      mpidist version --json
    """
    import importlib.metadata
    import json
    import platform

    from mpidist._version import __version__
    from mpidist.launch.starting import find_library

    versions = {"mpidist": __version__, "Python": platform.python_version()}
    packages = "numpy h5py mpi4py optree torch jax cupy-cuda12x cupy-cuda13x"
    for name in packages.split():
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        library = find_library()
        versions["MPI"] = " ".join(library.version.replace("\0", " ").split())[:60]
        versions["MPI library"] = str(library.path or "not known")
    except LaunchError as error:
        versions["MPI"] = str(error)
    width = max(map(len, versions))
    lines = [f"{name:{width}}  {text}" for name, text in versions.items()]
    print(json.dumps(versions, indent=1) if args.json else "\n".join(lines))
    return 0


# In the order of the help
_ADD = (
    *(_add_run, _add_doctor, _add_plan, _add_tune, _add_diff, _add_report),
    *(_add_config, _add_version),
)
