"""Gathering arrays whose lengths along an axis differ from rank to rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpidist import arithmetic, arrays, packing
from mpidist.transports import Transport

__all__ = ["gather"]


def gather(
    transport: Transport,
    ranks: int,
    given: Sequence[Any],
    axes: Sequence[int],
    bytes_per_pack: int,
    deadline: float | None,
    empty: Callable[[int, Any], Any],
) -> list[Any]:
    """Return the arrays of all ranks one behind the other. Collective.

    The lengths of all arrays travel first, together.

    Args:
      transport: of the arrays.
      ranks: how many there are; one does not communicate.
      given: arrays whose dtypes and other dimensions agree on all ranks.
      axes: of each array.
      bytes_per_pack: how large packs may get; 0 for no limit.
      deadline: see `Transport`.
      empty: gives an array of so many elements like another one.
    """
    lengths = np.array([a.shape[i] for a, i in zip(given, axes)], np.int64)
    everyone = np.empty((ranks, len(given)), np.int64)
    _gather_host(transport, ranks, lengths, everyone, deadline)
    results: list[Any] = [None] * len(given)
    # Packs must be the same on all ranks, so sizes are those of the results
    widths = [
        math.prod(packing.without(a.shape, (i,))) * a.dtype.itemsize
        for a, i in zip(given, axes)
    ]
    sizes = (everyone.sum(axis=0) * widths).tolist()
    for members in packing.groups(given, sizes, bytes_per_pack):
        gathered = _gather_group(
            transport,
            [given[j] for j in members],
            [axes[j] for j in members],
            everyone[:, members],
            deadline,
            empty,
        )
        for j, result in zip(members, gathered, strict=True):
            results[j] = result
    return results


def _gather_host(
    transport: Transport, ranks: int, send: Any, receive: Any, deadline: float | None
) -> None:
    """Gather equal lengths of host data from every rank."""
    if ranks == 1:
        receive[...] = send
        return
    transport.allgatherv(send, receive, [send.size] * ranks, deadline)


def _gather_group(
    transport: Transport,
    values: Sequence[Any],
    axes: Sequence[int],
    lengths: Any,
    deadline: float | None,
    empty: Callable[[int, Any], Any],
) -> Iterator[Any]:
    """Yield the gathered arrays of a pack of one dtype.

    `lengths[r, j]` is the length of rank r's array j along `axes[j]`.
    """
    xp = arrays.namespace(values[0])
    widths = [math.prod(packing.without(v.shape, (i,))) for v, i in zip(values, axes)]
    counts = (lengths * widths).sum(axis=1).tolist()
    pack = packing.pack([arithmetic.contiguous(v, v.dtype) for v in values])
    received = empty(sum(counts), pack)
    if len(counts) == 1:
        received[...] = pack.reshape(-1)
    else:
        transport.allgatherv(pack, received, counts, deadline)
    if len(values) == 1 and math.prod(values[0].shape[: axes[0]]) == 1:
        # Already in the order of the result
        total = int(lengths[:, 0].sum())
        yield received.reshape(packing.with_length(values[0].shape, axes[0], total))
        return
    starts = np.cumsum([0, *counts[:-1]])
    offsets = starts[:, None] + np.cumsum(lengths * widths, axis=1)
    offsets = offsets - lengths * widths
    for j, (value, axis, width) in enumerate(zip(values, axes, widths)):
        parts = [
            received[start : start + length * width].reshape(
                packing.with_length(value.shape, axis, length)
            )
            for start, length in zip(offsets[:, j].tolist(), lengths[:, j].tolist())
        ]
        yield xp.concatenate(parts, axis=axis)
