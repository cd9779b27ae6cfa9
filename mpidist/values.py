"""Values that live on every replica: one component per replica, no communication.

A process owns one replica, so `values` holds one component; `replica_ids` holds the
number of its replica.
"""

from __future__ import annotations

import copy
import dataclasses
import numbers
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.util import nest, validation

if TYPE_CHECKING:
    import typing_extensions

    T = typing_extensions.TypeVar("T", covariant=True, default=Any)
else:
    T = TypeVar("T", covariant=True)


class DistributedValues(Generic[T]):
    """Base class of values with one component per replica; create its subclasses.

    `PerReplica` components differ from replica to replica, `Mirrored` ones are equal.
    Nothing here communicates.

    Args:
      values: a sequence with the one component of this process's replica.
      replica_ids: the replica of each component, by default 0, 1, ...

    Raises:
      ArgumentTypeError: this class itself was called; values or ids are not a tuple or
        list.
      ArgumentError: no values, or a different number of replica ids.

    Example:
      >>> value = strategy.run(lambda: np.ones(2))
      >>> isinstance(value, mpidist.DistributedValues)
      True
      >>> value.values  # this process's component
      (array([1., 1.]),)
    """

    is_variable: ClassVar[bool] = False

    def __init__(self, values: Sequence[T], replica_ids: Sequence[int] | None = None):
        if type(self) is DistributedValues:
            raise ArgumentTypeError(
                "DistributedValues is a base class; create a PerReplica or a Mirrored"
            )
        if not isinstance(values, tuple):
            values = _as_tuple("values", values)
        if not values:
            raise ArgumentError("values must hold at least one component, not ()")
        if replica_ids is None:
            replica_ids = tuple(range(len(values)))
        elif not isinstance(replica_ids, tuple):
            replica_ids = _as_tuple("replica_ids", replica_ids)
        self._values, self._replica_ids = values, replica_ids
        if len(self._replica_ids) != len(self._values):
            raise ArgumentError(
                f"{len(self._values)} values came with {len(self._replica_ids)} "
                "replica ids"
            )

    @property
    def values(self) -> tuple[T, ...]:
        """The components of this process's replicas: a one-tuple."""
        return self._values

    @property
    def replica_ids(self) -> tuple[int, ...]:
        """The `replica_id_in_sync_group` of each component in `values`."""
        return self._replica_ids

    def __repr__(self) -> str:
        pairs = zip(self._replica_ids, self._values, strict=True)
        lines = ",\n".join(f"  {replica}: {value!r}" for replica, value in pairs)
        return f"{type(self).__name__}:{{\n{lines}\n}}"


_ADVICE = (
    "Use strategy.run(function, args=(value,)), or a loop over mpidist.as_arrays("
    "dataset), to compute with each replica's own;\nstrategy.reduce or strategy.gather "
    "to combine them; strategy.experimental_local_results to look at this process's own"
)


def _as_tuple(name: str, items: Any) -> tuple[Any, ...]:
    if isinstance(items, Sequence) and not isinstance(items, str | bytes):
        return tuple(items)
    raise ArgumentTypeError(
        f"{name} must be a tuple, one for each replica, not {validation.shown(items)}"
    )


class PerReplica(DistributedValues[T]):
    """A value that differs from replica to replica.

    Distributed datasets and `Strategy.run` create them. `Strategy.reduce`,
    `Strategy.gather`, `Strategy.experimental_local_results` and `Strategy.run` (in
    arguments) use their components. Any other use as an array, or in a comparison with
    an array, raises ValueError, since each process would compute with a different
    number. Two `PerReplica` values are equal only if they are the same object. Their
    truth value is always True.

    Example:
      >>> value = strategy.run(lambda: np.arange(3))
      >>> value  # on replica 0
      PerReplica:{
        0: array([0, 1, 2])
      }
      >>> strategy.reduce("SUM", value)
      array([0, 2, 4])
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        own = self._values[0]
        kind = type(own).__name__
        if hasattr(own, "dtype"):
            kind += f" of dtype {own.dtype} and shape {tuple(own.shape)}"
        raise ArgumentError(
            f"a PerReplica value is not one array, here of type {kind}: its "
            f"components differ from replica to replica.\n{_ADVICE}"
        )

    def __getattr__(self, name: str) -> NoReturn:
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        is_of_arrays = hasattr(np.ndarray, name) or name == "numpy"
        if is_of_arrays and not name.startswith("_"):
            text = f"{text}: its components differ from replica to replica.\n{_ADVICE}"
        raise AttributeError(text, name=name, obj=self)

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else str(self)

    def __bool__(self) -> bool:
        return True  # so that `value or default` works; see __len__

    __array__ = __array_ufunc__ = __array_function__ = _refuse
    __len__ = __getitem__ = __setitem__ = __iter__ = __contains__ = _refuse
    __reversed__ = __round__ = __float__ = __int__ = __complex__ = _refuse
    __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __divmod__ = __rdivmod__ = __lshift__ = __rlshift__ = _refuse
    __rshift__ = __rrshift__ = __invert__ = _refuse
    __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __pos__ = __abs__ = _refuse
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PerReplica):
            return self is other
        is_number = isinstance(other, numbers.Number | list | tuple)
        if is_number or hasattr(other, "__array__"):
            self._refuse()
        return NotImplemented


def _operator(operate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a binary operator for objects that stand for an array.

    Equivalent to NumPy's mixin, three times as fast.
    """

    def method(self: ArrayView, other: Any) -> Any:
        if isinstance(other, ArrayView):
            other = other._array()
        return operate(self._array(), other)

    return method


