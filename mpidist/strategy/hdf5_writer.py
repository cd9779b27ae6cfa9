"""Hdf5Writer: every rank writes its rows to its own file; an index joins them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from mpidist.comm.consensus.consensus import Fields
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveError,
    ContextError,
    DataError,
    RemoteError,
)
from mpidist.hdf5.linked_files import OutputPart, open_hdf5, read_part
from mpidist.hdf5.shard_writer import (
    FieldSpec,
    ShardWriter,
    StorageOptions,
    clean_name,
    common_fields,
    fields_of,
    publish_new,
    to_arrays,
    write_vds,
)
from mpidist.strategy.dataset_order import DatasetOrder
from mpidist.strategy.strategy import Strategy
from mpidist.util import validation
from mpidist.util.files import (
    SHARD_PATTERN,
    AtomicHdf5File,
    rename_beside,
    shard_name,
    sync_directory,
)
from mpidist.util.mounts import wait_for_file
from mpidist.util.representation import one_line

T = TypeVar("T")
_OPEN = "Hdf5Writer"
_CLOSE = "Hdf5Writer.close"
_ORDERS = ("rank", "dataset")
# How long a network file system may need to show a new file on other nodes
_VISIBLE_SECONDS = 10.0


class _Part(NamedTuple):
    """Name, number of rows and fields of one rank's file, and a random number."""

    name: str
    rows: int
    fields: tuple[FieldSpec, ...] | None
    token: str


