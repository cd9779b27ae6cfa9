"""Where rows come from: the contract of a source, and rows without a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from mpidist.data.elements import from_lists, plain_array
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ArgumentTypeError, DataError
from mpidist.hdf5.chunks import ChunkLayout
from mpidist.util import nest, validation
from mpidist.util.buffers import Buffers
from mpidist.util.dtypes import is_floating, is_integer
from mpidist.values import PerReplica

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
    """Rows in files that need an index before they are read.

    Files of which some belong together have a method `parts`, as `Hdf5Rows` does.
    """

    @property
    def file_count(self) -> int:
        """The number of files."""

    @property
    def is_indexed(self) -> bool:
        """Whether the rows are counted already, so that `len` opens no file."""

    def identify(self) -> str:
        """Return the names of files and datasets, without opening a file."""

    def inspect(self, files: Iterable[int]) -> list[Any]:
        """Return the indexes of some files, which can be sent to other ranks."""

    def set_index(
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

    def __init__(self, tensors: Any, name: str = "from_tensor_slices"):
        try:
            self._arrays = nest.map_leaves(_host_array, from_lists(tensors))
        except DataError as error:
            raise ArgumentError(f"{name}: {error}") from error
        self.leaves, _ = nest.flatten(self._arrays)
        if not self.leaves:
            raise ArgumentError(f"{name} needs at least one array")
        shapes = [leaf.shape for leaf in self.leaves]
        if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
            raise ArgumentError(
                f"{name} needs arrays of equal first dimension, not of "
                f"shapes {', '.join(map(str, shapes))}"
            )
        self._name = name
        self._length = int(shapes[0][0])
        self.row_bytes = sum(a.itemsize * math.prod(a.shape[1:]) for a in self.leaves)
        self.dtypes = [a.dtype for a in self.leaves]
        self.buffers = Buffers()

    def __len__(self) -> int:
        return self._length

    def read(self, rows: Positions) -> Any:
        """Return copies of the rows with these numbers, in that order."""
        return nest.map_leaves(lambda a: take_rows(a, rows, self.buffers), self._arrays)

    def contents(self) -> list[tuple[str, Any]]:
        """Return the arrays and their names, for error messages."""
        _, spec = nest.flatten(self._arrays)
        names = nest.leaf_names(spec, f"the content of {self._name}")
        return list(zip(names, self.leaves, strict=True))

    def describe(self) -> str:
        """Return the structure, dtypes and shapes, without the contents."""
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
        for number in numbers[:1], numbers[-1:]:
            if number and not _holds(np.dtype(dtype), number[0]):
                raise ArgumentError(
                    f"output_type {np.dtype(dtype)} does not hold all numbers of "
                    f"{numbers}; use int64 or another dtype"
                )
        return cls(numbers, dtype)

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, rows: Positions) -> Any:
        """Return the numbers at these positions of the range."""
        numbers = self._numbers.start + rows * self._numbers.step
        return numbers.astype(self._dtype, copy=False)

    def describe(self) -> str:
        """Return the range and the dtype."""
        return f"{self._numbers} of {self._dtype.name}"


def _holds(dtype: np.dtype[Any], number: int) -> bool:
    if is_integer(dtype):
        return int(np.iinfo(dtype).min) <= number <= int(np.iinfo(dtype).max)
    if dtype == np.bool_:
        return number in (0, 1)
    if not is_floating(dtype):
        return False
    # All integers up to 2**bits, bits being those of the mantissa
    one = np.ones(1, dtype)
    bits = next((b for b in range(1, 64) if (2**b * one) + one == 2**b * one), 64)
    return bool(abs(number) <= 2**bits)


def _host_array(leaf: Any) -> Any:
    if isinstance(leaf, PerReplica):
        raise DataError("a PerReplica has no rows in common")
    array = plain_array(leaf, "an array of a dataset")
    if arrays.is_device_array(array):
        raise DataError("an array of a dataset is on a GPU; pass a copy in host memory")
    return array
