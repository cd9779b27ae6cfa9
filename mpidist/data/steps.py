"""Choosing the steps that fit a dataset, and running them in order."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from mpidist.data import batching, caching, ordering, sequential
from mpidist.data.pipeline import Pipeline
from mpidist.data.stream import InOrder, Stream

__all__ = [
    "Steps",
    "concatenate",
    "in_order",
    "is_sharded",
    "read_ahead",
    "steps_of",
]

_END = object()


class Steps(NamedTuple):
    """The classes of steps, which are called with the parent and their arguments."""

    map: Callable[..., Any]
    batch: Callable[..., Any]
    shuffle: Callable[..., Any]
    repeat: Callable[..., Any]
    window: Callable[..., Any]
    shard: Callable[..., Any]
    cache: Callable[..., Any]


_ANY_ELEMENT = Steps(
    batching.Map,
    batching.Batch,
    ordering.Shuffle,
    ordering.Repeat,
    ordering.Window,
    ordering.Shard,
    caching.Cache,
)
_IN_ORDER = Steps(
    sequential.Map,
    sequential.Batch,
    sequential.Shuffle,
    sequential.Repeat,
    sequential.Window,
    sequential.Shard,
    caching.StreamCache,
)


def steps_of(pipeline: Pipeline | Stream) -> Steps:
    """Return the steps that may come after `pipeline`."""
    return _IN_ORDER if isinstance(pipeline, Stream) else _ANY_ELEMENT


def is_sharded(steps: Pipeline | Stream) -> bool:
    """Return whether one of the steps is a shard."""
    found = [isinstance(steps, ordering.Shard | sequential.Shard)]

    def look(parent: Any) -> Any:
        found.append(is_sharded(parent))
        return parent

    steps.over(look)
    return any(found)


def in_order(pipeline: Pipeline | Stream) -> Stream:
    """Return the elements of `pipeline` as a stream."""
    return pipeline if isinstance(pipeline, Stream) else InOrder(pipeline)


def concatenate(
    first: Pipeline | Stream, second: Pipeline | Stream
) -> Pipeline | Stream:
    """Return the elements of one, then those of the other."""
    if isinstance(first, Pipeline) and isinstance(second, Pipeline):
        return ordering.Concatenate(first, second)
    return sequential.Concatenate(in_order(first), in_order(second))


def read_ahead(elements: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield `elements`, reading `count` of them ahead in a thread."""
    reader = ThreadPoolExecutor(1, "mpidist-prefetch")
    try:
        ahead: collections.deque[Future[Any]] = collections.deque(
            reader.submit(next, elements, _END) for _ in range(count)
        )
        while (element := ahead.popleft().result()) is not _END:
            ahead.append(reader.submit(next, elements, _END))
            yield element
    finally:
        reader.shutdown(wait=True, cancel_futures=True)