class Hdf5Writer:
    """Write the rows of all ranks as HDF5 datasets. Collective to create and to close.

    Rank 3 of 16 writes `features-00003-of-00016.h5`, and `features.h5` is an index:
    through its virtual datasets, every HDF5 program reads the rows of all ranks, in
    rank order. Keep the files together; the directory may be moved. A rank without rows
    has no file. `Dataset.from_hdf5` reads the index, or the pattern
    `"features-*-of-*.h5"`. Each file says which files were written with it, so that
    rows of a job that was killed, or of two jobs, are never read for all.

    By default rows are in the order of the ranks: first all rows that rank 0 appended.
    So predictions for a distributed dataset are in another order than the dataset, on
    any number of ranks but one. With `order="dataset"`, row i of the file belongs to
    row i of the dataset, on any number of ranks, shuffled or not: append, for each
    batch of a distributed dataset, one row for each row of this replica's part, before
    the next batch is taken. If `close` finds that rows of the dataset were not
    appended, or twice, it raises. (Rows are exchanged in `close`, which writes them a
    second time. Rows of a generator, or after `filter` or `unbatch`, have no numbers:
    append those of a whole epoch, whose order they keep.)

    Use it in a `with` block; leaving the block is collective. The index appears last,
    when the rows of all ranks are on the disk. If a rank leaves the block by an
    exception, all ranks raise and the files are removed. A killed job leaves `*.tmp`
    files, or, at the very end, complete files without an index. A file that another job
    has written meanwhile is not replaced: then all ranks raise.

    All ranks must see the same directory. Parallel HDF5 and file locks are not needed.

    Args:
      strategy: the strategy whose ranks write.
      path: the index file; the same on all ranks. Its directory must exist.
      dataset: name of the dataset for rows appended as a bare array.
      chunk_rows: rows per chunk of each dataset, by default about 1 MiB. Rows are
        buffered until they fill a chunk (or 1 MiB).
      compression: None or "gzip".
      compression_level: 0..9 for gzip; None for h5py's default.
      shuffle: whether to reorder bytes first, which helps compression.
      overwrite: whether to replace an existing index and its shards. They are kept
        until all new rows are on disk; then they are renamed, the index first, to
        `*.earlier.tmp`, and removed when the new index is there. If that fails, they
        get their names again. Other files with the names of shards are an error.
      order: "rank" or "dataset".
      fill_value: with `order="dataset"`, the value of rows that were not appended, as
        after an iterator was restored in an epoch; by default they are an error.

    Raises, on all ranks:
      ArgumentError: an invalid option; the files exist and `overwrite` is False, or
        they were not written for this path.
      ArgumentTypeError: `strategy` is not a strategy, or `path` not a path.
      MismatchError: the arguments differ between ranks.
      DataError: the directory is missing, not writable, or not shared.

    Example:
      >>> x = np.full((2, 3), strategy.rank)
      >>> with mpidist.Hdf5Writer(strategy, "features.h5") as writer:
      ...     writer.append({"x": x, "label": x[:, 0]})
      >>> import h5py
      >>> with h5py.File("features.h5") as file:
      ...     print(file["label"][:])
      [0 0 1 1]

      Predictions in the order of the dataset:

      >>> rows = mpidist.Dataset.range(5).shuffle(seed=1).batch(2)
      >>> batches = strategy.experimental_distribute_dataset(rows)
      >>> with mpidist.Hdf5Writer(strategy, "squares.h5", order="dataset") as writer:
      ...     for batch in batches:
      ...         writer.append(strategy.run(np.square, args=(batch,)))
      >>> with h5py.File("squares.h5") as file:
      ...     print(file["data"][:])
      [ 0  1  4  9 16]
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
        order: str = "rank",
        fill_value: Any = None,
    ):
        if not isinstance(strategy, Strategy):
            raise ArgumentTypeError(
                f"{_OPEN} needs a strategy, not {validation.shown(strategy)}"
            )
        self._extended = strategy.extended
        self._extended.topology.require_open()
        self._shard: ShardWriter | None = None
        self._index: AtomicHdf5File | None = None
        self._earlier = _EarlierOutput()
        self._order: DatasetOrder | None = None
        self._closed = False

        def check() -> tuple[Path, Path, str, StorageOptions]:
            self._overwrite = validation.switch("overwrite", overwrite)
            storage = StorageOptions(
                chunk_rows, compression, compression_level, shuffle
            )
            if order not in _ORDERS or (fill_value is not None and order == "rank"):
                raise ArgumentError(
                    f"order must be 'rank' or 'dataset', not {validation.shown(order)}"
                    if order not in _ORDERS
                    else "fill_value needs order='dataset'"
                )
            named = _check_path(path)
            whole = validation.absolute("path", path)
            return named, whole, clean_name(dataset), storage

        def agreed(checked: tuple[Path, Path, str, StorageOptions]) -> Fields:
            named, _, dataset, storage = checked
            where = ("path", str(named)), ("dataset", dataset)
            filled = ("order", order), ("fill_value", str(fill_value))
            stored = ("storage", str(storage)), ("overwrite", str(overwrite))
            return (*where, *stored, *filled)

        consensus = self._extended.consensus
        checked = consensus.run(_OPEN, check, same=agreed)
        _, self._path, self._dataset, self._storage = checked
        consensus.root_only(_OPEN, self._checked(self._require_free))
        self._or_discard(self._create)
        if order == "dataset":
            self._order = DatasetOrder(self._extended, self._path, fill_value)

    def __repr__(self) -> str:
        def describe() -> str:
            return f"{self._path}{', closed' * self._closed}"

        return one_line(self, describe)

    def append(self, rows: Any) -> None:
        """Append rows of this rank. Not collective.

        Each rank may append any number of times, zero rows included. The first rows fix
        the datasets, dtypes and row shapes; they must be the same on all ranks that
        have rows, which `close` checks. But text (bytes) may have any width.

        Args:
          rows: one array, or a dict from dataset names, such as "x" or "train/x", to
            arrays `(rows, *shape)` with equal numbers of rows, of NumPy, CuPy or
            another library. If they are distributed values, this replica's component is
            written. They are written or copied before `append` returns. Big-endian
            arrays are stored in native byte order.

        Raises, on this rank (and on the other ranks at the end of the `with` block):
          ArgumentError: unequal numbers of rows; names, dtypes or shapes differ from
            earlier ones; an invalid HDF5 name. No rows are added.
          ArgumentTypeError: not an array.
          DTypeError: a dtype without HDF5 type (bfloat16, str, dates, objects).
          DataError: the rows cannot be written. The writer is then unusable.
          ContextError: the writer was closed.
        """
        if self._closed or self._shard is None:
            raise ContextError(f"{self._path}: append was called on a closed writer")
        self._extended.topology.require_open()
        by_name = rows if isinstance(rows, Mapping) else {self._dataset: rows}
        if self._order is None:
            self._shard.append(by_name)
            return
        checked = to_arrays(by_name)
        located = self._order.locate(len(next(iter(checked.values()))))
        self._order.require_fill(fields_of(checked))
        self._shard.append(checked)
        self._order.keep(located)

    def close(self) -> None:
        """Complete the files and write the index. Collective.

        The end of the `with` block calls it. A second call does nothing.

        Raises, on all ranks, after removing the new files:
          MismatchError: the ranks appended different datasets.
          DataError: no rank appended anything; or files cannot be written or renamed.
          ArgumentError: the files exist now, and may not be replaced.
        """
        if not self._closed:
            self._closed = True
            if self._order is not None:
                self._order.close()
            self._or_discard(self._complete)

    def __enter__(self) -> Hdf5Writer:
        if self._closed:
            raise ContextError(f"{self._path}: a closed writer cannot be entered")
        self._extended.consensus.enter_scope()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files, or remove them if any rank has an error. Collective."""
        try:
            self._extended.consensus.leave_scope("the end of Hdf5Writer's with", error)
        except BaseException as raised:
            self._discard()
            if raised is not error:
                raise
        else:
            self.close()

    def _create(self) -> None:
        """Create this rank's file; check on rank 0 that the directory is shared."""
        extended = self._extended

        def create() -> str:
            self._shard = self._new_shard()
            return self._shard.temporary.name

        name = extended.consensus.run(_OPEN, create)
        names = extended.consensus.gather_objects(_OPEN, lambda: name)
        look = functools.partial(_require_visible, self._path.parent, names)
        extended.consensus.root_only(_OPEN, look)

    def _new_shard(self) -> ShardWriter:
        extended = self._extended
        path = _shard_path(self._path, extended.replica_id, extended.num_replicas)
        return ShardWriter(path, self._storage)

    def _complete(self) -> None:
        consensus = self._extended.consensus
        self._extended.topology.require_open()
        part = consensus.run(_CLOSE, self._describe_shard, yield_cpu=True)
        parts = consensus.gather_objects(_CLOSE, lambda: part)
        # Raises the same on all ranks
        with_rows = [part.fields if part.rows else None for part in parts]
        if not any(with_rows):
            with_rows = [part.fields for part in parts]
        fields = common_fields(_CLOSE, with_rows)
        if self._order is not None:
            fields = self._order.with_fill(fields)
            part = consensus.run(_CLOSE, self._rearrange, self._order, fields)
            parts = consensus.gather_objects(_CLOSE, lambda: part)
        shards = sum((part.rows > 0) << rank for rank, part in enumerate(parts))
        where = self._path.name, self._extended.replica_id, len(parts), shards
        mine = OutputPart(parts[0].token, *where)
        assert self._shard is not None
        consensus.run(_CLOSE, self._shard.finish, fields, mine, yield_cpu=True)
        index = mine._replace(rank=-1)
        write = functools.partial(self._write_index, parts, fields, index)
        consensus.root_only(_CLOSE, self._checked(write))
        self._publish()

    def _describe_shard(self) -> _Part:
        assert self._shard is not None
        self._shard.require_whole()
        described = self._shard.path.name, self._shard.rows, self._shard.fields
        return _Part(*described, secrets.token_hex(16))

    def _rearrange(self, order: DatasetOrder, fields: Sequence[FieldSpec]) -> _Part:
        """Replace this rank's file by one with the rows that come next in order."""
        assert self._shard is not None
        appended, self._shard = self._shard, self._new_shard()
        try:
            appended.finish(fields)
            order.rearrange(_CLOSE, appended.temporary, fields, self._shard)
        finally:
            appended.discard()
        return self._describe_shard()

    def _write_index(
        self, parts: Sequence[_Part], fields: Sequence[FieldSpec], index: OutputPart
    ) -> None:
        """Write the index under a temporary name."""
        shards = [(part.name, part.rows) for part in parts if part.rows]
        self._index = write_vds(self._path, fields, shards, index)

    def _publish(self) -> None:
        """Rename the shards, then the index; if that fails, undo all of it."""
        assert self._shard is not None
        consensus = self._extended.consensus
        try:
            # No rank publishes its shard before this point
            consensus.root_only(_CLOSE, self._checked(self._clear_way))
            consensus.run(_CLOSE, self._shard.publish)
            consensus.root_only(_CLOSE, self._checked(self._publish_index))
        except BaseException as error:
            is_interrupt = not isinstance(error, Exception)
            is_lost = isinstance(error, CollectiveError)
            if self._extended.num_replicas > 1 and (
                is_interrupt or (is_lost and not isinstance(error, RemoteError))
            ):
                # Another rank may have published the index, which needs the shards
                self._earlier.restore()
            else:
                with contextlib.suppress(CollectiveError):  # the first error counts
                    self._undo()
            raise

    def _clear_way(self) -> None:
        self._require_free()
        self._earlier.set_aside(_find_output(self._path))

    def _publish_index(self) -> None:
        assert self._index is not None
        try:
            sync_directory(self._path.parent)
            publish_new(self._index)
            sync_directory(self._path.parent)
        except BaseException:
            self._index.withdraw()
            raise
        self._earlier.remove()

    def _undo(self) -> None:
        """Remove the new files, and bring back the earlier ones. Collective."""
        assert self._shard is not None
        consensus = self._extended.consensus

        if consensus.root_only(_CLOSE, self._remove_index):
            consensus.run(_CLOSE, self._shard.withdraw)
            consensus.root_only(_CLOSE, self._earlier.restore)

    def _remove_index(self) -> bool:
        """Withdraw the index; return whether its shards may go, too."""
        if self._index is not None:
            self._index.withdraw()
            with contextlib.suppress(OSError):
                return not self._index.has_final_name()
        return self._index is None

    def _require_free(self) -> None:
        """Raise an ArgumentError if files of this output exist, and may not go."""
        found = _find_output(self._path)
        if self._overwrite:
            found = [path for path in found if not _is_replaceable(path, self._path)]
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            names = ", ".join(path.name for path in found[:3]) + more
            advice = "remove them, write to another path, or pass overwrite=True"
            if self._overwrite:
                advice = (
                    f"by their content they are no shards of {self._path.name}, and "
                    "are not overwritten; remove them, or write to another path"
                )
            raise ArgumentError(
                f"{self._path}: these files exist already: {names}; {advice}"
            )

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
        """Remove unpublished files. Not collective."""
        self._closed = True
        if self._order is not None:
            self._order.close()
        if self._shard is not None:
            self._shard.discard()
        if self._index is not None:
            self._index.discard()


