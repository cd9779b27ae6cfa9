"""Small arrays on their way from a GPU to the host and back, in few calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mpidist import arrays
from mpidist.gpu.memory import Pinned

__all__ = ["SmallCopies"]

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
