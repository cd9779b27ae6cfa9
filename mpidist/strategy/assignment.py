"""Combine assignments to a variable over the replicas, and apply them.

The table at the top of `variables` has the rules for each kind and context. Those of
some rows or elements (`scatter`) have two exceptions: in replica context, SUM and MEAN
allow additions and subtractions only; ON_READ variables can be changed only inside
`StrategyExtended.update`, where each copy changes by itself.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist import context
from mpidist.comm import arithmetic
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ContextError, DTypeError, UnsupportedError
from mpidist.options import ReduceOp, VariableAggregation
from mpidist.util import validation
from mpidist.util.validation import shown
from mpidist.values import (
    ArrayView,
    DistributedValues,
    IndexedSlices,
    Mirrored,
    make_read_only,
)

if TYPE_CHECKING:
    from mpidist.strategy.variables import Variable

__all__ = [
    "Apply",
    "batches_of",
    "copy_of_new",
    "initial",
    "is_local",
    "parts_of",
    "read_reduced",
    "rows_of",
    "scatter",
    "share",
    "take",
    "update",
]

Apply = Callable[[Any, Any], Any]


def is_local(variable: Variable) -> bool:
    """Return whether the current context accesses this replica's copy only."""
    strategy = variable.distribute_strategy
    return context.in_update() or context.in_replica_of(strategy)


def read_reduced(variable: Variable) -> Any:
    """Return the value of an ON_READ variable, reduced over its copies. Collective."""
    if variable.aggregation is VariableAggregation.NONE:
        raise ArgumentError(
            f"{variable.name} cannot be read in cross-replica context: it is ON_READ "
            "with aggregation NONE, so its copies have no common value; set an "
            "aggregation"
        )
    extended, call = variable.distribute_strategy.extended, f"read of {variable.name}"
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        value = extended.broadcast_from_first(call, variable.local)
    else:
        op = ReduceOp.from_variable_aggregation(variable.aggregation)
        value = extended.reduce(call, op, variable.local)
    return make_read_only(value)


def update(
    variable: Variable, operation: str, apply: Apply, value: Any, part: Any = None
) -> Variable:
    """Replace the copies by `apply(old copy, value)`, by the rules of the context.

    `part` says which elements `apply` changes, if not all. If the replicas communicate,
    they must pass the same part.
    """
    _require_strategy(variable)
    if context.in_update() or (is_local(variable) and variable.on_read):
        new = _apply_to_copy(variable, operation, apply, value)
    elif is_local(variable):
        call = f"{operation} of {variable.name}"
        combined = _combine(variable, call, value, part)
        new = _apply_to_copy(variable, operation, apply, combined)
    else:
        new = _applied_everywhere(variable, operation, apply, value, part)
    variable.replace_local(new)
    return variable


def _require_strategy(variable: Variable) -> None:
    """Raise if a variable is used under another strategy."""
    current = context.get_strategy()
    if context.has_strategy() and current is not variable.distribute_strategy:
        raise ContextError(
            f"Mixing different tf.distribute.Strategy objects: {variable.name} of "
            f"{variable.distribute_strategy!r} was changed under {current!r}. Create "
            "variables inside `with strategy.scope():`"
        )


def _require_same_part(variable: Variable, call: str, part: Any) -> None:
    """Raise on all replicas if their parts differ. Collective if there is a part."""
    if part is not None:
        consensus = variable.distribute_strategy.extended.consensus
        consensus.require_same(CallSignature(call, (("part", part),)))


def _combine(variable: Variable, call: str, value: Any, part: Any) -> Any:
    """Return the replicas' values combined by a variable's aggregation."""
    if not context.has_strategy():  # the default strategy: nothing to combine
        return value
    _require_aggregation(variable, call)
    _require_same_part(variable, call, part)
    extended = variable.distribute_strategy.extended
    converted = extended.consensus.guard(call, lambda: _convert(variable, value))
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return extended.broadcast_from_first(call, converted)
    is_number = isinstance(value, numbers.Number) and not hasattr(value, "dtype")
    if is_number and variable.aggregation is VariableAggregation.MEAN:
        extended.require_equal(call, converted)
        return converted
    if is_number:
        raise ArgumentError(
            f"{call}: the Python number {shown(value)} is refused: with aggregation "
            "SUM it is unclear whether it is the total or one replica's share; pass "
            "an array"
        )
    op = ReduceOp.from_variable_aggregation(variable.aggregation)
    return extended.reduce(call, op, converted)