def _reflected(operate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the reflected operator: the other value is the first operand."""

    def method(self: ArrayView, other: Any) -> Any:
        if isinstance(other, ArrayView):
            other = other._array()
        return operate(other, self._array())

    return method


class ArrayView(NDArrayOperatorsMixin):
    """Reads and operators of an object that stands for one array.

    NumPy's own mixin supplies the operators: each is one ufunc, so that NumPy's and
    CuPy's promotion rules hold. A subclass defines `_array()`.
    """

    __add__, __radd__ = _operator(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _operator(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _operator(operator.mul), _reflected(operator.mul)
    __truediv__ = _operator(operator.truediv)
    __rtruediv__ = _reflected(operator.truediv)
    __matmul__, __rmatmul__ = _operator(operator.matmul), _reflected(operator.matmul)

    def _array(self) -> Any:
        raise NotImplementedError(type(self).__name__)  # pragma: no cover

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array."""
        return self._array().dtype  # type: ignore[no-any-return]  # cupy is untyped

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self._array().shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self._array().size)

    @property
    def T(self) -> Any:  # noqa: N802 (NumPy's name)
        """The transposed array."""
        return self._array().T

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the value as a NumPy array, read-only unless it had to be copied."""
        array = self._array()
        if not isinstance(array, np.ndarray | np.generic):
            array = array.get()
        view = np.asarray(array)
        if copy or (dtype is not None and np.dtype(dtype) != view.dtype):
            if copy is False:
                raise ArgumentError(f"a cast from {view.dtype} to {dtype} needs a copy")
            return np.array(view, dtype=dtype)
        view = view.view()
        view.flags.writeable = False
        return view

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any
    ) -> Any:
        plain = [x._array() if isinstance(x, ArrayView) else x for x in inputs]
        if method == "__call__" and not kwargs:
            return ufunc(*plain)
        if "out" in kwargs and any(isinstance(o, ArrayView) for o in kwargs["out"]):
            self._refuse_in_place(ufunc.__name__)
        if method == "at" and isinstance(inputs[0], ArrayView):
            self._refuse_in_place(f"{ufunc.__name__}.at")
        return getattr(ufunc, method)(*plain, **kwargs)

    def _refuse_in_place(self, operation: str) -> NoReturn:
        raise ArgumentTypeError(
            f"{operation} in place on a {type(self).__name__} is refused: replicas "
            "could drift apart"
        )

    def __getitem__(self, key: Any) -> Any:
        return self._array()[key]

    def __len__(self) -> int:
        return len(self._array())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._array())

    def __bool__(self) -> bool:
        return bool(self._array())

    def __int__(self) -> int:
        return int(self._array())

    def __float__(self) -> float:
        return float(self._array())

    def __complex__(self) -> complex:
        return complex(self._array())

    def __index__(self) -> int:
        return self._array().__index__()  # type: ignore[no-any-return]

    def __format__(self, spec: str) -> str:
        return format(self._array(), spec)


class Mirrored(ArrayView, DistributedValues[T]):
    """A value that is equal on all replicas; reads use this process's component.

    It works as an array of the component's shape and dtype (`x * 2`, `np.exp(x)`,
    `x[0]`). Its NumPy arrays are read-only, because the replicas' components must stay
    equal. (CuPy has no read-only arrays; do not change them in place.)

    Example:
      >>> total = strategy.extended.reduce_to("SUM", np.ones(3), "CPU:0")
      >>> isinstance(total, mpidist.Mirrored)
      True
      >>> total / 2
      array([1., 1., 1.])
    """

    __hash__ = object.__hash__

    def __init__(self, values: Sequence[T], replica_ids: Sequence[int] | None = None):
        super().__init__(values, replica_ids)
        self._values = tuple(map(_read_only_view, self._values))

    def _array(self) -> Any:
        return self._values[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._values[0], name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._values, self._replica_ids)

    def __copy__(self) -> Mirrored:
        return type(self)(self._values, self._replica_ids)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mirrored:
        return type(self)(copy.deepcopy(self._values, memo), self._replica_ids)

    def __repr__(self) -> str:
        return DistributedValues.__repr__(self)


def make_read_only(array: Any) -> Any:
    """Return `array`, made read-only if it is a NumPy array."""
    if isinstance(array, np.ndarray):
        array.flags.writeable = False
    return array


def _read_only_view(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        is_nest = isinstance(value, dict | list | tuple)
        return nest.map_leaves(_read_only_view, value) if is_nest else value
    return make_read_only(value.view()) if value.flags.writeable else value


@dataclasses.dataclass(frozen=True)
class IndexedSlices:
    """Some rows of an array, for a variable's `scatter_...` methods and for reductions.

    Args:
      values: the rows, `(n, *shape)`.
      indices: their indices in the first dimension, `(n,)`; may repeat.
      dense_shape: the shape of the whole array; carried, not used.

    The arguments are checked when they are used.

    Example:
      >>> table = mpidist.Variable(np.zeros((3, 2)))
      >>> rows = mpidist.IndexedSlices(np.ones((2, 2)), np.array([0, 2]))
      >>> table.scatter_add(rows).numpy()
      array([[1., 1.],
             [0., 0.],
             [1., 1.]])
    """

    values: Any
    indices: Any
    dense_shape: tuple[int, ...] | None = None


def local_component(value: Any) -> Any:
    """Return this process's component of a distributed value, or a plain value."""
    return value.values[0] if isinstance(value, DistributedValues) else value


