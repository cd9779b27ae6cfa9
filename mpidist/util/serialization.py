"""Python objects as JSON text, with their arrays beside it.

Only data come out of it: other than pickle, it looks up no classes and runs no code.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.errors import ArgumentTypeError
from mpidist.util import validation

__all__ = ["decode", "dtype_of", "encode", "text_of"]

_PLAIN = {bool, int, float, str, type(None)}


def encode(value: Any, take: Callable[[Any, str], Any], name: str = "value") -> str:
    """Return JSON text that `decode` makes the same object from.

    Args:
      value: None, a bool, number, str, bytes, or array; or a dict, list or tuple of
        such, nested. No subclasses: they would come back as something else.
      take: called as `take(leaf, name)` for what is none of these; returns what JSON
        can hold, or raises.
      name: how messages call the value.
    """
    return json.dumps(_encode(value, take, name))


def _encode(value: Any, take: Callable[[Any, str], Any], name: str) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if kind in (list, tuple):
        parts = [_encode(v, take, f"{name}[{i}]") for i, v in enumerate(value)]
        return [kind.__name__, parts]
    if kind is dict:
        pairs = []
        for key, part in value.items():
            if type(key) not in _PLAIN | {tuple, bytes}:
                raise ArgumentTypeError(
                    f"{name} has the key {validation.shown(key)}: keys must be str, "
                    "numbers, bytes or tuples of them"
                )
            there = _encode(part, take, f"{name}[{validation.shown(key)}]")
            pairs.append([_encode(key, take, name), there])
        return ["dict", pairs]
    if isinstance(value, dict | list | tuple | str | bytes | set | frozenset):
        raise ArgumentTypeError(
            f"{name} is {validation.shown(value)} of type {kind.__qualname__}, which "
            "would come back as another type on other replicas; convert it to a dict, "
            "list, tuple or str"
        )
    return ["leaf", take(value, name)]


def decode(text: str | bytes, give: Callable[[Any], Any]) -> Any:
    """Return the object of which `encode` made the text.

    Args:
      text: JSON.
      give: called with what `take` returned; returns the leaf.
    """
    return _decode(json.loads(text), give)


def _decode(part: Any, give: Callable[[Any], Any]) -> Any:
    if not isinstance(part, list):
        return part
    kind, *rest = part
    if kind == "complex":
        return complex(*rest)
    if kind == "bytes":
        return base64.b64decode(rest[0])
    if kind == "dict":
        return {_decode(key, give): _decode(value, give) for key, value in rest[0]}
    if kind == "leaf":
        return give(rest[0])
    parts = [_decode(value, give) for value in rest[0]]
    return tuple(parts) if kind == "tuple" else parts


def text_of(dtype: np.dtype[Any]) -> Any:
    """Return what `dtype_of` makes the dtype from, for JSON."""
    is_foreign = dtype.kind == "V" and dtype.fields is None and dtype.name[:4] != "void"
    return dtype.name if is_foreign else np.lib.format.dtype_to_descr(dtype)


def dtype_of(text: Any) -> np.dtype[Any]:
    """Return the dtype that `text_of` has described."""
    if isinstance(text, str) and text.isalnum() and not hasattr(np, text):
        import ml_dtypes  # of the one that has such an array, and so of this one

        return np.dtype(getattr(ml_dtypes, text, text))
    return np.lib.format.descr_to_dtype(_with_tuples(text))


def _with_tuples(text: Any) -> Any:
    """Return a description of fields as NumPy wants it: JSON has lists only."""
    if isinstance(text, str):
        return text
    return [tuple(map(_field, field)) for field in text]


def _field(part: Any) -> Any:
    """Return a name, a title, a dtype or a shape of a field."""
    if not isinstance(part, Sequence) or isinstance(part, str):
        return part
    is_fields = part and isinstance(part[0], list)
    return _with_tuples(part) if is_fields else tuple(part)
