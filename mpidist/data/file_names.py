"""What users name: files, and HDF5 datasets in them."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mpidist.errors import ArgumentError, ArgumentTypeError, DataError

__all__ = ["check_names", "list_files"]


def list_files(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[Path]:
    """Return the files that a path, a pattern or several paths name."""
    if not isinstance(files, str | os.PathLike):
        paths = [Path(file) for file in files]
        if not paths:
            raise ArgumentError("files must name at least one file, not []")
        return paths
    pattern = os.fspath(files)
    if not glob.has_magic(pattern) or os.path.exists(pattern):
        return [Path(pattern)]
    found = sorted(glob.glob(pattern))
    if not found:
        raise DataError(f"no file matches {pattern!r}")
    return [Path(file) for file in found]


def check_names(
    datasets: str | Sequence[str] | Mapping[str, str],
) -> str | tuple[str, ...] | dict[str, str]:
    """Return the names of HDF5 datasets in the structure of the elements."""
    if isinstance(datasets, str):
        return datasets
    names = dict(datasets) if isinstance(datasets, Mapping) else tuple(datasets)
    several = list(names.values()) if isinstance(names, dict) else names
    if not several:
        raise ArgumentError("datasets must name at least one HDF5 dataset")
    for name in several:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"datasets must hold names, not {name!r}")
    return names
