"""The state of a user's objects as a tree, gathered from all ranks.

Reading the state of an object can communicate, so all ranks do it in the same order.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import inspect
import random
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from mpidist.checkpoint.state_dicts import has_state, read_state
from mpidist.checkpoint.tree import (
    TEXTS,
    Group,
    Leaf,
    Link,
    Node,
    Path,
    as_name,
    child_names,
    container_type,
    encode,
    group_kind,
    is_container,
    leaf_of_array,
    leaves,
    nodes_below,
    readable,
    replace_nodes,
    require_depth,
)
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.device import arrays
from mpidist.errors import ArgumentTypeError, ContextError
from mpidist.strategy.strategy import Strategy
from mpidist.strategy.variables import Variable
from mpidist.util import validation
from mpidist.values import DistributedValues, Mirrored, PerReplica

__all__ = [
    "GENERATOR",
    "OBJECT",
    "Attributes",
    "PerRankState",
    "Tracked",
    "WrittenThrough",
    "children_of",
    "gather_state",
    "has_attributes",
    "identity",
    "is_generator",
    "require_saveable",
    "require_strategy",
    "state_of",
    "strategy_of",
]

OBJECT, GENERATOR, VARIABLE = "object", "generator", "variable"


class Tracked:
    """Base of Checkpoint: a set of named objects."""

    @property
    def objects(self) -> dict[str, Any]:
        """The objects by name."""
        raise NotImplementedError(type(self).__name__)  # pragma: no cover


class WrittenThrough(dict[str, Any]):
    """A dict whose changes are passed on, to where its values come from.

    Args:
      items: its content.
      write: called with name and value of each change.
    """

    def __init__(self, items: Mapping[str, Any], write: Callable[[str, Any], None]):
        super().__init__(items)
        self._write = write

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._write(name, value)


class Attributes(Tracked):
    """The members of an object, or of a container, that have state.

    Of an object these are attributes without "_" that are variables, checkpoints,
    arrays, values with a state of their own, or hold such themselves.

    Args:
      owner: the object, a list, a tuple or a dict.
      above: the objects that it is a member of, which are not looked at again.
    """

    def __init__(self, owner: Any, above: tuple[Any, ...] = ()):
        self.owner = owner
        # Objects on the way from the root: a circle would be endless.
        self._above = (*above, owner)

    @property
    def objects(self) -> dict[str, Any]:
        """The members by name, or position."""
        owner = self.owner
        members = members_of(owner)

        def write(name: str, value: Any) -> None:
            if isinstance(value, Attributes):
                return  # its members are written, where they are
            if is_container(owner):
                owner[members[name][0]] = value
            else:
                try:
                    setattr(owner, name, value)
                except AttributeError:  # a frozen dataclass, whose arrays change, too
                    vars(owner)[name] = value

        children = {name: self.child(member) for name, (_, member) in members.items()}
        kept = {name: child for name, child in children.items() if child is not None}
        return WrittenThrough(kept, write)

    def kinds(self, path: Path = ()) -> Iterator[tuple[Path, bool]]:
        """Yield the paths of numbers, and of what has state; and whether it has."""
        for name, (_, member) in members_of(self.owner).items():
            child, below = self.child(member), (*path, name)
            if isinstance(child, Attributes):
                yield from child.kinds(below)
            elif child is not None:
                yield from ((found, True) for found, _ in walk(child, below))
            elif isinstance(member, bool | int | float | complex | np.generic):
                yield below, False

    def require_kinds(self, kinds: Mapping[Path, bool]) -> None:
        """Raise if a number has become an array or other state, or the reverse.

        Args:
          kinds: what they were before; see `kinds`.

        Raises:
          ArgumentTypeError: one has; a new job could not restore it.
        """
        for path, had_state in kinds.items():
            value = self._at(path)
            if value is None or (self.child(value) is not None) == had_state:
                continue
            now, before = (("is not", "was"), ("is", "was not"))[not had_state]
            raise ArgumentTypeError(
                f"{readable(path)} of root {before} saved before, but {now} any more: "
                f"it has become {validation.shown(value)}. Of the attributes of an "
                "object, a Checkpoint saves arrays and other state, but no numbers: "
                "keep its type (root.x[...] = value), or give it by name"
            )

    def _at(self, path: Path) -> Any:
        """Return the member at a path, or what stands in its way; None if nothing."""
        value = self.owner
        for name in path:
            if not is_container(value) and not has_attributes(value):
                return value
            _, value = members_of(value).get(name, (None, None))
        return value

    def child(self, value: Any) -> Any:
        """Return what a checkpoint saves of a member; None for one without state."""
        is_value = isinstance(value, DistributedValues | Tracked) or is_generator(value)
        if is_value or has_state(value) or _is_array(value):
            return value
        # Seen above: do not descend again.
        if any(value is other for other in self._above):
            return None
        if is_container(value):
            members = value.values() if isinstance(value, Mapping) else value
            children = [self.child(member) for member in members]
            if all(child is None for child in children):
                # Containers without any state are left out; numbers alone are no state
                # of a model.
                return None
            is_plain = not any(isinstance(child, Attributes) for child in children)
            return value if is_plain else Attributes(value, self._above)
        if not has_attributes(value):
            return None
        # An object whose members have no state would only add an empty group.
        child = Attributes(value, self._above)
        return child if child.objects else None


def members_of(owner: Any) -> dict[str, tuple[Any, Any]]:
    """Return the members of an object or container by name, each with its key."""
    if isinstance(owner, Mapping):
        return {as_name(key, ()): (key, member) for key, member in owner.items()}
    if is_container(owner):
        return {str(i): (i, member) for i, member in enumerate(owner)}
    # Private attributes are implementation details of the user's class.
    found = vars(owner).items()
    return {name: (name, value) for name, value in found if not name.startswith("_")}


def has_attributes(value: Any) -> bool:
    """Return whether `value` is an object whose attributes may have state."""
    is_code = isinstance(value, type | types.ModuleType) or inspect.isroutine(value)
    is_own = type(value).__module__.partition(".")[0] == "mpidist"
    return hasattr(value, "__dict__") and not (is_code or is_own)


def _is_array(value: Any) -> bool:
    """Return whether `value` is an array of any library, and no number."""
    if isinstance(value, np.generic | type):
        return False
    is_other = hasattr(value, "__dlpack__") or arrays.is_jax_array(value)
    return isinstance(value, np.ndarray) or is_other


def identity(value: Any) -> Any:
    """Return the object that a restore changes in place; None if there is none.

    Arrays are not told by identity but by their memory: see `overlaps`.
    """
    if isinstance(value, Attributes):
        return value.owner
    if isinstance(value, np.random.Generator):
        return value.bit_generator  # which two generators may share
    if isinstance(value, np.random.RandomState):
        return value._bit_generator
    if isinstance(value, Mirrored | np.ndarray):
        return None
    kinds = (Variable, Tracked, MutableMapping, list, collections.deque)
    is_changed = isinstance(value, kinds) or is_generator(value) or has_state(value)
    return value if is_changed else None


@dataclasses.dataclass(frozen=True)
class PerRankState:
    """A node that can differ between ranks.

    Args:
      node: of this rank.
      is_shared: whether to save one node for all ranks if all are equal.
    """

    node: Any
    is_shared: bool


def children_of(value: Any, path: Path) -> dict[str, Any] | None:
    """Return the children of a container or a Checkpoint; None for other values."""
    require_depth(path)
    # Before containers: a Checkpoint is not a Mapping.
    if isinstance(value, Tracked):
        return child_names(value.objects, path)
    return child_names(value, path) if is_container(value) else None


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the values in nested containers, with their paths."""
    children = children_of(value, path)
    if children is None:
        yield path, value
        return
    for name, child in children.items():
        yield from walk(child, (*path, name))


