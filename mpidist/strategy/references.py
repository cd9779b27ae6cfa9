"""What refers to a variable: `Variable.ref`, and the parts that indexing gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpidist.strategy.variables import Variable

__all__ = ["Reference"]


class Reference:
    """A hashable reference to a variable: what `Variable.ref` returns."""

    __slots__ = ("_variable",)

    def __init__(self, variable: Variable):
        self._variable = variable

    def deref(self) -> Variable:
        """Return the variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reference):
            return NotImplemented
        return self._variable is other._variable

    def __hash__(self) -> int:
        return id(self._variable)

    def __repr__(self) -> str:
        return f"<Reference to {self._variable!r}>"
