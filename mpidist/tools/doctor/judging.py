"""From the facts of all ranks to the rows of the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpidist.tools.doctor import (
    gpu_checks,
    hdf5_checks,
    launch_checks,
    node_checks,
    path_checks,
    python_checks,
)
from mpidist.tools.doctor.finding import (
    Failure,
    Finding,
    Status,
    by_rank,
    describe_error,
    name_each,
)
from mpidist.tools.doctor.gpu_checks import GpuChoice, GpuFacts
from mpidist.tools.doctor.hdf5_checks import Hdf5Facts
from mpidist.tools.doctor.launch_checks import LaunchFacts
from mpidist.tools.doctor.node_checks import NodeFacts
from mpidist.tools.doctor.path_checks import PathReport
from mpidist.tools.doctor.python_checks import PythonFacts

__all__ = ["RankFacts", "are_gpus_usable", "judge", "judge_processes"]

_BROKEN = "this is what jobs would meet there; run that part alone to see more"
_TITLES = {
    "python": "Python and packages",
    "hdf5": "h5py",
    "gpus": "CuPy",
    "node": "cores and memory",
    "choice": "GPUs",
}


@dataclasses.dataclass(frozen=True)
class RankFacts:
    """What one rank knows; None for what it has not looked at, or what is not there."""

    python: PythonFacts | Failure
    hdf5: Hdf5Facts | Failure
    gpus: GpuFacts | Failure
    node: NodeFacts | Failure | None = None
    launch: LaunchFacts | None = None
    paths: Sequence[PathReport] | None = None
    choice: GpuChoice | Failure | None = None


def judge(everyone: Mapping[int, RankFacts], paths: Sequence[str]) -> list[Finding]:
    """Return all rows; facts by rank."""
    return [
        *judge_processes(everyone),
        *_judge_nodes(everyone),
        *_judge_gpus(everyone),
        *_judge_paths(everyone, paths),
    ]


def judge_processes(everyone: Mapping[int, RankFacts]) -> list[Finding]:
    """Return the rows on what each process is by itself; facts by rank."""
    rows, python = _split("python", everyone)
    rows += _guard("python", python_checks.check_python, python)
    rows += _guard("python", python_checks.check_environment, python)
    failures, hdf5 = _split("hdf5", everyone)
    return [*rows, *failures, *_guard("hdf5", hdf5_checks.check_hdf5, hdf5)]


def _judge_nodes(everyone: Mapping[int, RankFacts]) -> list[Finding]:
    """Return the rows on MPI, and on the nodes."""
    launch = {r: f.launch for r, f in everyone.items() if f.launch is not None}
    rows = []
    for check in (
        launch_checks.check_mpi,
        launch_checks.check_launcher,
        launch_checks.check_nodes,
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


def _judge_gpus(everyone: Mapping[int, RankFacts]) -> list[Finding]:
    rows, gpus = _split("gpus", everyone)
    failures, _ = _split("choice", everyone)
    # Before they are chosen, and without MPI, nothing is known of who takes which
    choices = {
        rank: facts.choice
        for rank, facts in everyone.items()
        if not isinstance(facts.choice, Failure)
    }
    seen = {r: len(g.gpus) for r, g in gpus.items()}
    if failures or (any(seen.values()) and not any(choices.values())):
        found = {rank: f"{count} seen" for rank, count in seen.items()}
        return [*rows, *failures, Finding(Status.OK, "GPUs", by_rank(found))]
    rows += _guard("gpus", gpu_checks.check_gpus, gpus, choices)
    has_nccl = bool(gpus) and all(fact.nccl for fact in gpus.values())
    return rows + _guard("gpus", gpu_checks.check_support, choices, has_nccl)


def _judge_paths(
    everyone: Mapping[int, RankFacts], paths: Sequence[str]
) -> list[Finding]:
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
) -> tuple[list[Finding], dict[int, Any]]:
    """Return a row on the ranks that failed to find facts, and those of the others."""
    found = {rank: getattr(facts, name) for rank, facts in everyone.items()}
    failures = {r: f.text for r, f in found.items() if isinstance(f, Failure)}
    good = {r: f for r, f in found.items() if f is not None and r not in failures}
    if not failures:
        return [], good
    is_everywhere = len(failures) == len(everyone)
    text = by_rank(failures) if is_everywhere else name_each(failures)
    return [Finding(Status.FAIL, _TITLES[name], text, _BROKEN)], good


def _guard(
    name: str, check: Callable[..., list[Finding]], facts: Mapping[int, Any], *more: Any
) -> list[Finding]:
    """Return a check's rows, of which there are none without facts."""
    try:
        return check(facts, *more) if facts else []
    except Exception as error:
        what = _TITLES.get(name, name)
        text = f"the check itself failed: {describe_error(error)}"
        return [Finding(Status.FAIL, what, text, "please report this")]
