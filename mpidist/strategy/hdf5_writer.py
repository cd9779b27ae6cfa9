"""Hdf5Writer: every rank writes its rows to a file of its own, under one index."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from mpidist.comm.consensus.calls import Call
from mpidist.data.hdf5.written_rows import (
    Field,
    Shard,
    Storage,
    clean_name,
    common_fields,
    write_index,
)
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    DataError,
    MpidistError,
)
from mpidist.strategy.strategy import Strategy
from mpidist.util import validation
from mpidist.util.files import (
    SHARD_PATTERN,
    AtomicHdf5File,
    shard_name,
    sync_directory,
)

__all__ = ["Hdf5Writer"]

T = TypeVar("T")
_OPEN = "Hdf5Writer"
_CLOSE = "Hdf5Writer.close"
# How long a network file system may take to show one node's file to another
_VISIBLE_SECONDS = 10.0


class _Part(NamedTuple):
    """What one rank wrote."""

    name: str
    rows: int
    fields: tuple[Field, ...] | None


class Hdf5Writer:
    """Writes the rows of all ranks as HDF5 datasets. Collective to make and to close.

    Rank 3 of 16 writes `features-00003-of-00016.h5`, and `features.h5` is an index: to
    h5py and to every other HDF5 program it has datasets with the rows of all ranks, in
    the order of the ranks. The files belong together; their folder may be moved. A rank
    without rows has no file. `Dataset.from_hdf5` reads the index, or the pattern
    `"features-*-of-*.h5"`.

    Use it in a `with` block, and leave the block on all ranks together. The index
    appears last, when all rows of all ranks are on the disk. If a rank leaves the block
    by an exception, all ranks raise, and nothing is left. Of a job that is killed only
    files `*.tmp` are left, and in the last moment complete files without an index.

    The ranks need one folder that all of them see. No parallel HDF5 is needed, and no
    file locks are taken.

    Args:
      strategy: whose ranks write.
      path: the index file; the same on all ranks. Its folder must exist.
      dataset: the dataset of rows that are appended as a bare array.
      chunk_rows: rows of a chunk of each dataset; by default about 1 MiB of them. Rows
        wait in memory until they fill a chunk (or 1 MiB).
      compression: None or "gzip".
      compression_level: 0..9 for gzip; None for h5py's default.
      shuffle: whether bytes are reordered first, which helps compression.
      overwrite: whether to put the new files in the place of an index and shards that
        exist. They stay until all new rows are on the disk; then the old index goes
        first.

    Raises, on all ranks:
      ArgumentError: an option; or the files exist, and `overwrite` is False.
      ArgumentTypeError: no strategy or no path.
      MismatchError: the arguments differ between ranks.
      DataError: the folder is missing, cannot be written to, or is not shared.

    Example:
      >>> x = np.full((2, 3), strategy.extended.replica_id)
      >>> with mpidist.Hdf5Writer(strategy, "features.h5") as writer:
      ...     writer.append({"x": x, "label": x[:, 0]})
      >>> import h5py
      >>> with h5py.File("features.h5") as file:
      ...     print(file["label"][:])
      [0 0 1 1]
    """

    def __init__(
        self,
        strategy: Strategy,
        path: str | os.PathLike[str],
        *,
        dataset: str = "data",
        chunk_rows: int | None = None,
        compression: str | None = None,
        compression_level: int | None = None,
        shuffle: bool = False,
        overwrite: bool = False,
    ):
        if not isinstance(strategy, Strategy):
            raise ArgumentTypeError(
                f"{_OPEN} needs a strategy, not {validation.shown(strategy)}"
            )
        self._extended = strategy.extended
        self._extended.topology.require_open()
        self._shard: Shard | None = None
        self._index: AtomicHdf5File | None = None
        self._closed = False

        def check() -> tuple[Path, str, Storage]:
            self._overwrite = validation.switch("overwrite", overwrite)
            storage = Storage(chunk_rows, compression, compression_level, shuffle)
            return _check_path(path), clean_name(dataset), storage

        agreement = self._extended.agreement
        checked = agreement.prepare(_OPEN, check)
        self._path, self._dataset, storage = checked
        where = (("path", str(self._path)), ("dataset", self._dataset))
        how = (("storage", str(storage)), ("overwrite", str(self._overwrite)))
        agreement.require_same(Call(_OPEN, where + how))
        self._path = self._path.absolute()
        agreement.root_only(_OPEN, self._checked(self._require_free))
        self._or_discard(lambda: self._create(storage))

    def append(self, rows: Any) -> None:
        """Add rows after those that this rank appended before. Not collective.

        Each rank appends when and as often as it likes, zero rows too. The first append
        fixes the datasets, their dtypes and the shapes of their rows, which must be the
        same on all ranks; `close` compares them.

        Args:
          rows: a dict of arrays `(rows, *shape)` by the name of their dataset, such as
            "x" or "train/x", with equal numbers of rows; or one array. They may be
            arrays of NumPy, CuPy or another library, or distributed values, of which
            this replica's component is taken. They are written, or copied, at once.
            Big-endian ones are stored in native byte order.

        Raises, on this rank (and, as it leaves the `with` block, on the others):
          ArgumentError: unequal numbers of rows; other names, dtypes or shapes than
            before; a name that HDF5 cannot have. Nothing is added.
          ArgumentTypeError: not an array.
          DTypeError: a dtype that HDF5 has not (bfloat16, str, dates, objects).
          DataError: the rows cannot be written. The writer cannot go on.
          ContextError: the writer was closed.
        """
        if self._closed or self._shard is None:
            raise ContextError(f"{self._path}: append was called on a closed writer")
        is_mapping = isinstance(rows, Mapping)
        self._shard.append(rows if is_mapping else {self._dataset: rows})

    def close(self) -> None:
        """Complete the files and write the index. Collective; the second does nothing.

        Leaving the `with` block calls it.

        Raises, on all ranks, and removes what was written:
          MismatchError: the ranks appended unlike datasets.
          DataError: no rank appended anything; or files cannot be written or renamed.
          ArgumentError: the files have come into existence, and `overwrite` is False.
        """
        if not self._closed:
            self._closed = True
            self._or_discard(self._complete)

    def __enter__(self) -> Hdf5Writer:
        if self._closed:
            raise ContextError(f"{self._path}: a closed writer cannot be entered")
        self._extended.agreement.enter_block()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files, or remove them if any rank has an error. Collective."""
        try:
            self._extended.agreement.leave_block("the end of Hdf5Writer's with", error)
        except BaseException as raised:
            self._discard()
            if raised is not error:
                raise
        else:
            self.close()

    def _create(self, storage: Storage) -> None:
        """Create this rank's file, and let rank 0 see that the folder is shared."""
        extended = self._extended
        path = _shard_path(self._path, extended.replica_id, extended.num_replicas)

        def create() -> str:
            self._shard = Shard(path, storage)
            return self._shard.temporary.name

        name = extended.agreement.prepare(_OPEN, create)
        names = extended.agreement.gather(_OPEN, name)
        look = functools.partial(_require_visible, self._path.parent, names)
        extended.agreement.root_only(_OPEN, look)

    def _complete(self) -> None:
        agreement = self._extended.agreement
        self._extended.topology.require_open()
        parts = agreement.gather(_CLOSE, agreement.prepare(_CLOSE, self._finish))
        # Raises the same on all ranks
        fields = common_fields(_CLOSE, [part.fields for part in parts])
        write = functools.partial(self._write_index, parts, fields)
        agreement.root_only(_CLOSE, self._checked(write))
        self._publish()
        agreement.root_only(_CLOSE, self._checked(self._publish_index))

    def _finish(self) -> _Part:
        assert self._shard is not None
        self._shard.finish()
        return _Part(self._shard.path.name, self._shard.rows, self._shard.fields)

    def _write_index(self, parts: Sequence[_Part], fields: Sequence[Field]) -> None:
        """Write the index under a temporary name, and remove what is in its place."""
        shards = [(part.name, part.rows) for part in parts if part.rows]
        self._index = write_index(self._path, fields, shards)
        # No rank renames its file before this
        self._require_free()
        _remove_output(self._path)

    def _publish(self) -> None:
        assert self._shard is not None
        call = Call(_CLOSE)
        try:
            self._extended.together(call, self._shard.publish)
        except MpidistError:
            # All ranks know, so there will be no index
            self._shard.withdraw()
            raise

    def _publish_index(self) -> None:
        assert self._index is not None
        sync_directory(self._path.parent)
        self._index.publish()
        sync_directory(self._path.parent)

    def _require_free(self) -> None:
        if not self._overwrite:
            _require_no_output(self._path)

    def _checked(self, fn: Callable[[], T]) -> Callable[[], T]:
        def checked() -> T:
            try:
                return fn()
            except (OSError, RuntimeError) as error:
                raise DataError(f"{self._path}: cannot be written: {error}") from error

        return checked

    def _or_discard(self, fn: Callable[[], None]) -> None:
        try:
            fn()
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        """Remove what has no name yet. Not collective."""
        self._closed = True
        if self._shard is not None:
            self._shard.discard()
        if self._index is not None:
            self._index.discard()


