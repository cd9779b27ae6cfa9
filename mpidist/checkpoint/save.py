"""Saving a checkpoint, blocking or in the background. Collective.

Every rank gathers the state (`Saver.save`), copies what it writes, and writes it
(`Saving`): first each its shard, then rank 0 the index, which completes the checkpoint.
A background thread does the writing without communication; `Saver.wait` compares the
results of all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mpidist.checkpoint import directory as directories
from mpidist.checkpoint.format import Header, Shard, header_crc32, unwritable
from mpidist.checkpoint.layout import Partition, make_partition, write_file
from mpidist.checkpoint.state import gather_state
from mpidist.checkpoint.tree import Group, Leaf, leaves, replace_nodes
from mpidist.checkpoint.tree import Path as NodePath
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.device import arrays
from mpidist.device.memory import Pinned
from mpidist.errors import CheckpointError, RankLostError
from mpidist.strategy.strategy import Strategy
from mpidist.util.files import AtomicFile
from mpidist.util.mounts import wait_for_file

__all__ = ["Saver", "Saving", "finish_all", "require_visible"]


# Which checkpoint is preserved last, and what is called after a save
Planned = tuple[tuple[int, float] | None, Callable[[], None] | None]
Plan = Callable[[list[directories.Saved]], Planned]
_WAIT = "waiting for a checkpoint"
_POLL_SECONDS = 0.02
# How long a network file system may take to show one node's file to another
VISIBLE_SECONDS = 60.0


class Saver:
    """Saves the checkpoints of one strategy, one after the other.

    Creating one is not collective.
    """

    # Those with a save in the background, in the order in which all ranks started it
    busy: ClassVar[list[Saver]] = []

    def __init__(self, strategy: Strategy):
        self._extended = strategy.extended
        self._strategy = strategy
        self._pending: Saving | None = None
        self.restored: Path | None = None  # by the same Checkpoint, the last time
        # Memory for copies is kept from save to save: page faults cost more than
        # copying.
        self._copies = Copies()
        self._shared: set[Path] = set()  # directories that all nodes see
        # The lock on the name ends with the strategy, or with this object.
        _release_at_end(self, self._extended.closing)

    def save(
        self,
        operation: str,
        index: Path,
        objects: Mapping[str, Any],
        *,
        shard_bytes: int,
        is_background: bool,
        attributes: dict[str, Any],
        known: directories.Known | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Save objects as a checkpoint. Collective.

        Args:
          operation: the public call, for messages.
          index: the checkpoint's file.
          objects: by name.
          shard_bytes: the least size of a shard.
          is_background: whether to return once the arrays were copied.
          attributes: of the file, for humans.
          known: see `directory.next_serial`.
          plan: called by rank 0 with the checkpoints of this name before the save;
            returns which one is preserved last (see `Header`), and what rank 0 calls
            when the checkpoint is complete, perhaps in a thread.

        Raises, on all ranks:
          CheckpointError: a file cannot be written, of this checkpoint or of the
            previous one, if that was saved in the background.
          What `gather_state` raises.
        """
        extended = self._extended
        extended.topology.require_open()
        self.wait()
        mine = id(self), time.monotonic()
        planned: Planned = None, None

        def begin() -> tuple[str, int]:
            nonlocal planned
            token, serial, found = _begin(index, id(self), known)
            planned = planned if plan is None else plan(found)
            return token, serial

        # The token is random, so shards of two saves never have one name.
        token, serial = extended.consensus.root_only(
            operation, begin, agreed=(("path", str(index)),)
        )
        rank, ranks = extended.replica_id, extended.num_replicas
        names = functools.partial(directories.shard_names, index, token)
        tree, own = gather_state(
            self._strategy, operation, objects, shard_bytes, lambda: names(ranks)
        )

        def prepare() -> Saving:
            partition = make_partition(
                tree, own, rank=rank, ranks=ranks, shard_bytes=shard_bytes, names=names
            )
            # Copy arrays, since training continues while the thread writes; except
            # those that never change in place.
            self._copies.replace(partition, rank == 0, is_needed_later=is_background)
            about = attributes | {"ranks": ranks}
            return Saving(index, token, serial, partition, rank, about, *planned, *mine)

        saving = extended.consensus.guard(operation, prepare)
        self._write(operation, saving, is_background)

    def _write(self, operation: str, saving: Saving, is_background: bool) -> None:
        """Write a checkpoint; return when it is complete, or has begun. Collective."""
        extended, call = self._extended, CallSignature(operation)
        try:
            if is_background:
                extended.consensus.require_same(call)
            self._require_shared(operation, saving)
        except BaseException:
            saving.abandon()
            raise
        if is_background:
            saving.start()
            self._pending = saving
            Saver.busy.append(self)
            # Closing the strategy, or losing ranks of it, first ends its save.
            extended.closing.append(self.wait)
            extended.consensus.failures.at_end.insert(0, self._end_lost)
            return
        with saving.until_complete():
            # All shards are complete before rank 0 writes the index, which makes them
            # count.
            if saving.partition.shard_names:  # on all ranks
                extended.run_collectively(call, saving.write_shard, yield_cpu=True)
            saving.expect_shards()
            extended.consensus.root_only(operation, saving.write_index)

    def _require_shared(self, operation: str, saving: Saving) -> None:
        """Raise unless all nodes see the directory of a save. Collective.

        Asked once for each directory, and only where several ranks write.
        """
        index = saving.index
        if not saving.partition.shard_names or index.parent in self._shared:
            return  # on all ranks
        probes: list[AtomicFile] = []

        def create() -> list[Path]:
            with unwritable(index):
                probes.append(AtomicFile(index))
            return [probes[0].temporary]

        try:
            require_visible(self._extended, operation, create)
        finally:
            for probe in probes:
                probe.discard()
        self._shared.add(index.parent)

    def wait(self) -> None:
        """Wait until the checkpoint that is being saved is complete. Collective.

        Raises, on all ranks:
          CheckpointError: it could not be written.
        """
        saving = self._pending
        if saving is None:  # on all ranks
            self._extended.topology.require_open()
            return
        with self._extended.consensus.recorder.counters.checkpointing("wait"):
            self._finish(saving)

    def _finish(self, saving: Saving) -> None:
        consensus = self._extended.consensus
        saving.shard_is_done.wait()
        if not consensus.failures.ranks:
            # If some ranks make another call, this raises and changes nothing
            consensus.require_same(CallSignature(_WAIT), yield_cpu=True)
        self._pending = None
        Saver.busy.remove(self)
        self._extended.closing.remove(self.wait)
        consensus.failures.at_end.remove(self._end_lost)
        with saving.until_complete():
            # The error of any rank's shard is raised on all.
            consensus.sync_errors(_WAIT, saving.shard_error)
            saving.expect_shards()
            consensus.root_only(_WAIT, saving.finish)

    def _end_lost(self) -> None:
        """End a save in the background after ranks have died. Not collective.

        A complete checkpoint stays; what cannot be completed is removed by a later job.
        """
        with contextlib.suppress(RankLostError):
            self.wait()


