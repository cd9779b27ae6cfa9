"""Memory for communication: device memory, and page-locked host memory.

Device memory that MPI or other processes access is allocated by cudaMalloc: memory of
CUDA's own pools (cudaMallocAsync) cannot be shared with other processes.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

ERROR_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation; CuPy has no Python name for it

_SMALLEST_BYTES = 4096


class DeviceBuffer:
    """Memory of the current GPU, allocated by itself and freed with the last reference.

    Attributes:
      array: the bytes, as a CuPy array.
    """

    in_use_bytes: ClassVar[int] = 0  # by all buffers of this process

    def __init__(self, size_bytes: int):
        import cupy

        pointer = cupy.cuda.MemoryPointer(_allocate(size_bytes), 0)
        self.array = cupy.ndarray((size_bytes,), np.uint8, memptr=pointer)
        DeviceBuffer.in_use_bytes += size_bytes
        weakref.finalize(self, DeviceBuffer._count_out, size_bytes)

    @staticmethod
    def _count_out(size_bytes: int) -> None:
        DeviceBuffer.in_use_bytes -= size_bytes


def _allocate(size_bytes: int) -> Any:
    """Allocate memory of the current GPU by cudaMalloc."""
    import cupy

    try:
        return cupy.cuda.Memory(size_bytes)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if error.status != ERROR_MEMORY_ALLOCATION:
            raise
    # CuPy's pool may hold enough memory of arrays that were freed
    cupy.get_default_memory_pool().free_all_blocks()
    return cupy.cuda.Memory(size_bytes)


class Pinned:
    """A reusable page-locked host buffer, which a GPU can read and write directly.

    Before writing to it again, the caller must wait until the GPU has read it.
    """

    def __init__(self) -> None:
        self.bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.address = 0

    def take(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return `size_bytes` bytes, in the same memory as before if that suffices."""
        if size_bytes > self.bytes.size:
            from cupy.cuda import alloc_pinned_memory

            size = max(size_bytes, _SMALLEST_BYTES)
            memory = alloc_pinned_memory(size)
            self.bytes = np.frombuffer(memory, np.uint8)[:size]
            self.address = memory.ptr
        return self.bytes[:size_bytes]


class Staged:
    """A small array on the GPU that is rewritten from the host.

    Attributes:
      array: the array; valid for work queued on the current stream after `write`.
    """

    def __init__(self) -> None:
        self._host = Pinned()
        self._read: Any = None  # the event after which the GPU has read `_host`
        self._buffer: DeviceBuffer | None = None
        self.array: Any = None

    def write(self, values: npt.NDArray[Any]) -> None:
        """Queue a copy of `values` to the GPU on the current stream."""
        import cupy

        if self._read is not None:
            self._read.synchronize()
        host = self._host.take(values.nbytes)
        host[...] = values.view(np.uint8)
        if self._buffer is None or self._buffer.array.size < values.nbytes:
            size = max(2 * values.nbytes, _SMALLEST_BYTES)
            self._buffer = DeviceBuffer(size)
        self.array = self._buffer.array[: values.nbytes]
        stream = cupy.cuda.get_current_stream()
        self.array.set(host, stream)
        self._read = cupy.cuda.Event(disable_timing=True)
        self._read.record(stream)


def is_plain(array: Any) -> bool:
    """Return whether a CuPy array was not allocated by cudaMallocAsync."""
    import cupy

    memory = array.data.mem
    return not isinstance(memory, cupy.cuda.memory.MemoryAsync)
