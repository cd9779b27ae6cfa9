"""Whether arguments can be used: each check returns what was given, in one form.

Each raises an ArgumentTypeError or an ArgumentError that names the argument, and what
was given, cut short where that is long.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from mpidist.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "LARGEST",
    "call_arguments",
    "dtype",
    "function",
    "instance",
    "integer",
    "number",
    "optional_function",
    "optional_integer",
    "path",
    "shown",
    "switch",
]

T = TypeVar("T")
LARGEST = (1 << 63) - 1  # of the integers in arrays
_LONGEST_PATH = 4095  # of Linux
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 400
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 20


def shown(value: Any) -> str:
    """Return `repr(value)` for a message, cut short where it is long."""
    try:
        return _SHORT.repr(value)
    except Exception:  # such as Python's limit for the digits of an integer
        return f"<{type(value).__name__}>"


def integer(
    name: str,
    value: Any,
    least: int | None = None,
    also: str = "",
    most: int = LARGEST,
) -> int:
    """Return an integer, which may be NumPy's, as Python's; no bool.

    Args:
      name: of the argument.
      value: what was given.
      least: what it must be at least.
      also: what else it may be, for messages: " or None".
      most: what it may be at most.
    """
    try:
        # NumPy 1's bool is an index, with a warning at most
        is_bool = isinstance(value, bool | np.bool_)
        found = None if is_bool else operator.index(value)
    except Exception:  # a PerReplica has an error of its own
        found = None
    if found is None:
        raise ArgumentTypeError(f"{name} must be an integer{also}, not {shown(value)}")
    if least is not None and found < least:
        raise ArgumentError(f"{name} must be >= {least}{also}, not {shown(found)}")
    if found > most:
        raise ArgumentError(f"{name} must be <= {most}, not {shown(found)}")
    return found


def optional_integer(
    name: str,
    value: Any,
    least: int | None = None,
    also: str = " or None",
    most: int = LARGEST,
) -> int | None:
    """Return None, or what `integer` does."""
    return None if value is None else integer(name, value, least, also, most)


def number(name: str, value: Any, least: str, also: str = "") -> float:
    """Return a real number as a float, if it is not below a bound, and no NaN.

    Args:
      name: of the argument.
      value: what was given.
      least: the bound: "> 0" or ">= 0".
      also: what follows it in messages: " or None".
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(f"{name} must be a number, not {shown(value)}")
    try:
        found = float(value)
    except OverflowError:  # of an integer
        found = math.inf if int(value) > 0 else -math.inf  # type: ignore[call-overload]
    if not (found > 0 or (found == 0 and least == ">= 0")):
        raise ArgumentError(f"{name} must be {least}{also}, not {shown(value)}")
    return found


def switch(name: str, value: Any) -> bool:
    """Return True or False, which may be NumPy's."""
    if not isinstance(value, bool | np.bool_):
        raise ArgumentTypeError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def instance(name: str, value: Any, kind: type[T]) -> T:
    """Return an object of a class of mpidist."""
    if not isinstance(value, kind):
        what = f"mpidist.{kind.__name__}"
        raise ArgumentTypeError(f"{name} must be {what}, not {shown(value)}")
    return value


def function(name: str, value: Any) -> Callable[..., Any]:
    """Return what can be called."""
    if not callable(value):
        raise ArgumentTypeError(f"{name} must be a function, not {shown(value)}")
    return value  # type: ignore[no-any-return]  # nothing more is known


def optional_function(name: str, value: Any) -> Callable[..., Any] | None:
    """Return None, or what can be called."""
    return None if value is None else function(name, value)


def call_arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the `args` and `kwargs` with which a function is to be called."""
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
    """Return the path that a str, bytes or os.PathLike is, as a str."""
    try:
        text = os.fsdecode(value)
    except Exception:  # of a PathLike that has none
        raise ArgumentTypeError(f"{name} must be a path, not {shown(value)}") from None
    try:
        given = os.fsencode(text)
        is_good = 0 < len(given) <= _LONGEST_PATH and b"\0" not in given
    except UnicodeEncodeError:
        is_good = False
    if not is_good:
        raise ArgumentError(
            f"{name} must be a path of 1 to {_LONGEST_PATH} bytes, none of them NUL, "
            f"not {shown(value)}"
        )
    return text


def dtype(name: str, value: Any) -> np.dtype[Any]:
    """Return the dtype that `value` is or names."""
    try:
        if value is not None:  # which NumPy takes for float64
            found: np.dtype[Any] = np.dtype(value)
            if found != np.dtype([]):  # which an empty list is
                return found
    except Exception:  # also of things that look like the parts of a dtype
        pass
    raise ArgumentTypeError(f"{name} must be a dtype, not {shown(value)}")
