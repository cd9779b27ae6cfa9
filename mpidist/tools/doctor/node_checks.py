"""The cores and the memory of each node: who is bound where, who shares what."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mpidist.tools.doctor.finding import Finding, Status, by_rank, name_ranks
from mpidist.util.available_memory import as_text, free_bytes

__all__ = ["NodeFacts", "check_binding", "check_memory", "check_threads", "find_node"]

_SHARED_FOLDER = "/dev/shm"
# Of shared memory that a rank's transports, and the MPI library, can do with
_LEAST_BYTES = 16 << 20
_GOOD_BYTES = 64 << 20
# The first that is set says how many threads NumPy's linear algebra starts
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


class NodeFacts(NamedTuple):
    """What one rank may use of its node.

    Args:
      cores: the numbers of the processors that it may run on.
      machine_cores: how many there are.
      siblings: for each of `cores` the first processor of the same physical core.
      thread_variable: name and value of what limits the threads of NumPy's linear
        algebra; empty if nothing does.
      shared_bytes, shared_free_bytes: of /dev/shm; negative where there is none.
      free: free bytes of all that limits memory, by name.
    """

    cores: tuple[int, ...]
    machine_cores: int
    siblings: tuple[int, ...]
    thread_variable: tuple[str, str]
    shared_bytes: int
    shared_free_bytes: int
    free: dict[str, int]


def find_node() -> NodeFacts:
    """Return this process's. To be called when MPI has started, which may bind it."""
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
        free_bytes(is_shared=False),
    )


def _first_sibling(core: int) -> int:
    path = f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
    try:
        return int(re.split(r"[-,]", Path(path).read_text().strip())[0])
    except (OSError, ValueError):
        return core


def check_binding(
    facts: Mapping[int, NodeFacts], nodes: Iterable[list[int]]
) -> list[Finding]:
    """Return a row; `facts` by rank, `nodes` the ranks of each node."""
    crowded: list[str] = []
    oversubscribed: list[str] = []
    siblings: list[str] = []
    for ranks in _known(nodes, facts):
        masks = {rank: set(facts[rank].cores) for rank in ranks}
        everywhere = set().union(*masks.values())
        for mask, inside in _crowds(masks):
            # All cores that there are being too few is another thing than a bad choice
            is_chosen = (
                mask != everywhere or len(mask) == 1 < facts[ranks[0]].machine_cores
            )
            text = f"{name_ranks(inside)} on {_name_cores(mask)}"
            (crowded if is_chosen else oversubscribed).append(text)
        physical = {rank: set(facts[rank].siblings) for rank in ranks}
        siblings += [name_ranks(inside) for _, inside in _crowds(physical)]
    if crowded:
        remedy = "bind each rank to cores of its own: mpirun --bind-to core, or srun "
        remedy += "--cpu-bind=cores with --cpus-per-task"
        found = f"ranks share cores: {'; '.join(crowded)}"
        return [Finding(Status.FAIL, "binding", found, remedy)]
    if oversubscribed:
        found = f"more ranks than cores: {'; '.join(oversubscribed)}"
        remedy = "start at most one rank per core: ranks wait for each other busily"
        return [Finding(Status.WARN, "binding", found, remedy)]
    if siblings:
        found = f"threads of one core: {'; '.join(siblings)}"
        remedy = "use srun --hint=nomultithread, or mpirun --bind-to core"
        return [Finding(Status.WARN, "binding", found, remedy)]
    return [Finding(Status.OK, "binding", by_rank(_texts(facts)))]


def _known(
    nodes: Iterable[list[int]], facts: Mapping[int, object]
) -> Iterator[list[int]]:
    """Yield the ranks of each node of which something is known."""
    for ranks in nodes:
        known = [rank for rank in ranks if rank in facts]
        if known:
            yield known


def _crowds(masks: Mapping[int, set[int]]) -> Iterator[tuple[set[int], list[int]]]:
    """Yield sets of cores, and the ranks, more than these, that have no others."""
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
) -> list[Finding]:
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
        return [Finding(Status.WARN, "threads", f"not a number: {text}", remedy)]
    if too_many:
        text = "; ".join(text for text, _ in too_many)
        remedy = f"set OMP_NUM_THREADS={min(each for _, each in too_many)} on all ranks"
        return [Finding(Status.WARN, "threads", text, remedy)]
    texts = {rank: f"{_threads(fact)} per rank" for rank, fact in facts.items()}
    return [Finding(Status.OK, "threads", by_rank(texts))]


def _threads(fact: NodeFacts) -> int:
    """Return how many threads linear algebra starts; 0 if the variable is no number."""
    name, value = fact.thread_variable
    if not name:
        return len(fact.cores)
    first = value.partition(",")[0].strip()  # one number for each level of nesting
    is_number = first.isascii() and first.isdecimal()
    return int(first) if is_number and len(first) < 9 else 0


def check_memory(
    facts: Mapping[int, NodeFacts], nodes: Iterable[list[int]]
) -> list[Finding]:
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
    remedy += "--ipc=host), and remove what dead jobs left there"
    rows.append(
        Finding(
            status,
            f"shared memory ({_SHARED_FOLDER})",
            by_rank(texts),
            "" if status is Status.OK else remedy,
        )
    )
    limits = {}
    for ranks in _known(nodes, facts):
        free_of = facts[ranks[0]].free
        if free_of:
            name = min(free_of, key=lambda name: free_of[name])
            limits[ranks[0]] = f"{as_text(free_of[name])} free, limited by {name}"
    if limits:
        rows.append(Finding(Status.OK, "memory", by_rank(limits)))
    return rows
