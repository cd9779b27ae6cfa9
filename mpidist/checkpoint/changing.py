"""Changing nests where they lie, as far as Python lets them be changed."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from mpidist.checkpoint.names import as_name
from mpidist.checkpoint.objects import Tracked

__all__ = ["Change", "become", "change_children"]

# Returns what is to stand in the place of an object: itself, or another one
Change = Callable[[], Any]


def become(value: Any, new: Any) -> Any:
    """Return `value` after it has become equal to `new`; or `new` where it cannot."""
    if isinstance(value, MutableMapping) and isinstance(new, Mapping):
        for key in list(value):  # in the new order, and no Counter adds up
            del value[key]
        for key, child in new.items():
            value[key] = child
        return value
    is_sequence = isinstance(new, list | tuple | collections.deque)
    if isinstance(value, list) and is_sequence:
        value[:] = new
        return value
    if isinstance(value, collections.deque) and is_sequence:
        value.clear()
        value.extend(new)
        return value
    if hasattr(value, "_fields") and type(new) is tuple:  # of an older version
        return type(value)(*new) if len(new) == len(value._fields) else new
    return new


def change_children(value: Any, changes: Mapping[str, Change]) -> Any:
    """Return a container after its children were changed."""
    if isinstance(value, Tracked):
        value = value.objects
    if isinstance(value, Mapping):
        keys = {as_name(key, ()): key for key in value}
        new = {keys[name]: change() for name, change in changes.items()}
        same = all(new[key] is value[key] for key in new)
        if same or isinstance(value, MutableMapping):
            for key, child in new.items():
                if child is not value[key]:
                    value[key] = child  # type: ignore[index]  # it is mutable
            return value
        return type(value)({**value, **new})  # type: ignore[call-arg]  # as tf.nest's
    made = [changes[str(i)]() if str(i) in changes else x for i, x in enumerate(value)]
    if all(a is b for a, b in zip(made, value, strict=True)):
        return value
    if isinstance(value, list | collections.deque):
        for i, child in enumerate(made):
            value[i] = child
        return value
    return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
