"""Launcher and MPI, and the cores and memory of each node."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from mpidist.tools.doctor.results import (
    CheckResult,
    Status,
    all_same,
    by_rank,
    name_ranks,
)
from mpidist.util.available_memory import as_text, free_bytes
from mpidist.util.settings import ALLOW_SINGLETON, RANKS_PER_NODE, decimal

__all__ = [
    "LaunchFacts",
    "Launched",
    "NodeFacts",
    "check_binding",
    "check_launcher",
    "check_memory",
    "check_mpi",
    "check_nodes",
    "check_threads",
    "count_left",
    "find_launched",
    "find_node",
    "is_hydra",
    "is_silent",
]

# Rank and size by launcher. Slurm comes last: under an mpirun in a Slurm job, its
# variables describe mpirun's own processes
_LAUNCHERS = {
    "Open MPI's mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MVAPICH's mpirun": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "PMI (mpirun or srun)": ("PMI_RANK", "PMI_SIZE"),
    "Flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
_THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_SHARED_FOLDER = "/dev/shm"
# What MPICH, and Open MPI and its UCX, name there
_MPI_FILES = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "ucx_shm_posix_*")
_STARTING_SECONDS = 60.0  # a job may be making newer ones
# Shared memory that a rank's transports and the MPI library need, per rank
_LEAST_BYTES = 16 << 20
_GOOD_BYTES = 64 << 20
# The first that is set limits the threads of NumPy's linear algebra
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


class Launched(NamedTuple):
    """Rank and size of this process in the variables of a launcher.

    Args:
      by: which launcher.
      rank, size: of the processes that it started.
      variables: that say so.
    """

    by: str
    rank: int
    size: int
    variables: str


class LaunchFacts(NamedTuple):
    """One rank in MPI and its launcher.

    Args:
      size: of COMM_WORLD.
      host: its node's name.
      node: the lowest rank on its node.
      library: first line of MPI's own version.
      standard: version of MPI's standard.
      thread_level: 0 to 3, of _THREAD_LEVELS.
      launched: the launcher's variables; None without.
      error: of `check_launch`; empty if none.
      is_allowed: whether MPIDIST_ALLOW_SINGLETON is 1.
      pretended: the variable MPIDIST_RANKS_PER_NODE, or nothing.
    """

    size: int
    host: str
    node: int
    library: str
    standard: str
    thread_level: int
    launched: Launched | None
    error: str
    is_allowed: bool
    pretended: str


def is_hydra() -> bool:
    """Return whether MPICH's mpirun, or one like it, started this process."""
    return "PMI_FD" in os.environ and "MPI_LOCALNRANKS" in os.environ


def find_launched(environ: Mapping[str, str]) -> list[Launched]:
    """Read the variables of launchers, the most reliable first."""
    found = []
    for by, names in _LAUNCHERS.items():
        rank, size = (decimal(environ.get(name, "")) for name in names)
        if rank is not None and size is not None:
            text = " ".join(f"{name}={environ[name]}" for name in names)
            found.append(Launched(by, rank, size, text))
    return found


def is_silent(environ: Mapping[str, str]) -> bool:
    """Return whether another process prints, by the launcher's variables."""
    if ALLOW_SINGLETON.read_or_default(environ):
        return False
    found = find_launched(environ)
    return bool(found) and 0 < found[0].rank < found[0].size


def check_launcher(facts: Mapping[int, LaunchFacts]) -> list[CheckResult]:
    """Compare the size of COMM_WORLD with the launcher's; facts by rank."""
    errors = {rank: fact.error for rank, fact in facts.items() if fact.error}
    first = facts[min(facts)]
    said = first.launched
    if errors:
        found = f"MPI sees {first.size} process; {said.variables if said else ''}"
        return [
            CheckResult(Status.FAIL, "launcher", found, next(iter(errors.values())))
        ]
    if said is None:
        alone = "one process, without a launcher"
        some = f"{first.size} ranks, by a launcher that does not say how many"
        return [CheckResult(Status.OK, "launcher", alone if first.size == 1 else some)]
    if said.size != first.size:
        is_meant = first.is_allowed and first.size == 1
        found = f"{said.by} says {said.variables}, MPI sees {first.size}"
        remedy = f"{ALLOW_SINGLETON.name}=1 allows that; unset it if not intended"
        if not is_meant:
            remedy = "unset variables left by another launcher, or restart the job"
        return [CheckResult(Status.WARN, "launcher", found, remedy)]
    unlike = [
        rank
        for rank, fact in facts.items()
        if fact.launched is None or fact.launched.rank != rank
    ]
    if unlike:
        found = f"{said.by} and MPI number {name_ranks(unlike)} differently"
        remedy = "use MPI's ranks in scripts, not the launcher's variables"
        return [CheckResult(Status.WARN, "launcher", found, remedy)]
    plural = "s" if first.size > 1 else ""
    found = f"{said.by} started {said.size} process{'es' * bool(plural)}, MPI sees "
    return [CheckResult(Status.OK, "launcher", f"{found}{first.size} rank{plural}")]


