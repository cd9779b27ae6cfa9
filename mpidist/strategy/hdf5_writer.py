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
from mpidist.hdf5.linked_files import (
    Identity,
    OutputPart,
    identity_of,
    open_hdf5,
    read_part,
)
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
    identity,
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
        get their names again. Other files with the names of shards are an error, and
        shards whose index was renamed or copied. After an interrupt, the earlier files
        may be left as `*.earlier.tmp` beside the new ones.
      order: "rank" or "dataset".
      fill_value: with `order="dataset"`, the value of rows that were not appended, as
        after an iterator was restored in an epoch; by default they are an error.

    Raises, on all ranks:
      ArgumentError: an invalid option; the files exist and `overwrite` is False, or
        they were not written for this path, or an index of another name needs them.
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
        self._output = ""  # random, of this write
        self._is_index_tried = False
        self._interrupt: BaseException | None = None
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
        self._earlier = _EarlierOutput(self._path)
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

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
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
        self._output = parts[0].token
        mine = OutputPart(self._output, *where)
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
        shards = [(part.name, part.rows) for part in parts if part.rows]
        self._index = write_vds(self._path, fields, shards, index)

    def _publish(self) -> None:
        """Rename the shards, then the index; if that fails, undo all of it.

        Once rank 0 has tried to name the index, an interrupt withdraws nothing.
        """
        consensus = self._extended.consensus
        try:
            # No rank publishes its shard before this point
            consensus.root_only(_CLOSE, self._checked(self._clear_way))
            consensus.run(_CLOSE, self._publish_shard)
            consensus.root_only(_CLOSE, self._checked(self._publish_index))
        except BaseException as error:
            self._undo(error)
            if self._interrupt is not None:
                raise self._interrupt from None
            raise
        consensus.root_only(_CLOSE, self._earlier.remove)

    def _clear_way(self) -> None:
        self._earlier.set_aside(self._require_free())

    def _publish_shard(self) -> None:
        assert self._shard is not None
        try:
            self._shard.publish()
        except Exception:
            raise
        except BaseException as error:
            # All undo it together, before this rank leaves, which may end the job
            self._interrupt = error
            kind = type(error).__name__
            raise DataError(
                f"{self._shard.path}: {kind} while it got its name"
            ) from None

    def _publish_index(self) -> None:
        assert self._index is not None
        sync_directory(self._path.parent)
        self._is_index_tried = True
        publish_new(self._index)
        sync_directory(self._path.parent)

    def _undo(self, error: BaseException) -> None:
        """Remove the new files, and bring back the earlier ones.

        Collective if all ranks have the error. Else only rank 0 knows whether there is
        an index, which needs the shards of all.
        """
        is_lost = isinstance(error, CollectiveError)
        is_lost &= not isinstance(error, RemoteError)
        try:
            if isinstance(error, Exception) and not is_lost:
                with contextlib.suppress(Exception):  # the first error counts
                    self._withdraw_together()
        finally:
            if self._extended.replica_id == 0:
                with contextlib.suppress(Exception):
                    self._take_back()

    def _withdraw_together(self) -> None:
        assert self._shard is not None
        consensus = self._extended.consensus
        if consensus.root_only(_CLOSE, self._remove_index):
            # Rank 0 may not see yet what other nodes have renamed
            consensus.run(_CLOSE, self._shard.withdraw)
            consensus.root_only(_CLOSE, self._take_back)

    def _remove_index(self) -> bool:
        """Withdraw the index; return whether its shards may go, too."""
        if self._index is not None:
            self._index.withdraw()
        return not self._may_have_index()

    def _may_have_index(self) -> bool:
        """Return whether the new index has its name, or that cannot be known."""
        if self._index is None or not self._is_index_tried:
            return False
        try:
            return self._index.has_final_name()
        except OSError:
            return True

    def _take_back(self) -> None:
        """Unless there is an index, undo what the ranks did. On rank 0 only."""
        for _ in range(2):  # another rank may rename its shard meanwhile
            if self._may_have_index():
                return
            self._remove_shards()
            if self._earlier.restore():
                return

    def _remove_shards(self) -> None:
        ranks = self._extended.num_replicas
        for path in [_shard_path(self._path, rank, ranks) for rank in range(ranks)]:
            with contextlib.suppress(OSError):
                part = _part_of(path)
                if part is not None and part.output == self._output:
                    path.unlink()

    def _require_free(self) -> list[_Found]:
        """Return the files of this output that exist, which may go."""
        found = _find_output(self._path)
        kept = [each.path for each in found]
        if self._overwrite:
            kept = [each.path for each in found if not each.is_replaceable]
        if kept:
            advice = "remove them, write to another path, or pass overwrite=True"
            if self._overwrite:
                advice = (
                    f"by their content they are no shards of {self._path.name}, and "
                    "are not overwritten; remove them, or write to another path"
                )
            raise ArgumentError(
                f"{self._path}: these files exist already: {_shown(kept)}; {advice}"
            )
        _require_unused(self._path, found)
        return found

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
    for rank, name in enumerate(names):
        if not wait_for_file(directory / name, _VISIBLE_SECONDS):
            raise DataError(
                f"{directory}: rank 0 does not see {name}, which rank {rank} wrote; "
                "use a directory on a file system that all nodes share"
            )


