"""One checkpoint on its way to the disk: a job of each rank, without communication."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mpidist.atomic_files import replace_file
from mpidist.checkpoint import job_locks
from mpidist.checkpoint.files import checked_write, remove, unwritable
from mpidist.checkpoint.folder import name_of, remove_other_shards
from mpidist.checkpoint.header import Header, Shard, render
from mpidist.checkpoint.layout import lay_out
from mpidist.checkpoint.reading import header_crc32
from mpidist.checkpoint.tree import Group
from mpidist.errors import CheckpointError

__all__ = ["Saving"]

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
            functools.partial(Header, self.serial, shards=shards, job=job_locks.JOB),
            [shard.name for shard in shards],
            self._locks,
        )
        self.index_tree = None
        name = name_of(self.index)
        job_locks.hold(self.index, name, self._locks.pop(), self.serial, self.owner)
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
            job_locks.lock(descriptor)
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
