"""Python objects as JSON text, with their arrays stored separately.

Unlike unpickling, decoding looks up no classes and runs no code.
"""

from __future__ import annotations

import array
import base64
import ctypes
import hashlib
import json
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

from mpidist.errors import ArgumentTypeError
from mpidist.util import validation

_PLAIN = {bool, int, float, str, type(None)}
# A subclass of these would come back as the base class, and a buffer as an array
_BASES = dict, list, tuple, set, frozenset, str, bytes, int, float, complex
_BUFFERS = bytearray, memoryview, array.array, mmap.mmap, ctypes.Array


def encode(value: Any, take: Callable[[Any, str], Any], name: str = "value") -> str:
    """Encode an object as JSON text, for `decode`.

    Args:
      value: None, a bool, number, str, bytes or bytearray; a nested dict, list or
        tuple; or anything that `take` accepts. No subclasses of these: decoding would
        return the base class.
      take: called as `take(leaf, name)` for objects of other types, such as arrays;
        returns a JSON-compatible object, or raises.
      name: what error messages call the value.
    """
    return json.dumps(_encode(value, take, name))


def _encode(value: Any, take: Callable[[Any, str], Any], name: str) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind in (bytes, bytearray):
        return [kind.__name__, base64.b64encode(value).decode()]
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
    is_number = isinstance(value, np.number)  # float64 is a float, too
    if isinstance(value, _BASES + _BUFFERS) and not is_number:
        raise ArgumentTypeError(
            f"{name} is {validation.shown(value)} of type {kind.__qualname__}, which "
            "would come back as another type on other replicas; convert it to a dict, "
            "list, tuple, str, bytes, number or array"
        )
    return ["leaf", take(value, name)]


def decode(text: str | bytes, give: Callable[[Any], Any]) -> Any:
    """Decode an object from the JSON text of `encode`.

    Args:
      text: the JSON text.
      give: called with each object that `take` returned; returns the leaf.
    """
    return _decode(json.loads(text), give)


def _decode(part: Any, give: Callable[[Any], Any]) -> Any:
    if not isinstance(part, list):
        return part
    kind, *rest = part
    if kind == "complex":
        return complex(*rest)
    if kind in ("bytes", "bytearray"):
        data = base64.b64decode(rest[0])
        return data if kind == "bytes" else bytearray(data)
    if kind == "dict":
        return {_decode(key, give): _decode(value, give) for key, value in rest[0]}
    if kind == "leaf":
        return give(rest[0])
    parts = [_decode(value, give) for value in rest[0]]
    return tuple(parts) if kind == "tuple" else parts


def hash62(text: str | bytes) -> int:
    """Return a 62-bit hash of `text`: the sum of two fits into an int64.

    Checkpoints of iterators contain such hashes, so the function must not change.
    """
    data = text.encode() if isinstance(text, str) else text
    hashed = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(hashed, "big") >> 2
