"""CheckpointManager: saves the checkpoints of a job, and removes old ones."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpidist.checkpoint import directory as directories
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory import Known, Saved
from mpidist.checkpoint.format import DamagedError, read_header, unwritable
from mpidist.checkpoint.save import Planned, Saving, require_visible
from mpidist.data.distributed.converted import ConvertedIterator
from mpidist.data.distributed.iterator import DistributedIterator
from mpidist.data.iterator import DatasetIterator
from mpidist.errors import ArgumentError, ArgumentTypeError, CheckpointError
from mpidist.strategy.variables import Variable
from mpidist.util import logs, validation
from mpidist.util.representation import one_line
from mpidist.util.validation import shown

_CALL = "CheckpointManager"


def latest_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    latest_filename: None = None,
    *,
    checkpoint_name: str | None = None,
) -> str | None:
    """Return the path of the latest checkpoint; None if there is none.

    Not collective: it reads the directory. Damaged checkpoints are skipped with a
    warning; the checksums of large arrays are verified by restoring only.

    Args:
      checkpoint_dir: the directory.
      latest_filename: must be None: no file stores the name of the latest checkpoint.
      checkpoint_name: the first part of the file names; by default any. Checkpoints of
        one name are in the order of saving; the latest ones of different names are
        compared by file times.

    Raises:
      ArgumentError, ArgumentTypeError: not a path, or not a name of files.
      CheckpointError: the directory, or a checkpoint, cannot be read now.

    Example:
      >>> checkpoint = mpidist.Checkpoint(strategy=strategy, step=7)
      >>> path = checkpoint.save("runs/ckpt")
      >>> mpidist.latest_checkpoint("runs") == path
      True
    """
    directory = validation.absolute("checkpoint_dir", checkpoint_dir)
    # TensorFlow's argument, whose only sensible value here is its default.
    if latest_filename is not None:
        raise ArgumentError(
            f"latest_filename must be None, not {shown(latest_filename)}: no file "
            "stores the name of the latest checkpoint; see checkpoint_name"
        )
    if checkpoint_name is None:
        names = directories.find_names(directory)
    # Each name is a series of its own; the newest file of all is the latest.
    else:
        names = {directories.require_name(checkpoint_name)}
    warn = directories.warn_skipped
    lists = [
        directories.find_undamaged(directory, name, warn) for name in sorted(names)
    ]
    latest = [found[-1] for found, _ in lists if found]
    return str(max(latest, key=lambda saved: saved.modified).path) if latest else None


class CheckpointManager:
    """Saves checkpoints `ckpt-1.h5`, `ckpt-2.h5`, ..., and removes old ones.

    Creating one is collective. An old checkpoint is removed when the new one is
    complete; the first save removes what killed jobs have left. Other files are neither
    removed nor replaced, whatever their names. The end of a `with` block is collective
    and waits for a save in the background. Any number of jobs may restore from a
    directory, but only one job at a time may save there under a name: see
    `Checkpoint.write`. The first save raises if another job has saved since this
    manager restored.

    Args:
      checkpoint: the `Checkpoint`.
      directory: a directory that all ranks see; created if missing.
      max_to_keep: how many to keep, or None for all.
      keep_checkpoint_every_n_hours: of the checkpoints to be removed, preserve one
        every so many hours, counted over all managers of this directory.
      checkpoint_name: the first part of the names of files.
      step_counter: a variable, or a function without arguments that returns a number;
        for `checkpoint_interval`.
      checkpoint_interval: save only if the counter has increased by at least this much
        since the last save.
      init_fn: called by `restore_or_initialize` if there is no checkpoint.
      last_checkpoint_step: the counter at the last save, if this manager continues an
        earlier one.
      keep_every: never remove checkpoints whose number is a multiple of this.
      is_background: whether a thread writes while training continues. Arrays are copied
        first (not variables: they never change in place). `save` first waits for the
        previous save and raises its errors, like `wait`.

    Raises, on all ranks:
      ArgumentError, ArgumentTypeError: an invalid argument.
      CheckpointError: the directory cannot be used.

    Example:
      >>> checkpoint = mpidist.Checkpoint(strategy=strategy, step=0)
      >>> manager = mpidist.CheckpointManager(checkpoint, "job", max_to_keep=2)
      >>> manager.restore_or_initialize() is None
      True
      >>> for step in range(3):
      ...     checkpoint.step = step
      ...     path = manager.save()
      >>> import os
      >>> sorted(os.listdir("job"))
      ['ckpt-2.h5', 'ckpt-3.h5']

      A job that may be ended at any time, and started again:

      >>> rows = mpidist.Dataset.range(6).shuffle(seed=0).batch(4)
      >>> train = strategy.experimental_distribute_dataset(rows)
      >>> state = mpidist.Checkpoint(sum=0, epoch=0, batches=iter(train))
      >>> manager = mpidist.CheckpointManager(state, "sums", max_to_keep=2)
      >>> _ = manager.restore_or_initialize()
      >>> while state.epoch < 2:
      ...     for batch in state.batches:
      ...         state.sum += int(strategy.reduce("SUM", batch, axis=0))
      ...         path = manager.save()
      ...     state.epoch, state.batches = state.epoch + 1, iter(train)
      ...     path = manager.save()
      >>> state.sum
      30
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
        last_checkpoint_step: int | None = None,
        *,
        keep_every: int | None = None,
        is_background: bool = False,
    ):
        if not isinstance(checkpoint, Checkpoint):
            raise ArgumentTypeError(
                f"{_CALL} needs a Checkpoint as checkpoint, not "
                f"{validation.shown(checkpoint)}"
            )
        self._checkpoint = checkpoint
        # Raises if there is no strategy: better here than at the first save.
        self._saver = checkpoint.saver
        self._extended = self._saver.extended
        self._last_step: int | None = None
        self._consensus = self._extended.consensus

        def check() -> None:
            validation.optional_integer("max_to_keep", max_to_keep, 1)
            validation.optional_integer("keep_every", keep_every, 1)
            validation.optional_integer("checkpoint_interval", checkpoint_interval, 1)
            validation.optional_function("init_fn", init_fn)
            name = "last_checkpoint_step"
            self._last_step = validation.optional_integer(name, last_checkpoint_step)
            validation.switch("is_background", is_background)
            if checkpoint_interval is not None and step_counter is None:
                raise ArgumentError("checkpoint_interval needs a step_counter")
            hours = keep_checkpoint_every_n_hours
            if hours is not None:
                validation.number("keep_checkpoint_every_n_hours", hours, "> 0")
            directories.require_name(checkpoint_name)
            self._directory = validation.absolute("directory", directory)
            if not (callable(step_counter) or isinstance(step_counter, Variable)):
                also = ", a variable, a function or None"
                validation.optional_integer("step_counter", step_counter, None, also)

        self._consensus.run(_CALL, check)
        self._max_to_keep = max_to_keep
        self._keep_hours = keep_checkpoint_every_n_hours
        self._keep_every = keep_every
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._init_fn = init_fn
        self._is_background = is_background
        # Only rank 0 touches the directory; the others get what it found.
        self._damaged: set[Saved] = set()
        self._warned: set[str] = set()  # on rank 0
        self._saved: list[Saved]
        self._preserved: tuple[int, float]
        found = self._consensus.root_only(_CALL, self._look)
        self._saved, serial, self._preserved = found
        # For the first save; later ones continue from the one before
        self._known: Known | None = Known(serial, None, is_restored=False)
        self._save_began = 0.0
        self._longest_save_seconds = 0.0

    def __repr__(self) -> str:
        return one_line(
            self, lambda: f"{len(self._saved)} checkpoints in {self._directory}"
        )

    @property
    def checkpoint(self) -> Checkpoint:
        """The objects that are saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """The directory."""
        return str(self._directory)

    @property
    def checkpoint_interval(self) -> int | None:
        """The minimum increase of the step counter between saves."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """The paths of complete checkpoints, in the order of saving.

        Collective: rank 0 lists the directory, in which another job may save. Excludes
        those preserved by `keep_checkpoint_every_n_hours`.
        """
        self._list(f"{_CALL}.checkpoints")
        return [str(s.path) for s in self._saved if not self._is_preserved(s)]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the checkpoint saved last; None if there is none.

        Collective: rank 0 lists the directory, in which another job may save.
        """
        self._list(f"{_CALL}.latest_checkpoint")
        return str(self._saved[-1].path) if self._saved else None

    def save(
        self, checkpoint_number: int | None = None, check_interval: bool = True
    ) -> str | None:
        """Save a checkpoint; return its path, or None if the interval has not passed.

        Collective.

        Args:
          checkpoint_number: number in its name, by default `save_counter`. The counter
            is always incremented.
          check_interval: whether to respect `checkpoint_interval`.

        Raises, on all ranks: what `Checkpoint.write` raises. With `is_background` also
          the errors of the previous save.
        """
        call = f"{_CALL}.save"
        step = None
        if self._interval is not None:
            step, is_checked = self._consensus.run(
                call,
                lambda: (
                    self._step(),
                    validation.switch("check_interval", check_interval),
                ),
                same=lambda found: (("step", found[0]), ("check_interval", found[1])),
            )
            # Counted from the last save, so a restored job keeps the rhythm.
            last = self._last_step
            is_early = last is not None and (step or 0) < last + self._interval
            if is_checked and is_early:
                return None

        def find_index(counter: int) -> Path:
            if checkpoint_number is not None:
                name = "checkpoint_number"
                validation.optional_integer(name, checkpoint_number, 0, "")
                counter = checkpoint_number
            return self._directory / f"{self._name}-{counter}{directories.SUFFIX}"

        self._save_began = time.monotonic()
        known = self._known
        if known is not None:
            known = known._replace(path=self._saver.restored)
        path = self._checkpoint.save_as(
            call,
            find_index,
            is_background=self._is_background,
            known=known,
            plan=self._plan_removal,
        )
        # Only now: a failed save does not count as one.
        self._last_step, self._known = step, None
        if self._extended.replica_id == 0:
            done = "saving" if self._is_background else "saved"
            logs.debug("checkpoint", f"{done} {path}")
        return path

    def wait(self) -> None:
        """Wait until the save in the background is complete. Collective.

        Raises, on all ranks:
          CheckpointError: it failed; earlier checkpoints are unchanged.
        """
        self._saver.wait()

    sync = wait

    def restore_or_initialize(self) -> str | None:
        """Restore the latest undamaged checkpoint; return its path. Collective.

        Rank 0 lists the directory anew, in which another job may have saved. If there
        is none, call `init_fn` and return None. Damaged ones are skipped with a
        warning.

        Raises, on all ranks:
          CheckpointError: the objects do not match the checkpoint, a node does not see
            it, or it cannot be read now, though it may be whole.
          What `Checkpoint.restore` or `init_fn` raises.
        """
        call = f"{_CALL}.restore_or_initialize"
        self.wait()
        while True:
            # The first save must not hide what is newer
            self._known = Known(self._list(call), None, is_restored=True)
            if not self._saved:
                break
            newest = self._saved[-1]
            path = str(newest.path)
            try:
                self._checkpoint.restore(path)
            except DamagedError as error:  # on all ranks, without changes
                # What another job has just removed is not damaged: list again
                if self._consensus.root_only(call, newest.path.exists):
                    # Nor is what a node does not see, and it must not be skipped
                    files = functools.partial(_files_of, path)
                    require_visible(self._extended, call, files)
                    self._damaged.add(newest)
                    if self._extended.replica_id == 0:
                        self._warn(error)
            else:
                self._last_step = self._step()
                if self._extended.replica_id == 0:
                    places = _places(self._checkpoint.objects)
                    logs.info("checkpoint", f"restored {path}{places}")
                return path
        if self._init_fn is not None:
            self._consensus.run(f"{_CALL}.init_fn", self._init_fn)
        if self._interval is not None:
            self._last_step = self._step()
        return None

    def __enter__(self) -> CheckpointManager:
        self._consensus.enter_scope()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Wait for the save in the background. Collective."""
        try:
            self._consensus.leave_scope(f"the end of {_CALL}'s with", error)
        except Exception as raised:  # on all ranks
            # Errors of the block come first, but the thread must not outlive it.
            self.wait()
            if raised is not error:
                raise
        else:
            self.wait()

    def _look(self) -> tuple[list[Saved], int, tuple[int, float]]:
        """Create the directory, and list its checkpoints. On rank 0.

        Returns the checkpoints, the latest serial, and which was preserved last.
        """
        with unwritable(self._directory):
            directories.make_directory(self._directory)
        existing, latest = self._find_undamaged()
        serial, seconds = _last_preserved(existing) or self._guess_preserved(existing)
        # The clock may have been set back
        return existing, latest, (serial, min(seconds, time.time()))

    def _guess_preserved(self, existing: list[Saved]) -> tuple[int, float]:
        """Return which checkpoint was preserved last, where none has a record of it."""
        outside = [] if self._max_to_keep is None else existing[: -self._max_to_keep]
        if self._keep_hours is not None and outside:  # an older version kept them
            return outside[-1].serial, outside[-1].modified
        return 0, existing[0].modified if existing else time.time()

    def _find_undamaged(self) -> tuple[list[Saved], int]:
        return directories.find_undamaged(
            self._directory, self._name, self._warn, self._damaged
        )

    def _warn(self, error: Exception) -> None:
        if str(error) not in self._warned:
            self._warned.add(str(error))
            directories.warn_skipped(error)

    def _list(self, call: str) -> int:
        """List the checkpoints again; return the latest serial. Collective."""
        # Rank 0 lists the directory: others may see it later, or differently.
        self._saved, serial = self._consensus.root_only(call, self._find_undamaged)
        self._note_preserved()
        return serial

    def _note_preserved(self) -> None:
        record = _last_preserved(self._saved)
        if record is not None and record[0] > self._preserved[0]:
            self._preserved = record

    def _is_preserved(self, saved: Saved) -> bool:
        return saved.serial <= self._preserved[0] and not self._is_nth(saved)

    def _is_nth(self, saved: Saved) -> bool:
        return self._keep_every is not None and saved.number % self._keep_every == 0

    def _plan_removal(self, index: Path, existing: list[Saved]) -> Planned:
        """Plan what is preserved and removed after a save; see `Saver.save`. On rank 0.

        Nothing is removed yet: a failed save removes nothing. Damaged checkpoints are
        removed like the others.

        The header of the new checkpoint records which one was preserved last, so the
        next manager continues from there. It is identified by its serial, since copying
        files changes their times.
        """
        if self._known is not None:
            # What killed jobs left of this name, which is this job's from now on
            stems = rf"{re.escape(self._name)}-\d+"
            directories.remove_useless(self._directory, stems, Saving.in_use)
        self._saved = existing
        self._note_preserved()
        serial, seconds = self._preserved
        outdated: list[Saved] = []
        if self._max_to_keep is None:
            return self._preserved, functools.partial(self._end_save, outdated)
        # A checkpoint of the same number is replaced, and is not one of those to keep.
        others = [saved for saved in self._saved if saved.path != index]
        for saved in others[: max(0, len(others) + 1 - self._max_to_keep)]:
            # Never removed: preserved for its hours, or the n-th.
            if saved.serial <= serial or self._is_nth(saved):
                continue
            hours = self._keep_hours
            if hours is not None and saved.modified >= seconds + hours * 3600:
                serial, seconds = saved.serial, saved.modified
            else:
                outdated.append(saved)
        return (serial, seconds), functools.partial(self._end_save, outdated)

    @property
    def longest_save_seconds(self) -> float:
        """The longest save, until all was on the disk; on rank 0 only."""
        return self._longest_save_seconds

    def _end_save(self, outdated: list[Saved]) -> None:
        """Remove old checkpoints once a new one is complete.

        On rank 0, perhaps in a thread.
        """
        seconds = time.monotonic() - self._save_began
        self._longest_save_seconds = max(self._longest_save_seconds, seconds)
        directories.remove_checkpoints(outdated, Saving.in_use)

    def _step(self) -> int | None:
        counter = self._step_counter
        if counter is None:
            return None
        step = counter() if callable(counter) else counter
        try:
            return int(step)
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(
                f"step_counter must return one whole number, not {shown(step)}"
            ) from error


def _last_preserved(existing: list[Saved]) -> tuple[int, float] | None:
    """Return serial and time of the last preserved one, by the latest that knows it."""
    known = (saved.preserved for saved in reversed(existing))
    return next((record for record in known if record is not None), None)


def _files_of(index: str) -> list[Path]:
    try:
        names = [shard.name for shard in read_header(Path(index)).shards]
    except CheckpointError:
        return []
    return [path for name in names if (path := Path(index).with_name(name)).exists()]


def _places(objects: Mapping[str, Any]) -> str:
    """Describe where the iterators of a checkpoint are: ": epoch 23, batch 4"."""
    kinds = DistributedIterator | ConvertedIterator | DatasetIterator
    states = [x.get_state() for x in objects.values() if isinstance(x, kinds)]
    places = [f"epoch {state['epoch']}, batch {state['step']}" for state in states]
    return f": {'; '.join(places)}" if places else ""
