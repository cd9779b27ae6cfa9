"""Variables: a copy per replica, kept equal (ON_WRITE) or reduced when read (ON_READ).

::

                       ON_WRITE                          ON_READ
    read, replica      own copy (all are equal)          own copy
    read, cross        own copy                          reduced by the aggregation
    assign, replica    values are reduced by the         own copy only
                       aggregation, then applied
    assign, cross      the same value to all copies      SUM: shares that add up to it;
                                                         else the same value to all

A copy is never changed in place: an assignment puts a new array in its place. So what
was read stays as it was.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpidist import arrays, context
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    DTypeError,
)
from mpidist.options import ReduceOp, VariableAggregation, VariableSynchronization
from mpidist.values import ArrayView, DistributedValues, Mirrored

if TYPE_CHECKING:
    from mpidist.strategy import Strategy

__all__ = ["Variable"]

_Apply = Callable[[Any, Any], Any]
_counter = itertools.count()


class Variable(ArrayView, DistributedValues):
    """An array with state, one copy per replica of the strategy it was created under.

    Created in a strategy's scope (or in `run`): collective, every replica gets replica
    0's initial value. Created outside all scopes: one copy, of the default strategy.

    Reads and operators work as on an array (`w * 2`, `np.exp(w)`, `w[0]`); in-place
    operators (`w += 1`) are refused, use `assign_add`.

    Args:
      initial_value: an array, a number, or a function without arguments that returns
        one. The same shape and dtype on all replicas.
      trainable: whether an optimizer should change it; carried, not used.
      name: for messages.
      dtype: the dtype, by default that of `initial_value`.
      synchronization: AUTO (= ON_WRITE), ON_WRITE or ON_READ.
      aggregation: how replicas' values are combined: NONE, SUM, MEAN or
        ONLY_FIRST_REPLICA.

    Raises, on all replicas:
      ArgumentError: synchronization NONE.
      MismatchError: initial values of unlike shapes or dtypes.
    """

    is_variable = True
    __hash__ = object.__hash__

    def __init__(
        self,
        initial_value: Any,
        trainable: bool = True,
        *,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ):
        if synchronization is VariableSynchronization.NONE:
            raise ArgumentError(
                "synchronization NONE is not supported; use AUTO, ON_WRITE or ON_READ"
            )
        if not isinstance(synchronization, VariableSynchronization):
            raise ArgumentTypeError(f"synchronization is {synchronization!r}")
        if not isinstance(aggregation, VariableAggregation):
            raise ArgumentTypeError(f"aggregation is {aggregation!r}")
        if synchronization is VariableSynchronization.AUTO:
            synchronization = VariableSynchronization.ON_WRITE
        self._strategy = context.get_strategy()
        self._name = f"Variable_{next(_counter)}" if name is None else name
        self._trainable = trainable
        self._synchronization = synchronization
        self._aggregation = aggregation

        extended = self._strategy.extended
        call = f"Variable {self._name}"
        first = extended.agreement.prepare(call, lambda: _first(initial_value, dtype))
        first = arrays.to_device(first, extended.device)
        local = extended.broadcast_from_first(call, first)
        super().__init__((local,), (extended.replica_id,))

    @property
    def name(self) -> str:
        """The name given at creation, or one that was made up."""
        return self._name

    @property
    def trainable(self) -> bool:
        """Whether an optimizer should change it."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """ON_WRITE or ON_READ."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How values of several replicas are combined."""
        return self._aggregation

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy it was created under."""
        return self._strategy

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, which never changes."""
        return self._values[0].dtype  # type: ignore[no-any-return]  # cupy is untyped

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which never changes."""
        return tuple(self._values[0].shape)

    def value(self) -> Any:
        """Return the value as a read-only array.

        Not collective, but for an ON_READ variable in cross-replica context.
        """
        view = self._array().view()
        if isinstance(view, np.ndarray):
            view.flags.writeable = False
        return view

    read_value = value

    def numpy(self) -> Any:
        """Return the value as a NumPy array, a copy of its own."""
        return np.array(arrays.to_host(self._array()))

    def assign(self, value: Any) -> Variable:
        """Replace the value, by the table at the top of this module. Returns self.

        Collective, but for an ON_READ variable in replica context and inside
        `StrategyExtended.update`.

        Raises:
          ArgumentError: another shape; a `PerReplica` in cross-replica context; in
            replica context an aggregation that is NONE, SUM of a Python number, MEAN of
            an integer variable.
          DTypeError: a value that cannot be cast to the variable's dtype safely.
          ContextError: under another strategy.
          MismatchError: in cross-replica context, values that differ, on all replicas.
        """
        return self._update("assign", lambda old, new: new.copy(), value)

    def assign_add(self, delta: Any) -> Variable:
        """Add to the value; collective and raising like `assign`. Returns self."""
        return self._update("assign_add", lambda old, new: old + new, delta)

    def assign_sub(self, delta: Any) -> Variable:
        """Subtract from the value; like `assign_add`."""
        return self._update("assign_sub", lambda old, new: old - new, delta)

    @property
    def _on_read(self) -> bool:
        return self._synchronization is VariableSynchronization.ON_READ

    def _array(self) -> Any:
        """Return what a read in the current context gives."""
        if not self._on_read or self._is_local():
            return self._values[0]
        if self._aggregation is VariableAggregation.NONE:
            raise ArgumentError(
                f"{self._name} cannot be read in cross-replica context: it is ON_READ "
                "with aggregation NONE, so its copies have no common value; set an "
                "aggregation"
            )
        extended = self._strategy.extended
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return extended.broadcast_from_first(
                f"read of {self._name}", self._values[0]
            )
        op = ReduceOp.from_variable_aggregation(self._aggregation)
        return extended.reduce(f"read of {self._name}", op, self._values[0])

    def _is_local(self) -> bool:
        """Return whether the current context concerns this replica's copy alone."""
        return context.in_update() or self._in_own_replica_context()

    def _in_own_replica_context(self) -> bool:
        replica = context.get_replica_context()
        return replica is not None and replica.strategy is self._strategy

    def _update(self, operation: str, apply: _Apply, value: Any) -> Variable:
        current = context.get_strategy()
        if context.has_strategy() and current is not self._strategy:
            raise ContextError(
                f"Mixing different tf.distribute.Strategy objects: {self._name} of "
                f"{self._strategy!r} was changed under {current!r}"
            )
        if context.in_update():
            self._apply(apply, value)
        elif self._in_own_replica_context():
            self._update_in_replica(operation, apply, value)
        else:
            self._update_across(operation, apply, value)
        return self

    def _update_in_replica(self, operation: str, apply: _Apply, value: Any) -> None:
        if not self._on_read:
            value = self._aggregate(operation, value)
        self._apply(apply, value)

    def _aggregate(self, operation: str, value: Any) -> Any:
        """Return what the values of all replicas come to for an ON_WRITE variable."""
        aggregation = self._aggregation
        if not context.has_strategy():  # the default strategy: nothing to combine
            return value
        if aggregation is VariableAggregation.NONE:
            raise ArgumentError(
                f"{self._name} cannot be changed by {operation} in replica context: "
                "its aggregation is NONE, so the copies would drift apart; create it "
                "with an aggregation, or change it by merge_call and extended.update"
            )
        call = f"{operation} of {self._name}"
        extended = self._strategy.extended
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return extended.broadcast_from_first(call, self._converted(value))
        is_number = isinstance(value, numbers.Number) and not hasattr(value, "dtype")
        if aggregation is VariableAggregation.MEAN:
            if not arrays.is_floating(self.dtype):
                raise ArgumentError(
                    f"{self._name} has dtype {self.dtype.name}, which a MEAN does not "
                    "fit; use a floating dtype or another aggregation"
                )
            if is_number:
                return value
        elif is_number:
            raise ArgumentError(
                f"{operation} of the Python number {value!r} to {self._name}, whose "
                "aggregation is SUM, is refused: it is unclear whether each replica "
                "gives it or all together; pass an array"
            )
        op = ReduceOp.from_variable_aggregation(aggregation)
        return extended.reduce(call, op, self._converted(value))

    def _update_across(self, operation: str, apply: _Apply, value: Any) -> None:
        if isinstance(value, DistributedValues) and not isinstance(value, ArrayView):
            raise ArgumentError(
                f"{operation} of a {type(value).__name__} to {self._name} in "
                "cross-replica context is refused: all copies must get the same value; "
                "reduce it first"
            )
        if isinstance(value, Mirrored):
            value = value.values[0]
        extended = self._strategy.extended
        call = f"{operation} of {self._name}"
        converted = extended.agreement.prepare(call, lambda: self._converted(value))
        extended.require_equal(call, converted)
        is_sum = self._on_read and self._aggregation is VariableAggregation.SUM
        if is_sum and operation != "assign":
            raise ArgumentError(
                f"{operation} to {self._name} in cross-replica context is refused: it "
                "is ON_READ with aggregation SUM; call assign, or do it in replica "
                "context"
            )
        if is_sum:
            converted = _share(converted, extended.num_replicas, extended.replica_id)
        self._apply(apply, converted)

    def _converted(self, value: Any) -> Any:
        """Return `value` as an array of the variable's dtype that fits its shape."""
        is_number = isinstance(value, int | float | complex)
        array = arrays.to_array(value)
        kind = "unsafe" if is_number and not _loses(value, self.dtype) else "same_kind"
        if not np.can_cast(array.dtype, self.dtype, kind):  # type: ignore[arg-type]
            raise DTypeError(
                f"a value of dtype {array.dtype.name} cannot be put into {self._name}, "
                f"which has dtype {self.dtype.name}; cast it first"
            )
        return array.astype(self.dtype, copy=False)

    def _apply(self, apply: _Apply, value: Any) -> None:
        """Put `apply(old, value)` in place of this replica's copy."""
        old = self._values[0]
        new = arrays.namespace(old).asarray(apply(old, self._converted(value)))
        if new.shape != old.shape:
            raise ArgumentError(self._misfit(new.shape))
        self._values = (new.astype(self.dtype, copy=False),)

    def _misfit(self, shape: tuple[int, ...]) -> str:
        return f"{self._name} has shape {self.shape}; {shape} does not fit it"

    def _refuse_in_place(self, operation: str) -> NoReturn:
        raise ArgumentTypeError(
            f"{operation} in place on {self._name} is refused; use assign, assign_add "
            "or assign_sub, which keep the replicas equal"
        )

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        self._refuse_in_place("item assignment")

    def __copy__(self) -> NoReturn:
        raise ContextError(
            f"{self._name} cannot be copied shallowly: both would share one state; use "
            "copy.deepcopy, or read its value"
        )

    def __repr__(self) -> str:
        return (
            f"<mpidist.Variable {self._name!r} shape={self.shape} "
            f"dtype={self.dtype.name}, {self._synchronization.name}, "
            f"{self._aggregation.name}, replica {self._replica_ids[0]}: "
            f"{self._values[0]!r}>"
        )


def _first(initial_value: Any, dtype: Any) -> Any:
    if callable(initial_value) and not hasattr(initial_value, "shape"):
        initial_value = initial_value()
    array = arrays.to_array(initial_value, "initial_value")
    return array.astype(array.dtype if dtype is None else dtype, copy=False)


def _loses(value: complex, dtype: np.dtype[Any]) -> bool:
    """Return whether a cast of a Python number to `dtype` could change its value."""
    if dtype.kind not in "iub":
        return isinstance(value, complex) and dtype.kind != "c"
    return not isinstance(value, int)


def _share(value: Any, replicas: int, replica: int) -> Any:
    """Return this replica's share of a total; the shares of all add up to it."""
    if value.dtype.kind in "iu":
        quotient, rest = np.divmod(value, replicas)
        return (quotient + (replica < rest)).astype(value.dtype)
    return (value / replicas).astype(value.dtype)
