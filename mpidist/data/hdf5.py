"""Rows of HDF5 datasets over one or several files, read by number."""

from __future__ import annotations

import dataclasses
import glob
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpidist import nest
from mpidist.errors import ArgumentError, ArgumentTypeError, DataError

__all__ = ["Hdf5Rows", "check_names", "list_files"]

# A gap between two wanted rows is read too if it is smaller: one call costs more
_GAP_BYTES = 32 << 10


@dataclasses.dataclass
class _Layout:
    """What was found in the files, which must not change while they are read."""

    starts: list[int]  # the number of each file's first row, and of all rows
    dtypes: list[np.dtype[Any]]
    row_shapes: list[tuple[int, ...]]


class Hdf5Rows:
    """The rows of HDF5 datasets, file after file; see `Dataset.from_hdf5`.

    Files are opened read-only, without locks (which fail on many network file systems),
    when they are first read, once in every process; a copy or a fork opens its own.
    """

    def __init__(
        self, paths: Sequence[Path], names: str | tuple[str, ...] | Mapping[str, str]
    ):
        self._paths = list(paths)
        self._names, self._spec = nest.flatten(names)
        self._all_paths = self._paths
        self._layout: _Layout | None = None
        self._files: dict[int, h5py.File] = {}
        self._owner = os.getpid()

    def __len__(self) -> int:
        return self._inspect().starts[-1]

    @property
    def file_count(self) -> int:
        """The number of files."""
        return len(self._paths)

    def shard_files(self, workers: int, worker: int) -> Hdf5Rows:
        """See `FileSource.shard_files`."""
        share = Hdf5Rows(
            self._paths[worker::workers], nest.unflatten(self._spec, self._names)
        )
        share._all_paths = self._paths
        return share

    def describe(self) -> str:
        """Return the rows of each file, and the names, dtypes and row shapes."""
        if self._all_paths is not self._paths:  # other workers' files are not opened
            files = [path.name for path in self._all_paths]
            return f"from_hdf5({files}, {self._names}, by file)"
        layout = self._inspect()
        files = [path.name for path in self._paths]
        columns = zip(self._names, layout.dtypes, layout.row_shapes, strict=True)
        fields = [f"{n}: {d} {s}" for n, d, s in columns]
        return f"from_hdf5({files}, {fields}, first rows {layout.starts})"

    def read(self, rows: npt.NDArray[np.int64]) -> Any:
        """Return the rows with the given numbers, in the given order.

        Reads each file in the order of its rows, and each row once.

        Raises:
          DataError: names the file, the dataset and the rows that cannot be read.
        """
        layout = self._inspect()
        wanted, back = np.unique(rows, return_inverse=True)
        columns = [
            np.empty((wanted.size, *shape), dtype)
            for shape, dtype in zip(layout.row_shapes, layout.dtypes, strict=True)
        ]
        cuts = np.searchsorted(wanted, layout.starts).tolist()
        for number, (first, last) in enumerate(itertools.pairwise(cuts)):
            if first < last:
                local = wanted[first:last] - layout.starts[number]
                parts = [column[first:last] for column in columns]
                self._read_file(number, local, parts)
        in_order = back.size == wanted.size and bool((np.diff(back) == 1).all())
        leaves = columns if in_order else [column[back] for column in columns]
        return nest.unflatten(self._spec, leaves)

    def close(self) -> None:
        """Close the files; reading opens them again."""
        while self._files:
            self._files.popitem()[1].close()

    def _read_file(
        self, number: int, rows: npt.NDArray[np.int64], parts: Sequence[Any]
    ) -> None:
        """Fill each of `parts` with the given increasing rows of one file."""
        for field, part in enumerate(parts):
            name = self._names[field]
            try:
                dataset = self._open(number)[name]
                self._require_unchanged(number, field, dataset)
                _read_rows(dataset, rows, part)
            except (OSError, KeyError, RuntimeError, ValueError) as error:
                raise DataError(
                    f"{self._paths[number]}: rows {rows[0]}..{rows[-1]} of dataset "
                    f"{name!r} cannot be read: {error}"
                ) from error

    def _require_unchanged(self, number: int, field: int, dataset: Any) -> None:
        layout = self._inspect()
        rows = layout.starts[number + 1] - layout.starts[number]
        expected = (rows, *layout.row_shapes[field]), layout.dtypes[field]
        found = None
        if isinstance(dataset, h5py.Dataset):
            found = dataset.shape, _native(dataset.dtype)
        if found != expected:
            raise DataError(
                f"{self._paths[number]}: dataset {self._names[field]!r} was {expected} "
                f"and is now {found}; a file must not change while it is read"
            )

    def _open(self, number: int) -> h5py.File:
        if self._owner != os.getpid():  # forked: HDF5 handles must not be shared
            self._files, self._owner = {}, os.getpid()
        if number not in self._files:
            path = self._paths[number]
            try:
                self._files[number] = _open_read_only(path)
            except OSError as error:
                raise DataError(f"{path}: cannot be opened as HDF5: {error}") from error
        return self._files[number]

    def _inspect(self) -> _Layout:
        """Return the layout of all files, read when first needed."""
        if self._layout is None:
            found = [self._inspect_file(i) for i in range(len(self._paths))]
            first = found[0][1:]
            for path, (_, *rest) in zip(self._paths, found, strict=True):
                self._require_like(path, rest, first)
            starts = [0, *itertools.accumulate(rows for rows, *_ in found)]
            self._layout = _Layout(starts, *first)
        return self._layout

    def _inspect_file(
        self, number: int
    ) -> tuple[int, list[np.dtype[Any]], list[tuple[int, ...]]]:
        path, file = self._paths[number], self._open(number)
        found = []
        for name in self._names:
            dataset = file.get(name)
            if not isinstance(dataset, h5py.Dataset):
                raise DataError(
                    f"{path}: there is no dataset {name!r}; there are: "
                    f"{', '.join(sorted(file)) or 'none'} (a group or a broken link "
                    "is no dataset)"
                )
            if dataset.ndim == 0:
                raise DataError(f"{path}: dataset {name!r} is a scalar, without rows")
            found.append(dataset)
        lengths = [dataset.shape[0] for dataset in found]
        if len(set(lengths)) > 1:
            pairs = ", ".join(
                f"{n!r} has {k}" for n, k in zip(self._names, lengths, strict=True)
            )
            raise DataError(f"{path}: the datasets have unequal rows: {pairs}")
        dtypes = [_native(dataset.dtype) for dataset in found]
        return lengths[0], dtypes, [dataset.shape[1:] for dataset in found]

    def _require_like(self, path: Path, found: Any, first: Any) -> None:
        for name, *pair in zip(self._names, *found, *first, strict=True):
            dtype, shape, first_dtype, first_shape = pair
            if (dtype, shape) != (first_dtype, first_shape):
                raise DataError(
                    f"{path}: rows of dataset {name!r} are {dtype} {shape}, but "
                    f"{first_dtype} {first_shape} in {self._paths[0]}"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}


def _read_rows(dataset: h5py.Dataset, rows: npt.NDArray[np.int64], out: Any) -> None:
    """Read increasing rows into `out`, in as few calls as is sensible."""
    row_bytes = max(1, dataset.dtype.itemsize * int(np.prod(dataset.shape[1:])))
    gaps = np.flatnonzero((np.diff(rows) - 1) * row_bytes > _GAP_BYTES) + 1
    edges = [0, *gaps.tolist(), rows.size]
    for first, last in itertools.pairwise(edges):
        start, stop = int(rows[first]), int(rows[last - 1]) + 1
        block = dataset[start:stop]
        out[first:last] = block[rows[first:last] - start]


def _open_read_only(path: Path) -> h5py.File:
    """Open a file without locking it, as locks fail on many network file systems."""
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        # This process has it open already, with locks
        if "locking flag" not in str(error):
            raise
        return h5py.File(path, "r")


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    native: np.dtype[Any] = dtype.newbyteorder("=")
    return native


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
