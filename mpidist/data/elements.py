"""Elements of datasets: nests of what users return, until `batch` makes arrays; specs.

Between two transformations an element stays as it was returned. Where elements become
arrays, nothing may be lost: neither a mask, a byte, nor a digit.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mpidist.device import arrays
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    DataError,
    DTypeError,
    MpidistError,
)
from mpidist.util import nest, validation
from mpidist.util.dtypes import is_beyond_exact, is_integer, is_real, traits
from mpidist.util.logs import warn

# Where NumPy makes one dtype of several, these may change: NULs, units
_CHANGING = {"bytes", "text", "string", "date", "duration"}
_NUMBERS = {bool, int, float, np.bool_, np.int64, np.int32, np.float64, np.float32}


def from_lists(value: Any) -> Any:
    """Return `value` with arrays in place of lists, which are no structure in data.

    But a list that begins with tensors of another library becomes a tuple: PyTorch's
    DataLoader returns such lists as structure.

    Raises:
      DataError: a list is ragged, or an array would change its values.
    """
    if isinstance(value, list):
        if _begins_with_tensors(value):
            return tuple(map(from_lists, value))
        return _array_of_list(value)
    if type(value) is tuple:
        is_done = {np.ndarray}.issuperset(map(type, value))
        return value if is_done else tuple(map(from_lists, value))
    if isinstance(value, dict):
        return {key: from_lists(item) for key, item in value.items()}
    return value


def _array_of_list(value: list[Any]) -> Any:
    _require_plain(value, "an item of a list of data")
    try:
        array = np.asarray(value)
    except Exception as error:  # ragged, or whatever an item raises
        raise DataError(
            f"a list of data cannot be an array: {error}. For rows of unlike lengths, "
            "use Dataset.range(len(rows)).map(lambda i: rows[i]), and pad them in map()"
        ) from error
    may_change = traits(array.dtype).family in _CHANGING or is_beyond_exact(array)
    if may_change and not all(_is_kept(item, array.dtype) for item in _items(value)):
        raise DataError(
            "a list of data mixes values that no dtype holds (such as numbers and "
            f"text, or large integers and floats), or has NULs at the end of text: as "
            f"{array.dtype} they would change; return arrays"
        )
    return array


def _items(value: Any) -> Iterator[Any]:
    for item in value:
        if isinstance(item, list | tuple):
            yield from _items(item)
        else:
            yield item


def _is_kept(item: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether an array of this dtype holds an item of a list exactly."""
    family = traits(dtype).family
    if isinstance(item, str | bytes):
        is_str = family in ("text", "string")
        return is_str == isinstance(item, str) and not _ends_with_nul(item)
    array = plain_array(item, "a list of data")
    if family in _CHANGING and traits(array.dtype).family != family:
        return False
    if family in ("date", "duration"):  # another unit, in which long times overflow
        again = array.astype(dtype).astype(array.dtype)
        return bool(((again == array) | np.isnat(array)).all())
    return not (is_integer(array.dtype) and is_beyond_exact(array, dtype))


def _ends_with_nul(text: str | bytes) -> bool:
    return text[-1:] in ("\0", b"\0")


