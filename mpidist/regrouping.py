"""Putting one replica's values together as those of all replicas, and back."""

from __future__ import annotations

from typing import Any

from mpidist import nest
from mpidist.values import DistributedValues, PerReplica, local_component

__all__ = ["regroup", "select_replica"]


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


def _select(leaf: Any) -> Any:
    if isinstance(leaf, DistributedValues) and not getattr(leaf, "is_variable", False):
        return local_component(leaf)
    return leaf
