"""Python, the packages that mpidist needs, and the environment, alike on all ranks."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpidist._version import __version__
from mpidist.tools.doctor.finding import (
    Failure,
    Finding,
    Status,
    all_same,
    by_rank,
    describe_error,
    name_each,
)

__all__ = [
    "NEEDED",
    "PythonFacts",
    "check_environment",
    "check_python",
    "choose_variables",
    "find_python",
    "try_import",
]

NEEDED = ("numpy", "h5py", "mpi4py", "deflate", "optree")
_ONE_PYTHON = "start all ranks with one Python of one environment, on every node"
# What changes how ranks work together, and should be the same on all of them
_PREFIXES = (
    "FI_",
    "HDF5_",
    "I_MPI_",
    "MKL_",
    "MPICH_",
    "MPIDIST_",
    "MPIR_CVAR_",
    "NCCL_",
    "OMPI_MCA_",
    "OMP_",
    "OPENBLAS_",
    "UCX_",
)
_NAMES = (
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "MPI4PY_RC_THREAD_LEVEL",
    "PYTHONHASHSEED",
    "PYTHONOPTIMIZE",
    "PYTHONPATH",
)
# Open MPI's launchers tell each rank who it is by some of these
_OF_LAUNCHERS = ("OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix", "I_MPI_INFO")
_SHOWN_LETTERS = 60


class PythonFacts(NamedTuple):
    """What one rank runs with.

    Args:
      python: version and implementation.
      executable: of Python.
      mpidist: version and folder.
      packages: versions, or what keeps them from being imported, by name.
      environment: the variables that should be the same on all ranks.
    """

    python: str
    executable: str
    mpidist: str
    packages: dict[str, str | Failure]
    environment: dict[str, str]


def find_python(packages: dict[str, str | Failure]) -> PythonFacts:
    """Return this process's; `packages` holds what `try_import` gives for each."""
    return PythonFacts(
        f"{platform.python_version()} ({platform.python_implementation()})",
        sys.executable,
        f"{__version__} in {Path(__file__).parents[2]}",
        packages,
        choose_variables(os.environ),
    )


def choose_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those that should be the same on all ranks."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in _NAMES
        or (name.startswith(_PREFIXES) and not name.startswith(_OF_LAUNCHERS))
    }


def try_import(name: str) -> str | Failure:
    """Return a package's version. It may crash, so only a `Worker` calls it."""
    try:
        importlib.import_module(name)
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
    except ModuleNotFoundError as error:
        return Failure("not installed" if error.name == name else describe_error(error))


def check_python(facts: Mapping[int, PythonFacts]) -> list[Finding]:
    """Return rows on versions; facts by rank."""
    # Files of one minor version work with its later ones, so the patch may differ
    minors = {fact.python.rpartition(".")[0] for fact in facts.values()}
    return [
        all_same(
            "Python",
            {rank: fact.python for rank, fact in facts.items()},
            _ONE_PYTHON,
            Status.WARN if len(minors) == 1 else Status.FAIL,
        ),
        all_same(
            "Python's path",
            {rank: fact.executable for rank, fact in facts.items()},
            _ONE_PYTHON,
            Status.WARN,
        ),
        all_same(
            "mpidist", {rank: fact.mpidist for rank, fact in facts.items()}, _ONE_PYTHON
        ),
        *_check_packages(facts),
    ]


def _check_packages(facts: Mapping[int, PythonFacts]) -> list[Finding]:
    """Return one row for all packages that are well, and one for each other."""
    rows, good = [], []
    for name in NEEDED:
        found = {
            rank: version.text if isinstance(version, Failure) else version
            for rank, version in ((r, f.packages[name]) for r, f in facts.items())
        }
        if any(isinstance(f.packages[name], Failure) for f in facts.values()):
            remedy = f"{sys.executable} -m pip install {name}"
            rows.append(Finding(Status.FAIL, name, name_each(found), remedy))
        elif len(set(found.values())) > 1:
            rows.append(Finding(Status.FAIL, name, by_rank(found), _ONE_PYTHON))
        else:
            good.append(f"{name} {by_rank(found)}")
    if good:
        rows.insert(0, Finding(Status.OK, "packages", ", ".join(good)))
    return rows


def check_environment(facts: Mapping[int, PythonFacts]) -> list[Finding]:
    """Return rows on variables that differ, or one that none does; facts by rank."""
    names = sorted({name for fact in facts.values() for name in fact.environment})
    rows = []
    for name in names:
        values = {r: fact.environment.get(name) for r, fact in facts.items()}
        if len(set(values.values())) > 1:
            is_ours = name.startswith("MPIDIST_") and name != "MPIDIST_BANNER"
            status = Status.FAIL if is_ours else Status.WARN
            shown = {rank: _shorten(value) for rank, value in values.items()}
            remedy = "set it on all ranks alike, or on none (mpirun -x or -genv)"
            rows.append(Finding(status, name, by_rank(shown), remedy))
    if not rows:
        count = (
            f"{len(names)} variables that matter" if names else "nothing that matters"
        )
        same = ", the same on all ranks" if len(facts) > 1 and names else ""
        rows.append(Finding(Status.OK, "environment", f"{count}{same}"))
    return rows


def _shorten(value: str | None) -> str:
    if value is None:
        return "not set"
    return value if len(value) <= _SHOWN_LETTERS else f"{value[:_SHOWN_LETTERS]}..."
