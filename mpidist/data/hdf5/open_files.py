"""The files that are open: the ones not used for the longest time are closed."""

from __future__ import annotations

import collections
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpidist.data.hdf5.index import (
    Column,
    FileIndex,
    FileState,
    kind_of,
    open_hdf5,
    state_of,
)
from mpidist.data.hdf5.raw_file import RawFile
from mpidist.errors import DataError

__all__ = ["OpenFiles"]

_OPEN_FILES = 128
_FEW_FILES = 16  # are checked at each read


class OpenFiles:
    """Files by path, as bytes and by h5py. May be used in threads."""

    def __init__(self) -> None:
        self._raw: collections.OrderedDict[Path, Any] = collections.OrderedDict()
        self._hdf5: collections.OrderedDict[Path, Any] = collections.OrderedDict()
        # What files were when this process first opened them: kept when they are closed
        self._states: dict[Path, FileState] = {}
        self._other_states: dict[Path, FileState] = {}
        # Whose many other files were checked since `check_others`
        self._checked: set[Path] = set()
        self._lock = threading.RLock()

    def raw(self, path: Path, index: FileIndex) -> RawFile:
        """Return a file as bytes; it must be the one with this index, unchanged."""
        expected = self._states.get(path, index.state)
        file: RawFile = self._opened(self._raw, path, lambda: RawFile(path, expected))
        self._states.setdefault(path, file.state)
        return file

    def by_h5py(
        self,
        path: Path,
        index: FileIndex,
        column: Column,
        read: Callable[[h5py.Dataset], Any],
    ) -> Any:
        """Return `read(dataset)`, of a dataset that must be as it was.

        One thread at a time: h5py waits for itself anyway, and is not safe everywhere.
        """
        with self._lock:
            found = self._by_h5py(path, column, read)
            if not index.is_being_written:
                # HDF5 gives zeros for what lies behind the end of a file
                self.raw(path, index).require_unchanged()
                self._require_others_unchanged(path, index)
            return found

    def check_others(self) -> None:
        """Check all other files that rows lie in once more, where they are many."""
        with self._lock:
            self._checked.clear()

    def _require_others_unchanged(self, path: Path, index: FileIndex) -> None:
        """Raise a DataError if a file has changed that a link or a source leads to."""
        # Where a rank has a path of its own, so may the others be
        if path != index.path or path in self._checked:
            return
        for before in index.others:
            expected = self._other_states.setdefault(before.path, before)
            if changes := expected.changes_to(state_of(before.path), is_shared=False):
                raise DataError(
                    f"{before.path}, which it leads to, was changed: "
                    f"{', '.join(changes)}; a file must not change while it is read; "
                    "make a new dataset to read it as it is now"
                )
        if len(index.others) > _FEW_FILES:
            self._checked.add(path)

    def _by_h5py(
        self, path: Path, column: Column, read: Callable[[h5py.Dataset], Any]
    ) -> Any:
        file = self._opened(self._hdf5, path, lambda: open_hdf5(path))
        dataset = file[column.name]
        found = kind_of(dataset) if isinstance(dataset, h5py.Dataset) else None
        if column.dtype.kind == "c" and found == (column.shape, _swapped(column)):
            # HDF5 sorts the members of a type by offset when it is first converted
            return read(dataset.astype(column.dtype))
        if found != (column.shape, column.dtype):
            raise DataError(
                f"it was {(column.shape, column.dtype)} and is now {found}; a file "
                "must not change while it is read"
            )
        return read(dataset)

    def close(self) -> None:
        """Close all files. Bytes of a file that is being read go on until the end."""
        with self._lock:
            self._raw.clear()
            while self._hdf5:
                self._hdf5.popitem()[1].close()

    def _opened(
        self,
        files: collections.OrderedDict[Path, Any],
        path: Path,
        open_file: Callable[[], Any],
    ) -> Any:
        with self._lock:
            if path not in files:
                files[path] = self._try_to_open(open_file)
            files.move_to_end(path)
            if len(files) > _OPEN_FILES:
                files.popitem(last=False)
            return files[path]

    def _try_to_open(self, open_file: Callable[[], Any]) -> Any:
        try:
            return open_file()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            self.close()  # this process may have fewer open
            return open_file()


def _swapped(column: Column) -> np.dtype[Any]:
    """Return the dtype of complex numbers with the imaginary part in front."""
    part = f"{column.dtype.byteorder}f{column.dtype.itemsize // 2}"
    return np.dtype([("i", part), ("r", part)])
