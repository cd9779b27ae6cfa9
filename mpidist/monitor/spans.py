"""Spans: named parts of a program in its timeline."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

from mpidist.util import tracing
from mpidist.util.representation import one_line

__all__ = ["span"]

F = TypeVar("F", bound=Callable[..., Any])


class span:  # noqa: N801 - it is used like a function
    """Name a part of the program in its timeline, if there is one. Not collective.

    A context manager, or a decorator of functions. Without a timeline it costs less
    than a microsecond.

    Args:
      name: any text; use few different names.

    Example:
      >>> with mpidist.span("forward"):
      ...     y = np.ones(3) * 2
      >>> @mpidist.span("backward")
      ... def backward():
      ...     return 1
      >>> backward()
      1
    """

    __slots__ = ("_begun", "_name")

    def __init__(self, name: str):
        self._name = name
        self._begun = 0

    def __repr__(self) -> str:
        return one_line(self, lambda: repr(self._name))

    def __enter__(self) -> span:
        self._begun = time.monotonic_ns() if tracing.active is not None else 0
        return self

    def __exit__(self, *_: object) -> None:
        trace = tracing.active
        if trace is not None and self._begun:
            name = self._name
            trace.span("span", str(name), self._begun, time.monotonic_ns())

    def __call__(self, function: F) -> F:
        """Return a function whose calls are spans."""
        name = self._name

        @functools.wraps(function)
        def spanned(*args: Any, **kwargs: Any) -> Any:
            with span(name):
                return function(*args, **kwargs)

        # It is called like the function
        return spanned  # type: ignore[return-value]