def _shard_path(index: Path, rank: int, size: int) -> Path:
    return index.with_name(shard_name(index.stem, rank, size, index.suffix))


class _Found(NamedTuple):
    """A file that has the name of an index or of a shard, when rank 0 looked at it.

    Args:
      path: of it.
      seen: its identity; None if it was gone.
      is_replaceable: whether `overwrite=True` may replace it: the index, or a shard of
        it. A name proves nothing: shards say of themselves what they are.
      output: of a shard that may be replaced.
    """

    path: Path
    seen: Identity | None
    is_replaceable: bool
    output: str | None = None


def _find_output(index: Path) -> list[_Found]:
    pattern = re.compile(
        re.escape(index.stem) + SHARD_PATTERN + re.escape(index.suffix)
    )
    names = set(os.listdir(index.parent))
    shards = sorted(name for name in names if pattern.fullmatch(name))
    indices = [index.name] if index.name in names else []
    return [_look_at(index.with_name(name), index) for name in indices + shards]


def _look_at(path: Path, index: Path) -> _Found:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return _Found(path, None, True)
    except OSError:
        return _Found(path, None, False)
    seen, mode = identity_of(status), status.st_mode
    if path == index:
        return _Found(path, seen, stat.S_ISREG(mode) or stat.S_ISLNK(mode))
    part = _part_of(path) if stat.S_ISREG(mode) else None
    if part is None or part.is_index or part.index_name != index.name:
        return _Found(path, seen, False)
    return _Found(path, seen, True, part.output)


def _part_of(path: Path) -> OutputPart | None:
    """Return which part of an output a file is; None if it is none, or unreadable."""
    try:
        with open_hdf5(path) as file:
            return read_part(file)
    except (OSError, RuntimeError, ValueError, KeyError):
        return None


def _require_unused(index: Path, found: Sequence[_Found]) -> None:
    outputs = {each.output for each in found if each.output}
    known = {each.path.name for each in found}
    for name in sorted(os.listdir(index.parent)) if outputs else ():
        path = index.with_name(name)
        # What a killed job left is not needed; a link leads to what takes its place
        if name in known or name.endswith(".tmp") or path.is_symlink():
            continue
        part = _part_of(path)
        if part is not None and part.is_index and part.output in outputs:
            used = [each.path for each in found if each.output == part.output]
            raise ArgumentError(
                f"{index}: {name} is a renamed or copied index, and its rows are in "
                f"{_shown(used)}, which are not overwritten; remove {name}, or write "
                "to another path"
            )


def _shown(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(path.name for path in paths[:3]) + more


class _EarlierOutput:
    """Files of an earlier writer, kept under other names until new ones are there."""

    def __init__(self, index: Path) -> None:
        self._index = index
        self._moves: list[tuple[Path, Path]] = []  # the index first

    def set_aside(self, found: Sequence[_Found]) -> None:
        """Rename the files: an index, then its shards.

        Raises:
          ArgumentError: one is not the file that was found; `restore` brings it back.
        """
        for path, seen, *_ in found:
            aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.earlier.tmp")
            self._moves.append((path, aside))
            with contextlib.suppress(FileNotFoundError):
                path.rename(aside)
                if identity_of(aside.lstat()) != seen:
                    raise ArgumentError(
                        f"{path}: another job has written it since this one looked; "
                        "remove it, or write to another path"
                    )
            # An index must not find other shards, not even after a power failure
            if path == self._index:
                sync_directory(path.parent)

    def restore(self) -> bool:
        """Rename them back, the index last; return whether all have their names.

        A name that another file has is left to it. Then the index, which needs all
        shards, keeps its temporary name.
        """
        away: list[tuple[Path, Path]] = []
        for move in reversed(self._moves):
            is_useless = bool(away) and move[0] == self._index
            if is_useless or not _move_back(*move):
                away.insert(0, move)
        self._moves = away
        return not away

    def remove(self) -> None:
        """Remove them. Errors are ignored: a temporary name stays then."""
        for _, aside in self._moves:
            with contextlib.suppress(Exception):
                aside.unlink()
        self._moves.clear()


def _move_back(path: Path, aside: Path) -> bool:
    """Rename a file from `aside` to `path`; return whether it is not away any more."""
    try:
        try:
            rename_beside(aside, path)
        except FileExistsError:
            if identity(path) != identity(aside):
                return False
    except FileNotFoundError:  # it was not renamed, or is back
        return True
    except OSError:
        return False
    with contextlib.suppress(OSError):
        aside.unlink(missing_ok=True)
    return True
