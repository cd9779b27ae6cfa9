"""Where rows come from: the contract of a source, and rows without a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from mpidist import checks, nest
from mpidist.block_order import Blocks
from mpidist.data.ownership import owned
from mpidist.errors import ArgumentError, ArgumentTypeError, DataError
from mpidist.memory.buffers import Buffers
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
            checks.integer(name, value, -checks.LARGEST)
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
        return tuple(map(from_lists, value))
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
