"""Launch the kernels of `kernels.cu`: sums in rank order, and packing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

from mpidist.device.arrays import current_gpu
from mpidist.device.streams import Staged
from mpidist.util.dtypes import is_integer, traits

# The compiler's options
OPTIONS = ("-std=c++17",)

_MOST_PARTS = 64  # arrays per launch, as in kernels.cu
_THREADS = 256
_BYTES_OF_THREAD = 64
_BLOCKS_OF_MULTIPROCESSOR = 16
_SPAN_BYTES = 32768
# Summed in float32
_NARROW = ("float16", "bfloat16")


@functools.cache
def _kernel_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name of the kernel that adds numbers of `dtype`; None if none does."""
    if dtype.name in _NARROW:
        return f"add_{dtype.name}"
    if not traits(dtype).is_summed:
        return None
    if is_integer(dtype):
        return f"add_u{dtype.itemsize}"
    # Adds real and imaginary parts as separate numbers
    return f"add_f{dtype.itemsize // _parts_of(dtype)}"


def _parts_of(dtype: np.dtype[Any]) -> int:
    return 2 if traits(dtype).family == "complex" else 1


def source() -> str:
    """Return the kernels' source code."""
    return resources.files("mpidist.device").joinpath("kernels.cu").read_text()


@functools.cache
def _module() -> Any:
    import cupy

    return cupy.RawModule(code=source(), options=OPTIONS)


def load() -> None:
    """Compile the kernels for the current GPU, unless that was done before."""
    for name in ("add_f4", "pack"):
        _function(name, current_gpu())


@functools.cache
def _function(name: str, device: int) -> tuple[Any, int]:
    """Return a kernel, and how many blocks fill the GPU `device`, the current one."""
    import cupy

    attributes = cupy.cuda.Device(device).attributes
    blocks = attributes["MultiProcessorCount"] * _BLOCKS_OF_MULTIPROCESSOR
    return _module().get_function(name), blocks


def _launch(name: str, bytes_of_block: int, size_bytes: int, arguments: Any) -> None:
    kernel, most = _function(name, current_gpu())
    blocks = min(most, -(-size_bytes // bytes_of_block))
    kernel((blocks,), (_THREADS,), arguments)


def add_parts(parts: Sequence[int], totals: Any, dtype: np.dtype[Any]) -> None:
    """Write the sum of contiguous arrays to `totals`, on the current stream.

    Each element is summed in the order of `parts`, so the result does not depend on the
    launch.

    Args:
      parts: the addresses of at least one array, each of `totals.size` elements.
      totals: a contiguous array; float32 for 16-bit dtypes.
      dtype: the dtype of the arrays.
    """
    if not totals.size:
        return
    name = _kernel_name(dtype)
    assert name is not None
    count = np.uint64(totals.size * _parts_of(dtype))
    bytes_of_block = _THREADS * _BYTES_OF_THREAD
    for start in range(0, len(parts), _MOST_PARTS):
        some = parts[start : start + _MOST_PARTS]
        table = np.zeros(1, np.dtype((np.void, 8 * _MOST_PARTS)))
        table.view(np.uint64)[: len(some)] = some
        # Later launches add to the sum of the earlier ones
        numbers = np.int32(len(some)), np.int32(start > 0)
        arguments = table, *numbers, totals.data.ptr, count
        _launch(name, bytes_of_block, totals.nbytes, arguments)


class Packer:
    """Copies pieces of a concatenation of arrays, each piece by one kernel launch."""

    def __init__(self) -> None:
        self._table = Staged()
        self._starts: Any = None
        self._count = 0

    def begin(self, arrays: Sequence[Any]) -> None:
        """Set the arrays to copy from: contiguous, on the current device."""
        self._count = len(arrays)
        ends = itertools.accumulate(array.nbytes for array in arrays)
        addresses = [array.data.ptr for array in arrays]
        self._table.write(np.array([*addresses, 0, *ends], np.uint64))

    def copy(self, first: int, size: int, to: Any) -> None:
        """Copy bytes `first..first+size` of the concatenation to the start of `to`."""
        if size:
            arguments = (
                self._table.array.data.ptr,
                np.int32(self._count),
                np.uint64(first),
                np.uint64(size),
                to.data.ptr,
            )
            _launch("pack", _SPAN_BYTES, size, arguments)
