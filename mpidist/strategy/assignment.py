"""How assignments to a variable are combined over the replicas, and applied.

The tables at the top of `variables` say what holds for which kind in which context.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist import context
from mpidist.comm import arithmetic
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ContextError, DTypeError, UnsupportedError
from mpidist.options import ReduceOp, VariableAggregation
from mpidist.util import validation
from mpidist.util.validation import shown
from mpidist.values import ArrayView, DistributedValues, IndexedSlices, Mirrored

if TYPE_CHECKING:
    from mpidist.strategy.variables import Variable

__all__ = ["Apply", "is_local", "scatter", "share", "update"]

Apply = Callable[[Any, Any], Any]
_SPARSE_SUMS = ("scatter_add", "scatter_sub")


def is_local(variable: Variable) -> bool:
    """Return whether the current context concerns this replica's copy alone."""
    strategy = variable.distribute_strategy
    return context.in_update() or context.in_replica_of(strategy)


def update(variable: Variable, operation: str, apply: Apply, value: Any) -> Variable:
    """Put `apply(old copy, value)` in place of the copies, as the context demands."""
    if context.in_update_of(variable.distribute_strategy):
        new = _plainly_applied(variable.local, apply, value)
        if new is not None:
            variable.set_local(new)
            return variable
    _require_strategy(variable)
    if context.in_update() or (is_local(variable) and variable.on_read):
        new = _applied(variable, operation, apply, value)
    elif is_local(variable):
        combined = _combine(variable, f"{operation} of {variable.name}", value)
        new = _applied(variable, operation, apply, combined)
    else:
        new = _applied_everywhere(variable, operation, apply, value)
    variable.replace_local(new)
    return variable


def scatter(
    variable: Variable, operation: str, ufunc: np.ufunc | None, delta: IndexedSlices
) -> Variable:
    """Apply `ufunc` to some rows of the copies; None replaces them."""
    _require_strategy(variable)
    call = f"{operation} of {variable.name}"
    extended = variable.distribute_strategy.extended
    is_reduced = variable.aggregation in (
        VariableAggregation.SUM,
        VariableAggregation.MEAN,
    )
    if variable.on_read or (is_reduced and operation not in _SPARSE_SUMS):
        raise UnsupportedError(
            f"{call} is not supported: it is {variable.synchronization.name} with "
            f"aggregation {variable.aggregation.name}"
        )
    if context.in_update() or (not context.has_strategy() and is_local(variable)):
        slices = _checked_slices(variable, delta)
    else:
        slices = extended.agreement.prepare(
            call, lambda: _checked_slices(variable, delta)
        )
        if is_local(variable):
            slices = _combine_slices(variable, call, *slices)
        else:
            extended.require_equal(call, slices)
    indices, rows = slices

    def put(old: Any, rows: Any) -> Any:
        new = old.copy()
        if ufunc is None:
            new[indices] = rows
        else:
            ufunc.at(new, indices, rows)
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


def _combine(variable: Variable, call: str, value: Any) -> Any:
    """Return what the values of all replicas come to for an ON_WRITE variable."""
    if not context.has_strategy():  # the default strategy: nothing to combine
        return value
    _require_aggregation(variable, call)
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


def _plainly_applied(old: Any, apply: Apply, value: Any) -> Any:
    """Return `apply(old, value)` for arrays that need no checks; None for others."""
    if (
        type(value) is type(old) is np.ndarray
        and value.dtype == old.dtype
        and value.shape == old.shape != ()
        and old.dtype.kind not in "iu"
    ):
        return apply(old, value)
    return None


def _applied(variable: Variable, operation: str, apply: Apply, value: Any) -> Any:
    """Return `apply(old copy, value)`; integers must not overflow."""
    old, given = variable.local, _converted(variable, value)
    new = apply(old, given)
    if old.dtype.kind in "iu" and operation != "assign":
        rough = apply(old.astype(np.float64), given.astype(np.float64))
        arithmetic.require_fit(new, rough, f"{operation} of {variable.name}")
    return new


def _applied_everywhere(
    variable: Variable, operation: str, apply: Apply, value: Any
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


def _checked_slices(variable: Variable, delta: IndexedSlices) -> tuple[Any, Any]:
    """Return indices `(n,)` and rows `(n, *shape)` that fit the variable."""
    if not isinstance(delta, IndexedSlices):
        raise ArgumentError(
            f"{variable.name}: IndexedSlices are needed, not {validation.shown(delta)}"
        )
    indices = arrays.to_tensor(delta.indices, "indices").reshape(-1)
    rows = _converted(variable, delta.values)
    if indices.dtype.kind not in "iu" and indices.size:
        raise DTypeError(f"indices must be integers, not {indices.dtype.name}")
    indices = indices.astype(np.int64)
    length = variable.shape[0] if variable.shape else 0
    if indices.size and not (indices.min() >= 0 and indices.max() < length):
        raise ArgumentError(
            f"{variable.name} has {length} rows; indices {indices.min()}.."
            f"{indices.max()} are out of range"
        )
    if rows.shape != (indices.size, *variable.shape[1:]):
        raise ArgumentError(
            f"{variable.name} needs {indices.size} rows of shape {variable.shape[1:]} "
            f"for as many indices, not values of shape {rows.shape}"
        )
    return indices, rows


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