def _check_path(path: str | os.PathLike[str]) -> Path:
    checked = Path(validation.path("path", path))
    try:
        is_folder = checked.is_dir()
    except OSError as error:  # such as of a name that is too long
        raise DataError(f"path cannot be used: {error}") from None
    if not checked.name or is_folder:
        raise ArgumentError(f"path must name a file, not {str(path)!r}")
    return checked


def _require_visible(folder: Path, names: Sequence[str]) -> None:
    """Raise if this rank does not see the files of all ranks, by rank, in `folder`."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    for rank, name in enumerate(names):
        while not (folder / name).exists():
            if time.monotonic() > deadline:
                raise DataError(
                    f"{folder}: rank 0 does not see {name}, which rank {rank} wrote; "
                    "all ranks need one folder on a file system that their nodes share"
                )
            time.sleep(0.01)


def _shard_path(index: Path, rank: int, size: int) -> Path:
    """Return the name of one rank's file beside an index file."""
    return index.with_name(shard_name(index.stem, rank, size, index.suffix))


def _find_output(index: Path) -> list[Path]:
    """Return the index file and its shards, of any number of ranks, that exist."""
    pattern = re.compile(
        re.escape(index.stem) + SHARD_PATTERN + re.escape(index.suffix)
    )
    names = set(os.listdir(index.parent))
    shards = sorted(name for name in names if pattern.fullmatch(name))
    found = [index.name] if index.name in names else []
    return [index.with_name(name) for name in found + shards]


def _require_no_output(index: Path) -> None:
    """Raise an ArgumentError if there is an index file or a shard of that name."""
    names = [path.name for path in _find_output(index)]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ArgumentError(
            f"{index}: there are files of this name already: {', '.join(names[:3])}"
            f"{more}; remove them, write to another path, or pass overwrite=True"
        )


def _remove_output(index: Path) -> None:
    """Remove an index file, and then its shards, if there are any."""
    for path in _find_output(index):
        path.unlink(missing_ok=True)
        if path == index:
            sync_directory(index.parent)
