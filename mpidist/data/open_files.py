"""The files that are open: the ones not used for the longest time are closed."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

from mpidist.data.hdf5_index import Column, FileIndex, open_hdf5
from mpidist.data.raw_file import RawFile
from mpidist.errors import DataError

__all__ = ["OpenFiles"]

_OPEN_FILES = 128


class OpenFiles:
    """Files by path, as bytes and by h5py. May be used in threads."""

    def __init__(self) -> None:
        self._raw: collections.OrderedDict[Path, Any] = collections.OrderedDict()
        self._hdf5: collections.OrderedDict[Path, Any] = collections.OrderedDict()
        self._lock = threading.RLock()

    def raw(self, path: Path, index: FileIndex) -> RawFile:
        """Return a file as bytes; it must be the one with this index."""
        file: RawFile = self._opened(
            self._raw, path, lambda: RawFile(path, index.size_bytes, index.head)
        )
        return file

    def dataset(self, path: Path, name: str, column: Column) -> h5py.Dataset:
        """Return a dataset opened by h5py, which must be as it was."""
        dataset = self._opened(self._hdf5, path, lambda: open_hdf5(path))[name]
        found = None
        if isinstance(dataset, h5py.Dataset):
            found = dataset.shape, dataset.dtype
        if found != (column.shape, column.dtype):
            raise DataError(
                f"it was {(column.shape, column.dtype)} and is now {found}; a file "
                "must not change while it is read"
            )
        return dataset

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
                files[path] = open_file()
            files.move_to_end(path)
            if len(files) > _OPEN_FILES:
                files.popitem(last=False)
            return files[path]
