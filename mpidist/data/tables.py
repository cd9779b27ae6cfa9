"""Where a cache keeps its elements, by their number.

A `RowTable` has rows of equal dtypes and shapes, in arrays that several threads may
use, and several processes; `Cells` has elements of any kind, in one process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist import nest
from mpidist.data.sources import Positions, stack
from mpidist.data.spec import TensorSpec
from mpidist.memory.storage import Field, Storage

__all__ = ["Cells", "RowTable", "copied", "fields_of", "row_spec", "unkeepable"]

_KINDS = "biufcSUmMV"  # what has a fixed size


class RowTable:
    """Rows of a storage, in a structure; `spec` is a nest of the rows' TensorSpec."""

    def __init__(self, storage: Storage, spec: Any):
        self._storage = storage
        self._leaf_specs, self._structure = nest.flatten(spec)

    def have(self, numbers: Positions) -> npt.NDArray[np.bool_]:
        """Return which rows are there."""
        with self._storage.use() as (flags, *_), self._storage.ordered():
            there: npt.NDArray[np.bool_] = flags[numbers] != 0
            return there

    def rows(self, numbers: Positions) -> Any:
        """Return copies of rows that are there."""
        with self._storage.use() as (_, *columns):
            leaves = [column[numbers] for column in columns]
        return nest.unflatten(self._structure, leaves)

    def element(self, number: int) -> Any:
        """Return a copy of a row that is there."""
        return nest.map_leaves(lambda a: a[0], self.rows(np.array([number])))

    def keep_rows(self, numbers: Positions, rows: Any) -> str | None:
        """Keep copies of rows; where they do not fit, say why, and keep none."""
        leaves, structure = nest.flatten(rows)
        reason = self._misfit(leaves, structure, numbers.size)
        if reason is None:
            with self._storage.use() as (flags, *columns):
                for column, leaf in zip(columns, leaves, strict=True):
                    column[numbers] = leaf
                with self._storage.ordered():
                    flags[numbers] = 1
        return reason

    def keep_element(self, number: int, element: Any) -> str | None:
        """Keep a copy of an element; where it does not fit, say why."""
        leaves, structure = nest.flatten(element)
        if not all(map(_is_numpy, leaves)):
            return "it has leaves that are no NumPy arrays"
        row = nest.unflatten(structure, [np.asarray(leaf)[None] for leaf in leaves])
        return self.keep_rows(np.array([number]), row)

    def _misfit(self, leaves: list[Any], structure: Any, rows: int) -> str | None:
        if structure != self._structure:
            return f"the structure is {structure}, before it was {self._structure}"
        names = nest.leaf_names(structure, "element")
        for name, leaf, spec in zip(names, leaves, self._leaf_specs, strict=True):
            if not _is_numpy(leaf):
                return f"{name} is no NumPy array but {_type_name(leaf)}"
            if leaf.shape[:1] != (rows,):
                return f"{name} has shape {leaf.shape} instead of {rows} rows"
            if (leaf.shape[1:], leaf.dtype) != (spec.shape, spec.dtype):
                return (
                    f"rows of {name} are {leaf.dtype} {leaf.shape[1:]}, before they "
                    f"were {spec.dtype} {spec.shape}"
                )
        return None


class Cells:
    """Elements of any kind by number, in the memory of this process."""

    def __init__(self) -> None:
        self._elements: dict[int, Any] = {}

    def have(self, numbers: Positions) -> npt.NDArray[np.bool_]:
        """Return which elements are there."""
        return np.array([i in self._elements for i in numbers.tolist()], bool)

    def rows(self, numbers: Positions) -> Any:
        """Return copies of elements that are there, stacked."""
        return stack([self._elements[i] for i in numbers.tolist()])

    def element(self, number: int) -> Any:
        """Return a copy of an element that is there."""
        return copied(self._elements[number])

    def keep_rows(self, numbers: Positions, rows: Any) -> None:
        """Keep copies of stacked elements."""
        leaves, structure = nest.flatten(rows)
        for i, *row in zip(numbers.tolist(), *leaves, strict=True):
            self.keep_element(i, nest.unflatten(structure, row))

    def keep_element(self, number: int, element: Any) -> None:
        """Keep a copy of an element."""
        self._elements[number] = copied(element)


def copied(element: Any) -> Any:
    """Return an element with copies of its NumPy arrays."""
    return nest.map_leaves(
        lambda a: a.copy() if isinstance(a, np.ndarray) else a, element
    )


def row_spec(rows: Any) -> Any:
    """Return the nest of TensorSpec of each of some stacked rows."""
    return nest.map_leaves(lambda a: TensorSpec(a.shape[1:], a.dtype), rows)


def fields_of(spec: Any, rows: int) -> list[Field]:
    """Return the arrays of a storage for `rows` rows like `spec`."""
    leaves, _ = nest.flatten(spec)
    return [
        Field((rows,), np.dtype(np.uint8)),
        *(Field((rows, *leaf.shape), leaf.dtype) for leaf in leaves),
    ]


def unkeepable(rows: Any) -> str | None:
    """Say why such rows cannot be in a table, None if they can."""
    leaves, structure = nest.flatten(rows)
    if not leaves:
        return "there is no array in it"
    for name, leaf in zip(nest.leaf_names(structure, "element"), leaves, strict=True):
        if not _is_numpy(leaf):
            return f"{name} is no NumPy array but {_type_name(leaf)}"
        if leaf.dtype.kind not in _KINDS or leaf.dtype.hasobject:
            return f"{name} has dtype {leaf.dtype}, which has no fixed size"
    return None


def _is_numpy(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic)


def _type_name(leaf: Any) -> str:
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"
