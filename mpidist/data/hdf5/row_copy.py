"""Copying rows out of the bytes of a file, in pieces that threads can share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.util.buffers import Buffers

__all__ = [
    "Bytes",
    "Map",
    "Offsets",
    "copy_rows",
    "items_of",
    "pick_rows",
    "spans_of",
    "take_rows",
]


Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]
# `map`, or what maps in threads
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]

# To wake a thread takes as long as copying 0.5 MB
_PIECE_BYTES = 2 << 20
# Copying so many takes longer than Python needs for each row
_LONG_BYTES = 64 << 10
# Wanted bytes this near to each other are read in one call, up to this many
_GAP_BYTES = 32 << 10
_CALL_BYTES = 8 << 20


def copy_rows(source: Bytes, offsets: Offsets, found: Bytes, parallel: Map) -> None:
    """Fill each row of `found`, `(offsets, bytes)`, from an offset of `source`."""
    rows, size_bytes = found.shape
    if size_bytes >= _LONG_BYTES:
        _copy_long(source, offsets, found, parallel)
        return
    items = items_of(source, size_bytes)
    whole = found.view(items.dtype).reshape(-1)

    def copy(piece: slice) -> None:
        whole[piece] = items[offsets[piece]]

    list(parallel(copy, _pieces(rows, size_bytes)))


def take_rows(
    source: Bytes, offset: int, rows: Offsets, found: Bytes, parallel: Map
) -> None:
    """Fill `found`, `(rows, bytes)`, with rows that lie side by side from `offset`.

    Faster than `copy_rows`, with the same result.
    """
    size_bytes = found.shape[1]
    if not rows.size or size_bytes >= _LONG_BYTES:
        _copy_long(source, offset + rows * size_bytes, found, parallel)
        return
    stop = offset + (int(rows.max()) + 1) * size_bytes
    table = source[offset:stop].reshape(-1, size_bytes)

    def copy(piece: slice) -> None:
        # "clip" writes to `found` at once; no row is beyond the last
        table.take(rows[piece], axis=0, out=found[piece], mode="clip")

    list(parallel(copy, _pieces(rows.size, size_bytes)))


def _copy_long(source: Bytes, offsets: Offsets, found: Bytes, parallel: Map) -> None:
    """Do what `copy_rows` does, row by row; very long ones are cut."""
    rows, size_bytes = found.shape
    starts = offsets.tolist()

    def copy(piece: tuple[slice, slice]) -> None:
        some, part = piece
        for row, start in zip(found[some, part], starts[some], strict=True):
            row[:] = source[start + part.start : start + part.stop]

    parts = _pieces(size_bytes, 1)
    several = _pieces(rows, size_bytes) if len(parts) == 1 else _pieces(rows, 1 << 62)
    list(parallel(copy, itertools.product(several, parts)))


def _pieces(count: int, size_bytes: int) -> list[slice]:
    """Cut so many items of `size_bytes` into pieces that are worth a thread each."""
    pieces = max(1, min(count, round(count * size_bytes / _PIECE_BYTES)))
    edges = [count * i // pieces for i in range(pieces + 1)]
    return [slice(*edge) for edge in itertools.pairwise(edges)]


def items_of(data: Bytes, size_bytes: int) -> npt.NDArray[np.void]:
    """Return what starts at each byte of `data`, an array that overlaps itself."""
    count = max(0, data.size - size_bytes + 1)
    items: npt.NDArray[np.void] = np.ndarray(
        (count,), np.dtype((np.void, size_bytes)), data, strides=(1,)
    )
    return items


def spans_of(ordered: Offsets, size_bytes: int) -> list[tuple[int, int]]:
    """Cut increasing offsets where two are far apart, or a call would be too long."""
    if not ordered.size:
        return []
    is_far = np.diff(ordered) - size_bytes > _GAP_BYTES
    cuts = [0, *(np.flatnonzero(is_far) + 1).tolist(), ordered.size]
    spans = []
    for first, last in itertools.pairwise(cuts):
        while first < last:
            reach = int(ordered[first]) + max(_CALL_BYTES, size_bytes) - size_bytes
            stop = min(last, int(np.searchsorted(ordered, reach, "right")))
            spans.append((first, stop))
            first = stop
    return spans


Numbers = npt.NDArray[np.int64]

# Longer rows take longer than Python needs for each array
_SHORT_BYTES = 16 << 10
_GATHER_BYTES = 1 << 20  # NumPy collects rows elsewhere first; so much is in a cache


def pick_rows(
    arrays: Sequence[Any], which: Numbers, rows: Numbers, buffers: Buffers
) -> Any:
    """Return row `rows[i]` of `arrays[which[i]]` for each i, in one of `buffers`.

    Args:
      arrays: at least one, all `(rows, *shape)` with the same shape of a row and the
        same dtype, contiguous in memory.
      which: the number of the array that each wanted row is in.
      rows: its number there, which must exist.
      buffers: where the rows are copied to.
    """
    first = arrays[0]
    row_bytes = first[:1].nbytes
    result = buffers.empty((which.size, *first.shape[1:]), first.dtype)
    if 0 < row_bytes <= _SHORT_BYTES and not first.dtype.hasobject:
        _pick_short(arrays, which, rows, result)
        return result
    for number, array in enumerate(arrays):
        here = np.flatnonzero(which == number)
        result[here] = array[rows[here]]
    return result


class _Memory:
    """Bytes of this process from an address on, as items that start at each byte."""

    def __init__(self, start: int, stop: int, item_bytes: int):
        self.__array_interface__ = {
            "version": 3,
            "data": (start, True),
            "shape": (stop - start - item_bytes + 1,),
            "strides": (1,),
            "typestr": f"|V{item_bytes}",
        }


def _pick_short(
    arrays: Sequence[Any], which: Numbers, rows: Numbers, result: Any
) -> None:
    """Copy the bytes of the rows by their addresses: one call for all arrays."""
    starts = np.array([a.__array_interface__["data"][0] for a in arrays], np.int64)
    stop = max(s + a.nbytes for s, a in zip(starts.tolist(), arrays, strict=True))
    start, row_bytes = int(starts.min()), arrays[0][:1].nbytes
    memory = np.asarray(_Memory(start, stop, row_bytes))
    found = result.reshape(-1).view(memory.dtype)
    places, step = starts[which] - start + rows * row_bytes, _GATHER_BYTES // row_bytes
    for first in range(0, len(places), step):
        found[first : first + step] = memory[places[first : first + step]]
