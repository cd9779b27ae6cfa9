"""References to a variable: `Variable.ref`, and the views that indexing returns."""

from __future__ import annotations

import functools
import operator
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mpidist.errors import ArgumentError
from mpidist.strategy import assignment

if TYPE_CHECKING:
    from mpidist.strategy.variables import Variable

__all__ = ["Part", "Reference", "number_class", "root_of"]


class Reference:
    """A hashable reference to a variable, returned by `Variable.ref`."""

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


class Part(np.ndarray[Any, np.dtype[Any]]):
    """A read-only view of part of a variable's copy; `assign` replaces that part.

    Results of computations with it are ordinary arrays. The base of every view, also of
    a view of a view, is the root array, which refers to the variable. So indexing a
    variable need not record anything.
    """

    __slots__ = ("variable",)  # in a root array: a weak reference
    # Lower than arrays, so that results are arrays; higher than numbers (-1e6)
    __array_priority__: ClassVar[float] = -1.0
    variable: weakref.ref[Variable]

    def __array_wrap__(
        self, array: Any, context: Any = None, return_scalar: bool = False
    ) -> Any:
        plain = np.asarray(array)
        return plain if plain.ndim else plain[()]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return np.asarray(self).__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(np.asarray(self))

    def assign(self, value: Any, name: str | None = None) -> Variable:
        """Replace this part of the variable; see `Variable.assign`.

        Args:
          value: an array that broadcasts to this shape.
          name: accepted for TensorFlow compatibility.

        Raises what `Variable.assign` raises; also MismatchError, on all replicas, if
        they assign to different parts, and ArgumentError for a copy of a part.
        """
        root = self if self.base is None else self.base
        if not isinstance(root, Part):
            root = self
        reference = getattr(root, "variable", None)
        if reference is None or self.dtype != root.dtype:
            raise ArgumentError(
                "assign needs a view of a variable, selected by integers and slices, "
                f"such as w[0] or w[:, 1:]; this is a copy: {self!r}"
            )
        variable = reference()
        if variable is None:
            raise ArgumentError("assign to a part: the variable no longer exists")
        offset = self.__array_interface__["data"][0]
        offset -= root.__array_interface__["data"][0]
        place = offset, self.shape, self.strides
        put = functools.partial(_put, variable.name, np.asarray(root), place)
        return assignment.update(variable, "assign", put, value, place)


def root_of(variable: Variable, array: Any) -> Any:
    """Return a view of a NumPy array whose views are parts of a variable."""
    if not isinstance(array, np.ndarray):
        return array
    is_dense = array.flags.c_contiguous or array.flags.f_contiguous
    root = (array if is_dense else array.copy()).view(Part)
    root.flags.writeable = False
    root.variable = weakref.ref(variable)
    return root


def _put(name: str, root: Any, place: Any, old: Any, value: Any) -> Any:
    """Return a copy of `old` with `value` in a part.

    Args:
      name: the variable's name, for messages.
      root: the array that the part is a view of.
      place: offset of the part in `root` in bytes, its shape and strides.
      old: the array to copy.
      value: broadcasts to the shape of the part.
    """
    offset, shape, strides = place
    new = np.empty_like(root)  # with the same strides
    new[...] = old
    part = np.ndarray(shape, new.dtype, new.ravel(order="K"), offset, strides)
    lacking = part.ndim - value.ndim
    if lacking < 0 or any(
        n not in (1, m) for n, m in zip(value.shape, shape[lacking:], strict=True)
    ):
        raise ArgumentError(
            f"a part of {name} has shape {shape}; a value of shape {value.shape} does "
            "not fit it"
        )
    part[...] = value
    return new


def _assign_number(self: Any, value: Any, name: str | None = None) -> Variable:
    """Replace this element of the variable; see `Variable.assign`."""
    root, key = self.source
    key = key if isinstance(key, tuple) else (key,)
    index = (*map(operator.index, key), ...)
    part: Part = root[index]
    return part.assign(value)


@functools.cache
def _subclass(kind: type[np.generic]) -> Any:
    members: dict[str, Any] = {
        "__slots__": ("source",),  # a root array and the index into it
        "__doc__": f"An element of a variable: {kind.__name__}, with `assign`.",
        "__repr__": lambda self: repr(kind(self)),
        "assign": _assign_number,
    }
    return type(kind.__name__, (kind,), members)


def number_class(array: Any) -> Any:
    """Return the class of elements that `assign` can replace, or None.

    None for NumPy's bool, which has no subclasses, and for CuPy arrays, whose elements
    are arrays.
    """
    is_number = (
        isinstance(array, np.ndarray) and array.dtype.char in "bhilqBHILQefdgFDG"
    )
    return _subclass(array.dtype.type) if is_number else None
