"""Python, the packages that mpidist needs, HDF5, and environment variables."""

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
from mpidist.errors import LaunchError
from mpidist.tools.doctor.results import (
    CheckResult,
    Failure,
    Status,
    all_same,
    by_rank,
    describe_error,
    name_each,
)
from mpidist.util.settings import BANNER, LOG, PREFIX, SETTINGS, unknown_names

__all__ = [
    "NEEDED",
    "Hdf5Facts",
    "PythonFacts",
    "check_environment",
    "check_hdf5",
    "check_python",
    "choose_variables",
    "find_hdf5",
    "find_python",
    "try_import",
]

NEEDED = ("numpy", "h5py", "mpi4py", "deflate", "optree")
_ONE_PYTHON = "start all ranks with one Python of one environment, on every node"
# Variables that change how ranks communicate, and should be equal on all ranks
_PREFIXES = (
    "FI_",
    "HDF5_",
    "I_MPI_",
    "MKL_",
    "MPICH_",
    PREFIX,
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
# Set by launchers, differently on each rank
_OF_LAUNCHERS = ("OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix", "I_MPI_INFO")
_SHOWN_LETTERS = 60
# They change only the output of a rank
_MAY_DIFFER = (BANNER.name, LOG.name)
_LOCKING = "HDF5_USE_FILE_LOCKING"
_LOCKING_VALUES = ("TRUE", "1", "FALSE", "0", "BEST_EFFORT")
_PLUGINS = "HDF5_PLUGIN_PATH"
# H5Z_FILTER_... of HDF5, and the most common registered filters
_FILTERS = {
    "gzip": 1,
    "shuffle": 2,
    "fletcher32": 3,
    "szip": 4,
    "scaleoffset": 6,
    "lzf": 32000,
    "blosc": 32001,
    "lz4": 32004,
    "bitshuffle": 32008,
    "zstd": 32015,
    "blosc2": 32026,
}
_WANTED = ("gzip", "shuffle", "fletcher32")


class PythonFacts(NamedTuple):
    """Python, packages and variables of one rank.

    Args:
      python: version and implementation.
      executable: of Python.
      mpidist: version and folder.
      packages: versions, or why the import failed, by name.
      environment: the variables that should be the same on all ranks.
    """

    python: str
    executable: str
    mpidist: str
    packages: dict[str, str | Failure]
    environment: dict[str, str]


def find_python(packages: dict[str, str | Failure]) -> PythonFacts:
    """Return this process's facts; `packages` are the results of `try_import`."""
    return PythonFacts(
        f"{platform.python_version()} ({platform.python_implementation()})",
        sys.executable,
        f"{__version__} in {Path(__file__).parents[2]}",
        packages,
        choose_variables(os.environ),
    )


def choose_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that should be the same on all ranks."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in _NAMES
        or (name.startswith(_PREFIXES) and not name.startswith(_OF_LAUNCHERS))
    }


def try_import(name: str) -> str | Failure:
    """Import a package and return its version. It may crash: call it in a child."""
    try:
        importlib.import_module(name)
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
    except ModuleNotFoundError as error:
        return Failure("not installed" if error.name == name else describe_error(error))


def check_python(facts: Mapping[int, PythonFacts]) -> list[CheckResult]:
    """Return rows on versions; facts by rank."""
    # Python is compatible within a minor version, so the patch number may differ
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


def _check_packages(facts: Mapping[int, PythonFacts]) -> list[CheckResult]:
    """Return one row for all packages that work, and one for each other."""
    rows, good = [], []
    for name in NEEDED:
        found = {
            rank: version.text if isinstance(version, Failure) else version
            for rank, version in ((r, f.packages[name]) for r, f in facts.items())
        }
        if any(isinstance(f.packages[name], Failure) for f in facts.values()):
            remedy = f"{sys.executable} -m pip install {name}"
            rows.append(CheckResult(Status.FAIL, name, name_each(found), remedy))
        elif len(set(found.values())) > 1:
            rows.append(CheckResult(Status.FAIL, name, by_rank(found), _ONE_PYTHON))
        else:
            good.append(f"{name} {by_rank(found)}")
    if good:
        rows.insert(0, CheckResult(Status.OK, "packages", ", ".join(good)))
    return rows


