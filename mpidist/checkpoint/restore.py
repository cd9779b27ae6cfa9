"""Restoring the state of objects from a checkpoint. Collective."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpidist.checkpoint.reading import load, read_tree
from mpidist.checkpoint.restore_plan import RestorePlan
from mpidist.checkpoint.state import Tracked
from mpidist.checkpoint.state_dicts import read_state, write_state
from mpidist.checkpoint.tree import readable
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.context import enter
from mpidist.errors import CheckpointError
from mpidist.strategy.strategy import Strategy
from mpidist.util.representation import one_line

__all__ = ["LoadStatus", "restore"]


class LoadStatus:
    """The result of `Checkpoint.restore`. Its methods do not communicate.

    Args:
      path: the path of the checkpoint; None if there was none.
      missing: objects that the file did not have.
      unused: names in the file for which there was no object.
    """

    def __init__(
        self,
        path: str | None,
        missing: Sequence[str] = (),
        unused: Sequence[str] = (),
    ):
        self.path = path
        self.missing = tuple(missing)
        self.unused = tuple(unused)

    def __repr__(self) -> str:
        def describe() -> str:
            return (
                f"{self.path}, {len(self.missing)} missing, {len(self.unused)} unused"
            )

        return one_line(self, describe)

    def assert_consumed(self) -> LoadStatus:
        """Raise a CheckpointError unless objects and file had the same names.

        Returns itself, like the other methods.
        """
        self.assert_existing_objects_matched()
        if self.unused:
            raise CheckpointError(
                f"{self.path} has names that match no object: {', '.join(self.unused)}"
            )
        return self

    def assert_existing_objects_matched(self) -> LoadStatus:
        """Raise a CheckpointError unless all objects were restored."""
        if self.path is None:
            raise CheckpointError("no checkpoint was given, so nothing was restored")
        if self.missing:
            raise CheckpointError(
                f"{self.path} lacks some objects, which are unchanged: "
                f"{', '.join(self.missing)}"
            )
        return self

    def assert_nontrivial_match(self) -> LoadStatus:
        """Raise a CheckpointError if there was no checkpoint."""
        if self.path is None:
            raise CheckpointError("no checkpoint was given, so nothing was restored")
        return self

    def run_restore_ops(self, session: Any = None) -> None:
        """Do nothing, as in TensorFlow's eager execution: all is restored.

        Raises:
          CheckpointError: no checkpoint was given.
        """
        self.assert_nontrivial_match()

    def initialize_or_restore(self, session: Any = None) -> None:
        """Do nothing: objects that were not restored keep their values."""

    def expect_partial(self) -> LoadStatus:
        """Return itself: there are no warnings about unused names."""
        return self


def restore(
    strategy: Strategy,
    operation: str,
    index: Path,
    tracked: Tracked,
    is_partial: bool,
) -> RestorePlan:
    """Restore the state of objects. Collective.

    Args:
      strategy: whose ranks restore.
      operation: the public call, for messages.
      index: the checkpoint's file.
      tracked: the objects.
      is_partial: whether objects that the file lacks stay unchanged.

    Raises, on all ranks, without changes:
      CheckpointError: the file is missing or damaged, or does not match an object.
      MismatchError: the ranks restore from different paths, or different objects.
      What `set_state` of an object raises on any rank.
    """
    extended = strategy.extended
    extended.topology.require_open()
    consensus = extended.consensus
    where = ("path", str(index)), ("is_partial", is_partial)
    # All ranks must name the same file, or one rank would restore a different state.
    consensus.require_same(CallSignature(operation, where))
    # Rank 0 reads the structure for all: the metadata of a file is read once per job,
    # and an error of it is raised on all ranks.
    tree = consensus.root_only(operation, lambda: read_tree(index))
    plan = RestorePlan(strategy, str(index), is_partial)
    # Nothing is changed yet: `match` only plans, and its errors are raised on all
    # ranks.
    change = consensus.guard(operation, lambda: plan.match(tracked, tree))
    # Ranks whose objects differ would read different arrays, and wait for each other.
    needed = [(leaf.kind, str(leaf.dtype), leaf.shape) for leaf in plan.shared]
    consensus.require_same(
        CallSignature(operation, (("the arrays to restore", tuple(needed)),))
    )
    shared, own = plan.shared, plan.own
    plan.values = load(extended, operation, index.parent, shared, own)
    # All that may still fail is computed before the first object changes.
    consensus.guard(operation, lambda: _compute(plan, index))
    # After this all ranks have all new values.
    consensus.require_same(CallSignature(operation))
    # set_state of a user's object may fail, so these come before our own changes.
    with enter(strategy):
        _set_states(consensus.run_in_scope, operation, plan)
    change()
    return plan


def _compute(plan: RestorePlan, index: Path) -> None:
    """Compute all new values: what changes the objects afterwards cannot fail."""
    # Errors of decoding name file and object; those of the checkpoint do so already.
    for deferred in plan.deferred:
        try:
            deferred.compute()
        except CheckpointError:
            raise
        except Exception as error:
            where = f"{index}: {readable(deferred.path)}"
            raise CheckpointError(f"{where}: {error or repr(error)}") from error
    plan.separate()


def _set_states(
    block: Callable[[str, Callable[[], Any]], Any],
    operation: str,
    plan: RestorePlan,
) -> None:
    """Call `set_state` of all objects; undo all calls if one raises. Collective."""
    if not plan.objects:
        return

    # Deep copies: set_state may change what get_state has returned.
    def get_states() -> list[Any]:
        return [copy.deepcopy(read_state(value)) for _, value, _ in plan.objects]

    before = block(operation, get_states)
    for i, (path, value, new) in enumerate(plan.objects):
        where = f"{operation} of {readable(path)}"
        try:
            block(where, functools.partial(write_state, value, new.value))
        # Undo in reverse order, on all ranks: every rank is in the same call of
        # `block`.
        except Exception:
            for j in range(i, -1, -1):
                _, changed, _ = plan.objects[j]
                block(where, functools.partial(write_state, changed, before[j]))
            raise
