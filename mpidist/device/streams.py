"""CUDA streams: events, ordering, worker and copy streams; memory that CUDA knows.

Device memory that MPI or other processes access is allocated by cudaMalloc: memory of
CUDA's own pools (cudaMallocAsync) cannot be shared with other processes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mpidist.device import arrays
from mpidist.device.binding import on_gpu


def record(stream: Any = None) -> Any:
    """Record an event after the work queued on `stream`, by default the current one."""
    import cupy

    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream or cupy.cuda.get_current_stream())
    return event


def external_stream(pointer: int, index: int) -> AbstractContextManager[Any]:
    """Return a context manager that makes another library's stream CuPy's current one.

    Args:
      pointer: the stream's cudaStream_t.
      index: the CUDA device index of its GPU.
    """
    import cupy

    stream: AbstractContextManager[Any]
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14
        stream = cupy.cuda.Stream.from_external(_ForeignStream(pointer))
    else:
        stream = cupy.cuda.ExternalStream(pointer, index)
    return stream


class _ForeignStream:
    """Another library's stream, by the `__cuda_stream__` protocol."""

    def __init__(self, pointer: int):
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, and the cudaStream_t."""
        return 0, self._pointer


def assign(to: Any, values: Any) -> None:
    """Do `to[...] = values` for contiguous arrays of equal size on the GPU."""
    if to.dtype != values.dtype:
        to[...] = values.reshape(to.shape)
    elif to.size:
        to.data.copy_from_device_async(values.data, to.nbytes)


class Order:
    """Orders the work that is queued in `with` blocks, on whatever streams.

    On entry, the current stream waits for the work of the previous block.
    """

    def __init__(self) -> None:
        self._last: Any = None

    def __enter__(self) -> None:
        if self._last is not None:
            import cupy

            cupy.cuda.get_current_stream().wait_event(self._last)

    def __exit__(self, *exception: object) -> None:
        self._last = record()

    def wait_on_host(self) -> None:
        """Wait, on the host, for the work of the last block."""
        if self._last is not None:
            self._last.synchronize()


class WorkerStream:
    """The stream of a worker thread, ordered with the stream of the thread it serves.

    Create it where the GPU is the current device.
    """

    def __init__(self) -> None:
        import cupy

        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._begun: Any = None
        self._done: Any = None

    def begin(self) -> None:
        """Order later work after all work queued on the current stream until now."""
        self._begun, self._done = record(), None

    @contextmanager
    def work(self, after: Iterable[Any]) -> Iterator[None]:
        """Make it the calling thread's current stream within a block.

        Args:
          after: events that the work of the block waits for.
        """
        with self._stream:
            for event in (self._begun, *after):
                self._stream.wait_event(event)
            yield
            self._done = record()

    def end(self) -> None:
        """Make the current stream wait for the work of the last block."""
        if self._done is not None:
            import cupy

            cupy.cuda.get_current_stream().wait_event(self._done)


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait, on the host, until the stream has reached this point."""


class Part(NamedTuple):
    """The place of a contiguous array in a buffer, from byte `start` on."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """The length in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def copy_stream(device: str) -> CopyStream | None:
    """Return the copy stream of a device; None for a CPU, which needs none."""
    if device.startswith("CPU"):
        return None
    return CopyStream(int(device.partition(":")[2]))


# One per GPU: CuPy's pool keeps freed memory for the stream of its allocation, so the
# memory of a stream that is never used again would be lost
_CUDA_STREAMS: dict[int, Any] = {}


class CopyStream:
    """A stream that copies to one GPU, with the memory that it copies from and to.

    Methods queue work and return at once; the work is done in order. Memory of `pin`
    and `reserve` is reused after the last reference to it is gone. Any thread may call
    any method.

    Args:
      index: the CUDA device index of the GPU.
    """

    def __init__(self, index: int):
        import cupy

        self._cupy: Any = cupy
        self._index = index

    @property
    def _device(self) -> Any:
        return on_gpu(self._index)

    @property
    def _stream(self) -> Any:
        """The stream. The GPU must be the current device."""
        if self._index not in _CUDA_STREAMS:
            # A blocking stream would synchronise with the default stream's kernels
            stream = self._cupy.cuda.Stream(non_blocking=True)
            _CUDA_STREAMS.setdefault(self._index, stream)  # another thread may be here
        return _CUDA_STREAMS[self._index]

    def _record(self, stream: Any) -> Any:
        """Record an event on `stream`. Its GPU must be the current device."""
        # Without block=True a host thread that waits for the event uses a core
        event = self._cupy.cuda.Event(block=True, disable_timing=True)
        event.record(stream)
        return event

    def pin(self, size: int) -> npt.NDArray[np.uint8]:
        """Return at least `size` bytes of page-locked host memory, of CuPy's pool.

        Sizes are rounded up, for example to powers of two, so that memory is reused.

        Raises:
          MemoryError: there is not enough of it.
        """
        try:
            with self._device:
                memory = self._cupy.cuda.alloc_pinned_memory(size)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            if error.status != ERROR_MEMORY_ALLOCATION:
                raise
            raise MemoryError(
                f"there are no {size} bytes of page-locked memory for a batch "
                f"({error}); use smaller batches, or read fewer of them ahead "
                "(InputOptions.experimental_per_replica_buffer_size), or keep them on "
                "the host (experimental_fetch_to_device=False)"
            ) from error
        return np.frombuffer(memory, np.uint8)

    def reserve(self, size: int) -> Any:
        """Return `size` bytes of device memory that only this stream may write."""
        with self._device, self._stream:
            return self._cupy.empty(size, np.uint8)

    def holds(self, leaf: Any) -> bool:
        """Return whether `leaf` is an array on a device already."""
        return arrays.is_device_array(leaf)

    def send(self, host: npt.NDArray[np.uint8], staged: Any, start: int) -> None:
        """Copy `host` (of `pin`) to `staged` (of `reserve`), from byte `start` on.

        The caller must keep a reference to `host` until the copy is done.
        """
        with self._device:
            staged[start : start + host.size].set(host, self._stream)

    def send_array(self, array: Any, staged: Any, part: Part) -> None:
        """Copy `array`, of the calling thread's current stream, to a part of `staged`.

        The array may lie on another GPU. The caller need not keep a reference to it.
        """
        with on_gpu(array.device.id):
            array = self._cupy.ascontiguousarray(array)
            here = self._cupy.cuda.get_current_stream()
            made = self._record(here)
        with self._device:
            self._stream.wait_event(made)
            target = staged.data + part.start
            target.copy_from_device_async(array.data, part.nbytes, self._stream)
            sent = self._record(self._stream)
        with on_gpu(array.device.id):
            here.wait_event(sent)  # before its memory is reused

    def wait(self, event: Any) -> None:
        """Make later work wait for `event`, of another stream."""
        with self._device:
            self._stream.wait_event(event)

    def record(self) -> Event:
        """Record an event after the work queued until now."""
        with self._device:
            event: Event = self._record(self._stream)
        return event

    def fetch(
        self, staged: Any, parts: Sequence[Part], sent: Any
    ) -> tuple[list[Any], Any]:
        """Return copies of parts of `staged`, and the event of the end of the copies.

        The calling thread's current stream waits for `sent` and makes the copies; they
        are memory of that stream.
        """
        with self._device:
            here = self._cupy.cuda.get_current_stream()
            here.wait_event(sent)
            fetched = []
            for part in parts:
                array = self._cupy.empty(part.shape, part.dtype)
                source = staged.data + part.start
                array.data.copy_from_device_async(source, part.nbytes, here)
                fetched.append(array)
            return fetched, self._record(here)


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
