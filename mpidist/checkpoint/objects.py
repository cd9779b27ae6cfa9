"""A user's objects as a tree: what each kind of object has to be saved.

The calls of `tree_of` may communicate: the ranks make them in the same order.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from mpidist.checkpoint.tree import (
    Group,
    Leaf,
    Node,
    Path,
    as_name,
    child_names,
    container_type,
    encode,
    group_kind,
    is_container,
    leaf_of_array,
    readable,
    require_depth,
)
from mpidist.errors import ArgumentTypeError, ContextError
from mpidist.strategy.strategy import Strategy
from mpidist.strategy.variables import Variable
from mpidist.util import validation
from mpidist.values import Mirrored, PerReplica

__all__ = [
    "Change",
    "GENERATOR",
    "OBJECT",
    "Own",
    "Tracked",
    "become",
    "change_children",
    "checked_state",
    "derived_state",
    "has_state",
    "is_generator",
    "set_state",
    "state_of",
    "tree_of",
    "walk",
]


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
            f"{name!r} is {validation.shown(value)}, which has no state to save"
        )


_PYTHONS = "random.Random"


def is_generator(value: Any) -> bool:
    """Return whether `value` is a random generator of NumPy or of Python."""
    return isinstance(value, np.random.Generator | np.random.RandomState) or (
        type(value) is random.Random
    )


def state_of(generator: Any) -> dict[str, Any]:
    """Return a generator's state."""
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return {
            "bit_generator": _PYTHONS,
            "version": version,
            "numbers": np.array(numbers, np.uint32),
            "gauss": gauss,
        }
    if isinstance(generator, np.random.RandomState):
        return dict(generator.get_state(legacy=False))
    return dict(generator.bit_generator.state)


def set_state(generator: Any, state: Any) -> None:
    """Let a generator go on from a state of its kind.

    Raises: ValueError, TypeError, KeyError, ...: it is none.
    """
    if isinstance(generator, random.Random):
        numbers = tuple(int(number) for number in state["numbers"])
        generator.setstate((state["version"], numbers, state["gauss"]))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def checked_state(generator: Any, state: Any) -> Any:
    """Return `state` if a generator like this one can go on from it.

    Raises:
      ValueError: it cannot.
    """
    kind = state_of(generator)["bit_generator"]
    found = state.get("bit_generator") if isinstance(state, dict) else None
    if found != kind:
        raise ValueError(f"expected a state of {kind}, found one of {found}")
    try:
        trial = _fresh(generator, 0)
        set_state(trial, state)
        state_of(trial)
    except Exception as error:  # classes of others may raise anything
        raise ValueError(f"the state of {kind} is damaged: {error!r}") from error
    return state


def derived_state(generator: Any, states: Sequence[Any], rank: int) -> Any:
    """Return the state for a rank that had none: seeded by all states and its number.

    It is the same for the same states, and differs from rank to rank.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for state in states:
        hashed.update(_text(state).encode())
    return state_of(_fresh(generator, int.from_bytes(hashed.digest(), "big"), rank))


def _text(state: Any) -> str:
    if isinstance(state, dict):
        return repr([(key, _text(state[key])) for key in sorted(state)])
    return state.tobytes().hex() if isinstance(state, np.ndarray) else repr(state)


def _fresh(generator: Any, *seeds: int) -> Any:
    """Return a generator of the same kind."""
    if isinstance(generator, random.Random):
        return random.Random(repr(seeds))
    seed = np.random.SeedSequence(seeds)
    if isinstance(generator, np.random.RandomState):
        return np.random.RandomState(type(generator._bit_generator)(seed))
    return np.random.Generator(type(generator.bit_generator)(seed))


# Returns what is to stand in the place of an object: itself, or another one
Change = Callable[[], Any]


def become(value: Any, new: Any) -> Any:
    """Return `value` after it has become equal to `new`; or `new` where it cannot."""
    if isinstance(value, MutableMapping) and isinstance(new, Mapping):
        for key in list(value):  # in the new order, and no Counter adds up
            del value[key]
        for key, child in new.items():
            value[key] = child
        return value
    is_sequence = isinstance(new, list | tuple | collections.deque)
    if isinstance(value, list) and is_sequence:
        value[:] = new
        return value
    if isinstance(value, collections.deque) and is_sequence:
        value.clear()
        value.extend(new)
        return value
    if hasattr(value, "_fields") and type(new) is tuple:  # of an older version
        return type(value)(*new) if len(new) == len(value._fields) else new
    return new


def change_children(value: Any, changes: Mapping[str, Change]) -> Any:
    """Return a container after its children were changed."""
    if isinstance(value, Tracked):
        value = value.objects
    if isinstance(value, Mapping):
        keys = {as_name(key, ()): key for key in value}
        new = {keys[name]: change() for name, change in changes.items()}
        same = all(new[key] is value[key] for key in new)
        if same or isinstance(value, MutableMapping):
            for key, child in new.items():
                if child is not value[key]:
                    value[key] = child  # type: ignore[index]  # it is mutable
            return value
        return type(value)({**value, **new})  # type: ignore[call-arg]  # as tf.nest's
    made = [changes[str(i)]() if str(i) in changes else x for i, x in enumerate(value)]
    if all(a is b for a, b in zip(made, value, strict=True)):
        return value
    if isinstance(value, list | collections.deque):
        for i, child in enumerate(made):
            value[i] = child
        return value
    return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
