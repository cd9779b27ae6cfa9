"""Checkpoint: saves objects to files, and restores them."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from mpidist.checkpoint.directory import SUFFIX, index_path
from mpidist.checkpoint.restore import LoadStatus, restore
from mpidist.checkpoint.save import Saver
from mpidist.checkpoint.state import (
    Attributes,
    WrittenThrough,
    has_attributes,
    require_saveable,
    strategy_of,
)
from mpidist.checkpoint.tree import Tracked, escape
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.comm.topology import job_size
from mpidist.context import (
    default_strategy,
    get_strategy,
    has_strategy,
    require_cross_replica,
)
from mpidist.data.distributed.converted import ConvertedIterator
from mpidist.data.distributed.iterator import DistributedIterator
from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.strategy.strategy import Strategy
from mpidist.util import validation

_COUNTER = "save_counter"
_SHARD_BYTES = 256 << 20


class Checkpoint(Tracked):
    """Objects that are saved and restored together.

    Objects are given by name, or assigned (`checkpoint.step = 7`), and are attributes:

    - variables. For an ON_WRITE variable one copy is saved and restored on all ranks.
      For an ON_READ variable its value is saved: a SUM is restored as a share of the
      total on each rank (shares of integers add up exactly), other values on each rank.
    - NumPy arrays, arrays of a GPU or of other libraries. They must be equal on all
      ranks, and are updated in place.
    - numbers, text, bytes, None, and dicts, lists and tuples of all of these. They must
      be equal on all ranks. Numbers cannot change in place, so read `checkpoint.step`
      after restoring. A dict or list of only numbers and text is replaced by the saved
      one, whatever its content. None is replaced by any saved value. A dict gets the
      order that it had when it was saved, on rank 0 if ranks differ; new keys come
      last. A list or tuple of numbers of one type is one dataset.
    - `PerReplica` values: one per rank.
    - random generators: `np.random.Generator`, `RandomState`, `random.Random`; and
      objects with `get_state()` and `set_state(state)`, such as dataset iterators. The
      state is a nest of arrays, numbers and text, and may differ between ranks.
      Namedtuples get the classes of the object's state before, and defaultdicts its
      functions; without them a namedtuple gets a new class, a defaultdict is refused.
    - objects with `state_dict()` and `load_state_dict(state)`, such as PyTorch's models
      and optimizers. The same rules apply.
    - another Checkpoint.

    A checkpoint restores identically on any number of ranks, except for per-rank state,
    which needs the same number of ranks. Random generators are an exception: surplus
    states are ignored, and new ranks get states seeded by all saved ones and the rank.

    A job that resumes needs the place in its input: save the iterator that it reads
    (see the example of `CheckpointManager`). If a distributed dataset of the strategy
    would begin anew, rank 0 warns, once.

    An object, or memory, may stand at several places. If the saved values of these
    places fit together, it stays one object. If not, an array, a generator or a
    container is replaced at the later places; another object is an error.

    A checkpoint is one HDF5 file, whose groups and datasets are named like the objects.
    If large arrays exceed `shard_bytes`, each rank writes a part of them to its own
    file, and virtual datasets of the first file join the parts. A file gets its name
    when it is completely on disk; its checksums are verified when it is read. It
    contains no code.

    Args:
      root: a Checkpoint, a dict, or another object with state in its attributes, such
        as a model with variables, at any depth. Its objects at the time of saving are
        saved as if given by name. (Numbers, text, functions and names that begin with
        "_" are not saved; give those by name. Saving raises ArgumentTypeError if a
        number has become an array since, or an array a number.)
      strategy: the strategy whose ranks save and restore; by default the current one,
        or the strategy of the variables.
      shard_bytes: the minimum number of bytes that each rank writes.
      objects: the objects by name. `save_counter` and method names are reserved.

    Raises:
      ArgumentError: a name is reserved or also in the root; an invalid root.
      ArgumentTypeError: an object without state.

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
        root: Any = None,
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
        self._root = root
        self._find_objects_of_root = _finder(root)
        self._is_object = not isinstance(root, MutableMapping) and has_attributes(root)
        self._kinds = Attributes(root).require_kinds({}) if self._is_object else {}
        self._strategy = strategy
        self._shard_bytes = validation.integer("shard_bytes", shard_bytes, 1)
        self._saver: Saver | None = None
        self._objects: dict[str, Any] = {_COUNTER: 0}
        # An object with a name in both would be saved once and restored into only one.
        for name in self._find_objects_of_root():
            if name in objects:
                raise ArgumentError(
                    f"{name!r} is also an object of root: rename one of them"
                )
            _require_name(name)
        for name, value in objects.items():
            setattr(self, name, value)

    @property
    def root(self) -> Any:
        """The root, or this checkpoint if it has none."""
        return self if self._root is None else self._root

    @property
    def objects(self) -> dict[str, Any]:
        """The objects by name, with `save_counter` and the objects of the root."""
        if self._root is None:
            return self._objects
        below = self._find_objects_of_root()

        # Restored numbers replace the old ones where they came from: here or in the
        # root.
        def write(name: str, value: Any) -> None:
            (self._objects if name in self._objects else below)[name] = value

        return WrittenThrough({**below, **self._objects}, write)

    @property
    def save_counter(self) -> int:
        """The number of calls of `save`; it is saved too."""
        return int(self._objects[_COUNTER])

    @property
    def strategy(self) -> Strategy:
        """The strategy whose ranks save and restore.

        Raises:
          ArgumentError: the job has several ranks, and there is no strategy, or the
            variables were created outside `strategy.scope()`.
        """
        if self._strategy is None:
            # The strategy of the first variable, whatever the scope of the checkpoint.
            self._strategy = strategy_of(self)
        # One rank needs no strategy. Several would all write the same file.
        if job_size() > 1 and self._strategy in (None, default_strategy()):
            is_local = self._strategy is not None
            what = "of variables of one rank" if is_local else "without variables"
            raise ArgumentError(
                f"a Checkpoint {what} needs a strategy: create the variables and the "
                "Checkpoint in strategy.scope(), or pass strategy=...; for a file of "
                "each rank that of MirroredStrategy(communicator=MPI.COMM_SELF)"
            )
        return self._strategy or get_strategy()

    def write(self, file_prefix: str | os.PathLike[str]) -> str:
        """Save the objects to one path; return the path. Collective.

        Args:
          file_prefix: the path; ".h5" is appended if missing. An existing checkpoint is
            replaced once the new one is complete.

        Only one job at a time may save under a name (without its number) in a
        directory: the job that saved last, until it ends or its strategy is closed. A
        requeued job waits up to 30 seconds for the previous one to end. On file systems
        without locks, the error is raised at the first save after a save of another
        job.

        Raises, on all ranks:
          CheckpointError: the checkpoint cannot be written; or another job saves under
            this name in the directory (the error names its host and job). An earlier
            checkpoint is unchanged.
          MismatchError: objects, numbers or arrays differ between ranks.
          ArgumentTypeError, ArgumentError: not a path; an object that cannot be saved.
          ContextError: a variable of another strategy; called in replica context.
          What `get_state` of an object raises on any rank.
        """
        return self.save_as(
            "Checkpoint.write",
            lambda _: index_path(file_prefix, "file_prefix"),
            is_counted=False,
        )

    def save(self, file_prefix: str | os.PathLike[str]) -> str:
        """Save the objects to `file_prefix-1.h5`, or the next number; return the path.

        Collective. The number is `save_counter`, which is incremented. Raises what
        `write` raises.
        """

        def find_index(counter: int) -> Path:
            prefix = validation.path("file_prefix", file_prefix).removesuffix(SUFFIX)
            return index_path(f"{prefix}-{counter}", "file_prefix")

        return self.save_as("Checkpoint.save", find_index)

    def read(
        self, save_path: str | os.PathLike[str], *, is_partial: bool = False
    ) -> LoadStatus:
        """Alias of `restore`."""
        return self._restore("Checkpoint.read", save_path, is_partial)

    def restore(
        self, save_path: str | os.PathLike[str] | None, *, is_partial: bool = False
    ) -> LoadStatus:
        """Restore the state of all objects. Collective.

        All objects are restored, or none. If `set_state` of an object raises, it and
        those before it get their earlier states again, by `set_state`.

        Args:
          save_path: returned by `save` or `write`; None does nothing.
          is_partial: whether objects that the file lacks stay unchanged.

        Returns:
          A status with `assert_consumed()`, which raises a CheckpointError if the file
          has more than the objects; `assert_existing_objects_matched()`, which raises
          it if `save_path` was None or the file lacks an object; and
          `expect_partial()`, which does nothing.

        Raises, on all ranks, without changes:
          CheckpointError: the file is missing or damaged; an object is missing, or has
            another shape or dtype; per-rank state of another number of ranks; one
            object at two places, for which the file has different values. The message
            names the file, the object, and what was expected and found.
          MismatchError: the arguments differ between ranks.
          ArgumentTypeError, ArgumentError: not a path; is_partial is not a bool.
          ContextError: a variable of another strategy; called in replica context.
          What `set_state` of an object raises on any rank.
        """
        # None is what `latest_checkpoint` returns in a first run.
        if save_path is None:
            nothing = CallSignature("Checkpoint.restore", (("path", None),))
            self.strategy.extended.consensus.require_same(nothing)
            return LoadStatus(None)
        return self._restore("Checkpoint.restore", save_path, is_partial)

    def sync(self) -> None:
        """Wait until the save in the background is complete. Collective.

        Raises, on all ranks:
          CheckpointError: it failed; earlier checkpoints are unchanged.
        """
        self.saver.wait()

    def save_as(
        self,
        operation: str,
        find_index: Callable[[int], Path],
        *,
        is_counted: bool = True,
        **options: Any,
    ) -> str:
        """Implement `save` and `write`, for other public calls as well. Collective.

        Args:
          operation: the public call, for messages.
          find_index: returns the file, given the counter; may raise on one rank alone.
          is_counted: whether to increment the counter.
          **options: of `Saver.save`.
        """
        # Replica functions may run at different times on each rank, so their saves
        # could not match.
        saver, shard_bytes = self.saver, self._shard_bytes
        require_cross_replica(saver.strategy, operation)
        # Counted before saving, so that the file holds the number in its own name.
        before = self._objects[_COUNTER]
        counter = self._objects[_COUNTER] = before + is_counted

        def find() -> tuple[Path, dict[str, Any]]:
            index = find_index(counter)
            self._require_kinds()
            return index, self.objects

        try:
            with saver.extended.consensus.recorder.counters.checkpointing("save"):
                return saver.save(operation, find, shard_bytes=shard_bytes, **options)
        # After a failed save the counters of all ranks stay equal.
        except BaseException:
            self._objects[_COUNTER] = before
            raise

    def _require_kinds(self) -> None:
        """Raise if an attribute that was saved before is not any more, or reverse."""
        if self._is_object:
            self._kinds = Attributes(self._root).require_kinds(self._kinds)
        for value in (self._root, *self._objects.values()):
            if isinstance(value, Checkpoint):
                value._require_kinds()

    @property
    def saver(self) -> Saver:
        """The saver, one for all calls."""
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

        consensus = self.strategy.extended.consensus
        with consensus.recorder.counters.checkpointing("restore"):
            # All ranks must name the same file, or one would restore a different state.
            index = consensus.run(
                operation,
                prepare,
                same=lambda index: (("path", str(index)), ("is_partial", is_partial)),
            )
            # A background save of the same path must be complete before it is read.
            self.saver.wait()
            plan = restore(self.strategy, operation, index, self, is_partial)
        self.saver.restored = index
        return LoadStatus(str(index), plan.missing, plan.unused)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        _require_name(name)
        require_saveable(value, name)
        if name in self._find_objects_of_root():
            raise ArgumentError(f"{name!r} is an object of root: assign it there")
        self._objects[name] = value
        if isinstance(value, DistributedIterator | ConvertedIterator):
            value.get_state()  # what is saved, if only later: see warn_unsaved_place

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for names before __init__ has run: no recursion then.
        if name.startswith("_") or name not in self._objects:
            raise AttributeError(f"this Checkpoint has no object {name!r}")
        return self._objects[name]

    def __repr__(self) -> str:
        return f"<mpidist.Checkpoint of {', '.join(self.objects)}>"


def _require_name(name: str) -> None:
    if name == _COUNTER or hasattr(Checkpoint, name):
        raise ArgumentError(f"an object of a Checkpoint cannot be named {name!r}")
    # Raises for a name that HDF5 cannot store, here instead of at the first save.
    escape(name)


def _finder(root: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the current objects of a root."""
    if root is None:
        return dict
    # A function, because the objects of a root may change between saves.
    if isinstance(root, Checkpoint):
        return lambda: WrittenThrough(
            # The root's own counter stays the root's.
            {name: value for name, value in root.objects.items() if name != _COUNTER},
            lambda name, value: root.objects.__setitem__(name, value),
        )
    if isinstance(root, MutableMapping) and all(type(name) is str for name in root):
        return lambda: WrittenThrough(root, root.__setitem__)
    if has_attributes(root):
        return lambda: Attributes(root).objects
    raise ArgumentError(
        "root must be a Checkpoint, a dict of objects by name, or an object with "
        f"attributes, not {validation.shown(root)}"
    )