def _check_path(path: str | os.PathLike[str]) -> Path:
    checked = Path(validation.path("path", path))
    try:
        is_directory = checked.is_dir()
    except OSError as error:  # such as a name that is too long
        raise DataError(f"path cannot be used: {error}") from None
    if not checked.name or is_directory:
        raise ArgumentError(f"path must name a file, not {str(path)!r}")
    return checked


def _require_visible(directory: Path, names: Sequence[str]) -> None:
    """Raise unless this rank sees the files of all ranks in the directory."""
    for rank, name in enumerate(names):
        if not wait_for_file(directory / name, _VISIBLE_SECONDS):
            raise DataError(
                f"{directory}: rank 0 does not see {name}, which rank {rank} wrote; "
                "use a directory on a file system that all nodes share"
            )


def _shard_path(index: Path, rank: int, size: int) -> Path:
    """Return the path of one rank's file beside an index."""
    return index.with_name(shard_name(index.stem, rank, size, index.suffix))


def _find_output(index: Path) -> list[Path]:
    """Return the existing index and shards, for any number of ranks."""
    pattern = re.compile(
        re.escape(index.stem) + SHARD_PATTERN + re.escape(index.suffix)
    )
    names = set(os.listdir(index.parent))
    shards = sorted(name for name in names if pattern.fullmatch(name))
    indices = [index.name] if index.name in names else []
    return [index.with_name(name) for name in indices + shards]


