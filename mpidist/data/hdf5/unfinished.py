"""New files for HDF5 to write into, which cannot be told that a write has failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpidist.atomic_files import NewFile

__all__ = ["Unfinished"]


class Unfinished(NewFile):
    """A new file for `h5py.File`, whose writes do not raise.

    HDF5 cannot close a file after a write that failed, and brings the process down when
    that ends. The first error is kept for `require_sound`, and nothing is written after
    it. In a forked process nothing is written at all. HDF5 takes no locks on such a
    file, which fail on many network file systems.

    Raises:
      OSError: the folder is not there, or cannot be written to.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`, or keep the error."""
        if self._may_write():
            with self._keep_error():
                return super().write(data)
        return memoryview(data).nbytes

    def truncate(self, size: int | None = None) -> int:
        """Change the length of the file, or keep the error."""
        if self._may_write():
            with self._keep_error():
                super().truncate(size)
        return 0 if size is None else size

    def require_sound(self) -> None:
        """Raise the OSError of the first write that failed."""
        if self._error is not None:
            raise self._error

    def complete(self) -> None:
        """Bring everything to the disk, and close the file.

        Raises:
          OSError: something could not be written, now or before.
        """
        with self._keep_error():
            super().complete()
        self.close()
        self.require_sound()

    def _may_write(self) -> bool:
        return self._error is None and self._is_owned()

    @contextlib.contextmanager
    def _keep_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = self._error or error
