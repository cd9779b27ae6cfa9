"""Which datasets a HDF5 file has."""

from __future__ import annotations

import collections
import os
from pathlib import Path

import h5py

from mpidist.data.hdf5.index import kind_of, open_hdf5
from mpidist.errors import DataError
from mpidist.regular_files import open_regular

__all__ = ["choose_datasets"]


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