def tree_of(value: Any, path: Path, strategy: Strategy) -> Any:
    """Return the tree of an object, with `PerRankState` nodes. Collective.

    Raises:
      ArgumentTypeError: a value that cannot be saved.
      ContextError: a variable of another strategy.
      What reading the state of an object raises.
    """
    children = children_of(value, path)
    if children is not None:
        nodes = {n: tree_of(c, (*path, n), strategy) for n, c in children.items()}
        if isinstance(value, Tracked):
            return Group("dict", nodes)
        return Group(group_kind(value), nodes, type=container_type(value, path))
    if isinstance(value, Variable):
        return _variable_leaf(value, path, strategy)
    # Per rank, however equal: it belongs to the rank.
    if isinstance(value, PerReplica):
        return PerRankState(encode(value.values[0], path), is_shared=False)
    if is_generator(value):
        # Usually the same on all ranks, and then saved once.
        state = encode(state_of(value), path)
        return PerRankState(_with_role(state, GENERATOR, path), is_shared=True)
    if has_state(value) and not isinstance(value, Mirrored | np.ndarray):
        state = encode(read_state(value), path)
        return PerRankState(_with_role(state, OBJECT, path), is_shared=True)
    return encode(value, path)


def _with_role(node: Node, role: str, path: Path) -> Group:
    # A group is needed to carry the role.
    if isinstance(node, Leaf):  # a state of one number
        return Group("tuple", {"0": node}, role + " of one")
    return dataclasses.replace(node, role=role)