def check_environment(facts: Mapping[int, PythonFacts]) -> list[CheckResult]:
    """Return rows on variables that differ, or one OK row; facts by rank."""
    names = sorted({name for fact in facts.values() for name in fact.environment})
    rows = _check_settings(facts)
    for name in names:
        values = {r: fact.environment.get(name) for r, fact in facts.items()}
        if len(set(values.values())) > 1:
            is_ours = name.startswith(PREFIX) and name not in _MAY_DIFFER
            status = Status.FAIL if is_ours else Status.WARN
            shown = {rank: _shorten(value) for rank, value in values.items()}
            remedy = (
                "set it to the same value on all ranks, or on none (mpirun -x or -genv)"
            )
            rows.append(CheckResult(status, name, by_rank(shown), remedy))
    if not rows:
        count = (
            f"{len(names)} variables that matter" if names else "nothing that matters"
        )
        same = ", the same on all ranks" if len(facts) > 1 and names else ""
        rows.append(CheckResult(Status.OK, "environment", f"{count}{same}"))
    return rows


def _check_settings(facts: Mapping[int, PythonFacts]) -> list[CheckResult]:
    """Return a row for each variable that prevents creating a strategy."""
    wrong: dict[str, dict[int, str]] = {}
    for rank, fact in facts.items():
        for name, reason in unknown_names(fact.environment).items():
            wrong.setdefault(name, {})[rank] = reason
        for setting in SETTINGS:
            try:
                setting.read(fact.environment)
            except LaunchError as error:
                wrong.setdefault(setting.name, {})[rank] = str(error)
    remedy = "correct it, or unset it: no strategy can be created with it"
    return [
        CheckResult(Status.FAIL, f"{name}, as a setting", by_rank(found), remedy)
        for name, found in wrong.items()
    ]


def _shorten(value: str | None) -> str:
    if value is None:
        return "not set"
    return value if len(value) <= _SHOWN_LETTERS else f"{value[:_SHOWN_LETTERS]}..."


class Hdf5Facts(NamedTuple):
    """HDF5 of one rank.

    Args:
      library: its version, and whether it was built for MPI.
      filters: the names of the available filters.
      locking: the variable HDF5_USE_FILE_LOCKING; None if not set.
      missing_plugins: folders of HDF5_PLUGIN_PATH that do not exist, or nothing.
    """

    library: str
    filters: tuple[str, ...]
    locking: str | None
    missing_plugins: str


def find_hdf5() -> Hdf5Facts:
    """Return this process's facts."""
    import h5py

    available = [n for n, code in _FILTERS.items() if h5py.h5z.filter_avail(code)]
    is_parallel = h5py.get_config().mpi
    folders = os.environ.get(_PLUGINS, "").split(os.pathsep)
    missing = [folder for folder in folders if folder and not os.path.isdir(folder)]
    return Hdf5Facts(
        f"{h5py.version.hdf5_version}{', built for MPI' if is_parallel else ''}",
        tuple(available),
        os.environ.get(_LOCKING),
        ", ".join(missing),
    )


def check_hdf5(facts: Mapping[int, Hdf5Facts]) -> list[CheckResult]:
    """Return rows on HDF5; facts by rank."""
    remedy = "install the same h5py on all nodes"
    rows = [
        all_same("HDF5", {r: fact.library for r, fact in facts.items()}, remedy),
        _check_filters(facts),
    ]
    if any(fact.missing_plugins for fact in facts.values()):
        missing = by_rank({r: f.missing_plugins or "none" for r, f in facts.items()})
        rows.append(
            CheckResult(
                Status.WARN,
                _PLUGINS,
                f"folders that do not exist: {missing}",
                "correct it, or unset it",
            )
        )
    return [*rows, _check_locking(facts)]


def _check_filters(facts: Mapping[int, Hdf5Facts]) -> CheckResult:
    found = {rank: ", ".join(fact.filters) for rank, fact in facts.items()}
    if any(set(_WANTED) - set(fact.filters) for fact in facts.values()):
        remedy = f"{sys.executable} -m pip install --force-reinstall h5py (its wheels "
        remedy += "have gzip, shuffle and fletcher32)"
        return CheckResult(Status.WARN, "HDF5's filters", by_rank(found), remedy)
    return all_same(
        "HDF5's filters", found, "give all ranks the same plugins", Status.WARN
    )


def _check_locking(facts: Mapping[int, Hdf5Facts]) -> CheckResult:
    values = {r: fact.locking for r, fact in facts.items()}
    shown = by_rank({r: "not set" if v is None else v for r, v in values.items()})
    known = [v is None or v in _LOCKING_VALUES for v in values.values()]
    if not all(known):
        return CheckResult(
            Status.WARN,
            _LOCKING,
            f"{shown}, which HDF5 does not know",
            f"use one of {', '.join(_LOCKING_VALUES)}, or unset it",
        )
    return CheckResult(Status.OK, _LOCKING, shown)
