"""Which datasets a HDF5 file has."""

from __future__ import annotations

import collections
import glob
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import h5py

from mpidist.data.hdf5.index import kind_of, open_hdf5
from mpidist.errors import ArgumentError, ArgumentTypeError, DataError
from mpidist.util import validation
from mpidist.util.files import open_regular

__all__ = ["check_names", "choose_datasets", "list_files"]


def choose_datasets(path: Path) -> tuple[list[str], list[str]]:
    """Return the names of datasets with equally many rows, and those of all others.

    Of several numbers of rows the one that has the most bytes is taken. Links to other
    places are not followed.

    Raises:
      DataError: the file cannot be read, or has no dataset with rows.
    """
    sizes: dict[str, int] = {}
    names = collections.defaultdict(list)
    others: list[str] = []

    def visit(name: str, item: h5py.Dataset | h5py.Group) -> None:
        if not isinstance(item, h5py.Dataset):
            return
        try:
            shape, dtype = kind_of(item) if item.shape else ((), None)
        except TypeError:  # a type that NumPy has not
            shape, dtype = (), None
        if dtype is None:
            others.append(name)
            return
        names[shape[0]].append(name)
        sizes[name] = item.size * dtype.itemsize

    try:
        os.close(open_regular(path))  # says shortly what HDF5 says at length
        with open_hdf5(path) as file:
            file.visititems(visit)
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path}: cannot be opened as HDF5: {error}") from error
    if not names:
        raise DataError(f"{path}: has no dataset with rows")
    taken = max(names.values(), key=lambda group: sum(sizes[name] for name in group))
    others += [name for group in names.values() for name in group if group is not taken]
    return taken, sorted(others)


_LONGEST = 4096  # of a name in a file, in bytes, with its groups


def list_files(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[Path]:
    """Return the files that a path, a pattern or several paths name."""
    if not isinstance(files, str | bytes | os.PathLike):
        several = _listed("files must be a path, a pattern or a list of paths", files)
        paths = [Path(validation.path("each of files", f)).absolute() for f in several]
        if not paths:
            raise ArgumentError("files must name at least one file, not []")
        return paths
    pattern = validation.path("files", files)
    if not glob.has_magic(pattern) or os.path.exists(pattern):
        return [Path(pattern).absolute()]
    found = sorted(glob.glob(pattern))
    if not found:
        raise DataError(f"no file matches {pattern!r}")
    return [Path(file).absolute() for file in found]


def check_names(
    datasets: str | Sequence[str] | Mapping[str, str],
) -> str | tuple[str, ...] | dict[str, str]:
    """Return the names of HDF5 datasets in the structure of the elements."""
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


def _listed(must: str, given: Any) -> list[Any]:
    """Return what an iterable has; a set's order is not the same on all ranks."""
    try:
        if not isinstance(given, Set | Mapping | bytes):
            return list(given)
    except (TypeError, ArgumentError) as error:  # the latter of a PerReplica
        raise ArgumentTypeError(f"{must}, not {validation.shown(given)}") from error
    raise ArgumentTypeError(f"{must}, not {validation.shown(given)}")


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
            f"datasets must hold names of HDF5, not {validation.shown(name)}"
        )
