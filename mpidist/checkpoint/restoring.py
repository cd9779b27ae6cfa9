"""Restoring objects from a checkpoint: all of them, or none. Collective."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpidist.agreement.calls import Call
from mpidist.checkpoint.loading import load
from mpidist.checkpoint.matching import Matching
from mpidist.checkpoint.names import readable
from mpidist.checkpoint.objects import Tracked
from mpidist.checkpoint.reading import read_tree
from mpidist.errors import CheckpointError
from mpidist.strategy import Strategy

__all__ = ["restore"]


def restore(
    strategy: Strategy,
    operation: str,
    index: Path,
    tracked: Tracked,
    is_partial: bool,
) -> Matching:
    """Give objects the state that a checkpoint has of them. Collective.

    Args:
      strategy: whose ranks restore.
      operation: the public call, for messages.
      index: the checkpoint's file.
      tracked: the objects.
      is_partial: whether objects that the file lacks are left as they are.

    Raises, on all ranks, and changes nothing:
      CheckpointError: the file is missing or damaged, or an object does not fit it.
      MismatchError: the ranks restore from unlike paths, or unlike objects.
      What `set_state` of an object raises on any rank.
    """
    extended = strategy.extended
    extended.topology.require_open()
    agreement = extended.agreement
    where = ("path", str(index)), ("is_partial", is_partial)
    agreement.require_same(Call(operation, where))
    tree = agreement.root_only(operation, lambda: read_tree(index))
    matching = Matching(strategy, str(index), is_partial)
    change = agreement.prepare(operation, lambda: matching.match(tracked, tree))
    needed = [(leaf.kind, str(leaf.dtype), leaf.shape) for leaf in matching.shared]
    agreement.require_same(Call(operation, (("the arrays to restore", tuple(needed)),)))
    shared, own = matching.shared, matching.own
    matching.values = load(extended, operation, index.parent, shared, own)
    agreement.prepare(operation, lambda: _prepare(matching, index))
    agreement.require_same(Call(operation))
    with strategy.scope():
        _set_states(agreement.block, operation, matching)
    change()
    return matching


def _prepare(matching: Matching, index: Path) -> None:
    """Make all new values, so that nothing can fail later."""
    for later in matching.laters:
        try:
            later.prepare()
        except CheckpointError:
            raise
        except Exception as error:
            where = f"{index}: {readable(later.path)}"
            raise CheckpointError(f"{where}: {error or repr(error)}") from error


def _set_states(
    block: Callable[[str, Callable[[], Any]], Any], operation: str, matching: Matching
) -> None:
    """Call `set_state` of all objects; undo what was done if one raises. Collective."""
    if not matching.objects:
        return

    def get_states() -> list[Any]:
        return [copy.deepcopy(value.get_state()) for _, value, _ in matching.objects]

    before = block(operation, get_states)
    for i, (path, value, new) in enumerate(matching.objects):
        where = f"{operation} of {readable(path)}"
        try:
            block(where, functools.partial(value.set_state, new.value))
        except Exception:
            for j in range(i, -1, -1):
                _, changed, _ = matching.objects[j]
                block(where, functools.partial(changed.set_state, before[j]))
            raise
