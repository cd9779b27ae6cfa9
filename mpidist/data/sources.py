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

from mpidist.data.shuffling import Blocks
from mpidist.errors import ArgumentError, ArgumentTypeError, DataError
from mpidist.util import nest, validation
from mpidist.util.buffers import Buffers
from mpidist.values import PerReplica

__all__ = [
    "ArrayRows",
    "BlockSource",
    "BufferedSource",
    "FileSource",
    "IndexedSource",
    "Positions",
    "RangeRows",
    "RowSource",
    "as_element",
    "from_lists",
    "is_in_blocks",
    "owned",
    "stack",
    "take_element",
]


Positions = npt.NDArray[np.int64]


class RowSource(Protocol):
    """Rows in storage: arrays in memory or datasets in files."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def read(self, rows: Positions) -> Any:
        """Return a nest of arrays with the given rows along the first dimension."""

    def describe(self) -> str:
        """Return what must be the same on every replica, as text."""


@runtime_checkable
class BlockSource(RowSource, Protocol):
    """Rows in chunks, which are read as a whole."""

    def blocks(self) -> Blocks:
        """Return how the rows lie in chunks."""

    def keep(self, rows: int) -> None:
        """Make room for the chunks of so many rows that are read in random order."""

    def retain(self) -> None:
        """Count one more use; the files stay open until all are released."""

    def release(self, keep_files: bool = False) -> None:
        """Count one use less; after the last one close the files, unless told not to.

        The threads end anyway.
        """


def is_in_blocks(source: RowSource) -> TypeGuard[BlockSource]:
    """Return whether a source has chunks; `isinstance` would take 20 us."""
    return hasattr(source, "retain")


@runtime_checkable
class BufferedSource(RowSource, Protocol):
    """Rows that are read into memory which is used again."""

    @property
    def buffers(self) -> Buffers:
        """The memory."""


@runtime_checkable
class IndexedSource(RowSource, Protocol):
    """Rows in files of which must be known where they lie."""

    @property
    def file_count(self) -> int:
        """The number of files."""

    def identify(self) -> str:
        """Return which files and datasets these are, without opening a file."""

    def inspect(self, files: Iterable[int]) -> list[Any]:
        """Return where the rows of some files lie; it can be sent to other ranks."""

    def adopt(
        self, files: Sequence[Any], rank: int | None = None, threads: int | None = None
    ) -> None:
        """Take what `inspect` returned for all files, perhaps on other ranks.

        Args:
          files: of each file.
          rank: of this process, which errors will name.
          threads: how many may read at the same time.
        """


@runtime_checkable
class FileSource(RowSource, Protocol):
    """Rows in several files, each of which can be read without the others."""

    @property
    def file_count(self) -> int:
        """The number of files."""

    def shard_files(self, workers: int, worker: int) -> RowSource:
        """Return the rows of every `workers`-th file, from file `worker` on.

        It describes itself alike for every worker, and never opens other files.
        """


# Memory for so much is worth to be used again
_LARGE_BYTES = 256 << 10


class ArrayRows:
    """Rows of arrays in memory. `name` is the function that messages speak of."""

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
        self._arrays = nest.map_leaves(np.asarray, arrays)
        self._name = name
        self._length = int(shapes[0][0])
        leaves, _ = nest.flatten(self._arrays)
        self.row_bytes = sum(a.itemsize * math.prod(a.shape[1:]) for a in leaves)
        self.buffers = Buffers()

    def __len__(self) -> int:
        return self._length

    def read(self, rows: Positions) -> Any:
        """See `RowSource.read`."""
        return nest.map_leaves(lambda a: self._take(a, rows), self._arrays)

    def _take(self, array: Any, rows: Positions) -> Any:
        shape, flags = (rows.size, *array.shape[1:]), array.flags
        is_large = math.prod(shape) * array.itemsize >= _LARGE_BYTES
        # Of an array of another layout NumPy would make a copy, each time
        if not (is_large and flags.c_contiguous and flags.aligned):
            return array[rows]
        found = self.buffers.empty(shape, array.dtype)
        # "clip" writes to `found` at once; all rows exist
        return array.take(rows, axis=0, out=found, mode="clip")

    def describe(self) -> str:
        """See `RowSource.describe`."""
        leaves, spec = nest.flatten(self._arrays)
        return f"{self._name}({spec}, {[(a.dtype.name, a.shape) for a in leaves]})"


class RangeRows:
    """The numbers of a range, which are computed when they are read."""

    def __init__(self, numbers: range, dtype: npt.DTypeLike):
        self._numbers = numbers
        self._dtype = np.dtype(dtype)
        self.row_bytes = self._dtype.itemsize

    @classmethod
    def of(cls, args: Sequence[Any], dtype: npt.DTypeLike) -> RangeRows:
        """Return the numbers of the range that these arguments of `range` stand for.

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
    """Return `value` with arrays in place of lists, which are no structure in data."""
    if isinstance(value, list):
        return np.asarray(value)
    if type(value) is tuple:
        is_done = {np.ndarray}.issuperset(map(type, value))
        return value if is_done else tuple(map(from_lists, value))
    if isinstance(value, dict):
        return {key: from_lists(item) for key, item in value.items()}
    return value


def as_element(value: Any) -> Any:
    """Return `value` as a nest of arrays; lists are arrays, not structure.

    Raises:
      DataError: a leaf is no array, number or text.
    """
    return nest.map_leaves(_as_array, from_lists(value))


def take_element(holder: list[Any]) -> Any:
    """Return what `as_element` does, with arrays that nobody else changes.

    Args:
      holder: a list of the value alone, which is taken out of it: references to the
        value are counted.

    Raises:
      DataError: a leaf is no array, number or text.
    """
    holder.append(from_lists(holder.pop()))
    return owned(holder, convert=_as_array)


def _as_array(leaf: Any) -> Any:
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
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
    given: tuple[Any, ...] = (),
    convert: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a nest with copies of those arrays whose memory others may change.

    Args:
      holder: a list of the nest alone, which is taken out of it: nothing else may refer
        to the nest, as references to its arrays are counted.
      given: nests with whose arrays the result may share memory.
      convert: of each leaf, before.
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
        if not (is_own or _is_of(leaves[i], given)):
            leaves[i] = _copy(leaves[i])
    return join(leaves)


def _is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array of another library than NumPy."""
    return hasattr(leaf, "__dlpack__")


def _is_of(array: Any, given: tuple[Any, ...]) -> bool:
    """Return whether an array has memory of an array of `given`."""
    for argument in given:
        if argument is array:
            return True
    memory = _memory(array)
    return any(memory is _memory(leaf) for leaf in nest.flatten(given)[0])


def _take_apart(
    holder: list[Any],
) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of a nest, to which nothing else refers, and what joins them.

    Without optree for what most functions return: that is many times faster.
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


# What Python counts for an object that only a list refers to
_ALONE = _count_references([np.empty(1)], 0)


def _is_new(arrays: list[Any], i: int, views: int = 0) -> bool:
    """Return whether only a list, and some known views, refer to an array's memory."""
    if not _CAN_COUNT or _count_references(arrays, i) > _ALONE + views:
        return False
    if arrays[i].base is None:
        return bool(arrays[i].flags.owndata)
    # A view of a buffer that is no array may be of memory that others know
    base = [arrays[i].base]
    return isinstance(base[0], np.ndarray) and _is_new(base, 0, views=1)


def _memory(leaf: Any) -> Any:
    """Return the object that has the memory of an array, perhaps itself."""
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
