"""Copies between a GPU and the host, beside what both do meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.device import arrays
from mpidist.device.memory import Pinned
from mpidist.device.streams import record

__all__ = ["HostCopies", "SmallCopies"]


# One is worked on, while another one is on its way
_BUFFERS = 2


class _Buffer:
    """A page-locked buffer, and what the GPU has to do with it still."""

    def __init__(self) -> None:
        self._pinned = Pinned()
        self.bytes: npt.NDArray[np.uint8] = self._pinned.take(0)
        self.event: Any = None

    @property
    def address(self) -> int:
        """Where the bytes begin."""
        return self._pinned.address

    def take(self, size_bytes: int) -> None:
        """Make `bytes` so many, once the GPU has no more to do with them."""
        if self.event is not None:
            self.event.synchronize()
        self.bytes = self._pinned.take(size_bytes)

    def wait(self) -> npt.NDArray[np.uint8]:
        """Return the bytes once they have come from the GPU."""
        self.event.synchronize()
        return self.bytes


class HostCopies:
    """The copies of one thing at a time that goes through the host.

    What the current stream does before `begin` is done before the copies; what it does
    after `end`, after them.
    """

    def __init__(self) -> None:
        self._down = [_Buffer() for _ in range(_BUFFERS)]
        self._up = [_Buffer() for _ in range(_BUFFERS)]
        self._own: tuple[Any, Any] | None = None
        self._streams: tuple[Any, Any] = None, None
        self._turns = [0, 0]

    def begin(self, is_alone: bool) -> None:
        """Begin with one thing.

        Args:
          is_alone: whether there is one copy in each direction only: then the current
            stream makes them.
        """
        import cupy

        here = cupy.cuda.get_current_stream()
        if is_alone:
            self._streams = here, here
            return
        if self._own is None:
            down, up = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            self._own = down, up
        self._streams = self._own
        begun = record(here)
        for stream in self._streams:
            stream.wait_event(begun)

    def end(self) -> None:
        """Let the current stream wait for the copies."""
        import cupy

        here = cupy.cuda.get_current_stream()
        for stream in self._streams:
            if stream != here:
                here.wait_event(record(stream))

    def fetch(self, array: Any) -> _Buffer:
        """Begin to copy a contiguous array to the host.

        The two buffers are used in turn: nobody may need the last but one any more.
        """
        buffer = self._next(self._down, 0)
        buffer.take(array.nbytes)
        stream = self._streams[0]
        if array.nbytes:
            array.data.copy_to_host_async(buffer.address, array.nbytes, stream)
        buffer.event = record(stream)
        return buffer

    def room(self, size_bytes: int) -> _Buffer:
        """Return a buffer to write to, for `send`."""
        buffer = self._next(self._up, 1)
        buffer.take(size_bytes)
        return buffer

    def send(self, buffer: _Buffer, places: Sequence[Any]) -> None:
        """Begin to copy what a buffer holds to arrays, one after the other."""
        stream = self._streams[1]
        start = buffer.address
        for place in places:
            if place.nbytes:
                place.data.copy_from_host_async(start, place.nbytes, stream)
                start += place.nbytes
        buffer.event = record(stream)

    def _next(self, buffers: Sequence[_Buffer], kind: int) -> _Buffer:
        self._turns[kind] = (self._turns[kind] + 1) % _BUFFERS
        return buffers[self._turns[kind]]


_ALIGNMENT = 64
# cudaMemcpyKind
_TO_DEVICE, _TO_HOST = 1, 2


class SmallCopies:
    """Copies the arrays of one thing at a time to the host, and results back.

    The current stream makes the copies; `up` comes after `down`.
    """

    def __init__(self) -> None:
        self._down, self._up = Pinned(), Pinned()
        self._sent: Any = None  # the event that the GPU has read what `up` gave it

    def down(self, values: Sequence[Any]) -> list[Any]:
        """Return arrays on the host, which are valid until the next call.

        What is there already stays. What the current stream was told before is done.
        """
        import cupy
        from cupy.cuda import runtime

        stream = cupy.cuda.get_current_stream()
        there = [arrays.is_device_array(value) for value in values]
        starts, size = _lay_out(values)
        host, address = self._down.take(size), self._down.address
        found = list(values)
        for j in itertools.compress(range(len(values)), there):
            value = cupy.ascontiguousarray(values[j])
            start, stop = starts[j], starts[j] + value.nbytes
            if value.nbytes:
                source, to = value.data.ptr, address + start
                runtime.memcpyAsync(to, source, value.nbytes, _TO_HOST, stream.ptr)
            # Not its own shape: CuPy makes one dimension of none
            found[j] = host[start:stop].view(value.dtype).reshape(values[j].shape)
        stream.synchronize()
        if self._sent is not None:  # by another stream, which may be gone by now
            self._sent.synchronize()
        return found

    def up(self, results: Sequence[Any], like: Sequence[Any]) -> list[Any]:
        """Return results where the arrays `like` lie."""
        import cupy
        from cupy.cuda import runtime

        stream = cupy.cuda.get_current_stream()
        starts, size = _lay_out(results)
        host, address = self._up.take(size), self._up.address
        found = list(results)
        for j, result in enumerate(results):
            if arrays.is_device_array(like[j]):
                found[j] = cupy.empty(result.shape, result.dtype)
                start, stop = starts[j], starts[j] + result.nbytes
                if result.nbytes:
                    host[start:stop].view(result.dtype)[...] = result.reshape(-1)
                    to, source = found[j].data.ptr, address + start
                    runtime.memcpyAsync(
                        to, source, result.nbytes, _TO_DEVICE, stream.ptr
                    )
        if self._sent is None:
            self._sent = cupy.cuda.Event(disable_timing=True)
        self._sent.record(stream)
        return found


def _lay_out(values: Sequence[Any]) -> tuple[list[int], int]:
    """Return where each array begins in a buffer, and how many bytes that has."""
    sizes = [-(-value.nbytes // _ALIGNMENT) * _ALIGNMENT for value in values]
    ends = [*itertools.accumulate(sizes, initial=0)]
    return ends[:-1], ends[-1]
