"""Giving the caches of a dataset their memory when it is divided over replicas."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.agreement.calls import Call
from mpidist.data.caching import Cache, Memory, StreamCache, frozen, rebuild
from mpidist.data.distributed.node_cache import NodeCache
from mpidist.data.pipeline import Pass, Pipeline
from mpidist.data.reading import Reading
from mpidist.data.stream import Stream
from mpidist.data.tables import fields_of, row_spec, unkeepable
from mpidist.errors import ArgumentError

if TYPE_CHECKING:
    from mpidist.extended import StrategyExtended

__all__ = ["reorder", "require_shareable", "share"]

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


def share(
    extended: StrategyExtended, steps: Pipeline | Stream, order: Pass, slices: int
) -> Pipeline | Stream:
    """Return the steps with caches that the ranks of a node share. Collective.

    The same cache, divided for the same strategy again, has the rows it had, unless
    they come in an order of a seed that is drawn for each distributed dataset.

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
        # What is in another order in each dataset belongs to one of them
        owner = Memory() if parent.needs_entropy else cache.memory
        storage = extended.node_memory.find(owner)
        if storage is None:
            return _make(extended, parent, order, owner, slices)
        return NodeCache(parent, storage, owner, slices)

    shared: Pipeline | Stream = rebuild(steps, change)
    return shared


def reorder(extended: StrategyExtended, steps: Pipeline | Stream, order: Pass) -> None:
    """Empty the shared caches before which the order is another one now. Collective.

    Args:
      extended: of the strategy.
      steps: that `share` has returned.
      order: the pass of which iterators will go on.
    """
    if not steps.needs_entropy:
        return
    for cache in _shared_caches(steps):
        changed = frozen(cache.parent, order)
        before, spec = cache.storage.note
        if before != changed:
            cache.hold(extended.node_memory.empty(cache.storage, (changed, spec)))


def _shared_caches(steps: Pipeline | Stream) -> list[NodeCache]:
    found: list[NodeCache] = []

    def look(parent: Any) -> Any:
        if isinstance(parent, NodeCache):
            found.append(parent)
        return parent.over(look)

    look(steps)
    return found


def _make(
    extended: StrategyExtended,
    parent: Pipeline,
    order: Pass,
    owner: object,
    slices: int,
) -> NodeCache:
    """Return a cache that holds the first row, or a few. Collective."""
    agreement, order = extended.agreement, frozen(parent, order)
    found: list[Any] = []

    def look() -> Any:
        found.append(_first_rows(parent, order, slices))
        return row_spec(found[0])

    # One rank reads rows and tells the others what they look like, if that can be told
    told = agreement.root_only(_CALL, lambda: _pickle(look()))
    spec = agreement.prepare(_CALL, lambda: pickle.loads(told) if told else look())
    assert parent.length is not None
    fields = fields_of(spec, parent.length * (parent.batch_size or 1))
    storage = extended.node_memory.allocate(owner, fields, (order, spec))
    cache = NodeCache(parent, storage, owner, slices)

    def fill() -> None:
        for rows in found[:1]:
            cache.fill(rows)

    extended.together(Call(_CALL), fill)  # so that nobody reads them again
    return cache


def _first_rows(parent: Pipeline, order: Pass, slices: int) -> Any:
    """Return the rows that are read first, stacked; none if there are none."""

    def read() -> Any:
        length = parent.length or 0
        if not parent.is_batched:
            return parent.elements(order, np.arange(min(1, length)))
        return parent.part(order, 0, slices, 0) if length else parent.empty_part(order)

    reading = Reading(parent)
    try:
        rows = reading.do(read)
    finally:
        reading.close()
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
