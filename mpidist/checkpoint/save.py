"""Saving a checkpoint, now or beside the work that goes on. Collective."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mpidist.checkpoint import files
from mpidist.checkpoint.directory import (
    name_of,
    next_serial,
    remove_other_shards,
    shard_names,
)
from mpidist.checkpoint.files import (
    checked_write,
    make_folder,
    removal,
    remove,
    unwritable,
)
from mpidist.checkpoint.format import Header, Shard, render
from mpidist.checkpoint.layout import lay_out
from mpidist.checkpoint.partition import Copies, assemble, collect
from mpidist.checkpoint.reading import header_crc32
from mpidist.checkpoint.tree import Group
from mpidist.comm.consensus.calls import Call
from mpidist.errors import CheckpointError, RankLostError
from mpidist.strategy.strategy import Strategy
from mpidist.util.files import replace_file

__all__ = ["Saver", "Saving", "finish_all", "finish_lost"]


_WAIT = "waiting for a checkpoint"


class _Pending:
    """A saving in a thread."""

    def __init__(self, saving: Saving, is_first: bool):
        self.saving = saving
        self.shard_error: Exception | None = None
        self.index_error: Exception | None = None
        self.shard_is_done = threading.Event()
        self._is_first = is_first
        # A daemon: if the job ends by force, it does not wait for this
        self.thread = threading.Thread(
            target=self._work, name="mpidist checkpoint", daemon=True
        )
        self.thread.start()

    def _work(self) -> None:
        """Write what this rank writes. Errors are kept, and nothing communicates."""
        try:
            self.saving.write_shard()
        except Exception as error:
            self.shard_error = error
        finally:
            self.shard_is_done.set()
        if self._is_first and self.shard_error is None:
            try:
                self.saving.write_index()
            except Exception as error:
                self.index_error = error

    def finish(self) -> None:
        """Wait for the end, and raise the error of the index."""
        self.thread.join()
        if self.index_error is not None:
            raise self.index_error


class Saver:
    """Saves the checkpoints of one strategy, one after the other.

    Not collective to make.
    """

    # Those that save something, in the order in which all ranks began it
    busy: ClassVar[list[Saver]] = []

    def __init__(self, strategy: Strategy):
        self._extended = strategy.extended
        self._strategy = strategy
        self._pending: _Pending | None = None
        self._copies = Copies()
        _release_at_end(self, self._extended.closing)

    @property
    def is_lost(self) -> bool:
        """Whether ranks of the strategy have died."""
        return self._extended.agreement.losses.ranks != ()

    def save(
        self,
        operation: str,
        index: Path,
        objects: Mapping[str, Any],
        *,
        shard_bytes: int,
        is_background: bool,
        attributes: dict[str, Any],
        after: Callable[[], None] | None = None,
    ) -> None:
        """Save objects as a checkpoint. Collective.

        Args:
          operation: the public call, for messages.
          index: the checkpoint's file.
          objects: by name.
          shard_bytes: see `assemble`.
          is_background: whether to return once the arrays were copied.
          attributes: of the file, for humans.
          after: called by rank 0 when the checkpoint is complete, perhaps in a thread.

        Raises, on all ranks:
          CheckpointError: a file cannot be written, of this checkpoint or the last one
            that was saved in the background.
          What `collect` raises.
        """
        self._extended.topology.require_open()
        agreement = self._extended.agreement
        agreement.require_same(Call(operation, (("path", str(index)),)))
        self.wait()
        token, serial = agreement.root_only(operation, lambda: _begin(index))
        ranks, rank = self._extended.num_replicas, self._extended.replica_id

        def names(count: int) -> list[str]:
            return shard_names(index, token, count)

        collected = collect(
            self._strategy, operation, objects, shard_bytes, lambda: names(ranks)
        )

        def prepare() -> Saving:
            made = assemble(collected, rank, ranks, shard_bytes, names)
            shard = self._copies.of(made.shard, is_background)
            is_first = rank == 0
            tree = self._copies.of(made.index, is_background) if is_first else None
            name = made.shard_names[rank] if shard is not None else None
            about = attributes | {"ranks": ranks}
            shards = made.shard_names
            return Saving(
                index, token, serial, shards, name, shard, tree, about, after, id(self)
            )

        saving = agreement.prepare(operation, prepare)
        agreement.require_same(Call(operation))
        if is_background:
            self._start(saving)
        else:
            self._write(operation, saving)

    def wait(self) -> None:
        """Wait until the checkpoint that is being saved is complete. Collective.

        Raises, on all ranks:
          CheckpointError: it could not be written.
        """
        pending = self._pending
        if pending is None:  # on all ranks
            return
        agreement = self._extended.agreement
        pending.shard_is_done.wait()
        if not agreement.losses.ranks:
            # If some ranks do something else, all are as before
            agreement.require_same(Call(_WAIT), is_patient=True)
        self._pending = None
        Saver.busy.remove(self)
        self._extended.closing.remove(self.wait)
        is_complete = False
        try:
            agreement.raise_together(_WAIT, pending.shard_error)
            pending.saving.expect_shards()
            agreement.root_only(_WAIT, pending.finish)
            is_complete = True
        except RankLostError:
            is_complete = True  # perhaps; who restores removes what is of no use
            raise
        finally:
            pending.saving.give_up()
            pending.thread.join()
            pending.saving.end(is_complete)

    def _start(self, saving: Saving) -> None:
        self._pending = _Pending(saving, self._extended.replica_id == 0)
        Saver.busy.append(self)
        self._extended.closing.append(self.wait)

    def _write(self, operation: str, saving: Saving) -> None:
        agreement = self._extended.agreement
        is_complete = False
        try:
            self._extended.together(
                Call(operation), saving.write_shard, is_patient=True
            )
            saving.expect_shards()
            agreement.root_only(operation, saving.write_index)
            is_complete = True
        except RankLostError:
            is_complete = True  # perhaps, see `wait`
            raise
        finally:
            saving.end(is_complete)


def _release_at_end(saver: Saver, closing: list[Callable[[], None]]) -> None:
    """Let other jobs save once the strategy is closed, or the saver is gone."""
    owner = id(saver)

    def release() -> None:
        files.release(owner)
        if release in closing:
            closing.remove(release)

    closing.append(release)
    weakref.finalize(saver, release)


def finish_all() -> None:
    """Wait for all that is being saved, at the end of the program. Collective."""
    while Saver.busy:
        Saver.busy[0].wait()


def finish_lost() -> None:
    """Let go of what was being saved by strategies whose ranks have died.

    What is complete, or can be, stays. Not collective.
    """
    for saver in list(Saver.busy):
        if saver.is_lost:
            with contextlib.suppress(RankLostError):
                saver.wait()


def _begin(index: Path) -> tuple[str, int]:
    """Return a token and a serial for this saving, once there is a folder for it."""
    removal.wait()  # space of former checkpoints may be needed
    with unwritable(index):
        make_folder(index.parent)
        return secrets.token_hex(4), next_serial(index)


_LOOK_SECONDS = 0.02
# How long a network file system may take to show one node's file to another
VISIBLE_SECONDS = 60.0


@dataclasses.dataclass
class Saving:
    """What one rank writes for one checkpoint.

    Args:
      index: the checkpoint.
      token: tells its shards from others'.
      serial: of the checkpoint in its folder.
      shard_names: of all ranks.
      shard_tree, shard_name: of this rank, if it has any.
      index_tree: on rank 0.
      attributes: of the index's root, for humans.
      after: called on rank 0 once the checkpoint is complete.
      owner: who releases its lock, see `job_locks`.
    """

    index: Path
    token: str
    serial: int
    shard_names: Sequence[str] = ()
    shard_name: str | None = None
    shard_tree: Group | None = None
    index_tree: Any = None
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    after: Callable[[], None] | None = None
    owner: int = 0

    in_use: ClassVar[set[str]] = set()  # tokens of this process

    def __post_init__(self) -> None:
        self._given_up = threading.Event()
        self._shards_are_written = threading.Event()
        self._locks: list[int] = []  # descriptors of what others are not to remove
        Saving.in_use.add(self.token)

    def write_shard(self) -> None:
        """Write this rank's shard, if it has one.

        Raises:
          CheckpointError: it cannot be written.
        """
        if self.shard_name is not None:
            path = self.index.with_name(self.shard_name)
            make_header = functools.partial(Header, 0)
            _write(path, self.shard_tree, {}, make_header, locks=self._locks)
        self.shard_tree = None

    def write_index(self) -> None:
        """On rank 0, write the index, which makes the checkpoint complete.

        It waits for the shards of other ranks.

        Raises:
          CheckpointError: it cannot be written, or a shard does not appear.
        """
        if self.index_tree is None:
            return
        shards = tuple(self._look_at(name) for name in self.shard_names)
        _write(
            self.index,
            self.index_tree,
            self.attributes,
            functools.partial(Header, self.serial, shards=shards, job=files.JOB),
            [shard.name for shard in shards],
            self._locks,
        )
        self.index_tree = None
        name = name_of(self.index)
        files.hold(self.index, name, self._locks.pop(), self.serial, self.owner)
        # It is saved, whatever becomes of old ones
        with contextlib.suppress(CheckpointError):
            remove_other_shards(self.index, self.token)
            if self.after is not None:
                self.after()

    def expect_shards(self) -> None:
        """Say that all ranks have written theirs, so that they must be there."""
        self._shards_are_written.set()

    def give_up(self) -> None:
        """Let `write_index` stop waiting: another rank has failed."""
        self._given_up.set()

    def end(self, is_complete: bool) -> None:
        """Forget the arrays; remove this rank's shard if it is of no use."""
        Saving.in_use.discard(self.token)
        while self._locks:
            os.close(self._locks.pop())
        self.shard_tree = self.index_tree = None
        if self.shard_name is not None and not is_complete:
            remove(self.index.with_name(self.shard_name))

    def _look_at(self, name: str) -> Shard:
        """Return size and checksum of a shard, once it is there."""
        path = self.index.with_name(name)
        seconds = 0.0
        while not path.exists():
            if self._given_up.wait(_LOOK_SECONDS):
                raise CheckpointError(f"{self.index}: another rank's shard failed")
            seconds += _LOOK_SECONDS * self._shards_are_written.is_set()
            if seconds > VISIBLE_SECONDS:
                raise CheckpointError(
                    f"{self.index.parent}: rank 0 does not see {name}, which another "
                    "rank wrote; all ranks need one folder on a file system that their "
                    "nodes share"
                )
        with unwritable(path):
            return Shard(name, path.stat().st_size, header_crc32(path))


