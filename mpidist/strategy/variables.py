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
was read stays as it was. NumPy arrays are read-only; CuPy has none that are, so on a
GPU nothing keeps a program from changing the array that it has read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpidist import context
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ArgumentTypeError, ContextError, DTypeError
from mpidist.options import ReduceOp, VariableAggregation, VariableSynchronization
from mpidist.strategy import assignment
from mpidist.util import validation
from mpidist.values import (
    ArrayView,
    DistributedValues,
    IndexedSlices,
    make_read_only,
)

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy

__all__ = ["Variable"]


_ON_READ = VariableSynchronization.ON_READ


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
      ArgumentTypeError: `initial_value` is no array, number or list of numbers; an
        argument of another type.
      MismatchError: initial values of unlike shapes or dtypes.
      What `initial_value` raises on any replica.

    Example:
      >>> with strategy.scope():
      ...     w = mpidist.Variable(np.ones(3), name="w")
      >>> w * 2
      array([2., 2., 2.])
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
        if synchronization is VariableSynchronization.AUTO:
            synchronization = VariableSynchronization.ON_WRITE
        self._strategy = context.get_strategy()
        number = self._strategy.extended.register(self)
        self._name = name if isinstance(name, str) else f"Variable_{number}"
        self._trainable = trainable
        self._synchronization = synchronization
        self._aggregation = aggregation

        extended = self._strategy.extended
        call = f"Variable {self._name}"

        def prepare() -> Any:
            _require_kinds(name, trainable, synchronization, aggregation)
            return arrays.to_device(_first(initial_value, dtype), extended.device)

        first = extended.agreement.prepare(call, prepare)
        local = extended.broadcast_from_first(call, first)
        super().__init__((make_read_only(local),), (extended.replica_id,))

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

        Not collective, but for an ON_READ variable in cross-replica context; there,
        ArgumentError on all replicas if its aggregation is NONE.
        """
        return make_read_only(self._array().view())

    read_value = value

    def numpy(self) -> Any:
        """Return the value as a NumPy array, a copy of its own; see `value`."""
        return np.array(arrays.to_host(self._array()))

    def assign(self, value: Any) -> Variable:
        """Replace the value, by the table at the top of this module. Returns self.

        Collective, but for an ON_READ variable in replica context and inside
        `StrategyExtended.update`.

        Args:
          value: an array or number of the variable's shape.

        Raises, on all replicas where it is collective:
          ArgumentError: another shape; a `PerReplica` in cross-replica context; in
            replica context an aggregation that is NONE, SUM of a Python number, MEAN of
            an integer variable; a result of integers that does not fit the dtype.
          DTypeError: a value that cannot be cast to the variable's dtype safely; an
            integer that does not fit it.
          ArgumentTypeError: no array or number.
          ContextError: under another strategy.
          MismatchError: in cross-replica context, values that differ, on all replicas.

        Example:
          >>> with strategy.scope():
          ...     w = mpidist.Variable(
          ...         np.zeros(2), aggregation=mpidist.VariableAggregation.MEAN
          ...     )
          >>> _ = strategy.run(lambda: w.assign(np.array([1.0, 3.0])))  # their mean
          >>> w.numpy()
          array([1., 3.])
          >>> w.assign(np.array([5.0, 7.0])).numpy()  # the same value to all
          array([5., 7.])
        """
        return assignment.update(self, "assign", lambda old, new: new.copy(), value)

    def assign_add(self, delta: Any) -> Variable:
        """Add to the value; collective and raising like `assign`. Returns self.

        `delta` has a shape that broadcasts to the variable's.

        Example:
          >>> with strategy.scope():
          ...     w = mpidist.Variable(np.ones(2))
          >>> w.assign_add(np.array([1.0, 2.0])).numpy()
          array([2., 3.])
        """
        return assignment.update(self, "assign_add", lambda old, new: old + new, delta)

    def assign_sub(self, delta: Any) -> Variable:
        """Subtract from the value; like `assign_add`."""
        return assignment.update(self, "assign_sub", lambda old, new: old - new, delta)

    def scatter_add(self, sparse_delta: IndexedSlices) -> Variable:
        """Add rows to rows of the value; repeated indices add up. Returns self.

        Collective like `assign`. In replica context the slices of all replicas, of
        which there may be different numbers, are applied (SUM, or divided by the number
        of replicas for MEAN), or replica 0's (ONLY_FIRST_REPLICA).

        Args:
          sparse_delta: rows `(n, *shape[1:])` and their indices `(n,)`, as arrays.

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
        return assignment.scatter(self, "scatter_add", np.add, sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices) -> Variable:
        """Subtract rows from rows of the value; like `scatter_add`."""
        return assignment.scatter(self, "scatter_sub", np.subtract, sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices) -> Variable:
        """Take the smaller of rows and rows of the value; like `scatter_add`.

        Raises: UnsupportedError: aggregation SUM or MEAN, which make no sense for it.
        """
        return assignment.scatter(self, "scatter_min", np.minimum, sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices) -> Variable:
        """Take the larger of rows and rows of the value; like `scatter_min`."""
        return assignment.scatter(self, "scatter_max", np.maximum, sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices) -> Variable:
        """Multiply rows of the value by rows; like `scatter_min`."""
        return assignment.scatter(self, "scatter_mul", np.multiply, sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices) -> Variable:
        """Divide rows of the value by rows; like `scatter_min`."""
        return assignment.scatter(self, "scatter_div", np.true_divide, sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices) -> Variable:
        """Replace rows of the value; like `scatter_min`."""
        return assignment.scatter(self, "scatter_update", None, sparse_delta)

    @property
    def on_read(self) -> bool:
        """Whether it is synchronized ON_READ."""
        return self._synchronization is _ON_READ

    def _array(self) -> Any:
        """Return what a read in the current context gives."""
        if self._synchronization is not _ON_READ or assignment.is_local(self):
            return self._values[0]
        if self._aggregation is VariableAggregation.NONE:
            raise ArgumentError(
                f"{self._name} cannot be read in cross-replica context: it is ON_READ "
                "with aggregation NONE, so its copies have no common value; set an "
                "aggregation"
            )
        extended = self._strategy.extended
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            value = extended.broadcast_from_first(
                f"read of {self._name}", self._values[0]
            )
        else:
            op = ReduceOp.from_variable_aggregation(self._aggregation)
            value = extended.reduce(f"read of {self._name}", op, self._values[0])
        return make_read_only(value)

    @property
    def local(self) -> Any:
        """The copy of this replica. Not collective."""
        return self._values[0]

    def set_local(self, array: Any) -> None:
        """Put `array`, of this dtype, shape and device, in place of this copy."""
        self._values = (make_read_only(array),)

    def replace_local(self, array: Any) -> None:
        """Put `array`, which is kept and read-only then, in place of this copy."""
        array = arrays.namespace(self.local).asarray(array)
        if array.shape != self.shape:
            raise ArgumentError(
                f"{self._name} has shape {self.shape}; {array.shape} does not fit it"
            )
        self.set_local(array.astype(self.dtype, copy=False))

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

    def __reduce__(self) -> NoReturn:
        raise ContextError(
            f"{self._name} cannot be pickled: it belongs to the ranks of this job; "
            "save it with mpidist.Checkpoint, or pickle its value"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Return a variable of the same strategy with a state of its own.

        Not collective: every replica copies its own copy.
        """
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin._values = (make_read_only(self.local.copy()),)
        self._strategy.extended.register(twin)
        return twin

    def __repr__(self) -> str:
        return (
            f"<mpidist.Variable {self._name!r} shape={self.shape} "
            f"dtype={self.dtype.name}, {self._synchronization.name}, "
            f"{self._aggregation.name}, replica {self._replica_ids[0]}: "
            f"{self._values[0]!r}>"
        )


def _require_kinds(
    name: Any, trainable: Any, synchronization: Any, aggregation: Any
) -> None:
    if name is not None and not isinstance(name, str):
        raise ArgumentTypeError(
            f"name must be a str or None, not {validation.shown(name)}"
        )
    if trainable is not None:  # as it may be in TensorFlow
        validation.switch("trainable", trainable)
    if synchronization is VariableSynchronization.NONE:
        raise ArgumentError(
            "synchronization NONE is not supported; use AUTO, ON_WRITE or ON_READ"
        )
    validation.instance("synchronization", synchronization, VariableSynchronization)
    validation.instance("aggregation", aggregation, VariableAggregation)


def _first(initial_value: Any, dtype: Any) -> Any:
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
