"""Reads and updates of some rows or elements of a variable.

Updates follow the table at the top of `variables`, with two exceptions: in replica
context, SUM and MEAN allow additions and subtractions only; ON_READ variables can be
updated only inside `StrategyExtended.update`, where each copy changes by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist import context
from mpidist.device import arrays
from mpidist.errors import ArgumentError, DTypeError, UnsupportedError
from mpidist.options import VariableAggregation
from mpidist.strategy.assignment import (
    apply_to_copy,
    convert,
    is_local,
    require_aggregation,
    require_strategy,
)
from mpidist.util.validation import shown
from mpidist.values import ArrayView, DistributedValues, IndexedSlices

if TYPE_CHECKING:
    from mpidist.strategy.variables import Variable

__all__ = ["SparseAccess"]


Name = str | None
_SUMS = ("scatter_add", "scatter_sub", "scatter_nd_add", "scatter_nd_sub")


class SparseAccess(ArrayView, DistributedValues):
    """Base class of `Variable`: methods for some of its rows or elements."""

    def sparse_read(self, indices: Any, name: Name = None) -> Any:
        """Return rows of the value, `(*indices.shape, *shape[1:])`; see `gather_nd`."""
        return self.gather_nd(arrays.to_tensor(indices, "indices")[..., None])

    def gather_nd(self, indices: Any, name: Name = None) -> Any:
        """Return elements of the value, or parts: `(..., *shape[k:])`.

        Collective where `value` is. Raises ArgumentError for indices out of range.

        Args:
          indices: `(..., k)`: each index has k numbers, for the first k dimensions.
          name: accepted for TensorFlow compatibility.

        Example:
          >>> w = mpidist.Variable(np.array([[1.0, 2.0], [3.0, 4.0]]))
          >>> w.gather_nd([[0, 1], [1, 0]])
          array([2., 3.])
        """
        found = arrays.to_tensor(indices, "indices")
        return _take(self, self._array(), found)

    def scatter_add(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Add rows to rows of the value; repeated indices add up. Returns self.

        Collective like `assign`. In replica context, SUM applies the slices of all
        replicas (their numbers may differ), MEAN divides them by the number of
        replicas, and ONLY_FIRST_REPLICA applies replica 0's. All scatters inside
        `StrategyExtended.update` change each copy by itself, whatever the aggregation.

        Args:
          sparse_delta: rows `(n, *shape[1:])` and their indices `(n,)`, as arrays.
          use_locking: accepted for TensorFlow compatibility.
          name: likewise.

        Raises: see `assign`; ArgumentError also for indices out of range;
          UnsupportedError: an ON_READ variable.

        Example:
          >>> with strategy.scope():
          ...     w = mpidist.Variable(
          ...         np.zeros(3), aggregation=mpidist.VariableAggregation.SUM
          ...     )
          >>> row = mpidist.IndexedSlices(np.array([1.0]), np.array([2]))
          >>> _ = strategy.run(lambda: w.scatter_add(row))  # one row from each replica
          >>> w.numpy()
          array([0., 0., 2.])
        """
        return _scatter(self, "scatter_add", np.add, sparse_delta)

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Subtract rows from rows of the value; like `scatter_add`."""
        return _scatter(self, "scatter_sub", np.subtract, sparse_delta)

    def scatter_min(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Replace rows of the value by the elementwise minimum; like `scatter_add`.

        Raises: UnsupportedError: aggregation SUM or MEAN, which a minimum cannot have.
        """
        return _scatter(self, "scatter_min", np.minimum, sparse_delta)

    def scatter_max(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Replace rows of the value by the elementwise maximum; like `scatter_min`."""
        return _scatter(self, "scatter_max", np.maximum, sparse_delta)

    def scatter_mul(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Multiply rows of the value by rows; like `scatter_min`."""
        return _scatter(self, "scatter_mul", np.multiply, sparse_delta)

    def scatter_div(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Divide rows of the value by rows; like `scatter_min`."""
        return _scatter(self, "scatter_div", np.true_divide, sparse_delta)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Replace rows of the value; like `scatter_min`."""
        return _scatter(self, "scatter_update", None, sparse_delta)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Replace rows of each batch: the first dimensions; like `scatter_min`.

        With indices `(*batch, n)` and values `(*batch, n, *shape[k:])` of k dimensions:
        `w[i, indices[i, j]] = values[i, j]`.
        """
        return _scatter_batches(self, "batch_scatter_update", sparse_delta)

    def scatter_nd_add(self, indices: Any, updates: Any, name: Name = None) -> Variable:
        """Add to elements of the value, or parts; like `scatter_add`.

        Args:
          indices: as in `gather_nd`.
          updates: what to add, `(..., *shape[k:])`.
          name: accepted for TensorFlow compatibility.

        Example:
          >>> w = mpidist.Variable(np.zeros((2, 2)))
          >>> w.scatter_nd_add([[0, 1], [1, 0]], [1.0, 2.0]).numpy()
          array([[0., 1.],
                 [2., 0.]])
        """
        return _scatter_nd(self, "scatter_nd_add", np.add, indices, updates)

    def scatter_nd_sub(self, indices: Any, updates: Any, name: Name = None) -> Variable:
        """Subtract from elements of the value, or parts; like `scatter_nd_add`."""
        return _scatter_nd(self, "scatter_nd_sub", np.subtract, indices, updates)

    def scatter_nd_update(
        self, indices: Any, updates: Any, name: Name = None
    ) -> Variable:
        """Replace elements of the value, or parts; like `scatter_min`."""
        return _scatter_nd(self, "scatter_nd_update", None, indices, updates)


def _scatter(
    variable: Any, operation: str, ufunc: np.ufunc | None, delta: IndexedSlices
) -> Variable:
    """Apply `ufunc` to some rows of the copies; None replaces the rows."""

    def find() -> tuple[Any, Any]:
        _require_slices(variable, delta)
        indices = arrays.to_tensor(delta.indices, "indices").reshape(-1, 1)
        return _checked_parts(variable, indices, delta.values)

    return _scatter_parts(variable, operation, ufunc, find)


def _scatter_nd(
    variable: Any,
    operation: str,
    ufunc: np.ufunc | None,
    indices: Any,
    updates: Any,
) -> Variable:
    """Apply `ufunc` to elements or parts of the copies; None replaces the elements."""

    def find() -> tuple[Any, Any]:
        found = arrays.to_tensor(indices, "indices")
        return _checked_parts(variable, found, updates)

    return _scatter_parts(variable, operation, ufunc, find)


def _scatter_batches(variable: Any, operation: str, delta: IndexedSlices) -> Variable:
    """Replace rows of each batch; see `Variable.batch_scatter_update`."""

    def find() -> tuple[Any, Any]:
        _require_slices(variable, delta)
        last = arrays.to_tensor(delta.indices, "indices")
        batch = arrays.namespace(last).indices(last.shape)[:-1]
        indices = arrays.namespace(last).stack([*batch, last], axis=-1)
        return _checked_parts(variable, indices, delta.values)

    return _scatter_parts(variable, operation, None, find)


def _scatter_parts(
    variable: Any,
    operation: str,
    ufunc: np.ufunc | None,
    find: Callable[[], tuple[Any, Any]],
) -> Variable:
    """Apply `ufunc` to parts of the copies.

    Args:
      variable: the variable to change.
      operation: the public call, for messages.
      ufunc: combines old and new values; None takes the new values.
      find: returns the same as `_checked_parts`.
    """
    require_strategy(variable)
    call = f"{operation} of {variable.name}"
    extended = variable.distribute_strategy.extended
    is_reduced = variable.aggregation in (
        VariableAggregation.SUM,
        VariableAggregation.MEAN,
    )
    is_supported = not variable.on_read and (not is_reduced or operation in _SUMS)
    if not (is_supported or context.in_update()):
        raise UnsupportedError(
            f"{call} is not supported: it is {variable.synchronization.name} with "
            f"aggregation {variable.aggregation.name}"
        )
    if context.in_update() or (not context.has_strategy() and is_local(variable)):
        slices = find()
    else:
        slices = extended.consensus.guard(call, find)
        if is_local(variable):
            slices = _combine_slices(variable, call, *slices)
        else:
            extended.require_equal(call, slices)
    indices, rows = slices

    def put(old: Any, rows: Any) -> Any:
        new = old.copy()
        part = rows.shape[1:]
        parts = new.reshape(math.prod(old.shape[: old.ndim - len(part)]), *part)
        if ufunc is None:
            parts[indices] = rows
        else:
            ufunc.at(parts, indices, rows)
        return new

    changed: Variable = variable
    changed.replace_local(apply_to_copy(variable, operation, put, rows))
    return changed


def _take(variable: Any, array: Any, indices: Any) -> Any:
    """Return the parts of an array that `Variable.gather_nd` reads."""
    flat, depth = _flat_indices(variable, indices)
    part = array.shape[depth:]
    return array.reshape(math.prod(array.shape[:depth]), *part)[flat]


def _require_slices(variable: Any, delta: Any) -> None:
    if not isinstance(delta, IndexedSlices):
        raise ArgumentError(
            f"{variable.name}: IndexedSlices are needed, not {shown(delta)}"
        )


def _checked_parts(variable: Any, indices: Any, values: Any) -> tuple[Any, Any]:
    """Return indices `(n,)`, and values `(n, *shape)`, of parts of a variable.

    The indexed (first) dimensions of the variable are flattened to one.

    Args:
      variable: the variable with the parts.
      indices: integers `(..., k)` into the first k dimensions.
      values: `(..., *shape)`, where `shape` is that of the other dimensions.
    """
    flat, depth = _flat_indices(variable, indices)
    rows, part = convert(variable, values), variable.shape[depth:]
    if rows.shape != (*flat.shape, *part):
        raise ArgumentError(
            f"{variable.name} needs {flat.size} rows of shape {part} for as many "
            f"indices, not values of shape {rows.shape}"
        )
    return flat.reshape(-1), rows.reshape(flat.size, *part)


def _flat_indices(variable: Any, indices: Any) -> tuple[Any, int]:
    """Return `(...)` flat indices into the first k dimensions for `(..., k)`, and k."""
    shape = variable.shape
    depth = indices.shape[-1] if indices.ndim else 0
    if not 1 <= depth <= len(shape):
        raise ArgumentError(
            f"{variable.name} has {len(shape)} dimensions; indices of shape "
            f"{indices.shape} are for {depth}"
        )
    if indices.dtype.kind not in "iu" and indices.size:
        raise DTypeError(f"indices must be integers, not {indices.dtype.name}")
    flat = 0
    for i in range(depth):
        index = indices[..., i]
        if index.size and not (index.min() >= 0 and index.max() < shape[i]):
            raise ArgumentError(
                f"{variable.name} has length {shape[i]} in dimension {i}; indices "
                f"{index.min()}..{index.max()} are out of range"
            )
        flat = flat * shape[i] + index.astype(np.int64)
    return flat, depth


def _combine_slices(
    variable: Any, call: str, indices: Any, rows: Any
) -> tuple[Any, Any]:
    """Return the slices of all replicas, or of replica 0."""
    require_aggregation(variable, call)
    extended = variable.distribute_strategy.extended
    mine = indices, rows, np.array([indices.size])
    indices, rows, counts = extended.gather(call, mine, axis=0)
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return indices[: counts[0]], rows[: counts[0]]
    if variable.aggregation is VariableAggregation.MEAN:
        rows = (rows / extended.num_replicas).astype(rows.dtype)
    return indices, rows