def check_mpi(facts: Mapping[int, LaunchFacts]) -> list[CheckResult]:
    """Return rows on the library and its thread level; facts by rank."""
    remedy = "start all ranks with one MPI library, on every node"
    libraries = {r: f"{f.library}, standard {f.standard}" for r, f in facts.items()}
    rows = [all_same("MPI", libraries, remedy)]
    levels = {rank: fact.thread_level for rank, fact in facts.items()}
    names = by_rank({r: f"MPI_THREAD_{_THREAD_LEVELS[n]}" for r, n in levels.items()})
    lowest = min(levels.values())
    status = (Status.FAIL, Status.FAIL, Status.WARN, Status.OK)[lowest]
    if status is not Status.OK:
        lost = "a cache that ranks share (Dataset.cache)"
        if lowest < 2:
            lost = (
                "collectives from threads, such as gradient buckets, and shared caches"
            )
        names = f"{names}, too low for {lost}"
    remedy = (
        "unset MPI4PY_RC_THREAD_LEVEL and other settings that lower it, or use an MPI "
        "built "
    )
    remedy += "with MPI_THREAD_MULTIPLE"
    rows.append(
        CheckResult(
            status, "threads in MPI", names, "" if status is Status.OK else remedy
        )
    )
    return rows


def check_nodes(facts: Mapping[int, LaunchFacts]) -> list[CheckResult]:
    """Return a row on which ranks are on which node; facts by rank."""
    nodes: dict[int, list[int]] = {}
    for rank, fact in facts.items():
        nodes.setdefault(fact.node, []).append(rank)
    texts = [f"{facts[ranks[0]].host}: {name_ranks(ranks)}" for ranks in nodes.values()]
    shown = "; ".join(texts[:8]) + "; ..." * (len(texts) > 8)
    found = f"{len(nodes)} node{'s' * (len(nodes) > 1)} ({shown})"
    pretended = {fact.pretended for fact in facts.values()} - {""}
    wrong = {text for text in pretended if not decimal(text)}
    if wrong:
        remedy = "unset it: strategies refuse it"
        return [
            CheckResult(
                Status.FAIL, "nodes", f"{RANKS_PER_NODE.name}={wrong.pop()}", remedy
            )
        ]
    if pretended:
        found += f", simulated by {RANKS_PER_NODE.name}={pretended.pop()}"
        remedy = "unset it: it is for tests, and keeps ranks from sharing memory"
        return [CheckResult(Status.WARN, "nodes", found, remedy)]
    sizes = sorted({len(ranks) for ranks in nodes.values()})
    if len(sizes) > 1:
        remedy = (
            "start the same number of ranks on each node: ranks wait for each other"
        )
        found += f"; different numbers of ranks: {', '.join(map(str, sizes))}"
        return [CheckResult(Status.WARN, "nodes", found, remedy)]
    return [CheckResult(Status.OK, "nodes", found)]


class NodeFacts(NamedTuple):
    """Cores and memory of the node that one rank may use.

    Args:
      cores: the numbers of the processors in its affinity mask.
      machine_cores: how many there are.
      siblings: for each of `cores` the first processor of the same physical core.
      thread_variable: name and value of the variable that limits the threads of
        NumPy's linear algebra; empty without.
      shared_bytes, shared_free_bytes: of /dev/shm; negative where there is none.
      left: how many files of MPI of ended jobs are there, and their bytes.
      free: free bytes of all that limits memory, by name.
    """

    cores: tuple[int, ...]
    machine_cores: int
    siblings: tuple[int, ...]
    thread_variable: tuple[str, str]
    shared_bytes: int
    shared_free_bytes: int
    left: tuple[int, int]
    free: dict[str, int]


