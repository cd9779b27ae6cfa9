"""How assignments to a variable are combined over the replicas, and applied.

The tables at the top of `variables` say what holds for which kind in which context.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist import context
from mpidist.comm import arithmetic
from mpidist.comm.consensus.calls import Call
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
    "copy_of_new",
    "initial",
    "is_local",
    "read_reduced",
    "scatter",
    "scatter_batches",
    "scatter_nd",
    "share",
    "take",
    "update",
]

Apply = Callable[[Any, Any], Any]
_SPARSE_SUMS = ("scatter_add", "scatter_sub", "scatter_nd_add", "scatter_nd_sub")


def is_local(variable: Variable) -> bool:
    """Return whether the current context concerns this replica's copy alone."""
    strategy = variable.distribute_strategy
    return context.in_update() or context.in_replica_of(strategy)


def read_reduced(variable: Variable) -> Any:
    """Return what the copies of an ON_READ variable come to. Collective."""
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
    """Put `apply(old copy, value)` in place of the copies, as the context demands.

    `part` says which elements `apply` changes, if not all; it must be the same on all
    replicas where they communicate.
    """
    _require_strategy(variable)
    if context.in_update() or (is_local(variable) and variable.on_read):
        new = _applied(variable, operation, apply, value)
    elif is_local(variable):
        call = f"{operation} of {variable.name}"
        combined = _combine(variable, call, value, part)
        new = _applied(variable, operation, apply, combined)
    else:
        new = _applied_everywhere(variable, operation, apply, value, part)
    variable.replace_local(new)
    return variable


def scatter(
    variable: Variable, operation: str, ufunc: np.ufunc | None, delta: IndexedSlices
) -> Variable:
    """Apply `ufunc` to some rows of the copies; None replaces them."""

    def find() -> tuple[Any, Any]:
        _require_slices(variable, delta)
        indices = arrays.to_tensor(delta.indices, "indices").reshape(-1, 1)
        return _checked_parts(variable, indices, delta.values)

    return _scatter(variable, operation, ufunc, find)


def scatter_nd(
    variable: Variable,
    operation: str,
    ufunc: np.ufunc | None,
    indices: Any,
    updates: Any,
) -> Variable:
    """Apply `ufunc` to elements, or parts, of the copies; None replaces them."""

    def find() -> tuple[Any, Any]:
        found = arrays.to_tensor(indices, "indices")
        return _checked_parts(variable, found, updates)

    return _scatter(variable, operation, ufunc, find)


def scatter_batches(
    variable: Variable, operation: str, delta: IndexedSlices
) -> Variable:
    """Replace rows of each batch; see `Variable.batch_scatter_update`."""

    def find() -> tuple[Any, Any]:
        _require_slices(variable, delta)
        last = arrays.to_tensor(delta.indices, "indices")
        batch = arrays.namespace(last).indices(last.shape)[:-1]
        indices = arrays.namespace(last).stack([*batch, last], axis=-1)
        return _checked_parts(variable, indices, delta.values)

    return _scatter(variable, operation, None, find)


def _scatter(
    variable: Variable,
    operation: str,
    ufunc: np.ufunc | None,
    find: Callable[[], tuple[Any, Any]],
) -> Variable:
    """Apply `ufunc` to parts of the copies.

    Args:
      variable: which is changed.
      operation: the public call, for messages.
      ufunc: of old and new values; None takes the new ones.
      find: returns what `_checked_parts` does.
    """
    _require_strategy(variable)
    call = f"{operation} of {variable.name}"
    extended = variable.distribute_strategy.extended
    is_reduced = variable.aggregation in (
        VariableAggregation.SUM,
        VariableAggregation.MEAN,
    )
    is_supported = not variable.on_read and (
        not is_reduced or operation in _SPARSE_SUMS
    )
    if not (is_supported or context.in_update()):
        raise UnsupportedError(
            f"{call} is not supported: it is {variable.synchronization.name} with "
            f"aggregation {variable.aggregation.name}"
        )
    if context.in_update() or (not context.has_strategy() and is_local(variable)):
        slices = find()
    else:
        slices = extended.agreement.prepare(call, find)
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

    variable.replace_local(_applied(variable, operation, put, rows))
    return variable


def _require_strategy(variable: Variable) -> None:
    current = context.get_strategy()
    if context.has_strategy() and current is not variable.distribute_strategy:
        raise ContextError(
            f"Mixing different tf.distribute.Strategy objects: {variable.name} of "
            f"{variable.distribute_strategy!r} was changed under {current!r}"
        )


def _require_same_part(variable: Variable, call: str, part: Any) -> None:
    """Raise on all replicas if they change other parts. Collective, with a part."""
    if part is not None:
        agreement = variable.distribute_strategy.extended.agreement
        agreement.require_same(Call(call, (("part", part),)))


def _combine(variable: Variable, call: str, value: Any, part: Any) -> Any:
    """Return what the values of all replicas come to for an ON_WRITE variable."""
    if not context.has_strategy():  # the default strategy: nothing to combine
        return value
    _require_aggregation(variable, call)
    _require_same_part(variable, call, part)
    extended = variable.distribute_strategy.extended
    converted = extended.agreement.prepare(call, lambda: _converted(variable, value))
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return extended.broadcast_from_first(call, converted)
    is_number = isinstance(value, numbers.Number) and not hasattr(value, "dtype")
    if is_number and variable.aggregation is VariableAggregation.MEAN:
        extended.require_equal(call, converted)
        return converted
    if is_number:
        raise ArgumentError(
            f"{call}: the Python number {shown(value)} is refused, since the "
            "aggregation is SUM and it is unclear whether each replica gives it or all "
            "together; pass an array"
        )
    op = ReduceOp.from_variable_aggregation(variable.aggregation)
    return extended.reduce(call, op, converted)


