"""Putting one replica's values together as those of all replicas, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist import nest
from mpidist.values import DistributedValues, Mirrored, PerReplica, local_component

__all__ = ["regroup", "select_arguments", "select_replica"]

# Types of which most arguments are; they have no structure
_COMMON = {np.ndarray, np.float64, float, int, PerReplica, Mirrored}


def regroup(value: Any, replica_id: int, num_replicas: int) -> Any:
    """Return a nest of one replica's values as `PerReplica`; as it is if it is alone.

    None, variables and values that are distributed already stay as they are.
    """
    if num_replicas == 1:
        return value
    return nest.map_leaves(lambda leaf: _wrap(leaf, replica_id), value)


def _wrap(leaf: Any, replica_id: int) -> Any:
    if leaf is None or isinstance(leaf, DistributedValues):
        return leaf
    return PerReplica((leaf,), (replica_id,))


def select_replica(value: Any) -> Any:
    """Return a nest with this process's components; variables pass whole."""
    return nest.map_leaves(_select, value)


def select_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a function, with this process's components in them."""
    if not kwargs and all(type(value) in _COMMON for value in args):
        return tuple(map(_select, args)), kwargs
    selected: tuple[tuple[Any, ...], dict[str, Any]] = select_replica((args, kwargs))
    return selected


def _select(leaf: Any) -> Any:
    if isinstance(leaf, DistributedValues) and not getattr(leaf, "is_variable", False):
        return local_component(leaf)
    return leaf
