"""MPI and the launcher: whether they mean the same job, and what MPI can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mpidist.tools.doctor.finding import (
    Finding,
    Status,
    all_same,
    by_rank,
    name_ranks,
)

__all__ = [
    "LaunchFacts",
    "Launched",
    "check_launcher",
    "check_mpi",
    "check_nodes",
    "find_launched",
    "is_silent",
]

# Rank and size as launchers tell them. Slurm's come last: under an mpirun in its job
# they describe that mpirun's own processes
_LAUNCHERS = {
    "Open MPI's mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MVAPICH's mpirun": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "PMI (mpirun or srun)": ("PMI_RANK", "PMI_SIZE"),
    "Flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
_ALLOWED = "MPIDIST_ALLOW_SINGLETON"
_PRETENDED = "MPIDIST_RANKS_PER_NODE"
_THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


class Launched(NamedTuple):
    """What a launcher says of this process.

    Args:
      by: which launcher.
      rank, size: of the processes that it started.
      variables: where it says so.
    """

    by: str
    rank: int
    size: int
    variables: str


class LaunchFacts(NamedTuple):
    """What MPI says of one rank.

    Args:
      size: of COMM_WORLD.
      host: its node's name.
      node: the lowest rank on its node.
      library: first line of MPI's own version.
      standard: version of MPI's standard.
      thread_level: 0 to 3, of _THREAD_LEVELS.
      launched: what the launcher says; None if there is none.
      error: what `check_launch` says is wrong; empty if nothing.
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


def find_launched(environ: Mapping[str, str]) -> list[Launched]:
    """Return what launchers say of this process, the most reliable first."""
    found = []
    for by, names in _LAUNCHERS.items():
        rank, size = (environ.get(name, "") for name in names)
        if all(t.isascii() and t.isdecimal() and len(t) < 10 for t in (rank, size)):
            text = " ".join(
                f"{n}={v}" for n, v in zip(names, (rank, size), strict=True)
            )
            found.append(Launched(by, int(rank), int(size), text))
    return found


def is_silent(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher says that another process speaks for this one."""
    if environ.get(_ALLOWED) == "1":
        return False
    found = find_launched(environ)
    return bool(found) and 0 < found[0].rank < found[0].size


def check_launcher(facts: Mapping[int, LaunchFacts]) -> list[Finding]:
    """Return rows on the world's size against the launcher's; facts by rank."""
    errors = {rank: fact.error for rank, fact in facts.items() if fact.error}
    first = facts[min(facts)]
    said = first.launched
    if errors:
        found = f"MPI sees {first.size} process; {said.variables if said else ''}"
        return [Finding(Status.FAIL, "launcher", found, next(iter(errors.values())))]
    if said is None:
        alone = "one process, without a launcher"
        some = f"{first.size} ranks, by a launcher that does not say how many"
        return [Finding(Status.OK, "launcher", alone if first.size == 1 else some)]
    if said.size != first.size:
        is_meant = first.is_allowed and first.size == 1
        found = f"{said.by} says {said.variables}, MPI sees {first.size}"
        remedy = f"{_ALLOWED}=1 allows that; unset it if it is not meant"
        if not is_meant:
            remedy = "unset variables left by another launcher, or start the job anew"
        return [Finding(Status.WARN, "launcher", found, remedy)]
    unlike = [
        rank
        for rank, fact in facts.items()
        if fact.launched is None or fact.launched.rank != rank
    ]
    if unlike:
        found = f"{said.by} and MPI number {name_ranks(unlike)} differently"
        remedy = "let scripts take MPI's ranks, not those of the launcher's variables"
        return [Finding(Status.WARN, "launcher", found, remedy)]
    plural = "s" if first.size > 1 else ""
    found = f"{said.by} started {said.size} process{'es' * bool(plural)}, MPI sees "
    return [Finding(Status.OK, "launcher", f"{found}{first.size} rank{plural}")]


def check_mpi(facts: Mapping[int, LaunchFacts]) -> list[Finding]:
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
        "unset MPI4PY_RC_THREAD_LEVEL and what else lowers it, or take an MPI built "
    )
    remedy += "with MPI_THREAD_MULTIPLE"
    rows.append(
        Finding(status, "threads in MPI", names, "" if status is Status.OK else remedy)
    )
    return rows


def check_nodes(facts: Mapping[int, LaunchFacts]) -> list[Finding]:
    """Return a row on which ranks are on which node; facts by rank."""
    nodes: dict[int, list[int]] = {}
    for rank, fact in facts.items():
        nodes.setdefault(fact.node, []).append(rank)
    texts = [f"{facts[ranks[0]].host}: {name_ranks(ranks)}" for ranks in nodes.values()]
    shown = "; ".join(texts[:8]) + "; ..." * (len(texts) > 8)
    found = f"{len(nodes)} node{'s' * (len(nodes) > 1)} ({shown})"
    pretended = {fact.pretended for fact in facts.values()} - {""}
    wrong = {text for text in pretended if not text.isdecimal() or int(text) < 1}
    if wrong:
        remedy = "unset it: strategies refuse it"
        return [Finding(Status.FAIL, "nodes", f"{_PRETENDED}={wrong.pop()}", remedy)]
    if pretended:
        found += f", as {_PRETENDED}={pretended.pop()} pretends"
        remedy = "unset it: it is for tests, and keeps ranks from sharing memory"
        return [Finding(Status.WARN, "nodes", found, remedy)]
    sizes = sorted({len(ranks) for ranks in nodes.values()})
    if len(sizes) > 1:
        remedy = "give each node equally many ranks: they wait for each other"
        found += f"; unlike numbers of ranks: {', '.join(map(str, sizes))}"
        return [Finding(Status.WARN, "nodes", found, remedy)]
    return [Finding(Status.OK, "nodes", found)]
