"""Variables: a copy per replica, kept equal (ON_WRITE) or reduced when read (ON_READ).

::

                       ON_WRITE                          ON_READ
    read, replica      own copy (all are equal)          own copy
    read, cross        own copy                          reduced by the aggregation
    assign, replica    values are reduced by the         own copy only
                       aggregation, then applied
    assign, cross      the same value to all copies      SUM: shares that add up to it;
                                                         else the same value to all
    in `update`        own copy only, whatever the       own copy only
                       aggregation

Scatters, which change some rows or elements, have two exceptions: in replica context,
SUM and MEAN allow additions and subtractions only; ON_READ variables can be changed
only in `update`.

A copy is never changed in place: an assignment replaces the array. So arrays that were
read before do not change. NumPy arrays are read-only. CuPy has no read-only arrays: do
not change an array that was read from a variable on a GPU.
"""

from __future__ import annotations

import functools
import numbers
import operator
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from mpidist import context
from mpidist.comm import arithmetic
from mpidist.comm.consensus.public_calls import announce_errors
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.device import arrays
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    UnsupportedError,
)
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.reductions import ReduceOp
from mpidist.strategy import assignment
from mpidist.strategy.assignment import batch_indices, row_indices
from mpidist.util import nest, validation
from mpidist.util.dtypes import accumulator_dtype, is_floating, is_integer, traits
from mpidist.values import (
    ArrayView,
    DistributedValues,
    IndexedSlices,
    Mirrored,
    make_read_only,
)

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy

_NONE, _SUM, _MEAN, _FIRST = (
    VariableAggregation.NONE,
    VariableAggregation.SUM,
    VariableAggregation.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA,
)
Name = str | None
# Returns the new copy, given the old one and what is assigned
Apply = Callable[[Any, Any], Any]


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