def require_visible(
    group: ReplicaGroup, operation: str, find: Callable[[], list[Path]]
) -> None:
    """Raise unless every node sees the files that rank 0 sees. Collective.

    Args:
      group: of the replicas.
      operation: the public call, for messages.
      find: returns the files, on rank 0; not called if there is one node.

    Raises, on all ranks:
      CheckpointError: a node does not see one of them.
      What `find` raises.
    """
    if group.topology.is_one_node:
        return
    files = group.consensus.root_only(operation, find)

    def look() -> None:
        # One rank of each node looks: the others would ask the same client.
        for path in files if group.topology.local_rank == 0 else []:
            if not wait_for_file(path, directories.LOOK_SECONDS):
                raise CheckpointError(
                    f"{path.parent}: rank {group.replica_id} on {os.uname().nodename} "
                    f"does not see {path.name}, which rank 0 sees; use a directory on "
                    "a file system that all nodes share"
                )

    group.run_collectively(CallSignature(operation), look, yield_cpu=True)


def _release_at_end(saver: Saver, closing: list[Callable[[], None]]) -> None:
    """Let other jobs save once the strategy is closed, or the saver was deleted."""
    owner = id(saver)

    def release() -> None:
        directories.release(owner)
        if release in closing:
            closing.remove(release)

    closing.append(release)
    weakref.finalize(saver, release)


