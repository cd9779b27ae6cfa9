"""Check what was read from a file against a schema, before anything uses it.

A schema is `str`; `bool`; a `Number`; `[schema]`, a list of any length;
`(schema, ...)`, a list of that length; `{"name": schema}`, a dict with these keys and
perhaps others; or `{str: schema}`, a dict with any keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mpidist.util.representation import printable


class Number(NamedTuple):
    """The schema of a finite number between two bounds."""

    least: float
    most: float
    is_integer: bool = True


# Numbers that neither overflow in sums nor as floats
INTEGER = Number(-(1 << 62), 1 << 62)
COUNT = Number(0, 1 << 52)
SIGNED = Number(-1e15, 1e15, is_integer=False)
SECONDS = Number(0.0, 1e11, is_integer=False)


def conform(value: Any, schema: Any, name: str = "the content") -> Any:
    """Return `value` with only what the schema names, and text made printable.

    Raises:
      ValueError: it does not conform; the message says where.
    """
    if isinstance(schema, Number):
        return _number(value, schema, name)
    if schema is bool:
        return _typed(value, bool, name, "true or false")
    if schema is str:
        return printable(_typed(value, str, name, "text"))
    if isinstance(schema, list | tuple):
        items = _typed(value, list, name, "a list")
        each = schema * len(items) if isinstance(schema, list) else schema
        if len(items) != len(each):
            raise ValueError(f"{name} has {len(items)} items, not {len(each)}")
        pairs = enumerate(zip(items, each, strict=True))
        return [conform(item, part, f"{name}[{i}]") for i, (item, part) in pairs]
    return _dict(_typed(value, dict, name, "a dict"), schema, name)


def _typed(value: Any, kind: type, name: str, what: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{name} is not {what} but of type {type(value).__name__}")
    return value


def _number(value: Any, schema: Number, name: str) -> Any:
    is_kind = type(value) is int or (type(value) is float and not schema.is_integer)
    if not is_kind or not schema.least <= value <= schema.most:
        what = "an integer" if schema.is_integer else "a number"
        raise ValueError(f"{name} is not {what} from {schema.least} to {schema.most}")
    return value


def _dict(value: Mapping[str, Any], schema: Mapping[Any, Any], name: str) -> Any:
    if str in schema:
        conforming = {
            printable(key): conform(item, schema[str], f"{name}.{printable(key)}")
            for key, item in value.items()
        }
        if len(conforming) < len(value):
            raise ValueError(f"{name} has two keys that differ in control characters")
        return conforming
    if missing := [key for key in schema if key not in value]:
        raise ValueError(f"{name} has no {missing[0]!r}")
    return {key: conform(value[key], schema[key], f"{name}.{key}") for key in schema}