def _begins_with_tensors(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return _is_array(value) and not isinstance(value, np.ndarray | np.generic)


def as_element(value: Any) -> Any:
    """Return `value` as a nest of arrays; lists are arrays, not structure.

    Raises:
      DataError: a leaf is not an array, number or text.
    """
    return nest.map_leaves(_as_array, from_lists(value))


def take_element(holder: list[Any]) -> Any:
    """Return `as_element` of a value, with arrays that no other code can change.

    Args:
      holder: a list with the only reference to the value, which is popped: arrays with
        other references are copied.

    Raises:
      DataError: a leaf is not an array, number or text.
    """
    holder.append(from_lists(holder.pop()))
    return owned(holder, convert=_as_array)


def _as_array(leaf: Any) -> Any:
    """Return a leaf as an array; a mask, a NUL and another library's arrays stay."""
    if isinstance(leaf, str | bytes):  # arrays have no NULs at the end of text
        return np.str_(leaf) if isinstance(leaf, str) else np.bytes_(leaf)
    if isinstance(leaf, np.ndarray | np.generic) or _stays_foreign(leaf):
        if leaf.dtype == object:
            raise DataError(_why_no_array(leaf, "an element of a dataset"))
        return leaf
    return plain_array(leaf)


def _stays_foreign(leaf: Any) -> bool:
    return arrays.is_device_array(leaf) or arrays.is_jax_array(leaf)


def plain_array(leaf: Any, name: str = "an element of a dataset") -> Any:
    """Return a leaf as an array of NumPy, or of CuPy if it is on a GPU.

    Raises:
      DataError: it is none, or a mask, a byte or a unit would be lost.
    """
    if type(leaf) in _NUMBERS:
        array: Any = np.asarray(leaf)
    elif isinstance(leaf, np.ndarray):
        _require_plain(leaf, name)
        array = leaf
    elif isinstance(leaf, str | bytes) and _ends_with_nul(leaf):
        raise DataError(
            f"{name} is {leaf!r}: arrays of text drop NULs at the end; convert it with "
            "np.frombuffer(value, np.uint8)"
        )
    elif isinstance(leaf, np.generic | str | bytes):
        array = np.asarray(leaf)
    elif arrays.is_device_array(leaf):
        array = leaf
    else:
        array = _from_library(leaf, name)
    if array.dtype.hasobject and traits(array.dtype).family != "string":
        raise DataError(_why_no_array(leaf, name))
    return array


def _from_library(leaf: Any, name: str) -> Any:
    has_numpy_dtype = hasattr(getattr(leaf, "dtype", np.dtype("O")), "kind")
    is_tensor = _is_array(leaf) and not has_numpy_dtype  # such as bfloat16 of PyTorch
    try:
        _require_plain(leaf, name)
        _require_one_dtype(leaf, name)
        convert = arrays.to_array if is_tensor else arrays.from_wrapper
        return convert(leaf, name)
    except DTypeError as error:  # what an array of it would lose
        raise DataError(str(error)) from None
    except MpidistError:
        raise
    except Exception as error:  # whatever another library raises
        raise DataError(f"{_why_no_array(leaf, name)}: {error}") from error


def is_plain(leaf: Any) -> bool:
    """Return whether a leaf is of NumPy, and `np.asarray` loses nothing of it."""
    if isinstance(leaf, np.generic):
        return not (isinstance(leaf, str | bytes) and _ends_with_nul(leaf))
    return isinstance(leaf, np.ndarray) and not arrays.find_meaning(leaf)


def _require_one_dtype(leaf: Any, name: str) -> None:
    dtypes = sorted(set(arrays.declared_dtypes(leaf)))
    if len(dtypes) > 1 and hasattr(leaf, "columns"):
        raise DataError(
            f"{name} is a data frame with columns of dtypes {', '.join(dtypes)}, which "
            "would be converted to one; pass dict(frame), of a column each"
        )


def _require_plain(value: Any, name: str) -> None:
    if meaning := arrays.find_meaning(value):
        raise DataError(f"{name} {meaning}")


def _why_no_array(leaf: Any, name: str) -> str:
    kind = type(leaf)
    what = f"{name} must hold arrays, numbers or text, not {kind.__module__}."
    if hasattr(leaf, "toarray"):
        return (
            f"{what}{kind.__qualname__} (sparse); pass matrix.toarray(), or, if it is "
            "too large, rows = matrix.tocsr() and Dataset.range(rows.shape[0]).map("
            "lambda i: rows[[i]].toarray()[0])"
        )
    return (
        f"{what}{kind.__qualname__} of Python objects; convert it, for example with "
        f"astype(float), astype(str) or map(): {validation.shown(leaf)}"
    )


def stack(elements: Sequence[Any]) -> Any:
    """Return a nest of arrays that hold the elements along a new first dimension.

    Raises:
      DataError: dtypes (see `one_dtype`) or shapes differ, or something would be lost.
      ArgumentError: structures differ.
    """
    return _join(np.stack, elements)


def concatenate(blocks: Sequence[Any]) -> Any:
    """Return the rows of stacked elements, one block after the other.

    Raises: see `stack`.
    """
    return _join(np.concatenate, blocks)


def split(block: Any) -> list[Any]:
    """Return the elements that are stacked in a nest of arrays."""
    leaves, spec = nest.flatten(block)
    return [nest.unflatten(spec, row) for row in zip(*leaves, strict=True)]


def merge(parts: Sequence[Sequence[Any]], origins: Iterable[int]) -> list[Any]:
    """Return the elements of `parts`; `origins` has the part of each of the result."""
    sources = list(map(iter, parts))
    return [next(sources[part]) for part in origins]


def _join(join: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> Any:
    rows, specs = zip(*map(nest.flatten, values), strict=True)
    if different := [spec for spec in specs if spec != specs[0]]:
        raise ArgumentError(f"structures differ: {specs[0]} and {different[0]}")
    columns = zip(*rows, strict=True)
    try:
        return nest.unflatten(specs[0], [_join_leaves(join, c) for c in columns])
    except DataError:  # say which leaf it is
        names = nest.leaf_names(specs[0], "element")
        for name, column in zip(names, zip(*rows, strict=True), strict=True):
            _join_leaves(join, column, name)
        raise


def _join_leaves(
    join: Callable[[Sequence[Any]], Any], leaves: Sequence[Any], name: str = "element"
) -> Any:
    plain = [a if type(a) is np.ndarray else plain_array(a, name) for a in leaves]
    # Most rows share a dtype, and `==` ignores the members of enums
    distinct = {id(a.dtype): a.dtype for a in plain}.values()
    dtypes = set(distinct)
    if any(dtype.hasobject for dtype in dtypes):
        plain = [plain_array(a, name) for a in plain]  # refuses Python objects
    if len(dtypes) > 1 and len(texts := {dtype_text(d) for d in dtypes}) > 1:
        reason = (
            f"the elements of a batch must have one dtype, but {name} is "
            f"{' and '.join(sorted(texts))} in different elements; convert it with "
            "map(), for example by np.float32(value)"
        )
        are_numbers = np.dtype(bool) not in dtypes and all(map(is_real, dtypes))
        if _is_strict.get() or not are_numbers:
            raise DataError(reason)
        _warn_once(f"{reason}. (In a distributed dataset this is an error)")
    try:
        joined = join(plain)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"elements that differ cannot make a batch: {name}: {error}"
        ) from error
    if any(dtype.metadata or dtype.names for dtype in distinct):
        return _with_members(joined, distinct, name)
    return joined


def _with_members(joined: Any, dtypes: Iterable[np.dtype[Any]], name: str) -> Any:
    """Return an array with the enums of its elements, whose members NumPy drops."""
    enums = {validation.members_of(dtype): dtype for dtype in dtypes}
    enums.pop((), None)  # scalars of NumPy have none
    if len(enums) > 1:
        one, other, *_ = map(dict, enums)
        raise DataError(
            f"the enums of the elements of a batch need the same members, but {name} "
            f"has {one} and {other}"
        )
    for dtype in enums.values():
        native = dtype.newbyteorder("=")
        return joined.view(native) if joined.dtype == native else joined
    return joined


# Of a context, because iterable datasets read ahead in threads
_is_strict = contextvars.ContextVar("_is_strict", default=False)
_warned: set[str] = set()


@contextlib.contextmanager
def one_dtype() -> Iterator[None]:
    """Return a context in which numbers of unlike dtypes are an error in a batch.

    Outside, in a dataset that one process reads, they are converted as NumPy does, with
    a warning. Rows of a distributed dataset would depend on the number of replicas.
    """
    token = _is_strict.set(True)
    try:
        yield
    finally:
        _is_strict.reset(token)


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warn(text)


@functools.lru_cache(maxsize=256)
def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return what the dtypes of a batch must have in common, as text.

    Text of any length fits in one array, and so does any byte order.
    """
    family = traits(dtype).family
    if family in ("bytes", "text"):
        return "bytes" if family == "bytes" else "str"
    return str(dtype if family == "string" else dtype.newbyteorder("="))


_CAN_COUNT = getattr(sys, "_is_gil_enabled", lambda: True)()
_PLAIN = (np.ndarray, np.generic, int, float, complex, str, bytes)


def owned(
    holder: list[Any],
    arguments: tuple[Any, ...] = (),
    convert: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a nest, with copies of the arrays that other code may change.

    Args:
      holder: a list with the only reference to the nest, which is popped: the function
        counts references to find arrays that nothing else uses.
      arguments: nests whose arrays the result may alias without a copy.
      convert: applied to each leaf first.
    """
    if type(holder[0]) is np.ndarray and convert is None and _is_new(holder, 0):
        return holder.pop()
    leaves, join = _take_apart(holder)
    if convert is not None:
        leaves = list(map(convert, leaves))
    for i in range(len(leaves)):
        if isinstance(leaves[i], np.ndarray):
            is_own = _is_new(leaves, i)
        else:
            is_own = isinstance(leaves[i], _PLAIN) or not _is_array(leaves[i])
        if not (is_own or _aliases(leaves[i], arguments)):
            leaves[i] = _copy(leaves[i])
    return join(leaves)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "__dlpack__")