def finish_all() -> None:
    """Wait for all saves in the background, at the end of the program. Collective."""
    while Saver.busy:
        Saver.busy[0].wait()


def _begin(
    index: Path, owner: int, known: directories.Known | None
) -> tuple[str, int, list[directories.Saved]]:
    """Make the directory of a save; return a token, and see `next_serial`."""
    directories.removal.wait()  # space of earlier checkpoints may be needed
    with unwritable(index):
        directories.make_directory(index.parent)
        return secrets.token_hex(4), *directories.next_serial(index, owner, known)


@dataclasses.dataclass
class Saving:
    """The writes of one rank for one checkpoint, in this thread or a separate one.

    Args:
      index: the checkpoint.
      token: distinguishes its shards from those of other saves.
      serial: of the checkpoint in its directory.
      partition: the trees that this rank writes.
      rank: of this process.
      attributes: of the index's root, for humans.
      preserved: see `Header`.
      after: called on rank 0 once the checkpoint is complete.
      owner: who releases its lock, see `directory.hold`.
      begun: when the save began, on `time.monotonic`'s clock.
    """

    index: Path
    token: str
    serial: int
    partition: Partition
    rank: int
    attributes: dict[str, Any]
    preserved: tuple[int, float] | None
    after: Callable[[], None] | None
    owner: int
    begun: float

    in_use: ClassVar[set[str]] = set()  # tokens of this process

    def __post_init__(self) -> None:
        self.shard_error: Exception | None = None
        # Set also when the shard has failed, or `_finish` would wait for ever.
        self.shard_is_done = threading.Event()
        self._index_error: Exception | None = None
        self._given_up = threading.Event()
        self._shards_are_written = threading.Event()
        self._thread: threading.Thread | None = None
        self._locks: list[int] = []  # descriptors that keep other jobs from removing
        self._shard_path: Path | None = None
        if self.partition.shard is not None:
            name = self.partition.shard_names[self.rank]
            self._shard_path = self.index.with_name(name)
        # So that cleaning up in this process leaves these files alone.
        Saving.in_use.add(self.token)

    def abandon(self) -> None:
        """End the save before anything is written."""
        self._end(is_complete=False)

    def start(self) -> None:
        """Write in a thread."""
        # A daemon: if the job ends by force, it does not wait for this
        self._thread = threading.Thread(
            target=self._work, name="mpidist checkpoint", daemon=True
        )
        self._thread.start()

    def _work(self) -> None:
        """Write what this rank writes; keep errors."""
        try:
            self.write_shard()
        except Exception as error:
            self.shard_error = error
        finally:
            self.shard_is_done.set()
        # The index waits for all shards, so rank 0 needs no exchange with other ranks
        # here.
        if self.rank == 0 and self.shard_error is None:
            try:
                self.write_index()
            except Exception as error:
                self._index_error = error

    def finish(self) -> None:
        """Wait for the thread, and raise the error of the index."""
        if self._thread is not None:
            self._thread.join()
        if self._index_error is not None:
            raise self._index_error

    @contextlib.contextmanager
    def until_complete(self) -> Iterator[None]:
        """End the save with the block; remove this rank's shard if the block raises."""
        is_complete = False
        try:
            yield
            is_complete = True
        except RankLostError:
            is_complete = True  # perhaps; a later restore removes useless shards
            raise
        finally:
            # Wakes the thread, which may be waiting for a shard that never comes.
            self._given_up.set()
            if self._thread is not None:
                self._thread.join()
            self._end(is_complete)

    def _end(self, is_complete: bool) -> None:
        Saving.in_use.discard(self.token)
        # Closing the descriptors releases the locks.
        while self._locks:
            os.close(self._locks.pop())
        self.partition.shard = self.partition.index = None
        # A shard without an index is useless; with one it belongs to a checkpoint.
        if self._shard_path is not None and not is_complete:
            directories.remove(self._shard_path)

    def write_shard(self) -> None:
        """Write this rank's shard, if it has one.

        Raises:
          CheckpointError: it cannot be written.
        """
        if self._shard_path is not None:
            make_header = functools.partial(Header, 0)
            tree = self.partition.shard
            write_file(self._shard_path, tree, {}, make_header, locks=self._locks)
        self.partition.shard = None

    def write_index(self) -> None:
        """Write the index, which completes the checkpoint. On rank 0.

        Waits for the shards of other ranks.

        Raises:
          CheckpointError: it cannot be written, or a shard does not appear.
        """
        names = self.partition.shard_names
        # Sizes and checksums of all shards are in the index: it refuses foreign ones.
        shards = tuple(self._wait_for_shard(name) for name in names)

        def make_header(size: int, crc32: int, data: Any) -> Header:
            took = math.ceil(1000 * (time.monotonic() - self.begun))
            found = self.serial, size, crc32, data
            return Header(*found, shards, directories.JOB, self.preserved, took)

        tree = self.partition.index
        # Renamed into place when complete: only then the checkpoint exists.
        write_file(self.index, tree, self.attributes, make_header, names, self._locks)
        self.partition.index = None
        directories.hold(self.index, self._locks.pop(), self.serial, self.owner)
        # The checkpoint is complete, even if old ones cannot be removed
        with contextlib.suppress(CheckpointError):
            directories.remove_other_shards(self.index, self.token)
            if self.after is not None:
                self.after()

    def expect_shards(self) -> None:
        """Start the time limit for shards to appear: all ranks have written theirs."""
        self._shards_are_written.set()

    def _wait_for_shard(self, name: str) -> Shard:
        """Return size and checksum of a shard, once it is visible."""
        path = self.index.with_name(name)
        seconds = 0.0
        while not path.exists():
            # Polled: another node's rename sends no signal.
            if self._given_up.wait(_POLL_SECONDS):
                raise CheckpointError(f"{self.index}: another rank's shard failed")
            # Only time after all have written counts against the limit.
            seconds += _POLL_SECONDS * self._shards_are_written.is_set()
            if seconds > VISIBLE_SECONDS:
                raise CheckpointError(
                    f"{self.index.parent}: rank 0 does not see {name}, which another "
                    "rank wrote; use a directory on a file system that all nodes share"
                )
        with unwritable(path):
            return Shard(name, path.stat().st_size, header_crc32(path))