def _require_aggregation(variable: Variable, call: str) -> None:
    """Raise unless values of several replicas can be combined."""
    if variable.aggregation is VariableAggregation.NONE:
        raise ArgumentError(
            f"{call} in replica context is refused: its aggregation is NONE, so the "
            "copies could become unequal; create it with an aggregation, or change it "
            "with merge_call and extended.update"
        )
    is_mean = variable.aggregation is VariableAggregation.MEAN
    if is_mean and not arrays.is_floating(variable.dtype):
        raise ArgumentError(
            f"{call} in replica context is refused: it has dtype "
            f"{variable.dtype.name}, which cannot hold a MEAN; use a floating dtype or "
            "another aggregation"
        )


def _apply_to_copy(variable: Variable, operation: str, apply: Apply, value: Any) -> Any:
    """Return `apply(old copy, value)`; integers must not overflow."""
    old, given = variable.local, _convert(variable, value)
    new = apply(old, given)
    if old.dtype.kind in "iu" and operation != "assign":
        rough = apply(old.astype(np.float64), given.astype(np.float64))
        arithmetic.require_fit(new, rough, f"{operation} of {variable.name}")
    return new


def _applied_everywhere(
    variable: Variable, operation: str, apply: Apply, value: Any, part: Any
) -> Any:
    """Return this replica's new copy for a value that is equal on all replicas."""
    call = f"{operation} of {variable.name}"
    extended = variable.distribute_strategy.extended

    def prepare() -> tuple[Any, Any]:
        if isinstance(value, DistributedValues) and not isinstance(value, ArrayView):
            raise ArgumentError(
                f"{call}: a {type(value).__name__} is refused in cross-replica "
                "context, where all copies must get the same value; reduce it first"
            )
        plain = value.values[0] if isinstance(value, Mirrored) else value
        converted = _convert(variable, plain)
        own = converted
        if is_sum:
            own = share(converted, extended.num_replicas, extended.replica_id)
        return converted, _apply_to_copy(variable, operation, apply, own)

    is_sum = variable.on_read and variable.aggregation is VariableAggregation.SUM
    if is_sum and operation != "assign":
        raise ArgumentError(
            f"{call} in cross-replica context is refused: it is ON_READ with "
            "aggregation SUM; call assign, or do it in replica context"
        )
    _require_same_part(variable, call, part)
    # Copies of ON_READ variables differ, so one replica alone may overflow
    converted, new = extended.consensus.guard(call, prepare)
    extended.require_equal(call, converted)
    return new


def share(value: Any, replicas: int, replica: int) -> Any:
    """Return this replica's share of a total; the shares of all add up to it."""
    if value.dtype.kind in "iu":
        wide = value.astype(f"{value.dtype.kind}8")  # it must hold `replicas`
        quotient, rest = np.divmod(wide, replicas)
        return (quotient + (replica < rest)).astype(value.dtype)
    return (value / replicas).astype(value.dtype)


def _convert(variable: Variable, value: Any) -> Any:
    """Return `value` as an array of the variable's dtype, on its device."""
    local = variable.local
    if type(value) is type(local) is np.ndarray and value.dtype == local.dtype:
        return value
    is_number = isinstance(value, int | float | complex)
    array = arrays.to_tensor(value)
    keeps = is_number and not _loses(value, variable.dtype)
    casting: Any = "unsafe" if keeps else "same_kind"
    if not np.can_cast(array.dtype, variable.dtype, casting):
        raise DTypeError(
            f"a value of dtype {array.dtype.name} cannot be assigned to "
            f"{variable.name}, which has dtype {variable.dtype.name}; cast it first"
        )
    arrays.require_range(array, variable.dtype, f"the value for {variable.name}")
    array = array.astype(variable.dtype, copy=False)
    return arrays.to_device_like(array, local)


def _loses(value: complex, dtype: np.dtype[Any]) -> bool:
    """Return whether a cast of a Python number to `dtype` could change its value."""
    if dtype.kind == "b":
        return value not in (0, 1) or not isinstance(value, int)
    if dtype.kind not in "iu":
        return isinstance(value, complex) and dtype.kind != "c"
    return not isinstance(value, int)


def copy_of_new(old: Any, new: Any) -> Any:
    """Return a copy of the new value; the `apply` of `assign`."""
    return new.copy()


def initial(initial_value: Any, dtype: Any) -> Any:
    """Return the initial value of a variable as an array, of `dtype` if it is given."""
    if callable(initial_value) and not hasattr(initial_value, "shape"):
        initial_value = initial_value()
    array = arrays.to_tensor(initial_value, "initial_value")
    if dtype is None:
        return array
    found = validation.dtype("dtype", dtype)
    if found.hasobject:
        raise DTypeError(f"dtype must not be {found}, which holds Python objects")
    arrays.require_range(array, found, "initial_value")
    try:
        return array.astype(found, copy=False)
    except (TypeError, ValueError) as error:
        raise DTypeError(
            f"dtype {found} does not fit initial_value, of {array.dtype}: {error}"
        ) from error


