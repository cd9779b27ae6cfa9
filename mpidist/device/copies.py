"""Asynchronous copies between a GPU and the host, for collectives on the host."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.device import arrays
from mpidist.device.streams import Pinned, record
from mpidist.util.available_memory import round_up

# Double buffering: the host works on one buffer while the other one is copied
_BUFFERS = 2


class _Buffer:
    """A page-locked buffer, and the event after which the GPU no longer uses it."""

    def __init__(self) -> None:
        self._pinned = Pinned()
        self.bytes: npt.NDArray[np.uint8] = self._pinned.take(0)
        self.event: Any = None

    @property
    def address(self) -> int:
        return self._pinned.address

    def take(self, size_bytes: int) -> None:
        """Wait until the GPU has finished with the buffer, and resize `bytes`."""
        if self.event is not None:
            self.event.synchronize()
        self.bytes = self._pinned.take(size_bytes)

    def wait(self) -> npt.NDArray[np.uint8]:
        self.event.synchronize()
        return self.bytes


class HostCopies:
    """Pipelined copies of one array at a time, in pieces, to the host and back.

    The copies run after the work queued on the current stream before `begin`, and
    before the work queued on it after `end`.
    """

    def __init__(self) -> None:
        self._down = [_Buffer() for _ in range(_BUFFERS)]
        self._up = [_Buffer() for _ in range(_BUFFERS)]
        self._own: tuple[Any, Any] | None = None
        self._streams: tuple[Any, Any] = None, None
        self._turns = [0, 0]

    def begin(self, is_alone: bool) -> None:
        """Start the copies of one array.

        Args:
          is_alone: whether there is only one copy in each direction. The current stream
            makes it then; else two streams of this object copy both ways at once.
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
        """Make the current stream wait for the copies."""
        import cupy

        here = cupy.cuda.get_current_stream()
        for stream in self._streams:
            if stream != here:
                here.wait_event(record(stream))

    def fetch(self, array: Any) -> _Buffer:
        """Start copying a contiguous array to the host.

        There are two buffers, used alternately: this overwrites the one that the call
        before the last returned.
        """
        buffer = self._next(self._down, 0)
        buffer.take(array.nbytes)
        stream = self._streams[0]
        if array.nbytes:
            array.data.copy_to_host_async(buffer.address, array.nbytes, stream)
        buffer.event = record(stream)
        return buffer

    def room(self, size_bytes: int) -> _Buffer:
        """Return a buffer to fill and pass to `send`."""
        buffer = self._next(self._up, 1)
        buffer.take(size_bytes)
        return buffer

    def send(self, buffer: _Buffer, targets: Sequence[Any]) -> None:
        """Start copying a buffer's contents to consecutive arrays on the GPU."""
        stream = self._streams[1]
        start = buffer.address
        for target in targets:
            if target.nbytes:
                target.data.copy_from_host_async(start, target.nbytes, stream)
                start += target.nbytes
        buffer.event = record(stream)

    def _next(self, buffers: Sequence[_Buffer], kind: int) -> _Buffer:
        self._turns[kind] = (self._turns[kind] + 1) % _BUFFERS
        return buffers[self._turns[kind]]


# cudaMemcpyKind
_TO_DEVICE, _TO_HOST = 1, 2


class SmallCopies:
    """Copies the small arrays of one collective to the host, and its results back.

    All copies are queued on the current stream. Call `down`, then `up`.
    """

    _sent: Any = None  # the event after which the copies of `up` are done

    @functools.cached_property
    def _buffers(self) -> tuple[Pinned, Pinned]:
        return Pinned(), Pinned()

    def down(self, values: Sequence[Any]) -> list[Any]:
        """Return the arrays on the host; they are valid until the next call.

        Arrays that are on the host already are returned as they are. Waits for all work
        queued on the current stream.
        """
        import cupy
        from cupy.cuda import runtime

        stream = cupy.cuda.get_current_stream()
        there = [arrays.is_device_array(value) for value in values]
        starts, size = _lay_out(values)
        buffer, _ = self._buffers
        host, address = buffer.take(size), buffer.address
        on_host = list(values)
        for j in itertools.compress(range(len(values)), there):
            value = cupy.ascontiguousarray(values[j])
            start, stop = starts[j], starts[j] + value.nbytes
            if value.nbytes:
                source, to = value.data.ptr, address + start
                runtime.memcpyAsync(to, source, value.nbytes, _TO_HOST, stream.ptr)
            # Not value.shape: ascontiguousarray turns 0 dimensions into 1
            on_host[j] = host[start:stop].view(value.dtype).reshape(values[j].shape)
        stream.synchronize()
        # The copies of the last `up` may be on another stream
        if self._sent is not None:
            self._sent.synchronize()
        return on_host

    def up(self, results: Sequence[Any], like: Sequence[Any]) -> list[Any]:
        """Copy each result to the GPU if its counterpart in `like` is there."""
        import cupy
        from cupy.cuda import runtime

        stream = cupy.cuda.get_current_stream()
        starts, size = _lay_out(results)
        _, buffer = self._buffers
        host, address = buffer.take(size), buffer.address
        copies = list(results)
        for j, result in enumerate(results):
            if arrays.is_device_array(like[j]):
                copies[j] = cupy.empty(result.shape, result.dtype)
                start, stop = starts[j], starts[j] + result.nbytes
                if result.nbytes:
                    host[start:stop].view(result.dtype)[...] = result.reshape(-1)
                    to, source = copies[j].data.ptr, address + start
                    runtime.memcpyAsync(
                        to, source, result.nbytes, _TO_DEVICE, stream.ptr
                    )
        if self._sent is None:
            self._sent = cupy.cuda.Event(disable_timing=True)
        self._sent.record(stream)
        return copies


def _lay_out(values: Sequence[Any]) -> tuple[list[int], int]:
    # Beside arrays on a GPU there may be Python's numbers, which need no room
    sizes = [round_up(getattr(value, "nbytes", 0)) for value in values]
    ends = [*itertools.accumulate(sizes, initial=0)]
    return ends[:-1], ends[-1]
