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

A copy is never changed in place: an assignment replaces the array. So arrays that were
read before do not change. NumPy arrays are read-only. CuPy has no read-only arrays: do
not change an array that was read from a variable on a GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpidist import context
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ArgumentTypeError, ContextError
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.strategy import assignment
from mpidist.strategy.assignment import Part, number_class, root_of
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
Name = str | None


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
      dtype: the dtype, by default that of `initial_value`.
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
        number = self._strategy.extended.register(self)
        self._name = name if isinstance(name, str) else f"Variable_{number}"
        self._constraint = constraint
        self._root: Any = None  # see `__getitem__`
        self._synchronization = VariableSynchronization.ON_WRITE
        self._aggregation = VariableAggregation.NONE
        self._trainable = False

        extended = self._strategy.extended
        call = f"Variable {self._name}"

        def prepare() -> Any:
            if name is not None and not isinstance(name, str):
                raise ArgumentTypeError(
                    f"name must be a str or None, not {validation.shown(name)}"
                )
            validation.optional_function("constraint", constraint)
            self._synchronization = VariableSynchronization.parse(synchronization)
            self._aggregation = VariableAggregation.parse(aggregation)
            self._trainable = not self.on_read
            if trainable is not None:
                self._trainable = validation.switch("trainable", trainable)
            return arrays.to_device(
                assignment.initial(initial_value, dtype), extended.device
            )

        first = extended.consensus.guard(call, prepare)
        local = extended.broadcast_from_first(call, first)
        self._cannot_overflow = local.dtype.kind not in "iu"
        self._number = number_class(local)
        super().__init__((make_read_only(local),), (extended.replica_id,))

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
        return self._strategy.extended.device

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
        return make_read_only(self._array().view())

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
        if self._fits(value):
            self._put(value.copy())
        else:
            assignment.update(self, "assign", assignment.copy_of_new, value)
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
        return assignment.take(self, self._array(), indices)

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
        return assignment.scatter(
            self, "scatter_add", np.add, assignment.rows_of, sparse_delta
        )

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Subtract rows from rows of the value; like `scatter_add`."""
        return assignment.scatter(
            self, "scatter_sub", np.subtract, assignment.rows_of, sparse_delta
        )

    def scatter_min(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Replace rows of the value by the elementwise minimum; like `scatter_add`.

        Raises: UnsupportedError: aggregation SUM or MEAN, which a minimum cannot have.
        """
        return assignment.scatter(
            self, "scatter_min", np.minimum, assignment.rows_of, sparse_delta
        )

    def scatter_max(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Replace rows of the value by the elementwise maximum; like `scatter_min`."""
        return assignment.scatter(
            self, "scatter_max", np.maximum, assignment.rows_of, sparse_delta
        )

    def scatter_mul(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Multiply rows of the value by rows; like `scatter_min`."""
        return assignment.scatter(
            self, "scatter_mul", np.multiply, assignment.rows_of, sparse_delta
        )

    def scatter_div(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Divide rows of the value by rows; like `scatter_min`."""
        return assignment.scatter(
            self, "scatter_div", np.true_divide, assignment.rows_of, sparse_delta
        )

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Replace rows of the value; like `scatter_min`."""
        return assignment.scatter(
            self, "scatter_update", None, assignment.rows_of, sparse_delta
        )

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Name = None
    ) -> Variable:
        """Replace rows of each batch: the first dimensions; like `scatter_min`.

        With indices `(*batch, n)` and values `(*batch, n, *shape[k:])` of k dimensions:
        `w[i, indices[i, j]] = values[i, j]`.
        """
        return assignment.scatter(
            self, "batch_scatter_update", None, assignment.batches_of, sparse_delta
        )

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
        return assignment.scatter(
            self, "scatter_nd_add", np.add, assignment.parts_of, indices, updates
        )

    def scatter_nd_sub(self, indices: Any, updates: Any, name: Name = None) -> Variable:
        """Subtract from elements of the value, or parts; like `scatter_nd_add`."""
        return assignment.scatter(
            self, "scatter_nd_sub", np.subtract, assignment.parts_of, indices, updates
        )

    def scatter_nd_update(
        self, indices: Any, updates: Any, name: Name = None
    ) -> Variable:
        """Replace elements of the value, or parts; like `scatter_min`."""
        return assignment.scatter(
            self, "scatter_nd_update", None, assignment.parts_of, indices, updates
        )

    def _change(self, operation: str, apply: assignment.Apply, delta: Any) -> None:
        if self._cannot_overflow and self._fits(delta):
            self._put(apply(self._values[0], delta))
        else:
            assignment.update(self, operation, apply, delta)

    def _fits(self, value: Any) -> bool:
        """Return whether an assignment needs no conversion and no communication."""
        local = self._values[0]
        return (
            type(value) is type(local) is np.ndarray
            and value.dtype is local.dtype
            and value.shape == local.shape != ()
            and context.in_update_of(self._strategy)
        )

    def _put(self, array: Any) -> None:
        array.setflags(False)
        self._values = (array,)
        self._root = None

    @property
    def on_read(self) -> bool:
        """Whether the variable is synchronized ON_READ."""
        return self._synchronization is _ON_READ

    def _array(self) -> Any:
        """Return the value that a read gives in the current context."""
        if self._synchronization is not _ON_READ or assignment.is_local(self):
            return self._values[0]
        return assignment.read_reduced(self)

    @property
    def local(self) -> Any:
        """The copy of this replica. Not collective."""
        return self._values[0]

    def replace_local(self, array: Any) -> None:
        """Replace this copy by `array`, which becomes read-only."""
        array = arrays.namespace(self.local).asarray(array)
        if array.shape != self.shape:
            raise ArgumentError(
                f"{self._name} has shape {self.shape}; {array.shape} does not fit it"
            )
        self._values = (make_read_only(array.astype(self.dtype, copy=False)),)
        self._root = None

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
            values, root = self._values, root_of(self, self._array())
            if not self.on_read:  # its value depends on the context
                self._root = root
                if self._values is not values:  # another thread has assigned since
                    self._root = None
        found = root[key]
        if type(found) is Part or self._number is None:
            return found
        made = self._number(found)
        made.source = root, key
        return made

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
        self._strategy.extended.register(twin)
        return twin

    def __repr__(self) -> str:
        return (
            f"<mpidist.Variable {self._name!r} shape={self.shape} "
            f"dtype={self.dtype.name}, {self._synchronization.name}, "
            f"{self._aggregation.name}, replica {self._replica_ids[0]}: "
            f"{self._values[0]!r}>"
        )