class Copies:
    """Copies of arrays in host memory, which the next save uses again."""

    def __init__(self) -> None:
        self._buffers: dict[NodePath, Any] = {}
        self._pinned: dict[NodePath, Pinned] = {}

    def replace(
        self, partition: Partition, has_index: bool, is_needed_later: bool
    ) -> None:
        """Put copies on the host in the place of a partition's arrays.

        Args:
          partition: of a state.
          has_index: whether this rank writes the index; if not, it is dropped.
          is_needed_later: whether to copy arrays that may change in place, too.
        """
        partition.shard = self._of(partition.shard, is_needed_later)
        index = partition.index if has_index else None
        partition.index = self._of(index, is_needed_later)

    def _of(self, tree: Group | None, is_needed_later: bool) -> Group | None:
        copies: dict[NodePath, Leaf] = {}
        for path, leaf in leaves(tree):
            if leaf.array is not None:
                array = self._copy(path, leaf, is_needed_later)
                copies[path] = dataclasses.replace(leaf, array=array, is_frozen=True)
        copied: Group | None = replace_nodes(tree, copies)
        return copied

    def _copy(self, path: NodePath, leaf: Leaf, is_needed_later: bool) -> Any:
        array = leaf.array
        if arrays.is_device_array(array):
            return self._fetch(path, array)
        if leaf.is_frozen or not is_needed_later:
            return array
        buffer = self._buffers.get(path)
        if buffer is None or (buffer.dtype, buffer.shape) != (array.dtype, array.shape):
            buffer = self._buffers[path] = np.empty(array.shape, array.dtype)
        np.copyto(buffer, array)
        return buffer

    def _fetch(self, path: NodePath, array: Any) -> Any:
        """Return a copy of a GPU's array in page-locked memory."""
        pinned = self._pinned.setdefault(path, Pinned())
        host = pinned.take(array.nbytes).view(array.dtype)
        if array.nbytes:
            arrays.namespace(array).ascontiguousarray(array).reshape(-1).get(out=host)
        return host.reshape(array.shape)
