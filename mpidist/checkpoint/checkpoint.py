"""Checkpoint: a user's objects, saved to files and restored from them."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpidist._version import __version__
from mpidist.checkpoint.directory import SUFFIX, index_path
from mpidist.checkpoint.restore import LoadStatus, restore
from mpidist.checkpoint.save import Saver
from mpidist.checkpoint.state import Tracked, require_saveable, strategy_of
from mpidist.checkpoint.tree import escape
from mpidist.comm.topology import job_size
from mpidist.context import get_strategy, has_strategy, require_cross_replica
from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.strategy.strategy import Strategy
from mpidist.util import validation

__all__ = ["Checkpoint"]

_COUNTER = "save_counter"
_SHARD_BYTES = 256 << 20


class Checkpoint(Tracked):
    """Objects that are saved together, and restored from what was saved.

    Objects are given by name, or assigned (`checkpoint.step = 7`), and are attributes:

    - variables. Of an ON_WRITE variable one copy is saved, and restored to all ranks.
      Of an ON_READ one its value: a SUM is restored as a share of the total for each
      rank (of integers, shares that add up to it), anything else to each.
    - NumPy arrays, arrays of a GPU or of other libraries. They must be the same on all
      ranks, and are filled where they lie.
    - numbers, text, bytes, None, and dicts, lists and tuples of all of these. They must
      be the same on all ranks. They cannot be changed where they are, so read
      `checkpoint.step` after restoring. A dict or a list of nothing but numbers and
      text becomes what was saved, whatever it held; None becomes anything.
    - `PerReplica` values: each rank has its own.
    - random generators: `np.random.Generator`, `RandomState`, `random.Random`; and
      objects with `get_state()` and `set_state(state)`, such as iterators of datasets,
      where a state is a nest of arrays, numbers and text. Each rank may have its own
      state.
    - another Checkpoint.

    What each rank has for itself is restored at the same number of ranks only; but of
    generators ranks that are there no more are left out, and new ranks get states that
    are seeded by those of all and the rank's number. All else does not depend on the
    number of ranks.

    A checkpoint is one HDF5 file, with groups and datasets that have the names of the
    objects. If it has large arrays of more than `shard_bytes`, each rank writes a part
    of them to a file of its own beside it, and the file shows them as a whole. A file
    gets its name when all of it is on the disk, and its checksums are verified when it
    is read. Nothing in it is code.

    Args:
      strategy: whose ranks save and restore, by default the current one, or that of the
        variables.
      shard_bytes: how many bytes each rank should write at least.
      objects: by name. `save_counter` and the names of methods are taken.

    Raises:
      ArgumentError: a name that is taken.
      ArgumentTypeError: an object that has no state.

    Example:
      >>> with strategy.scope():
      ...     w = mpidist.Variable(np.zeros(2))
      >>> checkpoint = mpidist.Checkpoint(weights={"w": w}, step=7)
      >>> path = checkpoint.save("run/ckpt")
      >>> _ = w.assign(np.ones(2))
      >>> checkpoint.step = 8
      >>> _ = checkpoint.restore(path)
      >>> w.numpy(), checkpoint.step
      (array([0., 0.]), 7)
      >>> import h5py
      >>> with h5py.File(path) as file:
      ...     print(file["weights/w"][:])
      [0. 0.]
    """

    def __init__(
        self,
        *,
        strategy: Strategy | None = None,
        shard_bytes: int = _SHARD_BYTES,
        **objects: Any,
    ):
        if strategy is not None and not isinstance(strategy, Strategy):
            raise ArgumentTypeError(
                f"strategy must be a Strategy, not {validation.shown(strategy)}"
            )
        if strategy is None and has_strategy():
            strategy = get_strategy()
        self._strategy = strategy
        self._shard_bytes = validation.integer("shard_bytes", shard_bytes, 1)
        self._saver: Saver | None = None
        self._objects: dict[str, Any] = {_COUNTER: 0}
        for name, value in objects.items():
            setattr(self, name, value)

    @property
    def objects(self) -> dict[str, Any]:
        """The objects by name, with `save_counter`."""
        return self._objects

    @property
    def save_counter(self) -> int:
        """How many times `save` was called; it is saved, too."""
        return int(self._objects[_COUNTER])

    @property
    def strategy(self) -> Strategy:
        """The strategy whose ranks save and restore.

        Raises:
          ArgumentError: there is none, and several ranks.
        """
        if self._strategy is None:
            self._strategy = strategy_of(self)
        if self._strategy is not None:
            return self._strategy
        if job_size() > 1:
            raise ArgumentError(
                "a Checkpoint of no variables needs a strategy, whose ranks save "
                "together: pass strategy=..., or make it in strategy.scope()"
            )
        return get_strategy()

    def write(self, file_prefix: str | os.PathLike[str]) -> str:
        """Save the objects to one path; return the path. Collective.

        Args:
          file_prefix: the path, to which ".h5" is added if it does not end so. A
            checkpoint that is there is replaced once the new one is complete.

        One job at a time may save under a name (without its number) in a folder: the
        one that saved there last, until it ends or its strategy is closed. A requeued
        job waits up to 30 seconds for the previous one to end. On file systems without
        locks, the error is raised at the first save after another job's.

        Raises, on all ranks:
          CheckpointError: it cannot be written, or another job saves under this name
            there: the error names host and job. What was there before still is.
          MismatchError: ranks have unlike objects, or other numbers or arrays.
          ArgumentTypeError, ArgumentError: no path; an object that cannot be saved.
          ContextError: a variable of another strategy; called in replica context.
          What `get_state` of an object raises on any rank.
        """
        return self.write_as("Checkpoint.write", file_prefix)

    def save(self, file_prefix: str | os.PathLike[str]) -> str:
        """Save the objects to `file_prefix-1.h5`, or the next number; return the path.

        Collective. The number is `save_counter`, which goes up. Raises what `write`
        raises.
        """
        return self.save_as("Checkpoint.save", file_prefix)

    def read(
        self, save_path: str | os.PathLike[str], *, is_partial: bool = False
    ) -> LoadStatus:
        """Do what `restore` does."""
        return self._restore("Checkpoint.read", save_path, is_partial)

    def restore(
        self, save_path: str | os.PathLike[str] | None, *, is_partial: bool = False
    ) -> LoadStatus:
        """Give all objects the state that was saved. Collective.

        All objects are restored, or none. If `set_state` of an object raises, objects
        that had been restored before it get back the state that they had.

        Args:
          save_path: what `save` or `write` returned, or None, which does nothing.
          is_partial: whether objects that the file does not have are left as they are.

        Returns:
          A status with `assert_consumed()`, which raises a CheckpointError if the file
          has more than the objects; `assert_existing_objects_matched()`, which does for
          None, and with `is_partial`; and `expect_partial()`, which does nothing.

        Raises, on all ranks, and changes nothing:
          CheckpointError: there is no such file, or it is damaged; an object is not in
            it, or has another shape or dtype; another number of ranks has saved states
            of their own. The message names file, object, what was expected, and found.
          MismatchError: the ranks call it with unlike arguments.
          ArgumentTypeError, ArgumentError: no path; is_partial is no bool.
          ContextError: a variable of another strategy; called in replica context.
          What `set_state` of an object raises on any rank.
        """
        if save_path is None:
            return LoadStatus(None)
        return self._restore("Checkpoint.restore", save_path, is_partial)

    def write_as(
        self,
        operation: str,
        file_prefix: str | os.PathLike[str],
        *,
        is_background: bool = False,
        after: Callable[[], None] | None = None,
    ) -> str:
        """Do what `write` does, for any public call; see `Saver.save`."""
        require_cross_replica(self.strategy, operation)
        now = datetime.datetime.now(datetime.timezone.utc)
        prepare = self.strategy.extended.agreement.prepare
        index = prepare(operation, lambda: index_path(file_prefix, "file_prefix"))
        self.saver.save(
            operation,
            index,
            self._objects,
            shard_bytes=self._shard_bytes,
            is_background=is_background,
            attributes={
                "saved": now.isoformat(timespec="seconds"),
                "mpidist": __version__,
            },
            after=after,
        )
        return str(index)

    def save_as(
        self,
        operation: str,
        file_prefix: str | os.PathLike[str],
        *,
        number: int | None = None,
        **options: Any,
    ) -> str:
        """Do what `save` does, for any public call; `number` stands for the counter."""
        prepare = self.strategy.extended.agreement.prepare
        path = prepare(operation, lambda: validation.path("file_prefix", file_prefix))
        before = self.save_counter
        self._objects[_COUNTER] = before + 1
        if number is None:
            number = before + 1
        try:
            path = f"{path.removesuffix(SUFFIX)}-{number}"
            return self.write_as(operation, path, **options)
        except BaseException:
            self._objects[_COUNTER] = before
            raise

    @property
    def saver(self) -> Saver:
        """What saves; one for all calls, which take turns."""
        if self._saver is None:
            self._saver = Saver(self.strategy)
        return self._saver

    def _restore(
        self, operation: str, path: str | os.PathLike[str], is_partial: bool
    ) -> LoadStatus:
        require_cross_replica(self.strategy, operation)

        def prepare() -> Path:
            validation.switch("is_partial", is_partial)
            return index_path(path, "save_path")

        index = self.strategy.extended.agreement.prepare(operation, prepare)
        self.saver.wait()
        found = restore(self.strategy, operation, index, self, is_partial)
        return LoadStatus(str(index), found.missing, found.unused)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        if name == _COUNTER or hasattr(type(self), name):
            raise ArgumentError(f"an object of a Checkpoint cannot be named {name!r}")
        escape(name)
        require_saveable(value, name)
        self._objects[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._objects:
            raise AttributeError(f"this Checkpoint has no object {name!r}")
        return self._objects[name]

    def __repr__(self) -> str:
        return f"<mpidist.Checkpoint of {', '.join(self._objects)}>"
