"""Combine assignments to a variable over the replicas, and apply them.

The table at the top of `variables` has the rules for each kind and context. Those of
some rows or elements (`scatter`) have two exceptions: in replica context, SUM and MEAN
allow additions and subtractions only; ON_READ variables can be changed only inside
`StrategyExtended.update`, where each copy changes by itself.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

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
    "Part",
    "batches_of",
    "copy_of_new",
    "initial",
    "is_local",
    "number_class",
    "parts_of",
    "read_reduced",
    "root_of",
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
        root = self if self.base is None else self.base
        if not isinstance(root, Part):
            root = self
        reference = getattr(root, "variable", None)
        if reference is None or self.dtype != root.dtype:
            raise ArgumentError(
                "assign needs a view of a variable, selected by integers and slices, "
                f"such as w[0] or w[:, 1:]; this is a copy: {self!r}"
            )
        variable = reference()
        if variable is None:
            raise ArgumentError("assign to a part: the variable no longer exists")
        offset = self.__array_interface__["data"][0]
        offset -= root.__array_interface__["data"][0]
        place = offset, self.shape, self.strides
        put = functools.partial(_put, variable.name, np.asarray(root), place)
        return update(variable, "assign", put, value, place)


def root_of(variable: Variable, array: Any) -> Any:
    """Return a view of a NumPy array whose views are parts of a variable."""
    if not isinstance(array, np.ndarray):
        return array
    is_dense = array.flags.c_contiguous or array.flags.f_contiguous
    root = (array if is_dense else array.copy()).view(Part)
    root.flags.writeable = False
    root.variable = weakref.ref(variable)
    return root


def _put(name: str, root: Any, place: Any, old: Any, value: Any) -> Any:
    """Return a copy of `old` with `value` in a part.

    Args:
      name: the variable's name, for messages.
      root: the array that the part is a view of.
      place: offset of the part in `root` in bytes, its shape and strides.
      old: the array to copy.
      value: broadcasts to the shape of the part.
    """
    offset, shape, strides = place
    new = np.empty_like(root)  # with the same strides
    new[...] = old
    part = np.ndarray(shape, new.dtype, new.ravel(order="K"), offset, strides)
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
    """Replace this element of the variable; see `Variable.assign`."""
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


def number_class(array: Any) -> Any:
    """Return the class of elements that `assign` can replace, or None.

    None for NumPy's bool, which has no subclasses, and for CuPy arrays, whose elements
    are arrays.
    """
    is_number = (
        isinstance(array, np.ndarray) and array.dtype.char in "bhilqBHILQefdgFDG"
    )
    return _subclass(array.dtype.type) if is_number else None