def find_node() -> NodeFacts:
    """Return this process's facts. MPI may bind it, so call this after MPI started."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    variable = next((name for name in _THREAD_VARIABLES if os.environ.get(name)), "")
    size = free = -1
    if Path(_SHARED_FOLDER).is_dir():
        status = os.statvfs(_SHARED_FOLDER)
        size, free = (n * status.f_frsize for n in (status.f_blocks, status.f_bavail))
    return NodeFacts(
        cores,
        os.cpu_count() or len(cores),
        tuple(map(_first_sibling, cores)),
        (variable, os.environ.get(variable, "")),
        size,
        free,
        count_left(Path(_SHARED_FOLDER), Path("/proc")),
        free_bytes(is_shared=False),
    )


def count_left(folder: Path, processes: Path) -> tuple[int, int]:
    """Return how many of MPI's files no process uses, and their bytes.

    MPI libraries remove their files when all ranks have opened them, or at the end. A
    job that is killed before leaves them. Only this user's count: who uses those of
    others cannot be seen.

    Args:
      folder: of shared memory.
      processes: like /proc.
    """
    sizes = {}
    for path in (path for pattern in _MPI_FILES for path in folder.glob(pattern)):
        with contextlib.suppress(OSError):  # just removed
            status = path.stat()
            is_old = time.time() - status.st_mtime > _STARTING_SECONDS
            if status.st_uid == os.getuid() and is_old:
                sizes[path] = status.st_blocks * 512
    used = set(chain(*map(_open_files, processes.glob("[0-9]*")))) if sizes else ()
    left = [size for path, size in sizes.items() if str(path) not in used]
    return len(left), sum(left)


def _open_files(process: Path) -> list[str]:
    """Return the paths of the files that a process has open or mapped."""
    names = []
    with contextlib.suppress(OSError):  # of another user, or ended
        maps = (process / "maps").read_text(errors="replace")
        names = [line.split(maxsplit=5)[-1] for line in maps.splitlines()]
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # just closed
                names.append(os.readlink(link))
    return names


def _first_sibling(core: int) -> int:
    path = f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
    try:
        return int(re.split(r"[-,]", Path(path).read_text().strip())[0])
    except (OSError, ValueError):
        return core


def check_binding(
    facts: Mapping[int, NodeFacts], nodes: Iterable[list[int]]
) -> list[CheckResult]:
    """Return a row; `facts` by rank, `nodes` the ranks of each node."""
    crowded: list[str] = []
    oversubscribed: list[str] = []
    siblings: list[str] = []
    for ranks in _known(nodes, facts):
        masks = {rank: set(facts[rank].cores) for rank in ranks}
        everywhere = set().union(*masks.values())
        for mask, inside in _crowds(masks):
            # Too few cores for all ranks is not a wrong binding
            is_chosen = (
                mask != everywhere or len(mask) == 1 < facts[ranks[0]].machine_cores
            )
            text = f"{name_ranks(inside)} on {_name_cores(mask)}"
            (crowded if is_chosen else oversubscribed).append(text)
        physical = {rank: set(facts[rank].siblings) for rank in ranks}
        siblings += [name_ranks(inside) for _, inside in _crowds(physical)]
    if crowded:
        remedy = "bind each rank to its own cores: mpirun --bind-to core, or srun "
        remedy += "--cpu-bind=cores with --cpus-per-task"
        found = f"ranks share cores: {'; '.join(crowded)}"
        return [CheckResult(Status.FAIL, "binding", found, remedy)]
    if oversubscribed:
        found = f"more ranks than cores: {'; '.join(oversubscribed)}"
        remedy = "start at most one rank per core: ranks busy-wait for each other"
        return [CheckResult(Status.WARN, "binding", found, remedy)]
    if siblings:
        found = f"threads of one core: {'; '.join(siblings)}"
        remedy = "use srun --hint=nomultithread, or mpirun --bind-to core"
        return [CheckResult(Status.WARN, "binding", found, remedy)]
    return [CheckResult(Status.OK, "binding", by_rank(_texts(facts)))]


def _known(
    nodes: Iterable[list[int]], facts: Mapping[int, object]
) -> Iterator[list[int]]:
    """Yield the ranks of each node that have facts."""
    for ranks in nodes:
        known = [rank for rank in ranks if rank in facts]
        if known:
            yield known


def _crowds(masks: Mapping[int, set[int]]) -> Iterator[tuple[set[int], list[int]]]:
    """Yield sets of cores that have more ranks bound to them than cores."""
    for mask in {frozenset(mask) for mask in masks.values()}:
        inside = [rank for rank, own in masks.items() if own <= mask]
        if len(inside) > len(mask):
            yield set(mask), inside


def _texts(facts: Mapping[int, NodeFacts]) -> dict[int, str]:
    return {
        rank: f"{_name_cores(fact.cores)} of {fact.machine_cores}"
        for rank, fact in facts.items()
    }


def _name_cores(cores: Iterable[int]) -> str:
    return name_ranks(cores).replace("rank", "core")


def check_threads(
    facts: Mapping[int, NodeFacts], nodes: Iterable[list[int]]
) -> list[CheckResult]:
    """Return a row on threads of linear algebra; arguments as `check_binding`'s."""
    too_many, bad = [], {}
    for ranks in _known(nodes, facts):
        cores: set[int] = set().union(*(facts[rank].cores for rank in ranks))
        counts = Counter({rank: _threads(facts[rank]) for rank in ranks})
        bad.update({r: facts[r].thread_variable for r in ranks if counts[r] < 1})
        # One rank alone may use what it has
        if sum(counts.values()) > len(cores) and len(ranks) > 1:
            each = max(1, len(cores) // len(ranks))
            text = f"{sum(counts.values())} threads of {name_ranks(ranks)} on "
            too_many.append((f"{text}{_name_cores(cores)}", each))
    if bad:
        text = by_rank({rank: "=".join(pair) for rank, pair in bad.items()})
        remedy = "set it to a number of threads, such as 1"
        return [CheckResult(Status.WARN, "threads", f"not a number: {text}", remedy)]
    if too_many:
        text = "; ".join(text for text, _ in too_many)
        remedy = f"set OMP_NUM_THREADS={min(each for _, each in too_many)} on all ranks"
        return [CheckResult(Status.WARN, "threads", text, remedy)]
    texts = {rank: f"{_threads(fact)} per rank" for rank, fact in facts.items()}
    return [CheckResult(Status.OK, "threads", by_rank(texts))]


def _threads(fact: NodeFacts) -> int:
    """Return the threads of linear algebra; 0 if the variable is not a number."""
    name, value = fact.thread_variable
    if not name:
        return len(fact.cores)
    # One number for each level of nesting
    return decimal(value.partition(",")[0].strip()) or 0


def _name_left(files: int, size_bytes: int) -> str:
    return f"{as_text(size_bytes)} in {files} files of ended jobs in {_SHARED_FOLDER}"


def check_memory(
    facts: Mapping[int, NodeFacts], nodes: Iterable[list[int]]
) -> list[CheckResult]:
    """Return rows on shared and other memory; arguments as `check_binding`'s."""
    rows = []
    status, texts = Status.OK, {}
    for ranks in _known(nodes, facts):
        first = facts[ranks[0]]
        size, free = first.shared_bytes, first.shared_free_bytes
        texts[ranks[0]] = f"{as_text(free)} free of {as_text(size)}"
        if size < 0:
            texts[ranks[0]] = f"there is no {_SHARED_FOLDER}"
        if free < _GOOD_BYTES * len(ranks):
            is_low = free < _LEAST_BYTES * len(ranks)
            status = max(status, Status.FAIL if is_low else Status.WARN)
    remedy = f"make {_SHARED_FOLDER} larger (containers: docker run --shm-size=8g, or "
    remedy += "--ipc=host), and remove files of dead jobs there"
    rows.append(
        CheckResult(
            status,
            f"shared memory ({_SHARED_FOLDER})",
            by_rank(texts),
            "" if status is Status.OK else remedy,
        )
    )
    left = {ranks[0]: facts[ranks[0]].left for ranks in _known(nodes, facts)}
    found = {rank: _name_left(*kept) for rank, kept in left.items() if kept[0]}
    if found:
        remedy = (
            f"remove them: cd {_SHARED_FOLDER} && for f in {' '.join(_MPI_FILES)}; "
        )
        remedy += 'do fuser -s "$f" || rm -f "$f"; done'
        rows.append(CheckResult(Status.WARN, "left by MPI", by_rank(found), remedy))
    limits = {}
    for ranks in _known(nodes, facts):
        free_of = facts[ranks[0]].free
        if free_of:
            name = min(free_of, key=lambda name: free_of[name])
            limits[ranks[0]] = f"{as_text(free_of[name])} free, limited by {name}"
    if limits:
        rows.append(CheckResult(Status.OK, "memory", by_rank(limits)))
    return rows