def _aliases(array: Any, arguments: tuple[Any, ...]) -> bool:
    for argument in arguments:
        if argument is array:
            return True
    memory = _memory(array)
    return any(memory is _memory(leaf) for leaf in nest.flatten(arguments)[0])


def _take_apart(
    holder: list[Any],
) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of a nest, without other references, and a function to join.

    Common results of functions avoid optree, which is many times slower.
    """
    value = holder.pop()
    if type(value) is np.ndarray:
        return [value], operator.itemgetter(0)
    if type(value) is tuple and all(isinstance(x, _PLAIN) for x in value):
        return list(value), tuple
    if type(value) is dict and all(isinstance(x, _PLAIN) for x in value.values()):
        keys = tuple(value)
        return list(value.values()), lambda leaves: dict(zip(keys, leaves, strict=True))
    leaves, spec = nest.flatten(value)
    return leaves, functools.partial(nest.unflatten, spec)


def _count_references(objects: list[Any], i: int) -> int:
    return sys.getrefcount(objects[i])


# The reference count of an object that is only in a list
_ALONE = _count_references([np.empty(1)], 0)


def _is_new(arrays: list[Any], i: int, views: int = 0) -> bool:
    """Return whether a list, and `views` views, have the only references to an array.

    An array that owns its memory is new then; a view is if its base is.
    """
    if not _CAN_COUNT or _count_references(arrays, i) > _ALONE + views:
        return False
    if arrays[i].base is None:
        return bool(arrays[i].flags.owndata)
    # The base may be a foreign buffer (mmap, DLPack), which others may change
    base = [arrays[i].base]
    return isinstance(base[0], np.ndarray) and _is_new(base, 0, views=1)


def _memory(leaf: Any) -> Any:
    while isinstance(leaf, np.ndarray) and leaf.base is not None:
        leaf = leaf.base
        if not isinstance(leaf, np.ndarray):  # as of np.lib.stride_tricks
            leaf = getattr(leaf, "base", leaf)
    return leaf


def _copy(array: Any) -> Any:
    copy: Callable[[], Any] | None = getattr(array, "clone", None)  # PyTorch
    copy = copy or getattr(array, "copy", None)
    return array if copy is None else copy()


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of an array in the elements of a dataset.

    Args:
      shape: with None for a length that may differ from element to element.
      dtype: a NumPy dtype, or an argument of `np.dtype`.

    Raises:
      ArgumentError: a length below 0.
      ArgumentTypeError: `shape` is not a tuple or list, or `dtype` not a dtype.

    Example:
      >>> mpidist.Dataset.range(4).batch(2).element_spec
      TensorSpec(shape=(None,), dtype=int64)
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple | list):
            raise ArgumentTypeError(
                f"shape must be a tuple of lengths, not {validation.shown(self.shape)}"
            )
        shape = (validation.optional_integer("each of shape", n, 0) for n in self.shape)
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "dtype", validation.dtype("dtype", self.dtype))

    def __repr__(self) -> str:
        return f"TensorSpec(shape={self.shape}, dtype={self.dtype.name})"


def spec_of(element: Any, is_batch: bool) -> Any:
    """Return a nest of TensorSpec like `element`; a batch has any number of rows."""

    def describe(leaf: Any) -> TensorSpec:
        shape = tuple(np.shape(leaf))
        # Foreign arrays keep their own dtype; numbers have NumPy's.
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        return TensorSpec((None, *shape[1:]) if is_batch and shape else shape, dtype)

    return nest.map_leaves(describe, element)


def batch_of(spec: Any) -> Any:
    """Return the nest of TensorSpec of batches of elements like `spec`."""
    return nest.map_leaves(lambda s: TensorSpec((None, *s.shape), s.dtype), spec)


def require_like_members(first: Any, second: Any) -> None:
    """Raise if enums of two datasets have other members, where both are known.

    Raises:
      ArgumentTypeError: has both.
    """
    if isinstance(first, tuple) and isinstance(second, tuple):
        for one, other in zip(first, second, strict=False):
            require_like_members(one, other)
    elif first and second and first != second:
        raise ArgumentTypeError(
            "the enums of concatenated or interleaved datasets need the same members, "
            f"not {first} and {second}"
        )


def require_like(first: Any, second: Any) -> None:
    """Raise if elements of two specs cannot be concatenated.

    Shapes and lengths of strings may differ.

    Raises:
      ArgumentTypeError: names the first difference.
    """
    needs = "concatenate needs datasets whose elements have the same structure and "
    specs, structure = nest.flatten(first)
    others, other_structure = nest.flatten(second)
    if structure != other_structure:
        raise ArgumentTypeError(
            f"{needs}dtypes, not the structures {structure} and {other_structure}"
        )
    names = nest.leaf_names(structure, "element")
    for name, spec, other in zip(names, specs, others, strict=True):
        # Strings of unlike lengths can be joined: NumPy widens them.
        families = {traits(spec.dtype).family, traits(other.dtype).family}
        are_strings = families in ({"bytes"}, {"text"})
        # Batches of them are in the byte order of this machine
        dtypes = {s.dtype.newbyteorder("=") for s in (spec, other)}
        if len(dtypes) > 1 and not are_strings:
            raise ArgumentTypeError(
                f"{needs}dtypes, but {name} has dtype {spec.dtype.name} in the first "
                f"and {other.dtype.name} in the second; convert one of them with map()"
            )