class Variable(ArrayView, DistributedValues):
    """An array with state, one copy per replica of the strategy it was created under.

    Creating one in a strategy's scope (or in `run`) is collective: every replica gets
    replica 0's initial value. Outside all scopes it has one copy, of the default
    strategy.

    Reads and operators work as on an array (`w * 2`, `np.exp(w)`, `w[0]`); in-place
    operators (`w += 1`) are refused: use `assign_add`.

    Args:
      initial_value: an array, a number, or a function without arguments that returns
        one. The same shape and dtype on all replicas.
      trainable: whether an optimizer should change it; by default True unless ON_READ.
        Stored, not used.
      name: used in messages.
      dtype: by default the dtype of `initial_value`.
      constraint: what an optimizer should apply to changed values. Stored, not used.
      synchronization: AUTO (= ON_WRITE), ON_WRITE or ON_READ; None is AUTO.
      aggregation: how replicas' values are combined: NONE, SUM, MEAN or
        ONLY_FIRST_REPLICA; None is NONE.

    Raises, on all replicas:
      ArgumentError: synchronization NONE; an unknown synchronization or aggregation.
      ArgumentTypeError: `initial_value` is not an array, number or list of numbers;
        another argument has an invalid type.
      MismatchError: shapes or dtypes of the initial values differ.
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
        trainable: bool | None = None,
        *,
        name: str | None = None,
        dtype: Any = None,
        constraint: Callable[[Any], Any] | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ):
        self._strategy = context.get_strategy()
        self._is_default = not context.has_strategy()
        extended = self._extended = self._strategy.extended
        number = extended.new_number()
        self._name = name if isinstance(name, str) else f"Variable_{number}"
        self._constraint = constraint
        self._root: Any = None  # see `__getitem__`

        def prepare() -> Any:
            if name is not None and not isinstance(name, str):
                raise ArgumentTypeError(
                    f"name must be a str or None, not {validation.shown(name)}"
                )
            validation.optional_function("constraint", constraint)
            self._synchronization = VariableSynchronization.parse(synchronization)
            self._is_on_read = self._synchronization is VariableSynchronization.ON_READ
            self._aggregation = VariableAggregation.parse(aggregation)
            self._trainable = not self._is_on_read
            if trainable is not None:
                self._trainable = validation.switch("trainable", trainable)
            value = assignment.evaluate(initial_value)
            return arrays.to_device(
                assignment.initial(_read(value), dtype), extended.device
            )

        call = f"Variable {self._name}"
        local = extended.consensus.run(call, prepare)
        local = extended.broadcast_from_first(call, local)
        self._can_overflow = is_integer(local.dtype)
        self._is_plain = type(local) is np.ndarray and not self._can_overflow
        # Whether values of several replicas can be combined to one
        self._is_combined = self._aggregation in (_SUM, _FIRST) or (
            self._aggregation is _MEAN and is_floating(local.dtype)
        )
        self._number = _number_class(local)
        super().__init__((make_read_only(local),), (extended.replica_id,))
        extended.register(self, number)

    @property
    def name(self) -> str:
        """The name given at creation, or a generated one."""
        return self._name

    @property
    def trainable(self) -> bool:
        """Whether an optimizer should change the variable."""
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
        """The strategy under which the variable was created."""
        return self._strategy

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, which never changes."""
        return self._values[0].dtype  # type: ignore[no-any-return]  # cupy is untyped

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which never changes."""
        return tuple(self._values[0].shape)

    def get_shape(self) -> tuple[int, ...]:
        """Return `shape`."""
        return self.shape

    @property
    def device(self) -> str:
        """The device of this replica's copy, such as "GPU:0"."""
        return self._extended.device

    @property
    def constraint(self) -> Callable[[Any], Any] | None:
        """What an optimizer should apply to changed values."""
        return self._constraint

    @property
    def initial_value(self) -> NoReturn:
        """Not available: raises ContextError, as in TensorFlow's eager execution."""
        raise ContextError(
            f"the initial value of {self._name} is not kept, to save memory; keep a "
            "copy in the program if you need it"
        )

    def is_initialized(self, name: Name = None) -> bool:
        """Return True: a variable has a value from its creation on."""
        return True

    def ref(self) -> Reference:
        """Return a hashable reference with `deref()`; equal for the same variable."""
        return Reference(self)

    def value(self) -> Any:
        """Return the value as a read-only array.

        Not collective, except for an ON_READ variable in cross-replica context; there
        it raises ArgumentError on all replicas if the aggregation is NONE.
        """
        # A view of a read-only array is read-only
        return (self._array() if self._is_on_read else self._values[0]).view()

    read_value = value

    def numpy(self) -> Any:
        """Return the value as a new NumPy array; see `value`."""
        return np.array(arrays.to_host(self._array()))

    def assign(
        self,
        value: Any,
        use_locking: bool = False,
        name: Name = None,
        read_value: bool = True,
    ) -> Any:
        """Replace the value; return self.

        `help(mpidist.strategy.variables)` has a table of the rules for each context.
        Collective, except for an ON_READ variable in replica context and inside
        `StrategyExtended.update`. `w[...].assign(value)` replaces a part.

        Args:
          value: an array or number of the variable's shape.
          use_locking: accepted for TensorFlow compatibility.
          name: likewise.
          read_value: if False, return None.

        Raises, on all replicas if it is collective:
          ArgumentError: another shape; a `PerReplica` in cross-replica context; in
            replica context, aggregation NONE, a Python number with SUM, or an integer
            variable with MEAN; an integer result that does not fit the dtype.
          DTypeError: a value that cannot be cast safely to the variable's dtype; an
            integer that does not fit it.
          ArgumentTypeError: `value` is not an array or number.
          ContextError: under another strategy.
          MismatchError: in cross-replica context, the replicas' values differ.

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
        self._change("assign", _copy_of_new, value)
        return self if read_value else None

    def assign_add(
        self,
        delta: Any,
        use_locking: bool = False,
        name: Name = None,
        read_value: bool = True,
    ) -> Any:
        """Add to the value; collective and raising like `assign`. Returns self.

        The shape of `delta` broadcasts to the variable's.

        Example:
          >>> with strategy.scope():
          ...     w = mpidist.Variable(np.ones(2))
          >>> w.assign_add(np.array([1.0, 2.0])).numpy()
          array([2., 3.])
        """
        self._change("assign_add", operator.add, delta)
        return self if read_value else None

    def assign_sub(
        self,
        delta: Any,
        use_locking: bool = False,
        name: Name = None,
        read_value: bool = True,
    ) -> Any:
        """Subtract from the value; like `assign_add`."""
        self._change("assign_sub", operator.sub, delta)
        return self if read_value else None

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
        return assignment.take(self._array(), indices, self._name)

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
        return self._scatter("scatter_add", np.add, sparse_delta)

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Subtract rows from rows of the value; like `scatter_add`."""
        return self._scatter("scatter_sub", np.subtract, sparse_delta)

    def scatter_min(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Replace rows of the value by the elementwise minimum; like `scatter_add`.

        Raises: UnsupportedError: aggregation SUM or MEAN, which a minimum cannot have.
        """
        return self._scatter("scatter_min", np.minimum, sparse_delta)

    def scatter_max(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Replace rows of the value by the elementwise maximum; like `scatter_min`."""
        return self._scatter("scatter_max", np.maximum, sparse_delta)

    def scatter_mul(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Multiply rows of the value by rows; like `scatter_min`."""
        return self._scatter("scatter_mul", np.multiply, sparse_delta)

    def scatter_div(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Divide rows of the value by rows; like `scatter_min`."""
        return self._scatter("scatter_div", np.true_divide, sparse_delta)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Replace rows of the value; like `scatter_min`."""
        return self._scatter("scatter_update", None, sparse_delta)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Replace rows of each batch: the first dimensions; like `scatter_min`.

        With indices `(*batch, n)` and values `(*batch, n, *shape[k:])` of k dimensions:
        `w[i, indices[i, j]] = values[i, j]`.
        """
        return self._scatter("batch_scatter_update", None, sparse_delta, batch_indices)

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
        return self._scatter(
            "scatter_nd_add", np.add, IndexedSlices(updates, indices), None
        )

    def scatter_nd_sub(self, indices: Any, updates: Any, name: Name = None) -> Variable:
        """Subtract from elements of the value, or parts; like `scatter_nd_add`."""
        return self._scatter(
            "scatter_nd_sub", np.subtract, IndexedSlices(updates, indices), None
        )

    def scatter_nd_update(
        self, indices: Any, updates: Any, name: Name = None
    ) -> Variable:
        """Replace elements of the value, or parts; like `scatter_min`."""
        return self._scatter(
            "scatter_nd_update", None, IndexedSlices(updates, indices), None
        )

    def _change(
        self, operation: str, apply: Apply, value: Any, part: Any = None
    ) -> None:
        """Replace the copies by `apply(old copy, value)`, by the rules of the context.

        `part` says which elements `apply` changes, if not all; replicas that
        communicate must pass the same.
        """
        frame = context.frame_for(self._strategy, self._name)
        if frame.is_update and self._is_plain:
            # The short way for an array of the same dtype: what is below gives the same
            local = self._values[0]
            if type(value) is Variable and not value._is_on_read:
                value = value._values[0]  # as in `_convert`
            if type(value) is np.ndarray and value.dtype is local.dtype:
                new = value.copy() if apply is _copy_of_new else apply(local, value)
                is_array = type(new) is np.ndarray and new.dtype is local.dtype
                if is_array and new.shape == local.shape:
                    new.setflags(False)
                    self._values, self._root = (new,), None
                    return
        if not (frame.is_update or frame.is_replica_of(self._strategy)):
            new = self._apply_everywhere(operation, apply, value, part)
        else:
            if frame.is_update or self._is_on_read or self._is_default:
                value = self._convert(value)
            else:
                value = self._combine(f"{operation} of {self._name}", value, part)
            new = self._apply(operation, apply, value)
        self.replace_local(new)

    def _combine(self, call: str, value: Any, part: Any) -> Any:
        """Return the replicas' values combined by the aggregation. Collective."""
        if not self._is_combined:
            self._refuse_to_combine(call)
        consensus, local = self._extended.consensus, self._values[0]
        if part is not None:
            consensus.require_same(CallSignature(call, (("part", part),)))
        if type(value) is type(local) is np.ndarray and value.dtype == local.dtype:
            return self._reduce(call, value)
        is_number = isinstance(value, numbers.Number) and not hasattr(value, "dtype")
        if is_number and self._aggregation is _MEAN:
            return consensus.run(
                call, self._convert, value, same=lambda x: _signature(call, x)
            )
        if is_number and self._aggregation is _SUM:
            raise ArgumentError(
                f"{call}: the Python number {validation.shown(value)} is refused: with "
                "aggregation SUM it is unclear whether it is the total or one "
                "replica's share; pass an array"
            )
        with consensus.call(call) as opened:
            value = opened.reserve(self._convert, value)
            return self._reduce(call, value)

    def _reduce(self, call: str, value: Any) -> Any:
        """Return the replicas' arrays combined by the aggregation. Collective."""
        if self._aggregation is _FIRST:
            return self._extended.broadcast_from_first(call, value)
        op = ReduceOp.SUM if self._aggregation is _SUM else ReduceOp.MEAN
        return self._extended.reduce(call, op, value)

    def _refuse_to_combine(self, call: str) -> NoReturn:
        if self._aggregation is _NONE:
            raise ArgumentError(
                f"{call} in replica context is refused: its aggregation is NONE, so "
                "the copies could become unequal; create it with an aggregation, or "
                "change it with merge_call and extended.update"
            )
        accumulator_dtype(self.dtype, self._name)
        raise ArgumentError(
            f"{call} in replica context is refused: it has dtype {self.dtype.name}, "
            "which cannot hold a MEAN; use a floating dtype or another aggregation"
        )

    def _apply_everywhere(
        self, operation: str, apply: Apply, value: Any, part: Any
    ) -> Any:
        """Return this replica's new copy for a value that is equal on all replicas.

        Collective. Copies of ON_READ variables differ, so that one replica alone may
        overflow: the new copy is made before the ranks agree.
        """
        call, extended = f"{operation} of {self._name}", self._extended
        is_total = self._is_on_read and self._aggregation is _SUM
        if is_total and operation != "assign":
            raise ArgumentError(
                f"{call} in cross-replica context is refused: it is ON_READ with "
                "aggregation SUM; call assign, or do it in replica context"
            )

        def prepare() -> tuple[Any, Any]:
            if isinstance(value, DistributedValues) and not isinstance(
                value, ArrayView
            ):
                raise ArgumentError(
                    f"{call}: a {type(value).__name__} is refused in cross-replica "
                    "context, where all copies must get the same value; reduce it first"
                )
            plain = value.values[0] if isinstance(value, Mirrored) else value
            converted = addend = self._convert(plain)
            if is_total:
                addend = assignment.share(
                    converted, extended.num_replicas, extended.replica_id
                )
            return converted, self._apply(operation, apply, addend)

        _, new = extended.consensus.run(
            call, prepare, same=lambda pair: _signature(call, pair[0], part)
        )
        return new

    def _apply(self, operation: str, apply: Apply, value: Any) -> Any:
        """Return `apply(old copy, value)`; integers must not overflow."""
        old = self._values[0]
        new = apply(old, value)
        if self._can_overflow and operation != "assign":
            estimate = apply(old.astype(np.float64), value.astype(np.float64))
            arithmetic.check_overflow(new, estimate, f"{operation} of {self._name}")
        return new

    def _convert(self, value: Any) -> Any:
        local = self._values[0]
        if type(value) is Variable and not value._is_on_read:
            value = value._values[0]  # whatever the context is
        if type(value) is type(local) is np.ndarray and value.dtype is local.dtype:
            return value
        return assignment.convert(_read(value), local, self._name)

    def _scatter(
        self,
        operation: str,
        ufunc: np.ufunc | None,
        delta: IndexedSlices,
        expand: Callable[[Any], Any] | None = row_indices,
    ) -> Variable:
        """Apply `ufunc` to parts of the copies, by the rules of the context.

        `ufunc`, `expand`: see `assignment.put` and `assignment.flatten`.
        """
        call, frame = (
            f"{operation} of {self._name}",
            context.frame_for(self._strategy, self._name),
        )
        is_sum = ufunc in (np.add, np.subtract)
        is_supported = is_sum or self._aggregation not in (_SUM, _MEAN)
        if (self._is_on_read or not is_supported) and not frame.is_update:
            raise UnsupportedError(
                f"{call} is not supported: it is {self._synchronization.name} with "
                f"aggregation {self._aggregation.name}"
            )

        def flatten() -> tuple[Any, Any]:
            slices = delta
            if isinstance(delta, IndexedSlices):
                slices = IndexedSlices(_read(delta.values), _read(delta.indices))
            return assignment.flatten(self.local, slices, expand, self._name)

        consensus = self._extended.consensus
        is_replica = frame.is_replica_of(self._strategy)
        if frame.is_update or (is_replica and self._is_default):
            indices, rows = flatten()
        elif is_replica:
            with consensus.call(call) as opened:
                indices, rows = self._gather(call, *opened.reserve(flatten))
        else:
            indices, rows = consensus.run(
                call, flatten, same=lambda pair: _signature(call, pair)
            )
        put = functools.partial(assignment.put, ufunc, indices)
        self.replace_local(self._apply(operation, put, rows))
        return self

    def _gather(self, call: str, indices: Any, rows: Any) -> tuple[Any, Any]:
        """Return the indices and rows of all replicas, or of replica 0. Collective."""
        if not self._is_combined:
            self._refuse_to_combine(call)
        extended, count = self._extended, np.array([indices.size])
        indices, rows, counts = extended.gather(call, (indices, rows, count), axis=0)
        if self._aggregation is _FIRST:
            return indices[: counts[0]], rows[: counts[0]]
        if self._aggregation is _MEAN:
            rows = (rows / extended.num_replicas).astype(rows.dtype)
        return indices, rows

    @property
    def on_read(self) -> bool:
        """Whether the variable is synchronized ON_READ."""
        return self._is_on_read

    def _array(self) -> Any:
        if not self._is_on_read:
            return self._values[0]
        frame = context.current()
        if frame.is_update or frame.is_replica_of(self._strategy):
            return self._values[0]
        if self._aggregation is _NONE:
            raise ArgumentError(
                f"{self._name} cannot be read in cross-replica context: it is ON_READ "
                "with aggregation NONE, so its copies have no common value; set an "
                "aggregation"
            )
        return self._reduced()

    def _reduced(self) -> Any:
        """Return the copies of all replicas, reduced. Collective."""
        return make_read_only(self._reduce(f"read of {self._name}", self._values[0]))

    @property
    def local(self) -> Any:
        """The copy of this replica. Not collective."""
        return self._values[0]

    def replace_local(self, array: Any) -> None:
        """Replace this copy by `array`, which becomes read-only."""
        local = self._values[0]
        if type(array) is not np.ndarray or array.dtype is not local.dtype:
            array = arrays.namespace(local).asarray(array)
            array = array.astype(local.dtype, copy=False)
        if array.shape != local.shape:
            raise ArgumentError(
                f"{self._name} has shape {self.shape}; {array.shape} does not fit it"
            )
        if type(array) is np.ndarray:
            array.setflags(write=False)  # faster than `flags.writeable`
        self._values, self._root = (array,), None

    def _refuse_in_place(self, operation: str) -> NoReturn:
        raise ArgumentTypeError(
            f"{operation} in place on {self._name} is refused; use assign, assign_add "
            "or assign_sub, which keep the replicas equal"
        )

    def __getitem__(self, key: Any) -> Any:
        """Return `value()[key]`; integers and slices give a part with `assign(value)`.

        That `assign` is collective and raises what the variable's `assign` raises; also
        MismatchError, on all replicas, if they assign to different parts. Elements of a
        bool vector and parts of variables on a GPU have no `assign`: use
        `scatter_nd_update` for them.

        Example:
          >>> with strategy.scope():
          ...     w = mpidist.Variable(np.zeros((2, 3)))
          >>> _ = w[0].assign(np.array([1.0, 2.0, 3.0]))  # on all replicas
          >>> _ = w[1, :2].assign(np.array([4.0, 5.0]))
          >>> w.numpy()
          array([[1., 2., 3.],
                 [4., 5., 0.]])
        """
        root = self._root
        if root is None:
            values, root = self._values, _root_of(self, self._array())
            if not self._is_on_read:  # its value depends on the context
                self._root = root
                if self._values is not values:  # another thread has assigned since
                    self._root = None
        part = root[key]
        if type(part) is Part or self._number is None:
            return part
        number = self._number(part)
        number.source = root, key
        return number

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
        """Return an independent variable of the same strategy.

        Not collective: every replica copies its own value.
        """
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin._values = (make_read_only(self.local.copy()),)
        twin._root = None
        self._extended.register(twin, self._extended.new_number())
        return twin

    def __repr__(self) -> str:
        return (
            f"<mpidist.Variable {self._name!r} shape={self.shape} "
            f"dtype={self.dtype.name}, {self._synchronization.name}, "
            f"{self._aggregation.name}, replica {self._replica_ids[0]}: "
            f"{self._values[0]!r}>"
        )


def _is_local(variable: Variable, call: str) -> bool:
    """Return whether changing a variable is not collective in the current context."""
    frame = context.current()
    if frame.is_update or variable._is_default:
        return True
    return variable._is_on_read and frame.is_replica_of(variable._strategy)


def _consensus_of(variable_or_strategy: Any) -> Any:
    return variable_or_strategy._extended.consensus


announce_errors(
    Variable, ("__init__",), lambda _: _consensus_of(context.get_strategy())
)
announce_errors(Variable, ("_reduced",), _consensus_of)
announce_errors(
    Variable,
    (
        *("assign", "assign_add", "assign_sub", "batch_scatter_update"),
        *("scatter_add", "scatter_sub", "scatter_min", "scatter_max", "scatter_mul"),
        *("scatter_div", "scatter_update", "scatter_nd_add", "scatter_nd_sub"),
        "scatter_nd_update",
    ),
    _consensus_of,
    _is_local,
)


def _read(value: Any) -> Any:
    """Return the value of a variable in this context, anything else as it is.

    Collective where `Variable.value` is.
    """
    return value._array() if isinstance(value, Variable) else value


def _copy_of_new(old: Any, new: Any) -> Any:
    return new.copy()


def _signature(call: str, value: Any, part: Any = None) -> CallSignature:
    """Return what ranks compare where all pass equal arrays: checksums of all bytes."""
    leaves, spec = nest.flatten(value)
    options = () if part is None else (("part", part),)
    described = [
        (a.dtype.name, a.shape, f"checksum {arrays.checksum(a)}") for a in leaves
    ]
    return CallSignature(call, options, spec, tuple(described))


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
        root, variable = _root_and_variable(self)
        offset = self.__array_interface__["data"][0]
        offset -= root.__array_interface__["data"][0]
        # In elements: a mean of integers, which `root` may be, has another dtype
        elements = tuple(n // self.itemsize for n in (offset, *self.strides))
        view = elements[0], self.shape, elements[1:]
        put = functools.partial(_put, variable.name, np.asarray(root), view)
        variable._change("assign", put, value, view)
        return variable


def _root_and_variable(part: Part) -> tuple[Part, Variable]:
    """Return what a part is a view of, and the variable.

    Raises ArgumentError if there is none.
    """
    root = part if part.base is None else part.base
    if not isinstance(root, Part):
        root = part
    reference = getattr(root, "variable", None)
    if reference is None or part.dtype != root.dtype:
        raise ArgumentError(
            "assign needs a view of a variable, selected by integers and slices, "
            f"such as w[0] or w[:, 1:]; this is a copy: {part!r}"
        )
    variable: Variable | None = reference()
    if variable is None:
        raise ArgumentError("assign to a part: the variable no longer exists")
    return root, variable


announce_errors(
    Part,
    ("assign",),
    lambda part: _consensus_of(_root_and_variable(part)[1]),
    lambda part, call: _is_local(_root_and_variable(part)[1], call),
)


def _root_of(variable: Variable, array: Any) -> Any:
    """Return a view of a NumPy array whose views are parts of a variable."""
    if not isinstance(array, np.ndarray):
        return array
    is_dense = array.flags.c_contiguous or array.flags.f_contiguous
    root = (array if is_dense else array.copy()).view(Part)
    root.flags.writeable = False
    root.variable = weakref.ref(variable)
    return root


def _put(name: str, root: Any, view: Any, old: Any, value: Any) -> Any:
    """Return a copy of `old` with `value` in a part.

    Args:
      name: the variable's name, for messages.
      root: the array that the part is a view of.
      view: offset of the part in `root` in elements, its shape and strides.
      old: the array to copy.
      value: broadcasts to the shape of the part.
    """
    offset, shape, strides = view
    new = np.empty_like(root, old.dtype)  # in the same order
    new[...] = old
    offset, *strides = (n * new.itemsize for n in (offset, *strides))
    part = np.ndarray(shape, new.dtype, new.ravel(order="K"), offset, tuple(strides))
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


def _number_class(array: Any) -> Any:
    """Return the class of elements that `assign` can replace, or None.

    None for NumPy's bool, which has no subclasses, and for CuPy arrays, whose elements
    are arrays.
    """
    found = traits(array.dtype)
    is_number = isinstance(array, np.ndarray) and found.is_native and found.is_summed
    return _subclass(array.dtype.type) if is_number else None