def _is_replaceable(path: Path, index: Path) -> bool:
    """Return whether `overwrite=True` may replace a file: the index, or a shard of it.

    A name proves nothing: shards say of themselves what they are.
    """
    try:
        mode = path.lstat().st_mode
        if path == index:
            return stat.S_ISREG(mode) or stat.S_ISLNK(mode)
        if not stat.S_ISREG(mode):
            return False
        with open_hdf5(path) as file:
            part = read_part(file)
    except FileNotFoundError:
        return True
    except (OSError, RuntimeError, ValueError, KeyError):
        return False
    return part is not None and not part.is_index and part.index_name == index.name


class _EarlierOutput:
    """Files of an earlier writer, kept under other names until new ones are there."""

    def __init__(self) -> None:
        self._moves: list[tuple[Path, Path]] = []  # the index first

    def set_aside(self, paths: Sequence[Path]) -> None:
        """Rename the files: an index, then its shards."""
        for path in paths:
            aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.earlier.tmp")
            self._moves.append((path, aside))
            with contextlib.suppress(FileNotFoundError):
                path.rename(aside)
            # An index must not find other shards, not even after a power failure
            if path == paths[0]:
                sync_directory(path.parent)

    def restore(self) -> None:
        """Rename them back, the index last, unless other files have their names."""
        with contextlib.suppress(OSError):
            while self._moves:
                path, aside = self._moves[-1]
                if os.path.lexists(aside):
                    rename_beside(aside, path)
                    aside.unlink(missing_ok=True)
                self._moves.pop()

    def remove(self) -> None:
        """Remove them. Errors are ignored: a temporary name stays then."""
        for _, aside in self._moves:
            with contextlib.suppress(OSError):
                aside.unlink()
        self._moves.clear()