# The types of most arguments; they have no structure
_WITH_COMPONENT = {PerReplica, Mirrored}
_PLAIN = {np.ndarray, np.float64, np.float32, np.bool_, float, int, bool, str}
_COMMON = _PLAIN | _WITH_COMPONENT


def regroup(value: Any, replica_id: int) -> Any:
    """Return a nest of `PerReplica` of this replica's components.

    None, variables and distributed values are left as they are.
    """
    if value is None or isinstance(value, DistributedValues):
        return value
    kind = type(value)
    # Common nests are taken apart without optree
    if kind in _COMMON:
        return _wrap([value], replica_id)[0]
    if kind is tuple and _COMMON.issuperset(map(type, value)):
        return tuple(_wrap(value, replica_id))
    if kind is dict and (named := _wrap_named(value, replica_id)) is not None:
        return named
    leaves, spec = nest.flatten(value)
    return nest.unflatten(spec, _wrap(leaves, replica_id))


def _wrap_named(value: dict[Any, Any], replica_id: int) -> dict[str, Any] | None:
    """Return a dict of `PerReplica`; None if a key or a value is not a common one."""
    wrapped, new, ids = {}, object.__new__, (replica_id,)
    for name, leaf in value.items():
        if type(leaf) not in _PLAIN or type(name) is not str:
            return None
        wrapped[name] = made = new(PerReplica)  # its arguments need no checks
        made._values = (leaf,)
        made._replica_ids = ids
    return wrapped


def _wrap(leaves: Iterable[Any], replica_id: int) -> list[Any]:
    wrapped, new, ids = [], object.__new__, (replica_id,)
    for leaf in leaves:
        if leaf is None or isinstance(leaf, DistributedValues):
            wrapped.append(leaf)
            continue
        wrapped.append(made := new(PerReplica))
        made._values, made._replica_ids = (leaf,), ids
    return wrapped


def select_replica(value: Any) -> Any:
    """Return a nest with this process's components; variables stay variables."""
    if value is None:
        return value
    return _select(value) if type(value) in _COMMON else nest.map_leaves(_select, value)


def local_arguments(
    args: Any, kwargs: Any
) -> tuple[tuple[Any, ...] | list[Any], dict[str, Any]]:
    """Return checked arguments of a call, with this process's components in them."""
    if type(args) is tuple and kwargs is None:
        # Fast path for one array after the other: no nest is taken apart
        components = []
        for value in args:
            kind = type(value)
            if kind in _WITH_COMPONENT:
                components.append(value._values[0])
            elif kind in _COMMON:
                components.append(value)
            elif kind is dict and _PLAIN.issuperset(map(type, value.values())):
                components.append(dict(value))
            elif isinstance(value, DistributedValues):
                components.append(value if value.is_variable else value._values[0])
            else:
                break
        else:
            return components, {}
    selected: tuple[tuple[Any, ...], dict[str, Any]]
    selected = select_replica(validation.call_arguments(args, kwargs))
    return selected


def _select(leaf: Any) -> Any:
    if isinstance(leaf, DistributedValues) and not leaf.is_variable:
        return leaf.values[0]
    return leaf


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """The argument of `value_fn` in `experimental_distribute_values_from_function`.

    Example:
      >>> def shape(context):
      ...     return (context.replica_id_in_sync_group, context.num_replicas_in_sync)
      >>> value = strategy.experimental_distribute_values_from_function(shape)
      >>> strategy.experimental_local_results(value)  # on replica 0
      ((0, 2),)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
