"""Combine assignments to a variable over the replicas, and apply them.

The table at the top of `variables` has the rules for each kind and context.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist import context
from mpidist.comm import arithmetic
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ContextError, DTypeError
from mpidist.options import ReduceOp, VariableAggregation
from mpidist.util import validation
from mpidist.util.validation import shown
from mpidist.values import (
    ArrayView,
    DistributedValues,
    Mirrored,
    make_read_only,
)

if TYPE_CHECKING:
    from mpidist.strategy.variables import Variable

__all__ = [
    "Apply",
    "apply_to_copy",
    "convert",
    "copy_of_new",
    "initial",
    "is_local",
    "read_reduced",
    "require_aggregation",
    "require_strategy",
    "share",
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
    require_strategy(variable)
    if context.in_update() or (is_local(variable) and variable.on_read):
        new = apply_to_copy(variable, operation, apply, value)
    elif is_local(variable):
        call = f"{operation} of {variable.name}"
        combined = _combine(variable, call, value, part)
        new = apply_to_copy(variable, operation, apply, combined)
    else:
        new = _applied_everywhere(variable, operation, apply, value, part)
    variable.replace_local(new)
    return variable


def require_strategy(variable: Variable) -> None:
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
    require_aggregation(variable, call)
    _require_same_part(variable, call, part)
    extended = variable.distribute_strategy.extended
    converted = extended.consensus.guard(call, lambda: convert(variable, value))
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


def require_aggregation(variable: Variable, call: str) -> None:
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


def apply_to_copy(variable: Variable, operation: str, apply: Apply, value: Any) -> Any:
    """Return `apply(old copy, value)`; integers must not overflow."""
    old, given = variable.local, convert(variable, value)
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
        converted = convert(variable, plain)
        own = converted
        if is_sum:
            own = share(converted, extended.num_replicas, extended.replica_id)
        return converted, apply_to_copy(variable, operation, apply, own)

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


def convert(variable: Variable, value: Any) -> Any:
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