def scatter(
    variable: Variable,
    operation: str,
    ufunc: np.ufunc | None,
    select: Callable[..., tuple[Any, Any]],
    *arguments: Any,
) -> Variable:
    """Apply `ufunc` to parts of the copies, by the rules of the context.

    Args:
      variable: the variable to change.
      operation: the public call, for messages.
      ufunc: combines old and new values; None takes the new values.
      select: `rows_of`, `batches_of` or `parts_of`.
      arguments: of `select`, after the variable.
    """
    _require_strategy(variable)
    call, aggregation = f"{operation} of {variable.name}", variable.aggregation
    extended = variable.distribute_strategy.extended
    is_reduced = aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
    is_sum = ufunc in (np.add, np.subtract)
    is_supported = not variable.on_read and (is_sum or not is_reduced)
    if not (is_supported or context.in_update()):
        raise UnsupportedError(
            f"{call} is not supported: it is {variable.synchronization.name} with "
            f"aggregation {aggregation.name}"
        )

    def flatten() -> tuple[Any, Any]:
        """Return flat indices `(n,)`, and values `(n, *shape)`."""
        indices, values = select(variable, *arguments)
        flat, depth = _flat_indices(variable, indices)
        rows, part = _convert(variable, values), variable.shape[depth:]
        if rows.shape != (*flat.shape, *part):
            raise ArgumentError(
                f"{variable.name} needs {flat.size} rows of shape {part} for as many "
                f"indices, not values of shape {rows.shape}"
            )
        return flat.reshape(-1), rows.reshape(flat.size, *part)

    def put(old: Any, rows: Any) -> Any:
        new = old.copy()
        parts = _parts_of_array(new, new.ndim - rows.ndim + 1)
        if ufunc is None:
            parts[indices] = rows
        else:
            ufunc.at(parts, indices, rows)
        return new

    if context.in_update() or (not context.has_strategy() and is_local(variable)):
        indices, rows = flatten()
    else:
        indices, rows = extended.consensus.guard(call, flatten)
        if is_local(variable):
            indices, rows = _gather_slices(variable, call, indices, rows)
        else:
            extended.require_equal(call, (indices, rows))
    variable.replace_local(_apply_to_copy(variable, operation, put, rows))
    return variable


def take(variable: Variable, array: Any, indices: Any) -> Any:
    """Return the parts of an array that `Variable.gather_nd` reads."""
    flat, depth = _flat_indices(variable, arrays.to_tensor(indices, "indices"))
    return _parts_of_array(array, depth)[flat]


def rows_of(variable: Variable, delta: Any) -> tuple[Any, Any]:
    """Return indices `(n, 1)` and values of rows of a variable."""
    indices, values = _require_slices(variable, delta)
    return indices.reshape(-1, 1), values


def batches_of(variable: Variable, delta: Any) -> tuple[Any, Any]:
    """Return indices and values of rows of each batch; see `batch_scatter_update`."""
    last, values = _require_slices(variable, delta)
    batch = arrays.namespace(last).indices(last.shape)[:-1]
    return arrays.namespace(last).stack([*batch, last], axis=-1), values


def parts_of(variable: Variable, indices: Any, updates: Any) -> tuple[Any, Any]:
    """Return indices `(..., k)` into the first k dimensions, and values."""
    return arrays.to_tensor(indices, "indices"), updates


def _require_slices(variable: Variable, delta: Any) -> tuple[Any, Any]:
    if not isinstance(delta, IndexedSlices):
        raise ArgumentError(
            f"{variable.name}: IndexedSlices are needed, not {shown(delta)}"
        )
    return arrays.to_tensor(delta.indices, "indices"), delta.values


def _parts_of_array(array: Any, depth: int) -> Any:
    """Return a view `(n, *shape[depth:])`: its first dimensions are one."""
    return array.reshape(math.prod(array.shape[:depth]), *array.shape[depth:])


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


def _gather_slices(
    variable: Variable, call: str, indices: Any, rows: Any
) -> tuple[Any, Any]:
    """Return the slices of all replicas, or of replica 0."""
    _require_aggregation(variable, call)
    extended = variable.distribute_strategy.extended
    own = indices, rows, np.array([indices.size])
    indices, rows, counts = extended.gather(call, own, axis=0)
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return indices[: counts[0]], rows[: counts[0]]
    if variable.aggregation is VariableAggregation.MEAN:
        rows = (rows / extended.num_replicas).astype(rows.dtype)
    return indices, rows
