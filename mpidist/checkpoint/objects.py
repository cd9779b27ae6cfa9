"""A user's objects as a tree: what each kind of object has to be saved.

The calls of `tree_of` may communicate: the ranks make them in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpidist import checks
from mpidist.checkpoint.generators import is_generator, state_of
from mpidist.checkpoint.names import Path, readable
from mpidist.checkpoint.tree import (
    Group,
    Leaf,
    Node,
    child_names,
    container_type,
    encode,
    group_kind,
    is_container,
    leaf_of_array,
    require_depth,
)
from mpidist.errors import ArgumentTypeError, ContextError
from mpidist.strategy import Strategy
from mpidist.values import Mirrored, PerReplica
from mpidist.variables import Variable

__all__ = ["GENERATOR", "OBJECT", "Own", "Tracked", "has_state", "tree_of", "walk"]

OBJECT, GENERATOR, VARIABLE = "object", "generator", "variable"


class Tracked:
    """Base of Checkpoint: an object that is a dict of objects, by name."""

    @property
    def objects(self) -> dict[str, Any]:
        """The objects by name."""
        raise NotImplementedError(type(self).__name__)  # pragma: no cover


@dataclasses.dataclass(frozen=True)
class Own:
    """A node that each rank has for itself, and that may be the same on all.

    Args:
      node: this rank's.
      is_shared: whether one is saved for all if they are the same.
    """

    node: Any
    is_shared: bool


def has_state(value: Any) -> bool:
    """Return whether `value` says itself what there is to save."""
    methods = (getattr(value, name, None) for name in ("get_state", "set_state"))
    return not isinstance(value, type) and all(map(callable, methods))


def children_of(value: Any, path: Path) -> dict[str, Any] | None:
    """Return the children of a container or a Checkpoint; None of anything else."""
    require_depth(path)
    if isinstance(value, Tracked):
        return child_names(value.objects, path)
    return child_names(value, path) if is_container(value) else None


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield everything below `value` that is no container, with its path."""
    children = children_of(value, path)
    if children is None:
        yield path, value
        return
    for name, child in children.items():
        yield from walk(child, (*path, name))


def tree_of(value: Any, path: Path, strategy: Strategy) -> Any:
    """Return the tree of an object: groups, leaves, and `Own` nodes. Collective.

    Raises:
      ArgumentTypeError: something that cannot be saved.
      ContextError: a variable of another strategy.
      What `get_state` of an object raises.
    """
    children = children_of(value, path)
    if children is not None:
        nodes = {n: tree_of(c, (*path, n), strategy) for n, c in children.items()}
        if isinstance(value, Tracked):
            return Group("dict", nodes)
        return Group(group_kind(value), nodes, type=container_type(value, path))
    if isinstance(value, Variable):
        return _variable_leaf(value, path, strategy)
    if isinstance(value, PerReplica):
        return Own(encode(value.values[0], path), is_shared=False)
    if is_generator(value):
        state = encode(state_of(value), path)
        return Own(_with_role(state, GENERATOR, path), is_shared=True)
    if has_state(value) and not isinstance(value, Mirrored | np.ndarray):
        state = encode(value.get_state(), path)
        return Own(_with_role(state, OBJECT, path), is_shared=True)
    return encode(value, path)


def _with_role(node: Node, role: str, path: Path) -> Group:
    if isinstance(node, Leaf):  # a state of one number
        return Group("tuple", {"0": node}, role + " of one")
    return dataclasses.replace(node, role=role)


def _variable_leaf(variable: Variable, path: Path, strategy: Strategy) -> Leaf:
    """Return the leaf of a variable's one value. Collective if it is ON_READ."""
    require_strategy(variable, path, strategy)
    value = variable.value() if variable.on_read else variable.local
    leaf = leaf_of_array(value, path)
    return dataclasses.replace(leaf, role=VARIABLE, is_frozen=True)


def require_strategy(variable: Variable, path: Path, strategy: Strategy) -> None:
    """Raise if a variable belongs to another strategy than the checkpoint."""
    if variable.distribute_strategy is not strategy:
        raise ContextError(
            f"{readable(path)} is a variable of {variable.distribute_strategy!r}, the "
            f"checkpoint is of {strategy!r}: Mixing different tf.distribute.Strategy "
            "objects; create the variable in the strategy's scope"
        )


def strategy_of(value: Any) -> Strategy | None:
    """Return the strategy of the first variable or distributed iterator, if any."""
    for _, leaf in walk(value):
        if isinstance(leaf, Variable):
            return leaf.distribute_strategy
        plan = getattr(leaf, "_plan", None)
        extended = getattr(plan, "extended", None)
        if extended is not None and isinstance(extended.strategy, Strategy):
            return extended.strategy
    return None


def require_saveable(value: Any, name: str) -> None:
    """Raise an ArgumentTypeError for classes and functions, which are no state."""
    if isinstance(value, type) or (callable(value) and not has_state(value)):
        raise ArgumentTypeError(
            f"{name!r} is {checks.shown(value)}, which has no state to save"
        )
