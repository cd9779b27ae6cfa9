"""Validate arguments: each function returns the value, converted to one type.

Each raises an ArgumentTypeError or an ArgumentError that names the argument and shows
its value, shortened if it is long.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mpidist.errors import ArgumentError, ArgumentTypeError

T = TypeVar("T")
LARGEST = (1 << 63) - 1  # of the integers in arrays
_LONGEST_PATH = 4095  # of Linux
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 400
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 20


def shown(value: Any) -> str:
    """Return `repr(value)` for an error message, shortened if it is long."""
    try:
        return _SHORT.repr(value)
    except Exception:  # such as Python's limit for the digits of an integer
        return f"<{type(value).__name__}>"


def integer(
    name: str, value: Any, least: int | None = None, also: str = "", most: int = LARGEST
) -> int:
    """Return an integer of Python or NumPy as an int; a bool is refused.

    Args:
      name: the argument's name.
      value: its value.
      least: the minimum.
      also: what else is allowed, for messages: " or None".
      most: the maximum.
    """
    try:
        # NumPy 1's bool is an index, with a warning at most
        is_bool = isinstance(value, bool | np.bool_)
        index = None if is_bool else operator.index(value)
    except Exception:  # a PerReplica raises an error of its own
        index = None
    if index is None:
        raise ArgumentTypeError(f"{name} must be an integer{also}, not {shown(value)}")
    if least is not None and index < least:
        raise ArgumentError(f"{name} must be >= {least}{also}, not {shown(index)}")
    if index > most:
        raise ArgumentError(f"{name} must be <= {most}, not {shown(index)}")
    return index


def optional_integer(
    name: str,
    value: Any,
    least: int | None = None,
    also: str = " or None",
    most: int = LARGEST,
) -> int | None:
    """Do what `integer` does, but also accept None."""
    return None if value is None else integer(name, value, least, also, most)


def number(name: str, value: Any, least: str, also: str = "") -> float:
    """Return a real number as a float; NaN and numbers below the bound are refused.

    Args:
      name: the argument's name.
      value: its value.
      least: the bound: "> 0" or ">= 0".
      also: what else is allowed, for messages: " or None".
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(f"{name} must be a number, not {shown(value)}")
    try:
        real = float(value)
    except OverflowError:  # a large integer
        real = math.inf if int(value) > 0 else -math.inf  # type: ignore[call-overload]
    if not (real > 0 or (real == 0 and least == ">= 0")):
        raise ArgumentError(f"{name} must be {least}{also}, not {shown(value)}")
    return real


def switch(name: str, value: Any) -> bool:
    """Return a bool of Python or NumPy as a bool."""
    if not isinstance(value, bool | np.bool_):
        raise ArgumentTypeError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def instance(name: str, value: Any, kind: type[T]) -> T:
    """Return an object of `kind`, a public class of mpidist, or of Python."""
    if not isinstance(value, kind):
        room = "" if kind.__module__ == "builtins" else "mpidist."
        what = f"{room}{kind.__name__}"
        raise ArgumentTypeError(f"{name} must be {what}, not {shown(value)}")
    return value


def function(name: str, value: Any) -> Callable[..., Any]:
    """Return a callable."""
    if not callable(value):
        raise ArgumentTypeError(f"{name} must be a function, not {shown(value)}")
    return value  # type: ignore[no-any-return]


def optional_function(name: str, value: Any) -> Callable[..., Any] | None:
    """Return a callable or None."""
    return None if value is None else function(name, value)


def call_arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `args` and `kwargs` of a function call as a tuple and a dict."""
    if not isinstance(args, tuple | list):
        raise ArgumentError(f"args must be a tuple or a list, not {shown(args)}")
    if kwargs is None:
        return tuple(args), {}
    if not isinstance(kwargs, Mapping) or not all(type(k) is str for k in kwargs):
        raise ArgumentTypeError(
            f"kwargs must be a dict of arguments by name, not {shown(kwargs)}"
        )
    return tuple(args), dict(kwargs)


def path(name: str, value: Any) -> str:
    """Return a str, bytes or os.PathLike as a str."""
    try:
        text = os.fsdecode(value)
    except Exception:  # also of a PathLike's own method
        raise ArgumentTypeError(f"{name} must be a path, not {shown(value)}") from None
    try:
        encoded = os.fsencode(text)
        is_good = 0 < len(encoded) <= _LONGEST_PATH and b"\0" not in encoded
    except UnicodeEncodeError:
        is_good = False
    if not is_good:
        raise ArgumentError(
            f"{name} must be a path of 1 to {_LONGEST_PATH} bytes, none of them NUL, "
            f"not {shown(value)}"
        )
    return text


def absolute(name: str, value: Any) -> Path:
    """Return a path that stays the same when the program changes its folder."""
    text = path(name, value)
    try:
        return Path(text).absolute()
    except OSError as error:  # it was removed, or is on a disk that is gone
        raise ArgumentError(
            f"{name} must be an absolute path, not {shown(text)}, because the current "
            f"folder cannot be found: {error}"
        ) from None


def members_of(dtype: np.dtype[Any]) -> tuple[tuple[str, Any], ...]:
    """Return the members of an enum of HDF5, or of the enums in a dtype.

    Also the dtype of arrays of any length. `==` of dtypes ignores them.
    """
    if dtype.subdtype:
        return members_of(dtype.base)
    nested = [(name, members_of(dtype[name])) for name in dtype.names or ()]
    metadata: Mapping[str, Any] = dtype.metadata or {}
    enum = sorted((k, int(v)) for k, v in (metadata.get("enum") or {}).items())
    if isinstance(item := metadata.get("vlen"), np.dtype):
        nested.append((str(item.newbyteorder("=")), members_of(item)))
    return (*enum, *(pair for pair in nested if pair[1] or not dtype.names))


def dtype(name: str, value: Any) -> np.dtype[Any]:
    """Return the dtype that `value` is, or names."""
    try:
        if value is not None:  # np.dtype(None) is float64
            result: np.dtype[Any] = np.dtype(value)
            if result != np.dtype([]):  # of an empty list
                return result
    except Exception:  # np.dtype raises errors of many types
        pass
    raise ArgumentTypeError(f"{name} must be a dtype, not {shown(value)}")
