"""What is assigned to variables, as arrays: values, shares, rows and elements.

Nothing here communicates, or knows contexts: see `variables` for the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpidist.device import arrays
from mpidist.errors import ArgumentError, DTypeError
from mpidist.util import validation
from mpidist.util.dtypes import is_integer, require_range, traits
from mpidist.values import IndexedSlices


def convert(value: Any, local: Any, name: str) -> Any:
    """Return a value as an array of the dtype of `local`, on its device.

    Args:
      value: what the user assigns.
      local: the copy of the variable.
      name: the variable's.

    Raises:
      DTypeError: it does not fit the dtype.
    """
    is_number = isinstance(value, int | float | complex)
    array = arrays.to_tensor(value)
    keeps = is_number and not _loses(value, local.dtype)
    casting: Any = "unsafe" if keeps else "same_kind"
    fits = np.can_cast(array.dtype, local.dtype, casting)
    if not keeps and traits(local.dtype).family == "integer":
        # ml_dtypes calls a cast of floats to its integers one of the same kind
        fits = fits and traits(array.dtype).family in ("bool", "integer")
    if not fits:
        raise DTypeError(
            f"a value of dtype {array.dtype.name} cannot be assigned to {name}, which "
            f"has dtype {local.dtype.name}; cast it first"
        )
    require_range(array, local.dtype, f"the value for {name}")
    return arrays.to_device_like(array.astype(local.dtype, copy=False), local)


def _loses(value: complex, dtype: np.dtype[Any]) -> bool:
    """Return whether a cast of a Python number to `dtype` could change its value."""
    if dtype == np.bool_:
        return value not in (0, 1) or not isinstance(value, int)
    if traits(dtype).family != "integer":
        return isinstance(value, complex) and traits(dtype).family != "complex"
    return not isinstance(value, int)


def evaluate(initial_value: Any) -> Any:
    """Return an initial value, or what it returns if it is a function."""
    is_function = callable(initial_value) and not hasattr(initial_value, "shape")
    return initial_value() if is_function else initial_value


def initial(initial_value: Any, dtype: Any) -> Any:
    """Return the initial value of a variable as an array, of `dtype` if it is given."""
    array = arrays.to_tensor(initial_value, "initial_value")
    if dtype is None:
        return array
    dtype = validation.dtype("dtype", dtype)
    if dtype.hasobject:
        raise DTypeError(f"dtype must not be {dtype}, which holds Python objects")
    require_range(array, dtype, "initial_value")
    try:
        return array.astype(dtype, copy=False)
    except (TypeError, ValueError) as error:
        raise DTypeError(
            f"dtype {dtype} does not fit initial_value, of {array.dtype}: {error}"
        ) from error


def share(value: Any, replicas: int, replica: int) -> Any:
    """Return this replica's share of a total; the shares of all add up to it."""
    if is_integer(value.dtype):
        wide = value.astype(f"{value.dtype.kind}8")  # it must hold `replicas`
        quotient, rest = np.divmod(wide, replicas)
        return (quotient + (replica < rest)).astype(value.dtype)
    return (value / replicas).astype(value.dtype)


# Rows and elements: an index `(k,)` selects a part of the shape `shape[k:]`


def take(array: Any, indices: Any, name: str) -> Any:
    """Return parts of a variable's copy for indices `(..., k)`: `(..., *shape[k:])`."""
    indices = arrays.to_tensor(indices, "indices")
    flat = _flat_indices(array.shape, indices, name)
    return _parts(array, indices.shape[-1])[flat]


def flatten(
    local: Any, delta: Any, expand: Callable[[Any], Any] | None, name: str
) -> tuple[Any, Any]:
    """Return flat indices `(n,)` of parts of a copy, and their values `(n, *shape)`.

    Args:
      local: the copy of the variable.
      delta: `IndexedSlices`, as the user passed them.
      expand: turns their indices into `(..., k)`; None if they are so.
      name: the variable's.

    Raises:
      ArgumentError: they are no slices of this variable.
    """
    if not isinstance(delta, IndexedSlices):
        raise ArgumentError(
            f"{name}: IndexedSlices are needed, not {validation.shown(delta)}"
        )
    indices = arrays.to_tensor(delta.indices, "indices")
    if expand is not None:
        indices = expand(indices)
    flat = _flat_indices(local.shape, indices, name)
    rows, part = convert(delta.values, local, name), local.shape[indices.shape[-1] :]
    if rows.shape != (*flat.shape, *part):
        raise ArgumentError(
            f"{name} needs {flat.size} rows of shape {part} for as many indices, not "
            f"values of shape {rows.shape}"
        )
    return flat.reshape(-1), rows.reshape(flat.size, *part)


def row_indices(indices: Any) -> Any:
    """Return the indices `(n, 1)` of rows `(n,)`."""
    return indices.reshape(-1, 1)


def batch_indices(indices: Any) -> Any:
    """Return `(*batch, n, k)` for indices in each batch `(*batch, n)`."""
    namespace = arrays.namespace(indices)
    batch = namespace.indices(indices.shape)[:-1]
    return namespace.stack([*batch, indices], axis=-1)


def put(ufunc: np.ufunc | None, indices: Any, old: Any, rows: Any) -> Any:
    """Return a copy of `old` with parts changed.

    Args:
      ufunc: combines old and new values; None takes the new ones.
      indices: see `flatten`.
      old: the array to copy.
      rows: see `flatten`.
    """
    new = old.copy()
    parts = _parts(new, new.ndim - rows.ndim + 1)
    if ufunc is None:
        parts[indices] = rows
    else:
        ufunc.at(parts, indices, rows)
    return new


def _parts(array: Any, k: int) -> Any:
    """Return a view `(n, *shape[k:])`: its first k dimensions are one."""
    return array.reshape(math.prod(array.shape[:k]), *array.shape[k:])


def _flat_indices(shape: tuple[int, ...], indices: Any, name: str) -> Any:
    k = indices.shape[-1] if indices.ndim else 0
    if not 1 <= k <= len(shape):
        raise ArgumentError(
            f"{name} has {len(shape)} dimensions; indices of shape {indices.shape} are "
            f"for {k}"
        )
    if not is_integer(indices.dtype) and indices.size:
        raise DTypeError(f"indices must be integers, not {indices.dtype.name}")
    flat = 0
    for i in range(k):
        index = indices[..., i]
        if index.size and not (index.min() >= 0 and index.max() < shape[i]):
            raise ArgumentError(
                f"{name} has length {shape[i]} in dimension {i}; indices "
                f"{index.min()}..{index.max()} are out of range"
            )
        flat = flat * shape[i] + index.astype(np.int64)
    return flat