def _variable_leaf(variable: Variable, path: Path, strategy: Strategy) -> Leaf:
    """Return the leaf of a variable's value. Collective if it is ON_READ."""
    require_strategy(variable, path, strategy)
    # ON_READ: the value over all replicas, which takes a collective; else the local
    # copy.
    value = variable.value() if variable.on_read else variable.local
    leaf = leaf_of_array(value, path)
    # Variables replace their arrays instead of changing them, so no copy is needed.
    return dataclasses.replace(leaf, role=VARIABLE, is_frozen=True)


def require_strategy(variable: Variable, path: Path, strategy: Strategy) -> None:
    """Raise if a variable belongs to another strategy than the checkpoint."""
    if variable.distribute_strategy is not strategy:
        raise ContextError(
            f"{readable(path)} is a variable of {variable.distribute_strategy!r}, but "
            f"the checkpoint belongs to {strategy!r}: Mixing different "
            "tf.distribute.Strategy objects; create the variable in the strategy's "
            "scope"
        )


def strategy_of(value: Any) -> Strategy | None:
    """Return the strategy of the first variable or distributed iterator, if any."""
    for _, leaf in walk(value):
        if isinstance(leaf, Variable):
            return leaf.distribute_strategy
        own = getattr(leaf, "distribute_strategy", None)  # of a model
        if isinstance(own, Strategy):
            return own
        plan = getattr(leaf, "_plan", None)
        extended = getattr(plan, "extended", None)
        if extended is not None and isinstance(extended.strategy, Strategy):
            return extended.strategy
    return None


def require_saveable(value: Any, name: str) -> None:
    """Raise an ArgumentTypeError for classes and functions."""
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
    """Return the state of a generator."""
    if isinstance(generator, random.Random):
        # Python's generator has a tuple of 625 numbers.
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


