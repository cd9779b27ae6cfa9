"""Saving a checkpoint, now or beside the work that goes on. Collective."""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from mpidist.agreement.calls import Call
from mpidist.checkpoint import job_locks
from mpidist.checkpoint.assembling import Copies, assemble
from mpidist.checkpoint.collecting import collect
from mpidist.checkpoint.files import make_folder, removal, unwritable
from mpidist.checkpoint.folder import next_serial, shard_name
from mpidist.checkpoint.saving import Saving
from mpidist.errors import RankLostError
from mpidist.strategy import Strategy

__all__ = ["Saver", "finish_all", "finish_lost"]

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
            return [shard_name(index, token, i, count) for i in range(count)]

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
        job_locks.release(owner)
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
