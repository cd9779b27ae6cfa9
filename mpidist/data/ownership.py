"""Arrays that generators and mapped functions return, and may fill again later.

TensorFlow copies each element. Here an array is copied unless it is new: nothing else
refers to its memory, as the count of references tells. (Python without a global lock
cannot tell this: there every array is copied.)
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from mpidist import nest

__all__ = ["owned"]

_CAN_COUNT = getattr(sys, "_is_gil_enabled", lambda: True)()
_PLAIN = (np.ndarray, np.generic, int, float, complex, str, bytes)


def owned(
    holder: list[Any],
    given: tuple[Any, ...] = (),
    convert: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a nest with copies of those arrays whose memory others may change.

    Args:
      holder: a list of the nest alone, which is taken out of it: nothing else may refer
        to the nest, as references to its arrays are counted.
      given: nests with whose arrays the result may share memory.
      convert: of each leaf, before.
    """
    if type(holder[0]) is np.ndarray and convert is None and _is_new(holder, 0):
        return holder.pop()
    leaves, join = _take_apart(holder)
    if convert is not None:
        leaves = list(map(convert, leaves))
    for i in range(len(leaves)):
        if isinstance(leaves[i], np.ndarray):
            is_own = _is_new(leaves, i)
        else:
            is_own = isinstance(leaves[i], _PLAIN) or not _is_array(leaves[i])
        if not (is_own or _is_of(leaves[i], given)):
            leaves[i] = _copy(leaves[i])
    return join(leaves)


def _is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array of another library than NumPy."""
    return hasattr(leaf, "__dlpack__")


def _is_of(array: Any, given: tuple[Any, ...]) -> bool:
    """Return whether an array has memory of an array of `given`."""
    for argument in given:
        if argument is array:
            return True
    memory = _memory(array)
    return any(memory is _memory(leaf) for leaf in nest.flatten(given)[0])


def _take_apart(
    holder: list[Any],
) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of a nest, to which nothing else refers, and what joins them.

    Without optree for what most functions return: that is many times faster.
    """
    value = holder.pop()
    if type(value) is np.ndarray:
        return [value], operator.itemgetter(0)
    if type(value) is tuple and all(isinstance(x, _PLAIN) for x in value):
        return list(value), tuple
    if type(value) is dict and all(isinstance(x, _PLAIN) for x in value.values()):
        keys = tuple(value)
        return list(value.values()), lambda leaves: dict(zip(keys, leaves, strict=True))
    leaves, spec = nest.flatten(value)
    return leaves, functools.partial(nest.unflatten, spec)


def _count_references(objects: list[Any], i: int) -> int:
    return sys.getrefcount(objects[i])


# What Python counts for an object that only a list refers to
_ALONE = _count_references([np.empty(1)], 0)


def _is_new(arrays: list[Any], i: int, views: int = 0) -> bool:
    """Return whether only a list, and some known views, refer to an array's memory."""
    if not _CAN_COUNT or _count_references(arrays, i) > _ALONE + views:
        return False
    if arrays[i].base is None:
        return bool(arrays[i].flags.owndata)
    # A view of a buffer that is no array may be of memory that others know
    base = [arrays[i].base]
    return isinstance(base[0], np.ndarray) and _is_new(base, 0, views=1)


def _memory(leaf: Any) -> Any:
    """Return the object that has the memory of an array, perhaps itself."""
    while isinstance(leaf, np.ndarray) and leaf.base is not None:
        leaf = leaf.base
        if not isinstance(leaf, np.ndarray):  # as of np.lib.stride_tricks
            leaf = getattr(leaf, "base", leaf)
    return leaf


def _copy(array: Any) -> Any:
    """Return a copy of an array of NumPy or another library."""
    copy: Callable[[], Any] | None = getattr(array, "clone", None)  # PyTorch
    copy = copy or getattr(array, "copy", None)
    return array if copy is None else copy()
