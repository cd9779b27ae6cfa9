"""Giving the caches of a dataset their memory when it is divided over replicas."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist import nest
from mpidist.calls import Call
from mpidist.data.caching import Cache, Memory, NodeCache, StreamCache, rebuild
from mpidist.data.pipeline import Pass, Pipeline
from mpidist.data.stream import Stream
from mpidist.data.tables import fields_of, row_spec, unkeepable
from mpidist.errors import ArgumentError

if TYPE_CHECKING:
    from mpidist.extended import StrategyExtended

__all__ = ["keep_apart", "require_shareable", "share"]

_CALL = "cache"


def require_shareable(steps: Pipeline | Stream) -> None:
    """Raise if a cache cannot be shared, as its elements cannot be counted."""

    def check(cache: Cache | StreamCache, parent: Any) -> Any:
        if isinstance(cache, StreamCache):
            raise ArgumentError(
                "cache() of a generator's dataset cannot be divided over replicas, as "
                "the number of its elements is not known; make a dataset of arrays "
                "or files, or cache in distribute_datasets_from_function"
            )
        cache.require_end()
        return cache

    rebuild(steps, check)


def keep_apart(steps: Pipeline | Stream, order: Pass) -> Pipeline | Stream:
    """Return the steps with caches of their own, which start empty, in this process.

    Datasets that were made of the same steps cannot change the order of these.
    """
    memories: dict[int, Memory] = {}

    def change(cache: Cache | StreamCache, parent: Any) -> Any:
        if isinstance(cache, StreamCache):
            return StreamCache(parent)
        cache.require_end()
        return Cache(parent, memories.setdefault(id(cache.memory), Memory(order)))

    changed: Pipeline | Stream = rebuild(steps, change)
    return changed


def share(
    extended: StrategyExtended, steps: Pipeline | Stream, order: Pass, slices: int
) -> Pipeline | Stream:
    """Return the steps with caches that the ranks of a node share. Collective.

    The same cache, divided for the same strategy again, has the rows it had.

    Args:
      extended: of the strategy.
      steps: shareable, and equal on all ranks.
      order: the pass over what comes before the caches.
      slices: in how many parts batches are read: 1 or the number of replicas.

    Raises, on all ranks:
      ArgumentError: rows of no fixed size, or not enough memory.
      What reading the first row raises.
    """

    def change(cache: Cache, parent: Pipeline) -> NodeCache:
        storage = extended.node_memory.find(cache.memory)
        if storage is None:
            return _make(extended, parent, order, cache.memory, slices)
        spec, first_order = storage.note
        return NodeCache(parent, storage, first_order, spec, cache.memory, slices)

    shared: Pipeline | Stream = rebuild(steps, change)
    return shared


def _make(
    extended: StrategyExtended,
    parent: Pipeline,
    order: Pass,
    memory: Memory,
    slices: int,
) -> NodeCache:
    """Return a cache that holds the first row, or a few. Collective."""
    agreement = extended.agreement
    found: list[Any] = []

    def look() -> Any:
        found.append(_first_rows(parent, order, slices))
        return row_spec(found[0])

    # One rank reads rows and tells the others what they look like, if that can be told
    told = agreement.root_only(_CALL, lambda: _pickle(look()))
    spec = agreement.prepare(_CALL, lambda: pickle.loads(told) if told else look())
    assert parent.length is not None
    fields = fields_of(spec, parent.length * (parent.batch_size or 1))
    storage = extended.node_memory.allocate(memory, fields, (spec, order))
    cache = NodeCache(parent, storage, order, spec, memory, slices)

    def fill() -> None:
        for rows in found[:1]:
            cache.keep(np.arange(len(nest.flatten(rows)[0][0])), rows)

    extended.together(Call(_CALL), fill)  # so that nobody reads them again
    return cache


def _first_rows(parent: Pipeline, order: Pass, slices: int) -> Any:
    """Return the rows that are read first, stacked; none if there are none."""
    length = parent.length or 0
    if not parent.is_batched:
        rows = parent.elements(order, np.arange(min(1, length)))
    elif length:
        rows = parent.part(order, 0, slices, 0)
    else:
        rows = parent.empty_part(order)
    reason = unkeepable(rows)
    if reason is not None:
        raise ArgumentError(
            "cache() of a distributed dataset needs numbers, bools or strings of fixed "
            f"length in its elements, but {reason}; map() it to such, or leave cache() "
            "out"
        )
    return rows


def _pickle(spec: Any) -> bytes | None:
    try:
        return pickle.dumps(spec)
    except (pickle.PicklingError, AttributeError, TypeError):  # say, a local class
        return None