def _require_aggregation(variable: Variable, call: str) -> None:
    if variable.aggregation is VariableAggregation.NONE:
        raise ArgumentError(
            f"{call} in replica context is refused: its aggregation is NONE, so the "
            "copies would drift apart; create it with an aggregation, or change it by "
            "merge_call and extended.update"
        )
    is_mean = variable.aggregation is VariableAggregation.MEAN
    if is_mean and not arrays.is_floating(variable.dtype):
        raise ArgumentError(
            f"{call} in replica context is refused: it has dtype "
            f"{variable.dtype.name}, which a MEAN does not fit; use a floating dtype "
            "or another aggregation"
        )


def _applied(variable: Variable, operation: str, apply: Apply, value: Any) -> Any:
    """Return `apply(old copy, value)`; integers must not overflow."""
    old, given = variable.local, _converted(variable, value)
    new = apply(old, given)
    if old.dtype.kind in "iu" and operation != "assign":
        rough = apply(old.astype(np.float64), given.astype(np.float64))
        arithmetic.require_fit(new, rough, f"{operation} of {variable.name}")
    return new


def _applied_everywhere(
    variable: Variable, operation: str, apply: Apply, value: Any, part: Any
) -> Any:
    """Return this replica's new copy for a value that all replicas give alike."""
    call = f"{operation} of {variable.name}"
    extended = variable.distribute_strategy.extended

    def convert() -> tuple[Any, Any]:
        if isinstance(value, DistributedValues) and not isinstance(value, ArrayView):
            raise ArgumentError(
                f"{call}: a {type(value).__name__} is refused in cross-replica "
                "context, where all copies must get the same value; reduce it first"
            )
        plain = value.values[0] if isinstance(value, Mirrored) else value
        converted = _converted(variable, plain)
        own = converted
        if is_sum:
            own = share(converted, extended.num_replicas, extended.replica_id)
        return converted, _applied(variable, operation, apply, own)

    is_sum = variable.on_read and variable.aggregation is VariableAggregation.SUM
    if is_sum and operation != "assign":
        raise ArgumentError(
            f"{call} in cross-replica context is refused: it is ON_READ with "
            "aggregation SUM; call assign, or do it in replica context"
        )
    _require_same_part(variable, call, part)
    # Copies of ON_READ variables differ, so that of one replica alone may overflow
    converted, new = extended.agreement.prepare(call, convert)
    extended.require_equal(call, converted)
    return new


def share(value: Any, replicas: int, replica: int) -> Any:
    """Return this replica's share of a total; the shares of all add up to it."""
    if value.dtype.kind in "iu":
        wide = value.astype(f"{value.dtype.kind}8")  # replicas need not fit its dtype
        quotient, rest = np.divmod(wide, replicas)
        return (quotient + (replica < rest)).astype(value.dtype)
    return (value / replicas).astype(value.dtype)


def _converted(variable: Variable, value: Any) -> Any:
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
            f"a value of dtype {array.dtype.name} cannot be put into {variable.name}, "
            f"which has dtype {variable.dtype.name}; cast it first"
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


def take(variable: Variable, array: Any, indices: Any) -> Any:
    """Return the parts of an array that `Variable.gather_nd` reads."""
    flat, depth = _flat_indices(variable, indices)
    part = array.shape[depth:]
    return array.reshape(math.prod(array.shape[:depth]), *part)[flat]


def _require_slices(variable: Variable, delta: Any) -> None:
    if not isinstance(delta, IndexedSlices):
        raise ArgumentError(
            f"{variable.name}: IndexedSlices are needed, not {shown(delta)}"
        )


def _checked_parts(variable: Variable, indices: Any, values: Any) -> tuple[Any, Any]:
    """Return indices `(n,)`, and values `(n, *shape)`, of parts of a variable.

    The first dimensions of the variable, those that are indexed, count as one.

    Args:
      variable: which has the parts.
      indices: integers `(..., k)` into the first k dimensions.
      values: `(..., *shape)`, where `shape` is that of the other dimensions.
    """
    flat, depth = _flat_indices(variable, indices)
    rows, part = _converted(variable, values), variable.shape[depth:]
    if rows.shape != (*flat.shape, *part):
        raise ArgumentError(
            f"{variable.name} needs {flat.size} rows of shape {part} for as many "
            f"indices, not values of shape {rows.shape}"
        )
    return flat.reshape(-1), rows.reshape(flat.size, *part)


def _flat_indices(variable: Variable, indices: Any) -> tuple[Any, int]:
    """Return `(...)` indices into the first k dimensions, as one, for `(..., k)`; k."""
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
    variable: Variable, call: str, indices: Any, rows: Any
) -> tuple[Any, Any]:
    """Return the slices of all replicas, or of the first."""
    _require_aggregation(variable, call)
    extended = variable.distribute_strategy.extended
    mine = indices, rows, np.array([indices.size])
    indices, rows, counts = extended.gather(call, mine, axis=0)
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return indices[: counts[0]], rows[: counts[0]]
    if variable.aggregation is VariableAggregation.MEAN:
        rows = (rows / extended.num_replicas).astype(rows.dtype)
    return indices, rows


def copy_of_new(old: Any, new: Any) -> Any:
    """Return a copy of the new value: what `assign` applies."""
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
        raise DTypeError(f"dtype must not be one of Python objects, as {found} is")
    arrays.require_range(array, found, "initial_value")
    try:
        return array.astype(found, copy=False)
    except (TypeError, ValueError) as error:
        raise DTypeError(
            f"dtype {found} does not fit initial_value, of {array.dtype}: {error}"
        ) from error
