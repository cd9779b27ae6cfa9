"""What streams do: copies, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Order", "SideStream", "assign", "record"]


def record(stream: Any = None) -> Any:
    """Return the event that a stream, the current one, has done all it was told."""
    import cupy

    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream or cupy.cuda.get_current_stream())
    return event


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


class SideStream:
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
