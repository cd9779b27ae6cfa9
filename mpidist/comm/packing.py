"""Shapes and packs: several arrays as one, axes, and shapes with an axis changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from mpidist.device import arrays
from mpidist.errors import ArgumentError
from mpidist.util import validation
from mpidist.util.available_memory import LINE_BYTES
from mpidist.util.validation import shown

# From this size on, ranks agree after they have reserved memory for results whose
# size they learn late; for less, another round would cost more than it saves
LARGE_BYTES = 256 << 10
Axis = int | Sequence[int]
Kind = tuple[np.dtype[Any], bool]  # a dtype, and whether arrays are on a GPU


def normalize_axes(axis: Axis, ndim: int, name: str = "value") -> tuple[int, ...]:
    """Return `axis`, an integer or several, as distinct numbers in 0..ndim-1.

    Raises:
      ArgumentError: out of range, repeated, or empty.
      ArgumentTypeError: not an integer, or a list or tuple of integers.
    """
    several: Sequence[Any] = axis if isinstance(axis, list | tuple) else [axis]
    normal = tuple(normalize_axis(i, ndim, name) for i in several)
    if not normal or len(set(normal)) < len(normal):
        raise ArgumentError(
            f"axis must name each dimension once, not {validation.shown(axis)}"
        )
    return normal


def normalize_axis(axis: int, ndim: int, name: str = "value") -> int:
    """Return `axis` as a number in 0..ndim-1.

    Raises:
      ArgumentError: out of range.
      ArgumentTypeError: not an integer.
    """
    number = validation.integer("axis", axis)
    if not -ndim <= number < ndim:
        raise ArgumentError(
            f"axis {shown(number)} is out of range for {name}, which has {ndim} "
            "dimensions"
        )
    return number % ndim


def without(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return `shape` without the dimensions `axes`."""
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def with_length(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    """Return `shape` with `length` in place of its length along `axis`."""
    return (*shape[:axis], length, *shape[axis + 1 :])


def kind_of(array: Any) -> Kind:
    """Return what arrays of one pack have in common."""
    return array.dtype, arrays.is_device_array(array)


def groups(
    kinds: Sequence[Kind],
    sizes: Sequence[int],
    bytes_per_pack: int,
    whole: Collection[Kind] = (),
) -> Iterator[list[int]]:
    """Yield the numbers of the arrays of each pack: of one kind, up to a size.

    `sizes` are in bytes, and equal on all ranks. Kinds of `whole` get one pack.
    """
    by_kind: dict[Kind, list[int]] = {}
    for j, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(j)
    for kind, same in by_kind.items():
        members: list[int] = []
        size, limit = 0, 0 if kind in whole else bytes_per_pack
        for j in same:
            if members and limit and size + sizes[j] > limit:
                yield members
                members, size = [], 0
            members.append(j)
            size += sizes[j]
        yield members


def edges(count: int, parts: int, itemsize: int) -> list[int]:
    """Return where each of `parts` parts of an array begins, and the end of the last.

    Parts are whole cache lines, of nearly equal size.
    """
    # So that no two ranks write into one cache line.
    line = max(1, LINE_BYTES // itemsize)
    lines = -(-count // line)
    return [min(lines * part // parts * line, count) for part in range(parts + 1)]


def pack(values: Sequence[Any]) -> Any:
    """Return one array with the elements of all; a single array as it is."""
    if len(values) == 1:
        # No copy: the caller must not write to it.
        return values[0]
    flat, dtype = [value.reshape(-1) for value in values], values[0].dtype
    return arrays.namespace(values[0]).concatenate(flat, dtype=dtype)


def unpack(pack: Any, shapes: Sequence[tuple[int, ...]]) -> Iterator[Any]:
    """Yield views of `pack` with the given shapes."""
    start = 0
    flat = pack.reshape(-1)
    for shape in shapes:
        stop = start + math.prod(shape)
        yield flat[start:stop].reshape(shape)
        start = stop
