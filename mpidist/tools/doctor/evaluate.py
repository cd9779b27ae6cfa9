"""Evaluate the facts of all ranks: facts in, rows of the table out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpidist.tools.doctor import gpu_checks, node_checks, path_checks, process_checks
from mpidist.tools.doctor.gpu_checks import GpuChoice, GpuFacts
from mpidist.tools.doctor.node_checks import LaunchFacts, NodeFacts
from mpidist.tools.doctor.path_checks import PathReport
from mpidist.tools.doctor.process_checks import Hdf5Facts, PythonFacts
from mpidist.tools.doctor.results import (
    CheckResult,
    Failure,
    Status,
    by_rank,
    describe_error,
    name_each,
)

__all__ = ["RankFacts", "are_gpus_usable", "evaluate", "evaluate_processes"]

_BROKEN = "jobs would fail in the same way; run this check alone for details"
_TITLES = {
    "python": "Python and packages",
    "hdf5": "h5py",
    "gpus": "CuPy",
    "node": "cores and memory",
    "choice": "GPUs",
}


@dataclasses.dataclass(frozen=True)
class RankFacts:
    """The facts of one rank; None for what was not checked, or does not exist."""

    python: PythonFacts | Failure
    hdf5: Hdf5Facts | Failure
    gpus: GpuFacts | Failure
    node: NodeFacts | Failure | None = None
    launch: LaunchFacts | None = None
    paths: Sequence[PathReport] | None = None
    choice: GpuChoice | Failure | None = None


def evaluate(
    everyone: Mapping[int, RankFacts], paths: Sequence[str]
) -> list[CheckResult]:
    """Return all rows; facts by rank."""
    return [
        *evaluate_processes(everyone),
        *_evaluate_nodes(everyone),
        *_evaluate_gpus(everyone),
        *_evaluate_paths(everyone, paths),
    ]


def evaluate_processes(everyone: Mapping[int, RankFacts]) -> list[CheckResult]:
    """Return the rows on what needs no other rank; facts by rank."""
    rows, python = _split("python", everyone)
    rows += _guard("python", process_checks.check_python, python)
    rows += _guard("python", process_checks.check_environment, python)
    failures, hdf5 = _split("hdf5", everyone)
    return [*rows, *failures, *_guard("hdf5", process_checks.check_hdf5, hdf5)]


def _evaluate_nodes(everyone: Mapping[int, RankFacts]) -> list[CheckResult]:
    """Return the rows on MPI, and on the nodes."""
    launch = {r: f.launch for r, f in everyone.items() if f.launch is not None}
    rows = []
    for check in (
        node_checks.check_mpi,
        node_checks.check_launcher,
        node_checks.check_nodes,
    ):
        rows += _guard("MPI", check, launch)
    nodes: dict[int, list[int]] = {}
    for rank in everyone:
        nodes.setdefault(launch[rank].node if rank in launch else 0, []).append(rank)
    failures, found = _split("node", everyone)
    rows += failures
    for look in (
        node_checks.check_binding,
        node_checks.check_threads,
        node_checks.check_memory,
    ):
        rows += _guard("node", look, found, list(nodes.values()))
    return rows


def _evaluate_gpus(everyone: Mapping[int, RankFacts]) -> list[CheckResult]:
    rows, gpus = _split("gpus", everyone)
    failures, _ = _split("choice", everyone)
    # Which rank uses which GPU is known only once MPI has started
    choices = {
        rank: facts.choice
        for rank, facts in everyone.items()
        if not isinstance(facts.choice, Failure)
    }
    seen = {r: len(g.gpus) for r, g in gpus.items()}
    if failures or (any(seen.values()) and not any(choices.values())):
        found = {rank: f"{count} seen" for rank, count in seen.items()}
        return [*rows, *failures, CheckResult(Status.OK, "GPUs", by_rank(found))]
    rows += _guard("gpus", gpu_checks.check_gpus, gpus, choices)
    has_nccl = bool(gpus) and all(fact.nccl for fact in gpus.values())
    return rows + _guard("gpus", gpu_checks.check_support, choices, has_nccl)


def _evaluate_paths(
    everyone: Mapping[int, RankFacts], paths: Sequence[str]
) -> list[CheckResult]:
    if any(facts.paths is None for facts in everyone.values()):
        return []
    python = everyone[min(everyone)].python
    locking = None
    if isinstance(python, PythonFacts):
        locking = python.environment.get("HDF5_USE_FILE_LOCKING")
    rows = []
    for number, path in enumerate(paths):
        reports = {r: f.paths[number] for r, f in everyone.items() if f.paths}
        rows += _guard(path, path_checks.check_path, reports, path, locking)
    return rows


def are_gpus_usable(everyone: Mapping[int, RankFacts]) -> bool:
    """Return whether all ranks have a GPU."""
    return bool(everyone) and all(
        isinstance(facts.choice, GpuChoice) for facts in everyone.values()
    )


def _split(
    name: str, everyone: Mapping[int, RankFacts]
) -> tuple[list[CheckResult], dict[int, Any]]:
    """Return a row on the ranks whose check failed, and the facts of the others."""
    found = {rank: getattr(facts, name) for rank, facts in everyone.items()}
    failures = {r: f.text for r, f in found.items() if isinstance(f, Failure)}
    good = {r: f for r, f in found.items() if f is not None and r not in failures}
    if not failures:
        return [], good
    is_everywhere = len(failures) == len(everyone)
    text = by_rank(failures) if is_everywhere else name_each(failures)
    return [CheckResult(Status.FAIL, _TITLES[name], text, _BROKEN)], good


def _guard(
    name: str,
    check: Callable[..., list[CheckResult]],
    facts: Mapping[int, Any],
    *more: Any,
) -> list[CheckResult]:
    """Return a check's rows; none without facts, one that fails if it raises."""
    try:
        return check(facts, *more) if facts else []
    except Exception as error:
        what = _TITLES.get(name, name)
        text = f"the check itself failed: {describe_error(error)}"
        return [CheckResult(Status.FAIL, what, text, "please report this")]
