"""HDF5: which library, which filters it has, and whether it locks files."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from mpidist.tools.doctor.finding import Finding, Status, all_same, by_rank

__all__ = ["Hdf5Facts", "check_hdf5", "find_hdf5"]

_LOCKING = "HDF5_USE_FILE_LOCKING"
_LOCKING_VALUES = ("TRUE", "1", "FALSE", "0", "BEST_EFFORT")
_PLUGINS = "HDF5_PLUGIN_PATH"
# H5Z_FILTER_... of HDF5 and of the registered filters that are met most often
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


class Hdf5Facts(NamedTuple):
    """HDF5 of one rank.

    Args:
      library: its version, and whether it was built for MPI.
      filters: the names of those that it can apply and undo.
      locking: the variable HDF5_USE_FILE_LOCKING; None if not set.
      missing_plugins: a folder of HDF5_PLUGIN_PATH that is not there, or nothing.
    """

    library: str
    filters: tuple[str, ...]
    locking: str | None
    missing_plugins: str


def find_hdf5() -> Hdf5Facts:
    """Return this process's."""
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


def check_hdf5(facts: Mapping[int, Hdf5Facts]) -> list[Finding]:
    """Return rows; facts by rank."""
    remedy = "install the same h5py on all nodes"
    rows = [
        all_same("HDF5", {r: fact.library for r, fact in facts.items()}, remedy),
        _check_filters(facts),
    ]
    if any(fact.missing_plugins for fact in facts.values()):
        missing = by_rank({r: f.missing_plugins or "none" for r, f in facts.items()})
        rows.append(
            Finding(
                Status.WARN,
                _PLUGINS,
                f"folders that are not there: {missing}",
                "correct it, or unset it",
            )
        )
    return [*rows, _check_locking(facts)]


def _check_filters(facts: Mapping[int, Hdf5Facts]) -> Finding:
    found = {rank: ", ".join(fact.filters) for rank, fact in facts.items()}
    if any(set(_WANTED) - set(fact.filters) for fact in facts.values()):
        remedy = f"{sys.executable} -m pip install --force-reinstall h5py (its wheels "
        remedy += "have gzip, shuffle and fletcher32)"
        return Finding(Status.WARN, "HDF5's filters", by_rank(found), remedy)
    return all_same(
        "HDF5's filters", found, "give all ranks the same plugins", Status.WARN
    )


def _check_locking(facts: Mapping[int, Hdf5Facts]) -> Finding:
    values = {r: fact.locking for r, fact in facts.items()}
    shown = by_rank({r: "not set" if v is None else v for r, v in values.items()})
    known = [v is None or v in _LOCKING_VALUES for v in values.values()]
    if not all(known):
        return Finding(
            Status.WARN,
            _LOCKING,
            f"{shown}, which HDF5 does not know",
            f"use one of {', '.join(_LOCKING_VALUES)}, or unset it",
        )
    return Finding(Status.OK, _LOCKING, shown)
