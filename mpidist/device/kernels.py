"""The kernels of `kernels.cu`: sums in the order of the ranks, and packs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

from mpidist.device.arrays import current_gpu
from mpidist.device.memory import Staged

__all__ = ["OPTIONS", "Packer", "add_parts", "can_add", "load", "source"]

# What the kernels are compiled with
OPTIONS = ("-std=c++17",)

_MOST_PARTS = 64  # at a time, as in kernels.cu
_THREADS = 256
_BYTES_OF_THREAD = 64
_BLOCKS_OF_MULTIPROCESSOR = 16
_SPAN_BYTES = 32768
# Numbers of 16 bits are added up in float32
_NARROW = ("float16", "bfloat16")


def can_add(dtype: np.dtype[Any]) -> bool:
    """Return whether `add_parts` can add numbers of this dtype."""
    return _kernel_name(dtype) is not None


@functools.cache
def _kernel_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name of the kernel that adds numbers, or parts of numbers."""
    if dtype.name in _NARROW:
        return f"add_{dtype.name}"
    if dtype.kind == "c":  # real and imaginary part
        return f"add_f{dtype.itemsize // 2}"
    if dtype.kind in "iu":
        return f"add_u{dtype.itemsize}"
    return f"add_f{dtype.itemsize}" if dtype.kind == "f" else None


def source() -> str:
    """Return the kernels' code."""
    return resources.files("mpidist.device").joinpath("kernels.cu").read_text()


@functools.cache
def _module() -> Any:
    import cupy

    return cupy.RawModule(code=source(), options=OPTIONS)


def load() -> None:
    """Compile the kernels for the current GPU, if that was not done before."""
    for name in ("add_f4", "pack"):
        _function(name, current_gpu())


@functools.cache
def _function(name: str, device: int) -> tuple[Any, int]:
    """Return a kernel, and how many blocks fill a GPU, which is the current one."""
    import cupy

    attributes = cupy.cuda.Device(device).attributes
    blocks = attributes["MultiProcessorCount"] * _BLOCKS_OF_MULTIPROCESSOR
    return _module().get_function(name), blocks


def _launch(name: str, bytes_of_block: int, size_bytes: int, arguments: Any) -> None:
    kernel, most = _function(name, current_gpu())
    blocks = min(most, -(-size_bytes // bytes_of_block))
    kernel((blocks,), (_THREADS,), arguments)


def add_parts(parts: Sequence[int], totals: Any, dtype: np.dtype[Any]) -> None:
    """Put the sum of contiguous arrays into `totals`; the current stream does it.

    They are added up one after the other.

    Args:
      parts: the addresses of the arrays, one at least.
      totals: a contiguous array; of float32 for numbers of 16 bits.
      dtype: of the arrays.
    """
    if not totals.size:
        return
    name = _kernel_name(dtype)
    assert name is not None
    count = np.uint64(totals.size * (2 if dtype.kind == "c" else 1))
    bytes_of_block = _THREADS * _BYTES_OF_THREAD
    for start in range(0, len(parts), _MOST_PARTS):
        some = parts[start : start + _MOST_PARTS]
        table = np.zeros(1, np.dtype((np.void, 8 * _MOST_PARTS)))
        table.view(np.uint64)[: len(some)] = some
        # What comes after the first ones is added to their sum
        numbers = np.int32(len(some)), np.int32(start > 0)
        arguments = table, *numbers, totals.data.ptr, count
        _launch(name, bytes_of_block, totals.nbytes, arguments)


class Packer:
    """Copies pieces of several arrays, as if those were one, by one kernel."""

    def __init__(self) -> None:
        self._table = Staged()
        self._starts: Any = None
        self._count = 0

    def begin(self, arrays: Sequence[Any]) -> None:
        """Take the arrays to copy from: contiguous, on the current device."""
        self._count = len(arrays)
        ends = itertools.accumulate(array.nbytes for array in arrays)
        addresses = [array.data.ptr for array in arrays]
        self._table.write(np.array([*addresses, 0, *ends], np.uint64))

    def copy(self, first: int, size: int, to: Any) -> None:
        """Copy bytes `first..first+size` of all to the beginning of `to`."""
        if size:
            arguments = (
                self._table.array.data.ptr,
                np.int32(self._count),
                np.uint64(first),
                np.uint64(size),
                to.data.ptr,
            )
            _launch("pack", _SPAN_BYTES, size, arguments)
