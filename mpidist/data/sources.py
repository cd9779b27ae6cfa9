"""Where rows come from: the contract of a source, and rows without a file."""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from mpidist.data.shuffling import ChunkLayout
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ArgumentTypeError, DataError
from mpidist.util import nest, validation
from mpidist.util.buffers import Buffers
from mpidist.values import PerReplica

__all__ = [
    "ArrayRows",
    "ChunkedSource",
    "BufferedSource",
    "FileSource",
    "IndexedSource",
    "Positions",
    "RangeRows",
    "RowSource",
    "as_element",
    "from_lists",
    "has_chunks",
    "owned",
    "stack",
    "take_element",
    "take_rows",
]


Positions = npt.NDArray[np.int64]


class RowSource(Protocol):
    """Rows by number: of arrays in memory, or of datasets in files."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def read(self, rows: Positions) -> Any:
        """Return a nest of arrays with the given rows along the first dimension."""

    def describe(self) -> str:
        """Return text that must be equal on all replicas."""


@runtime_checkable
class ChunkedSource(RowSource, Protocol):
    """Rows in chunks that can only be read whole."""

    def chunk_layout(self) -> ChunkLayout:
        """Return how the rows are stored in chunks."""

    def reserve_cache(self, rows: int) -> None:
        """Size the cache of decoded chunks for random reads among so many rows."""

    def retain(self) -> None:
        """Count one more user; the files stay open until all have released them."""

    def release(self, keep_files: bool = False) -> None:
        """Count one user less; the last one ends the threads and closes the files.

        With `keep_files` the files stay open.
        """


def has_chunks(source: RowSource) -> TypeGuard[ChunkedSource]:
    """Return whether a source has chunks; `isinstance` of a protocol takes 20 us."""
    return hasattr(source, "retain")


@runtime_checkable
class BufferedSource(RowSource, Protocol):
    """Rows that are read into recycled buffers."""

    @property
    def buffers(self) -> Buffers:
        """The buffers."""


@runtime_checkable
class IndexedSource(RowSource, Protocol):
    """Rows in files that need an index before they are read."""

    @property
    def file_count(self) -> int:
        """The number of files."""

    def identify(self) -> str:
        """Return the names of files and datasets, without opening a file."""

    def inspect(self, files: Iterable[int]) -> list[Any]:
        """Return the indexes of some files, which can be sent to other ranks."""

    def adopt(
        self,
        files: Sequence[Any],
        rank: int | None = None,
        threads: int | None = None,
        most_kept_bytes: int = 0,
    ) -> None:
        """Use the indexes that `inspect` returned, perhaps on other ranks.

        Args:
          files: the index of each file.
          rank: of this process, for error messages.
          threads: the largest number of concurrent reads.
          most_kept_bytes: of short rows that may stay in memory.
        """


@runtime_checkable
class FileSource(RowSource, Protocol):
    """Rows in several files that can be read independently."""

    @property
    def file_count(self) -> int:
        """The number of files."""

    def shard_files(self, workers: int, worker: int) -> RowSource:
        """Return the rows of every `workers`-th file, from file `worker` on.

        `describe` is the same for all workers, and never opens the other files.
        """


# From this size on, recycling a buffer is cheaper than page faults of new memory
_LARGE_BYTES = 256 << 10


class ArrayRows:
    """Rows of arrays in memory. `name` is the function named in error messages."""

    def __init__(self, arrays: Any, name: str = "from_tensor_slices"):
        leaves, _ = nest.flatten(arrays)
        if not leaves or any(isinstance(leaf, PerReplica) for leaf in leaves):
            raise ArgumentError(f"{name} needs at least one array, and no PerReplica")
        shapes = [np.shape(leaf) for leaf in leaves]
        if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
            raise ArgumentError(
                f"{name} needs arrays of equal first dimension, not of "
                f"shapes {', '.join(map(str, shapes))}"
            )
        self._arrays = nest.map_leaves(_to_numpy, arrays)
        self._name = name
        self._length = int(shapes[0][0])
        leaves, _ = nest.flatten(self._arrays)
        self.row_bytes = sum(a.itemsize * math.prod(a.shape[1:]) for a in leaves)
        self.buffers = Buffers()

    def __len__(self) -> int:
        return self._length

    def read(self, rows: Positions) -> Any:
        """See `RowSource.read`."""
        return nest.map_leaves(lambda a: take_rows(a, rows, self.buffers), self._arrays)

    def describe(self) -> str:
        """See `RowSource.describe`."""
        leaves, spec = nest.flatten(self._arrays)
        return f"{self._name}({spec}, {[(a.dtype.name, a.shape) for a in leaves]})"


def take_rows(array: Any, rows: Positions, buffers: Buffers) -> Any:
    """Return copies of rows of an array.

    Args:
      array: of NumPy, at least one dimension.
      rows: numbers of its rows, which exist.
      buffers: allocates large results.
    """
    # From another layout, `take` would first copy the whole array, each time
    if not (array.flags.c_contiguous and array.flags.aligned):
        return array[rows]
    shape = rows.size, *array.shape[1:]
    if math.prod(shape) * array.itemsize < _LARGE_BYTES:
        return array.take(rows, axis=0)  # several times as fast as array[rows]
    taken = buffers.empty(shape, array.dtype)
    # mode="clip" writes to `out` without a buffer; no row is clipped
    return array.take(rows, axis=0, out=taken, mode="clip")


class RangeRows:
    """The numbers of a range, which are computed when they are read."""

    def __init__(self, numbers: range, dtype: npt.DTypeLike):
        self._numbers = numbers
        self._dtype = np.dtype(dtype)
        self.row_bytes = self._dtype.itemsize

    @classmethod
    def of(cls, args: Sequence[Any], dtype: npt.DTypeLike) -> RangeRows:
        """Return the numbers of `range(*args)`.

        Raises:
          ArgumentError: a step of 0, or numbers of more than 64 bits.
          ArgumentTypeError: not one to three arguments, or no integers.
        """
        names = ["stop"] if len(args) == 1 else ["start", "stop", "step"]
        if not 1 <= len(args) <= len(names):
            raise ArgumentTypeError(
                "range takes stop, or start, stop, or start, stop, step, not "
                f"{len(args)} arguments"
            )
        for name, value in zip(names, args):
            validation.integer(name, value, -validation.LARGEST)
        if len(args) == 3 and args[2] == 0:
            raise ArgumentError("step must not be 0")
        numbers = range(*args)
        try:
            len(numbers)
        except OverflowError:
            raise ArgumentError(f"stop is too far from start: {numbers}") from None
        return cls(numbers, dtype)

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, rows: Positions) -> Any:
        """See `RowSource.read`."""
        numbers = self._numbers.start + rows * self._numbers.step
        return numbers.astype(self._dtype, copy=False)

    def describe(self) -> str:
        """See `RowSource.describe`."""
        return f"{self._numbers} of {self._dtype.name}"


def from_lists(value: Any) -> Any:
    """Return `value` with arrays in place of lists, which are no structure in data.

    But a list that begins with tensors of another library becomes a tuple: PyTorch's
    DataLoader returns such lists as structure.
    """
    if isinstance(value, list):
        if _begins_with_tensors(value):
            return tuple(map(from_lists, value))
        return np.asarray(value)
    if type(value) is tuple:
        is_done = {np.ndarray}.issuperset(map(type, value))
        return value if is_done else tuple(map(from_lists, value))
    if isinstance(value, dict):
        return {key: from_lists(item) for key, item in value.items()}
    return value


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


def _to_numpy(leaf: Any) -> Any:
    if hasattr(getattr(leaf, "dtype", np.dtype("O")), "kind"):
        return np.asarray(leaf)
    return arrays.to_array(leaf, "an array of a dataset")  # of PyTorch


def _as_array(leaf: Any) -> Any:
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if not hasattr(array.dtype, "kind"):  # of PyTorch
        return arrays.to_array(leaf, "an element of a dataset")
    if array.dtype.kind == "O":
        raise DataError(f"an element of a dataset must hold arrays, not {leaf!r}")
    return array


def stack(elements: Sequence[Any]) -> Any:
    """Return a nest of arrays that hold the elements along a new first dimension."""
    try:
        return nest.map_leaves(lambda *xs: np.stack(xs), *elements)
    except ValueError as error:
        raise DataError(f"elements that differ cannot make a batch: {error}") from error


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
    """Return whether a leaf is an array of another library than NumPy."""
    return hasattr(leaf, "__dlpack__")


def _aliases(array: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether an array shares memory with an array in `arguments`."""
    # The common case, without flattening
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
    """Return the object that owns the memory of an array, perhaps itself."""
    while isinstance(leaf, np.ndarray) and leaf.base is not None:
        leaf = leaf.base
        if not isinstance(leaf, np.ndarray):  # as of np.lib.stride_tricks
            leaf = getattr(leaf, "base", leaf)
    return leaf


def _copy(array: Any) -> Any:
    """Return a copy of an array of NumPy or another library."""
    copy: Callable[[], Any] | None = getattr(array, "clone", None)  # PyTorch
    copy = copy or getattr(array, "copy", None)
    return array if copy is None else copy()
