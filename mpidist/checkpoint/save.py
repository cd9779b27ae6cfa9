"""Saving a checkpoint, blocking or in the background. Collective.

Every rank gathers the state (`Saver.save`), copies what it writes, and writes it
(`Saving`), perhaps in a thread, without communication. Any step may fail, raise, or be
the last one of a process; what lies in the directory is then an earlier checkpoint, the
new one, or both:

1. Rank 0 looks at what is there, and draws the id of the save. A file that is no
   checkpoint is not replaced. Threads start, and arrays are copied: what may fail on
   one rank comes before the ranks agree.
2. Each rank writes its shard under a temporary name, flushes it, and gives it its name.
   That is its word that the shard is complete, so it is the last thing that can fail.
3. Rank 0 has the word of all: the ranks agree, or where threads write, each shard's
   header has the id. It flushes the directory, writes and flushes the index, and gives
   it its name: from now on the checkpoint exists.
4. Rank 0 flushes the directory, then removes older checkpoints.

Before the index has its name nothing older is touched. Once rank 0 has tried to give it
its name, nothing of the save is removed, whatever is raised. Only rank 0 removes files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import operator
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mpidist._version import __version__
from mpidist.checkpoint import directory as directories
from mpidist.checkpoint.format import (
    Header,
    Shard,
    Split,
    read_shard,
    unlock,
    unwritable,
    write_file,
)
from mpidist.checkpoint.state import (
    Digests,
    PerRankState,
    describe,
    digest,
    join_ranks,
    nodes_of,
)
from mpidist.checkpoint.tree import Group, Leaf, Nodes, readable
from mpidist.checkpoint.tree import Path as NodePath
from mpidist.comm.consensus.consensus import Fields
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.context import Scope
from mpidist.data.distributed.datasets import warn_unsaved_place
from mpidist.device import arrays
from mpidist.device.streams import Pinned
from mpidist.errors import CheckpointError, RankLostError
from mpidist.strategy.strategy import Strategy
from mpidist.util.files import AtomicFile, sync_directory
from mpidist.util.mounts import wait_for_file

# Which checkpoint is preserved last, and what is called after a save
Planned = tuple[tuple[int, float] | None, Callable[[], None] | None]
# Returns the checkpoint's file, and the objects by name
Find = Callable[[], tuple[Path, Mapping[str, Any]]]
Plan = Callable[[Path, list[directories.Saved]], Planned]
_WAIT = "waiting for a checkpoint"
_POLL_SECONDS = 0.02
_PAUSE_SECONDS = 0.001
# How long a network file system may take to show one node's file to another
VISIBLE_SECONDS = 60.0


class Saver:
    """Saves the checkpoints of one strategy, one after the other.

    Creating one is not collective.
    """

    # Those with a save in the background, in the order in which all ranks started it
    busy: ClassVar[list[Saver]] = []

    def __init__(self, strategy: Strategy):
        self.extended = strategy.extended
        self.strategy = strategy
        self._scope = Scope(strategy)
        self._pending: Saving | None = None
        self.restored: Path | None = None  # by the same Checkpoint, the last time
        # Memory for copies is kept from save to save: page faults cost more than
        # copying.
        self._copies = Copies()
        self._shared: set[Path] = set()  # directories that all nodes see
        # The lock on the name ends with the strategy, or with this object.
        _release_at_end(self, self.extended.closing)

    def save(
        self,
        operation: str,
        find: Find,
        *,
        shard_bytes: int,
        is_background: bool = False,
        known: directories.Known | None = None,
        plan: Plan | None = None,
    ) -> str:
        """Save objects as a checkpoint; return its path. Collective.

        Args:
          operation: the public call, for messages.
          find: see `Find`; may raise on one rank alone.
          shard_bytes: the least size of a shard.
          is_background: whether to return once the arrays were copied.
          known: see `directory.next_serial`.
          plan: called by rank 0 with the checkpoint's file and the checkpoints of this
            name before the save; returns which one is preserved last (see `Header`),
            and what rank 0 calls when the checkpoint is complete, perhaps in a thread.

        Raises, on all ranks:
          CheckpointError: a file cannot be written, of this checkpoint or of the
            previous one, if that was saved in the background.
          MismatchError: arrays, numbers or text differ between ranks.
          What `nodes_of` raises on any rank.
        """
        if self._pending is not None:
            self.wait()  # two at once would need twice the memory
        begun, extended = time.monotonic(), self.extended
        rank, ranks = extended.replica_id, extended.num_replicas
        index, nodes, digests, _ = extended.consensus.run(
            operation, self._read_state, find, same=operator.itemgetter(3)
        )
        if extended.inputs:
            warn_unsaved_place(extended)
        in_shard: Nodes | None = None
        if digests:  # on all ranks
            in_shard = join_ranks(extended, operation, nodes, digests, shard_bytes)
        shards, cuts = plan_shards(nodes, in_shard is not None, ranks, shard_bytes)
        of_root: tuple[Any, Any, Any] = None, None, None
        thread: WriterThread | None = None

        def begin() -> tuple[str, int]:
            nonlocal of_root, thread
            serial, of_root = self._begin(index, known, plan)
            if not shards:  # nothing that could fail is left to the other ranks
                self._copies.replace(nodes, is_needed_later=is_background)
                thread = WriterThread() if is_background else None
            # Random, so shards of two saves never have one name.
            return secrets.token_hex(16), serial

        save_id, serial = extended.consensus.root_only(operation, begin)
        who = save_id, directories.shard_names(index, save_id, shards), rank, ranks
        saving = Saving(index, serial, *who, *of_root, id(self), begun)
        saving.thread = thread
        if rank == 0:
            saving.index_nodes = nodes

        def take_shard() -> None:
            saving.shard = divide(nodes, in_shard or {}, cuts, rank)
            self._copies.replace(saving.shard, is_needed_later=is_background)
            self._copies.replace(saving.index_nodes, is_needed_later=is_background)
            if is_background and (saving.has_shard or rank == 0):
                saving.thread = WriterThread()

        self._write(operation, saving, take_shard, is_background)
        return str(index)

    def _begin(
        self, index: Path, known: directories.Known | None, plan: Plan | None
    ) -> tuple[int, tuple[Any, Any, Any]]:
        """Return the serial; what there is, what is preserved, and called at the end.

        On rank 0.
        """
        directories.removal.wait()  # space of earlier checkpoints may be needed
        with unwritable(index):
            directories.make_directory(index.parent)
            before = directories.look(index)
            serial, existing = directories.next_serial(index, id(self), known)
        planned: Planned = (None, None) if plan is None else plan(index, existing)
        series = frozenset(saved.path for saved in existing)
        return serial, (before._replace(series=series), *planned)

    def _read_state(self, find: Find) -> tuple[Path, Nodes, Digests, Fields]:
        """Return the file, all nodes, digests, and what must be equal. Collective.

        The digests are those of each `PerRankState`.
        """
        index, objects = find()
        with self._scope:  # as get_state of a user may read variables
            nodes = nodes_of(objects, self.strategy)
        states = {p: n for p, n in nodes.items() if isinstance(n, PerRankState)}
        digests = {path: digest(state.nodes) for path, state in states.items()}
        # Differences between ranks are an error: a checkpoint restores one value on all
        compares = self.extended.num_replicas > 1
        fields = [(readable(path), describe(n, compares)) for path, n in nodes.items()]
        return index, nodes, digests, [("path", str(index)), *fields]

    def _write(
        self,
        operation: str,
        saving: Saving,
        take_shard: Callable[[], None],
        is_background: bool,
    ) -> None:
        """Write a checkpoint; return when it is complete, or has begun. Collective."""
        consensus = self.extended.consensus
        try:
            if saving.shard_names:  # on all ranks
                self._require_shared(operation, saving.index)
                if is_background:
                    consensus.run(operation, take_shard)
        except BaseException:
            saving.end()
            raise
        if is_background:
            try:
                self._pending = saving
                Saver.busy.append(self)
                # Closing the strategy, or losing ranks of it, first ends its save.
                self.extended.closing.append(self.wait)
                consensus.failures.at_end.insert(0, self._end_lost)
            finally:
                saving.start()
            return

        def write_shard() -> None:
            take_shard()
            saving.write_shard()

        try:
            # All shards are complete before rank 0 writes the index, which makes them
            # count.
            if saving.shard_names:  # on all ranks
                consensus.run(operation, write_shard, yield_cpu=True)
            saving.shards_are_written.set()
            consensus.root_only(operation, saving.write_index)
        finally:
            saving.end()

    def _require_shared(self, operation: str, index: Path) -> None:
        """Raise unless all nodes see the directory of a save. Collective.

        Asked once for each directory, and only where several ranks write.
        """
        if index.parent in self._shared:  # on all ranks
            return
        probes: list[AtomicFile] = []

        def create() -> list[Path]:
            with unwritable(index):
                probes.append(AtomicFile(index))
            return [probes[0].temporary]

        try:
            require_visible(self.extended, operation, create)
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
            self.extended.consensus.require_open()
            return
        with self.extended.consensus.recorder.counters.checkpointing("wait"):
            self._finish(saving)

    def _finish(self, saving: Saving) -> None:
        consensus = self.extended.consensus
        wait_until(saving.shard_is_done)
        if not consensus.failures.ranks:
            # If some ranks make another call, this raises and changes nothing
            consensus.require_same(_WAIT, yield_cpu=True)
        self._pending = None
        Saver.busy.remove(self)
        self.extended.closing.remove(self.wait)
        consensus.failures.at_end.remove(self._end_lost)
        try:
            # The error of any rank's shard is raised on all.
            consensus.require_same(_WAIT, saving.shard_error)
            saving.shards_are_written.set()
            consensus.root_only(_WAIT, saving.finish)
        finally:
            saving.end()

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

    group.consensus.run(operation, look, yield_cpu=True)


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


def wait_until(event: threading.Event) -> None:
    """Wait for an event, in a thread that a signal may interrupt.

    (The lock of `Event.wait` may then raise a RuntimeError in the signal's place.)
    """
    while not event.is_set():
        time.sleep(_PAUSE_SECONDS)


class WriterThread:
    """A thread that waits for what it is to do: starting one may fail."""

    def __init__(self) -> None:
        self._begin = threading.Event()
        self._has_ended = threading.Event()
        self._work: Callable[[], None] | None = None
        # A daemon: if the job ends by force, it does not wait for this
        threading.Thread(
            target=self._run, name="mpidist checkpoint", daemon=True
        ).start()

    def _run(self) -> None:
        self._begin.wait()
        try:
            if self._work is not None:
                self._work()
        finally:
            self._has_ended.set()

    def begin(self, work: Callable[[], None]) -> None:
        """Do the work in the thread."""
        self._work = work
        self._begin.set()

    def join(self) -> None:
        """Wait until the work is done; without work the thread ends.

        (Of a thread whose `join` a signal has interrupted, Python 3.11 believes that it
        has ended.)
        """
        self._begin.set()
        wait_until(self._has_ended)


@dataclasses.dataclass
class Saving:
    """The writes of one rank for one checkpoint, in this thread or a separate one.

    Args:
      index: the checkpoint.
      serial: of the checkpoint in its directory.
      id: distinguishes it from other saves, and its shards from theirs.
      shard_names: of all shards, by rank; the first ranks write them.
      rank, ranks: of this process, and how many there are.
      before: on rank 0, what there was when the save began.
      preserved: see `Header`.
      after: called on rank 0 once the checkpoint is complete.
      owner: who releases its lock, see `directory.hold`.
      begun: when the save began, on `time.monotonic`'s clock.
    """

    index: Path
    serial: int
    id: str
    shard_names: Sequence[str]
    rank: int
    ranks: int
    before: directories.Before | None
    preserved: tuple[int, float] | None
    after: Callable[[], None] | None
    owner: int
    begun: float

    in_use: ClassVar[set[str]] = set()  # ids of this process

    def __post_init__(self) -> None:
        self.shard_error: Exception | None = None
        # Set also when the shard has failed, or `_finish` would wait for ever.
        self.shard_is_done = threading.Event()
        self._index_error: Exception | None = None
        self._given_up = threading.Event()
        self.shards_are_written = threading.Event()
        self.thread: WriterThread | None = None
        self._may_exist = False  # whether the index may have its name
        self._locks: list[int] = []  # descriptors that keep other jobs from removing
        self.shard: Nodes = {}
        self.index_nodes: Nodes = {}
        # So that cleaning up in this process leaves these files alone.
        Saving.in_use.add(self.id)

    @property
    def has_shard(self) -> bool:
        """Whether this rank writes a shard."""
        return self.rank < len(self.shard_names)

    def start(self) -> None:
        """Write in the thread."""
        if self.thread is None:  # there is nothing to write
            self.shard_is_done.set()
        else:
            self.thread.begin(self._work)

    def _work(self) -> None:
        try:
            self.write_shard()
        except BaseException as error:
            self.shard_error = self._named(error)
        finally:
            self.shard_is_done.set()
        # The index waits for all shards, so rank 0 needs no exchange with other ranks
        # here.
        if self.rank == 0 and self.shard_error is None:
            try:
                self.write_index()
            except BaseException as error:
                self._index_error = self._named(error)

    def _named(self, error: BaseException) -> Exception:
        """Return an error of a thread; what would end a program ends the save only."""
        if isinstance(error, Exception):
            return error
        return CheckpointError(f"{self.index}: cannot be written: {error!r}")

    def finish(self) -> None:
        """Wait for the thread, and raise the error of the index."""
        if self.thread is not None:
            self.thread.join()
        if self._index_error is not None:
            raise self._index_error

    def end(self) -> None:
        """End the save; what was not begun is not written.

        Rank 0 removes the shards if there is, and will be, no index of them. If a rank
        still writes one, a later job removes that.
        """
        # Wakes the thread, which may be waiting for a shard that never comes.
        self._given_up.set()
        if self.thread is not None:
            self.thread.join()
        Saving.in_use.discard(self.id)
        # Closing the descriptors releases the locks.
        while self._locks:
            unlock(self._locks.pop())
        self.shard = self.index_nodes = {}
        if self.rank == 0 and not self._may_exist:
            for name in self.shard_names:
                directories.removal.remove(self.index.with_name(name))

    def write_shard(self) -> None:
        """Write this rank's shard, if it has one; nothing can fail after it.

        Raises:
          CheckpointError: it cannot be written.
        """
        if self.has_shard:
            path = self.index.with_name(self.shard_names[self.rank])
            header = Header(0, id=self.id, writer=directories.WRITER)
            write_file(path, self.shard, {}, header, locks=self._locks)
        self.shard = {}

    def write_index(self) -> None:
        """Write the index, which completes the checkpoint. On rank 0.

        Waits for the shards of other ranks.

        Raises:
          CheckpointError: it cannot be written, or a shard does not appear; or it is
            complete, but perhaps not on the disk yet.
        """
        # Sizes and checksums of all shards are in the index: it refuses foreign ones.
        with unwritable(self.index):
            shards = tuple(map(self._wait_for_shard, self.shard_names))
        now = datetime.datetime.now(datetime.timezone.utc)
        attributes = {
            "saved": now.isoformat(timespec="seconds"),
            "mpidist": __version__,
            "ranks": self.ranks,
        }
        header = Header(
            self.serial,
            shards=shards,
            job=directories.JOB,
            preserved=self.preserved,
            id=self.id,
            writer=directories.WRITER,
        )
        nodes, locks = self.index_nodes, self._locks
        header = write_file(
            self.index, nodes, attributes, header, self._publish, locks, self.begun
        )
        self.index_nodes = {}
        try:
            directories.hold(self.index, locks.pop(), header, self.owner)
            sync_directory(self.index.parent)
        except OSError as error:
            raise CheckpointError(
                f"{self.index}: the checkpoint is complete, but its name may not be on "
                f"the disk; older ones were kept: {error}"
            ) from error
        # It stays complete if older ones cannot be removed
        with contextlib.suppress(CheckpointError, OSError):
            self._remove_older()

    def _publish(self, file: AtomicFile) -> None:
        assert self.before is not None
        for name in self.shard_names:  # nobody has removed one meanwhile
            os.stat(self.index.with_name(name))
        if self.shard_names:  # whose names have to last as long
            sync_directory(self.index.parent)
        self._may_exist = True
        try:
            directories.publish(file, self.before)
        except CheckpointError:  # the name is another file's
            self._may_exist = False
            raise

    def _remove_older(self) -> None:
        """Remove what this checkpoint has replaced, and what `after` removes."""
        if self.before is not None and self.before.file is not None:
            stem, ended = re.escape(self.index.stem), self.before.needs
            directories.remove_useless(self.index.parent, stem, Saving.in_use, ended)
        if self.after is not None:
            self.after()

    def _wait_for_shard(self, name: str) -> Shard:
        """Return size and checksum of a shard, once it is visible.

        It got its name as the last thing that its rank did; the id tells that it is of
        this save.
        """
        path = self.index.with_name(name)
        seconds = 0.0
        while not path.exists():
            # Polled: another node's rename sends no signal.
            time.sleep(_POLL_SECONDS)
            if self._given_up.is_set():
                raise CheckpointError(f"{self.index}: another rank's shard failed")
            # Only time after all have written counts against the limit.
            seconds += _POLL_SECONDS * self.shards_are_written.is_set()
            if seconds > VISIBLE_SECONDS:
                raise CheckpointError(
                    f"{self.index.parent}: rank 0 does not see {name}, which another "
                    "rank wrote; use a directory on a file system that all nodes share"
                )
        header, shard = read_shard(path)
        if header.id != self.id:
            raise CheckpointError(f"{path}: it is not of this save")
        return shard


class Copies:
    """Copies of arrays in host memory, which the next save uses again."""

    def __init__(self) -> None:
        self._buffers: dict[NodePath, Any] = {}
        self._pinned: dict[NodePath, Pinned] = {}

    def replace(self, nodes: Nodes, is_needed_later: bool) -> None:
        """Put copies on the host in the place of arrays.

        Args:
          nodes: what this rank writes.
          is_needed_later: whether to copy arrays that may change in place, too: the
            training continues while a thread writes.
        """
        for path, node in nodes.items():
            if not isinstance(node, Leaf) or node.array is None:
                continue
            if not isinstance(node.array, np.ndarray):
                array = self._fetch(path, node.array)
            elif is_needed_later and not node.is_frozen:
                array = self._copy(path, node.array)
            else:
                continue
            nodes[path] = dataclasses.replace(node, array=array)

    def _copy(self, path: NodePath, array: Any) -> Any:
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


SMALLEST_SHARD_BYTES = 1 << 20
# Cuts this close to an edge of an array are moved to the edge
_SNAP_BYTES = 64 << 10


def shard_count(total_bytes: int, shard_bytes: int, ranks: int) -> int:
    """Return the number of shards for arrays of so many bytes; 1 for no shards."""
    # Shards of less than a megabyte cost more in metadata than they save.
    smallest = max(shard_bytes, SMALLEST_SHARD_BYTES)
    return max(1, min(ranks, total_bytes // smallest))


def cut(sizes: Sequence[tuple[int, int]], shards: int) -> list[list[int]]:
    """Cut concatenated arrays into shards of equal size.

    Args:
      sizes: number of elements of each array, and bytes of an element.
      shards: number of shards.

    Returns:
      For each array, `shards + 1` ascending element numbers: shard s holds the elements
      from the s-th to the next.
    """
    total = sum(count * item for count, item in sizes)
    cuts = []
    start = 0
    # Shard boundaries are computed in bytes of all arrays, then rounded to elements.
    for count, item in sizes:
        edges = [
            _snap(total * s // shards - start, count * item) for s in range(shards)
        ]
        cuts.append([*(edge // item for edge in edges), count])
        start += count * item
    return cuts


def _snap(edge: int, size: int) -> int:
    # A sliver of an array in another shard would cost a file access to read.
    if edge < _SNAP_BYTES:
        return 0
    return size if edge > size - _SNAP_BYTES else edge


def plan_shards(
    nodes: Nodes, has_states: bool, ranks: int, shard_bytes: int
) -> tuple[int, dict[NodePath, list[int]]]:
    """Return the number of shards, and how they divide the large arrays; see `cut`.

    Equal on all ranks, without an exchange.

    Args:
      nodes: of all objects.
      has_states: whether each rank has states for its shard.
      ranks: how many there are.
      shard_bytes: the least size of a shard.
    """
    large = [
        (path, node.size_bytes, node.dtype.itemsize)
        for path, node in nodes.items()
        if isinstance(node, Leaf) and node.size_bytes >= SMALLEST_SHARD_BYTES
    ]
    total = sum(size for _, size, _ in large)
    count = shard_count(total, shard_bytes, ranks) if large else 1
    # With per-rank states each rank has a shard, however small its part is. Else one
    # shard would only add a file.
    if count == 1:
        return ranks * has_states, {}
    edges = cut([(size // item, item) for _, size, item in large], count)
    paths = [path for path, _, _ in large]
    return ranks if has_states else count, dict(zip(paths, edges, strict=True))


def divide(
    nodes: Nodes, states: Nodes, cuts: Mapping[NodePath, list[int]], rank: int
) -> Nodes:
    """Return the nodes of a rank's shard.

    Args:
      nodes: of all objects; for an array that is cut, the index gets a `Split`.
      states: of this rank, for its shard.
      cuts: see `plan_shards`.
      rank: of this process.
    """
    parts = dict(states)
    for path, edges in cuts.items():
        leaf, ranges = nodes[path], list(enumerate(itertools.pairwise(edges)))
        nodes[path] = Split(
            dataclasses.replace(leaf, array=None),
            tuple((shard, a, b) for shard, (a, b) in ranges if a < b),
        )
        for shard, (start, stop) in ranges:
            if shard == rank and start < stop:
                view = leaf.array.reshape(-1)[start:stop]
                parts[path] = dataclasses.replace(
                    leaf, kind="array", shape=view.shape, array=view, role=""
                )
    shard_nodes: Nodes = {}
    for path, node in parts.items():
        for depth in range(len(path)):
            shard_nodes.setdefault(path[:depth], Group("dict"))
        shard_nodes[path] = node
    return shard_nodes
