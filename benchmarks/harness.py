"""What all benchmarks share: options, timing in turns, comparisons, results.

A benchmark has a table of cases. A case times contestants in turn, this library, which
is "ours", and others, and yields a `Comparison` for each of the others. `report` prints
these, and writes medians, never raw samples, with a description of the machine.

Importing this module limits each rank to one BLAS thread, so import it before NumPy. It
does not start MPI.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

ROOT = Path(__file__).resolve().parents[1]
# Helpers that start jobs, and the jobs themselves
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "jobs")]
# For programs that are started as users start them
USERS_ENVIRONMENT = dict(os.environ)
# One rank is one share of the CPU: its BLAS must not take the others' cores
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

Calls = Mapping[str, Callable[[], Any]]  # contestants by name
Times = dict[str, list[float]]  # seconds of each turn, by contestant
OURS = "ours"


def parser(doc: str | None, takes_turns: int = 0) -> argparse.ArgumentParser:
    """Return a parser of the options that benchmarks share.

    Args:
      doc: the docstring of the benchmark.
      takes_turns: the default of --repetitions; without that option if 0.
    """
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--output", type=Path, help="JSON file for the results")
    made.add_argument("--tiny", action="store_true", help="only see that it runs")
    if takes_turns:
        text = f"of each contestant (default {takes_turns})"
        made.add_argument("--repetitions", type=int, default=takes_turns, help=text)
    return made


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Measurements of ours beside those of another way, one pair per repetition.

    Args:
      case: what is done.
      against: what ours is divided by.
      unit: of `ours` and `theirs`.
      target: what the ratio has to reach; None where there is none.
      is_at_least: whether the ratio has to be at least the target, or at most.
      note: what else there is to say.
    """

    case: str
    against: str
    unit: str
    ours: list[float]
    theirs: list[float]
    target: float | None = None
    is_at_least: bool = True
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        """Ours by theirs in each repetition."""
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of all repetitions."""
        return statistics.median(self.ratios)

    @property
    def is_reached(self) -> bool | None:
        """Whether the ratio is what it has to be."""
        if self.target is None:
            return None
        if self.is_at_least:
            return self.ratio >= self.target
        return self.ratio <= self.target

    def as_dict(self) -> dict[str, Any]:
        """Return the medians for a JSON file."""
        note = {"note": self.note} if self.note else {}
        return {
            "case": self.case,
            "against": self.against,
            "unit": self.unit,
            "ours": statistics.median(self.ours),
            "theirs": statistics.median(self.theirs),
            "ratio": self.ratio,
            "ratios": [min(self.ratios), max(self.ratios)],
            "target": self.target,
            "is_at_least": self.is_at_least,
            **note,
        }

    def line(self) -> str:
        """Return a line of the table."""
        sign = ">=" if self.is_at_least else "<="
        target = "" if self.target is None else f"{sign} {self.target:g}"
        word = {True: "reached", False: "missed", None: ""}[self.is_reached]
        ours, theirs = map(statistics.median, (self.ours, self.theirs))
        return (
            f"{self.case:32} {self.against:44} {_short(ours):>8} {_short(theirs):>8} "
            f"{self.unit:10} {self.ratio:8.3g} {target:>7} {word}"
        ).rstrip()


TABLE_HEAD = (
    f"{'case':32} {'against':44} {'ours':>8} {'theirs':>8} {'':10} "
    f"{'ratio':>8} {'target':>7}"
)


def _short(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def slowest(comm: MPI.Intracomm, call: Callable[[], Any], calls: int = 1) -> float:
    """Return the seconds of one of some calls, on the slowest rank. Collective."""
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return max(comm.allgather((time.perf_counter() - start) / calls))


def take_turns(
    comm: MPI.Intracomm,
    contestants: Calls,
    turns: int,
    warm_up: int = 1,
    calls: int = 1,
) -> Times:
    """Time all contestants in turn, several times. Collective.

    Args:
      comm: the ranks.
      contestants: what is timed; each returns when its work is done.
      turns: that count.
      warm_up: turns before them.
      calls: in each turn.
    """
    times: Times = {name: [] for name in contestants}
    for turn in range(warm_up + turns):
        for name, call in contestants.items():
            seconds = slowest(comm, call, calls)
            if turn >= warm_up:
                times[name].append(seconds)
    return times


def beside(
    case: str,
    times: Mapping[str, list[float]],
    targets: Mapping[str, float | None] | None = None,
    unit: str = "us",
    amount: float = 0.0,
    ours: str = OURS,
) -> list[Comparison]:
    """Return ours beside each of the others.

    Args:
      case: what was done.
      times: seconds by contestant.
      targets: by contestant, what the ratio has to reach.
      unit: "us", or the unit of a rate.
      amount: what a call moves or handles, if rates are compared instead of times.
      ours: the name of ours.
    """
    values = {
        name: [amount / s if amount else s * 1e6 for s in seconds]
        for name, seconds in times.items()
    }
    return [
        Comparison(
            case, name, unit, values[ours], other, (targets or {}).get(name), amount > 0
        )
        for name, other in values.items()
        if name != ours
    ]


def report(
    comparisons: Iterable[Comparison],
    output: Path | None,
    comm: MPI.Intracomm | None = None,
    folder: Path | None = None,
    **facts: Any,
) -> None:
    """Print a table of comparisons as they come, and write it. Collective.

    Args:
      comparisons: may measure while they are iterated over, on all ranks.
      output: a JSON file, or None.
      comm: the ranks; None for one process.
      folder: whose file system was measured; None for that of temporary files.
      facts: what else the file is to hold. They are written in the end.
    """
    say(comm, TABLE_HEAD)
    rows = []
    for comparison in comparisons:
        say(comm, comparison.line())
        rows.append(comparison.as_dict())
    for reason in facts.get("skipped", ()):
        say(comm, f"skipped: {reason}")
    if output is not None and (comm is None or comm.rank == 0):
        ranks = {} if comm is None else {"ranks": comm.size}
        save(output, folder, **ranks, **facts, comparisons=rows)


def say(comm: MPI.Intracomm | None, line: str) -> None:
    """Print a line on rank 0."""
    if comm is None or comm.rank == 0:
        print(line, flush=True)


def save(output: Path, folder: Path | None = None, **result: Any) -> None:
    """Write a result with a description of the machine, see `report`."""
    machine = describe_machine(folder or Path(tempfile.gettempdir()))
    date = datetime.date.today().isoformat()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(as_text({"machine": machine, "date": date, **result}) + "\n")


def as_text(value: Any, indent: str = "") -> str:
    """Return JSON with six digits, and one line for what is no longer than that."""
    if isinstance(value, float):
        return json.dumps(float(f"{value:.6g}"))
    if not isinstance(value, (Mapping, list, tuple)):
        return json.dumps(value)
    inner = indent + " "
    if isinstance(value, Mapping):
        parts = [f"{json.dumps(str(k))}: {as_text(v, inner)}" for k, v in value.items()]
        begin, end = "{}"
    else:
        parts, (begin, end) = [as_text(item, inner) for item in value], "[]"
    if sum(map(len, parts)) < 300:
        return f"{begin}{', '.join(parts)}{end}"
    lines = f",\n{inner}".join(parts)
    return f"{begin}\n{inner}{lines}\n{indent}{end}"


def describe_machine(folder: Path) -> dict[str, Any]:
    """Return what the numbers depend on: hardware, versions, file system."""
    import h5py
    from mpi4py import MPI

    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_of_this_process": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": _file_system_of(folder),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "hdf5": h5py.version.hdf5_version,
        "mpi": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        **dict(_versions()),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system_of(folder: Path) -> str:
    """Return the type of the file system that holds a folder, such as ext4."""
    mounts = map(str.split, Path("/proc/self/mounts").read_text().splitlines())
    holding = [m for m in mounts if folder.resolve().is_relative_to(m[1])]
    # Of several mounts at one place, the last one counts
    return max(reversed(holding), key=lambda m: len(m[1]))[2] if holding else "unknown"


def _versions() -> Iterator[tuple[str, str]]:
    for name in ("mpidist", "numpy", "h5py", "mpi4py", "torch", "jax", "tensorflow"):
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name == "mpidist":  # it runs in a clone, uninstalled
                import mpidist

                yield name, mpidist.__version__


def is_everywhere(comm: MPI.Intracomm, module: str) -> bool:
    """Return whether all ranks can import a module. Collective."""
    return all(comm.allgather(importlib.util.find_spec(module) is not None))


def own_cores(comm: MPI.Intracomm, count: int) -> list[int]:
    """Return `count` cores that are for this rank alone; fewer if there are fewer.

    Collective. Ranks of a node that may use the same cores divide them; others keep to
    theirs.
    """
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    allowed: list[list[int]] = node.allgather(sorted(os.sched_getaffinity(0)))
    is_shared = all(cores == allowed[0] for cores in allowed)
    first = count * node.rank if is_shared else 0
    mine = allowed[node.rank][first : first + count]
    node.Free()
    return mine


@contextlib.contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Keep all threads of this process on some cores."""

    def move(cores: Collection[int]) -> None:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), cores)

    allowed = os.sched_getaffinity(0)
    move(cores)
    try:
        yield
    finally:
        move(allowed)
