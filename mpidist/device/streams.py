"""What streams do: copies, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mpidist.device import arrays
from mpidist.device.binding import on_gpu
from mpidist.device.memory import ERROR_MEMORY_ALLOCATION

__all__ = [
    "CopyStream",
    "Event",
    "Order",
    "Part",
    "WorkerStream",
    "assign",
    "copy_stream",
    "external_stream",
    "record",
]


def record(stream: Any = None) -> Any:
    """Return the event that a stream, the current one, has done all it was told."""
    import cupy

    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream or cupy.cuda.get_current_stream())
    return event


def external_stream(pointer: int, index: int) -> AbstractContextManager[Any]:
    """Return a context in which a stream of another library is CuPy's current one.

    Args:
      pointer: its cudaStream_t.
      index: the number of its GPU.
    """
    import cupy

    stream: AbstractContextManager[Any]
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14
        stream = cupy.cuda.Stream.from_external(_ForeignStream(pointer))
    else:
        stream = cupy.cuda.ExternalStream(pointer, index)
    return stream


class _ForeignStream:
    """A stream of another library, by CUDA's protocol for Python."""

    def __init__(self, pointer: int):
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, and the cudaStream_t."""
        return 0, self._pointer


def assign(to: Any, values: Any) -> None:
    """Do `to[...] = values` for contiguous arrays of one size on the GPU."""
    if to.dtype != values.dtype:
        to[...] = values.reshape(to.shape)
    elif to.size:
        to.data.copy_from_device_async(values.data, to.nbytes)


class Order:
    """Things done in `with` blocks come after each other, whatever streams do them.

    On entering, the current stream waits for what was done in the block before.
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
        """Return when all is done."""
        if self._last is not None:
            self._last.synchronize()


class WorkerStream:
    """A stream of a thread that works beside the one that has it work.

    To make where its GPU is the current one.
    """

    def __init__(self) -> None:
        import cupy

        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._begun: Any = None
        self._done: Any = None

    def begin(self) -> None:
        """Let it come after what the current stream was told until now."""
        self._begun, self._done = record(), None

    @contextmanager
    def work(self, after: Iterable[Any]) -> Iterator[None]:
        """Make it the calling thread's current stream.

        Args:
          after: events; what is done in the block comes after them.
        """
        with self._stream:
            for event in (self._begun, *after):
                self._stream.wait_event(event)
            yield
            self._done = record()

    def end(self) -> None:
        """Let the current stream wait for what was done."""
        if self._done is not None:
            import cupy

            cupy.cuda.get_current_stream().wait_event(self._done)


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait, on the host, until the stream has come here."""


class Part(NamedTuple):
    """Where in a buffer an array lies: from byte `start` on, contiguous."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """The length in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class CopyStream(Protocol):
    """A stream that copies to one device, and the memory at its ends.

    Its work is done in order, some time after the methods have returned. Memory of
    `pin` and `reserve` that nobody holds any more may be what the next call returns.
    Any thread may call any method.
    """

    def pin(self, size: int) -> npt.NDArray[np.uint8]:
        """Return at least `size` bytes of host memory that the device can read.

        Few different sizes come of it, such as powers of two.
        """

    def reserve(self, size: int) -> Any:
        """Return `size` bytes of device memory, to be written by this stream only."""

    def holds(self, leaf: Any) -> bool:
        """Return whether `leaf` is an array on a device already."""

    def send(self, host: npt.NDArray[np.uint8], staged: Any, start: int) -> None:
        """Copy `host`, of `pin`, to `staged`, of `reserve`, from byte `start` on.

        The caller must hold `host` until that is done.
        """

    def send_array(self, array: Any, staged: Any, part: Part) -> None:
        """Copy `array`, which the calling thread's current stream makes, to a part.

        The caller may forget it.
        """

    def wait(self, event: Event) -> None:
        """Do what comes next after `event`, of another stream."""

    def record(self) -> Event:
        """Return the event that all until now was done."""

    def fetch(
        self, staged: Any, parts: Sequence[Part], sent: Event
    ) -> tuple[list[Any], Event]:
        """Return copies of parts of `staged`, and the event that they were made.

        They are made by the calling thread's current stream, once `sent` has happened,
        and belong to it.
        """


def copy_stream(device: str) -> CopyStream | None:
    """Return the stream of copies to a device; None for a CPU, which needs none."""
    if device.startswith("CPU"):
        return None
    return _CudaCopyStream(int(device.partition(":")[2]))


# One per GPU. CuPy keeps freed memory for the stream that it was allocated on, so that
# the memory of a stream that nobody uses again would be lost.
_CUDA_STREAMS: dict[int, Any] = {}


class _CudaCopyStream:
    """See `CopyStream`."""

    def __init__(self, index: int):
        import cupy

        self._cupy: Any = cupy
        self._index = index

    @property
    def _device(self) -> Any:
        """A context in which the GPU is the calling thread's current one."""
        return on_gpu(self._index)

    @property
    def _stream(self) -> Any:
        """The stream; to be asked for where the GPU is current."""
        if self._index not in _CUDA_STREAMS:
            # One that blocks would take turns with the default stream's kernels
            stream = self._cupy.cuda.Stream(non_blocking=True)
            _CUDA_STREAMS.setdefault(self._index, stream)  # another thread may be here
        return _CUDA_STREAMS[self._index]

    def _record(self, stream: Any) -> Any:
        """Return the event that all until now was done; where its GPU is current."""
        # Whoever waits for one that does not block takes a core meanwhile
        event = self._cupy.cuda.Event(block=True, disable_timing=True)
        event.record(stream)
        return event

    def pin(self, size: int) -> npt.NDArray[np.uint8]:
        """See `CopyStream.pin`. The memory is of CuPy's pool, and goes back there.

        Raises:
          MemoryError: there is not as much.
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
        """See `CopyStream.reserve`."""
        with self._device, self._stream:
            return self._cupy.empty(size, np.uint8)

    def holds(self, leaf: Any) -> bool:
        """See `CopyStream.holds`."""
        return arrays.is_device_array(leaf)

    def send(self, host: npt.NDArray[np.uint8], staged: Any, start: int) -> None:
        """See `CopyStream.send`."""
        with self._device:
            staged[start : start + host.size].set(host, self._stream)

    def send_array(self, array: Any, staged: Any, part: Part) -> None:
        """See `CopyStream.send_array`. The array may lie on another GPU."""
        with on_gpu(array.device.id):
            array = self._cupy.ascontiguousarray(array)
            here = self._cupy.cuda.get_current_stream()
            made = self._record(here)
        with self._device:
            self._stream.wait_event(made)
            place = staged.data + part.start
            place.copy_from_device_async(array.data, part.nbytes, self._stream)
            sent = self._record(self._stream)
        with on_gpu(array.device.id):
            here.wait_event(sent)  # before its memory is given to others

    def wait(self, event: Any) -> None:
        """See `CopyStream.wait`."""
        with self._device:
            self._stream.wait_event(event)

    def record(self) -> Any:
        """See `CopyStream.record`."""
        with self._device:
            return self._record(self._stream)

    def fetch(
        self, staged: Any, parts: Sequence[Part], sent: Any
    ) -> tuple[list[Any], Any]:
        """See `CopyStream.fetch`."""
        with self._device:
            here = self._cupy.cuda.get_current_stream()
            here.wait_event(sent)
            fetched = []
            for part in parts:
                array = self._cupy.empty(part.shape, part.dtype)
                place = staged.data + part.start
                array.data.copy_from_device_async(place, part.nbytes, here)
                fetched.append(array)
            return fetched, self._record(here)