def _write(
    path: Path,
    tree: Any,
    attributes: dict[str, Any],
    make_header: Callable[..., Header],
    shards: Sequence[str] = (),
    locks: list[int] | None = None,
) -> None:
    """Write a file of a tree, all or nothing.

    Args:
      path: the name that the file gets in the end.
      tree: of nodes.
      attributes: of the root.
      make_header: called with the size, the structure's checksum and the blocks.
      shards: the names that the header will have.
      locks: gets a descriptor by which the file is locked, for the caller to close.
    """
    plan = lay_out(tree, attributes, shards)
    with unwritable(path), replace_file(path) as file:
        descriptor = file.fileno()
        if locks is not None:
            files.lock(descriptor)
            locks.append(os.dup(descriptor))
        data = tuple(
            (offset, block.nbytes, checked_write(descriptor, offset, block))
            for offset, block in plan.blocks()
        )
        image, crc32 = plan.image, 0
        holes = [(offset, size) for offset, size, _ in data]
        for offset, part in image.solid(plan.header_bytes, holes):
            checked_write(descriptor, offset, part)
            crc32 = zlib.crc32(part, crc32)
        header = make_header(image.size, crc32, data)
        checked_write(descriptor, 0, render(header, plan.header_bytes))
        os.ftruncate(descriptor, image.size)