def gather_state(
    strategy: Strategy,
    operation: str,
    objects: Mapping[str, Any],
    own_bytes: int,
    shard_names: Callable[[], list[str]],
) -> tuple[Group, dict[Path, Node] | None]:
    """Return the state of all objects, and nodes for this rank's shard. Collective.

    The tree is the same on all ranks, with a `Link` for each per-rank state that goes
    to the shards. Without such states, the nodes are None.

    Args:
      strategy: whose ranks save.
      operation: the public call, for messages.
      objects: by name.
      own_bytes: per-rank states of more bytes in total go to the shards.
      shard_names: returns the names of the shards of all ranks.

    Raises, on all ranks:
      MismatchError: arrays, numbers or text that differ between ranks.
      What `tree_of` raises on any rank.
    """
    consensus = strategy.extended.consensus
    # A single rank needs no comparison, so it computes no checksums.
    compares = strategy.extended.num_replicas > 1
    # In the scope, as get_state of a user may read variables. Differences between ranks
    # are an error: a checkpoint restores one value on all.
    with strategy.scope():
        tree = consensus.run_in_scope(
            operation,
            lambda: tree_of(dict(objects), (), strategy),
            describe=lambda t: CallSignature(operation, tuple(_describe(t, compares))),
        )
    own = {p: n for p, n in nodes_below(tree) if isinstance(n, PerRankState)}
    if not own:
        # The usual case: no rank has a state of its own.
        return tree, None
    # A state that is equal on all ranks is saved once
    own_hashes = {path: (_digest(o.node), _bytes(o.node)) for path, o in own.items()}
    everyone = consensus.gather(operation, own_hashes)
    # In the order of the dict, which is the same on all ranks.
    unlike = [
        path
        for path, state in own.items()
        if not state.is_shared or len({ranks[path][0] for ranks in everyone}) > 1
    ]
    # Equal on all ranks: any rank's node will do.
    chosen: dict[Path, Any] = {path: own[path].node for path in own.keys() - unlike}
    nodes = {path: _on_host(own[path].node) for path in unlike}
    size_bytes = sum(ranks[path][1] for path in unlike for ranks in everyone)
    # Too much to send to rank 0: each rank writes its own.
    if size_bytes > own_bytes:
        links: dict[str, Any] = {str(r): Link(n) for r, n in enumerate(shard_names())}
        chosen |= {path: Group("ranks", links) for path in unlike}
        rank = str(strategy.extended.replica_id)
        in_shard = {(*path, rank): node for path, node in nodes.items()}
        return replace_nodes(tree, chosen), in_shard
    # Small: rank 0 writes all, and no shards are needed.
    gathered = consensus.gather(operation, nodes) if unlike else []
    for path in unlike:
        states = {str(rank): found[path] for rank, found in enumerate(gathered)}
        chosen[path] = Group("ranks", states)
    return replace_nodes(tree, chosen), None


def _describe(node: Any, compares: bool, path: Path = ()) -> list[tuple[str, str]]:
    """Describe what must be equal on all ranks, per node."""
    if isinstance(node, PerRankState):
        return [(readable(path), "a state")]
    if isinstance(node, Leaf):
        return [(readable(path), _describe_leaf(node, compares))]
    lines = [(readable(path), node.kind if node.type is None else repr(node.type))]
    for name, child in node.children.items():
        lines += _describe(child, compares, (*path, name))
    return lines


def _describe_leaf(leaf: Leaf, compares: bool) -> str:
    text = f"{leaf.kind} {leaf.dtype} {leaf.shape}"
    # Frozen values belong to variables, which are equal by construction.
    if leaf.is_frozen or not leaf.size_bytes or not compares:
        return text
    if leaf.kind == "array" or leaf.kind in TEXTS:
        return f"{text} checksum {arrays.checksum(leaf.array)}"
    return f"{leaf.kind} {arrays.value_bytes(leaf.array).tobytes().hex()}"


def _digest(node: Node) -> bytes:
    """Return a hash of a tree."""
    hashed = hashlib.blake2b(digest_size=16)
    for path, leaf in leaves(node):
        hashed.update(repr((path, leaf.kind, str(leaf.dtype), leaf.shape)).encode())
        if leaf.size_bytes:
            hashed.update(arrays.checksum(leaf.array).encode())
    # Types of containers count as well.
    hashed.update(_kinds(node).encode())
    return hashed.digest()


def _kinds(node: Node) -> str:
    if isinstance(node, Leaf):
        return ""
    below = [_kinds(child) for child in node.children.values()]
    return repr((node.kind, node.role, node.type, below))


def _bytes(node: Node) -> int:
    return sum(leaf.size_bytes for _, leaf in leaves(node))


def _on_host(node: Node) -> Any:
    """Return a node with copies of its arrays in host memory."""
    copies = {
        path: dataclasses.replace(
            leaf, array=np.array(arrays.to_host(leaf.array), order="C"), is_frozen=True
        )
        for path, leaf in leaves(node)
        if leaf.array is not None
    }
    return replace_nodes(node, copies)
