"""Names of files and datasets, as users give them."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from mpidist.errors import ArgumentError, ArgumentTypeError, DataError
from mpidist.util import validation

__all__ = ["check_names", "list_files"]

_LONGEST = 4096  # of a name in a file, in bytes, with its groups


def list_files(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[Path]:
    """Return the files of a path, a pattern or several paths."""
    if not isinstance(files, str | bytes | os.PathLike):
        several = _listed("files must be a path, a pattern or a list of paths", files)
        paths = [validation.absolute("each of files", file) for file in several]
        if not paths:
            raise ArgumentError("files must name at least one file, not []")
        return paths
    pattern = validation.path("files", files)
    if not glob.has_magic(pattern) or os.path.exists(pattern):
        return [validation.absolute("files", pattern)]
    matches = sorted(glob.glob(pattern))
    if not matches:
        raise DataError(f"no file matches {pattern!r}")
    return [validation.absolute("files", file) for file in matches]


def check_names(
    datasets: str | Sequence[str] | Mapping[str, str],
) -> str | tuple[str, ...] | dict[str, str]:
    """Validate the names of HDF5 datasets, in the structure of the elements."""
    if isinstance(datasets, str):
        _require_name(datasets)
        return datasets
    if isinstance(datasets, Mapping):
        names: dict[str, str] | tuple[str, ...] = dict(datasets)
    else:
        must = "datasets must be a name, or a list or dict of names"
        names = tuple(_listed(must, datasets))
    several = list(names.values()) if isinstance(names, dict) else names
    if not several:
        raise ArgumentError("datasets must name at least one HDF5 dataset")
    for name in several:
        _require_name(name)
    return names


def _listed(must: str, value: Any) -> list[Any]:
    """Return the items of an iterable; sets differ in order between ranks."""
    try:
        if not isinstance(value, Set | Mapping | bytes):
            return list(value)
    except (TypeError, ArgumentError) as error:  # ArgumentError: a PerReplica
        raise ArgumentTypeError(f"{must}, not {validation.shown(value)}") from error
    raise ArgumentTypeError(f"{must}, not {validation.shown(value)}")


def _require_name(name: Any) -> None:
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"datasets must hold names, not {validation.shown(name)}"
        )
    try:
        is_good = name != "" and len(name.encode()) < _LONGEST and "\0" not in name
    except UnicodeEncodeError:
        is_good = False
    if not is_good:
        raise ArgumentError(
            f"datasets must hold valid HDF5 names, not {validation.shown(name)}"
        )
