"""Nested structures by tf.nest's rules, on top of optree.

Lists, tuples, namedtuples, deques and mappings (subclasses too) are structure, with the
keys of a mapping in sorted order (an OrderedDict keeps its own); anything else, None
included, is a leaf.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optree

from mpidist.errors import ArgumentError

# Nested structures for type checkers, which cannot know the leaves
Nest = Mapping[Any, Any] | list[Any] | tuple[Any, ...]
Spec = optree.PyTreeSpec
_NAMESPACE = "mpidist"
_STRUCTURES = (Mapping, list, tuple)
# Known types of leaves: `isinstance(leaf, Mapping)` is slow
_leaf_types: set[type] = set()
_MOST_LEAF_TYPES = 1000
# Two threads may use a class for the first time at once
_registered: set[type] = set()
_registering = threading.RLock()


def flatten(nest: Any) -> tuple[list[Any], Spec]:
    """Return the leaves of `nest` and the structure that `unflatten` needs.

    Specs compare and hash as values within a process; `str(spec)` is the same text in
    every process.
    """
    leaves, spec = optree.tree_flatten(nest, none_is_leaf=True, namespace=_NAMESPACE)
    # optree sees subclasses of dict, list and tuple as leaves until they are registered
    unknown = set(map(type, leaves)) - _leaf_types
    if not unknown:
        return leaves, spec
    structures = {cls for cls in unknown if issubclass(cls, _STRUCTURES)}
    if not structures:
        if len(_leaf_types) < _MOST_LEAF_TYPES:
            _leaf_types.update(unknown)
        return leaves, spec
    with _registering:
        for cls in structures - _registered:
            _register(cls)
            _registered.add(cls)
    return flatten(nest)


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """Return the structure `spec` with `leaves` in place of the leaves."""
    return optree.tree_unflatten(spec, leaves)


def map_leaves(fn: Callable[..., Any], nest: Any, *others: Any) -> Any:
    """Return `nest` with `fn(leaf, *leaves of others)` in place of every leaf.

    Raises:
      ArgumentError: one of `others` has another structure than `nest`.
    """
    leaves, spec = flatten(nest)
    columns = [leaves]
    for other in others:
        other_leaves, other_spec = flatten(other)
        if other_spec != spec:
            raise ArgumentError(f"structures differ: {spec} and {other_spec}")
        columns.append(other_leaves)
    return unflatten(spec, [fn(*row) for row in zip(*columns, strict=True)])


def leaf_names(spec: Spec, root: str) -> list[str]:
    """Return each leaf's name as a Python expression, such as `root['a'][0]`."""
    return [accessor.codify(root) for accessor in spec.accessors()]


class _Keys:
    """A mapping's keys, sorted; keeps the insertion order, which equality ignores."""

    def __init__(self, mapping: Mapping[Any, Any]):
        self.order = tuple(mapping)
        try:
            self.sorted = tuple(sorted(self.order))
        except TypeError:  # keys that cannot be compared: insertion order
            self.sorted = self.order
        self.factory = getattr(mapping, "default_factory", None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keys) and self.sorted == other.sorted

    def __hash__(self) -> int:
        return hash(self.sorted)

    def __repr__(self) -> str:
        return repr(self.sorted)


def _register(cls: Any) -> None:
    """Make optree flatten instances of `cls`, a subclass of mapping, list or tuple."""

    def make_mapping(keys: Any, children: Iterable[Any]) -> Any:
        items = dict(zip(keys.sorted, children, strict=True))
        ordered = {key: items[key] for key in keys.order}
        if issubclass(cls, collections.defaultdict):
            return cls(keys.factory, ordered)
        return cls(ordered)

    def make_sequence(_: Any, children: Iterable[Any]) -> Any:
        return cls(children)

    is_mapping = issubclass(cls, Mapping)
    flatten_one: Any = _flatten_mapping if is_mapping else _flatten_sequence
    make = make_mapping if is_mapping else make_sequence
    optree.register_pytree_node(cls, flatten_one, make, namespace=_NAMESPACE)


def _flatten_sequence(sequence: Iterable[Any]) -> tuple[tuple[Any, ...], None]:
    return tuple(sequence), None


def _flatten_mapping(
    mapping: Mapping[Any, Any],
) -> tuple[tuple[Any, ...], _Keys, tuple[Any, ...]]:
    keys = _Keys(mapping)
    return tuple(mapping[key] for key in keys.sorted), keys, keys.sorted


def _disown() -> None:
    """Release the lock in a forked process, where its holder does not exist."""
    global _registering
    _registering = threading.RLock()


# Not by `forks`, which imports MPI: tools without MPI use this
os.register_at_fork(after_in_child=_disown)
