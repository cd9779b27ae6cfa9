"""Batches on their way to a GPU, while it computes on those before.

A batch goes through a slot. It is packed into the slot's host buffer, which is
page-locked, so that a stream of copies can bring it to the slot's device memory while
the processor goes on. Whoever asks for the batch gets copies of that, made by the
stream that is current there.

The second copy is there for the sake of lifetimes. CuPy gives memory that was freed to
the next allocation for the same stream at once, since one stream does things in order.
If batches were memory of the stream of copies, it would overwrite one as soon as Python
had forgotten it, while another stream's kernels still read it. So batches are memory of
the stream that uses them, to be kept and forgotten like all other arrays. The memory of
slots is all that two streams use, and there each waits for the other's events. The copy
is within the GPU's memory: it takes a few percent of the time of the one from the host.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist import arrays, nest
from mpidist.copy_streams import CopyStream, Event, Part

__all__ = ["Upload", "Uploads", "take"]

_ALIGNMENT = 256  # bytes, as cudaMalloc's


@dataclasses.dataclass(eq=False)
class _Slot:
    """What one batch at a time goes through.

    Args:
      host: page-locked.
      staged: on the device, of `size` bytes.
      sent: the event that `host` was read and `staged` written.
      taken: the event that `staged` was read.
    """

    host: npt.NDArray[np.uint8]
    staged: Any
    size: int
    sent: Event | None = None
    taken: Event | None = None


@dataclasses.dataclass(eq=False)
class Upload:
    """A batch on its way: its slot until it is taken, and the leaves without a part."""

    uploads: Uploads
    slot: _Slot | None
    leaves: list[Any]
    spec: nest.Spec
    parts: dict[int, Part]


class Uploads:
    """The batches of one iteration, on their way to a device.

    There come to be as many slots as batches are on their way at the same time.
    """

    def __init__(self, stream: CopyStream):
        self._stream = stream
        self._slots: list[_Slot] = []
        self._free: collections.deque[_Slot] = collections.deque()
        self._is_closed = False

    def upload(self, batch: Any) -> Any:
        """Start to copy a nest of arrays, which may be changed afterwards. Any thread.

        Returns what `take` turns into the batch, or the batch itself if a device can
        hold nothing of it.

        Raises:
          MemoryError: page-locked memory, or memory on the device, does not suffice.
        """
        leaves, spec = nest.flatten(batch)
        parts, size = _lay_out(leaves)
        if not parts:
            return batch
        slot = self._free_slot(size)
        sent = slot.sent = self._send(slot, size, leaves, parts)
        if self._is_closed:  # meanwhile, and did not wait for this
            sent.synchronize()
        rest = [None if i in parts else leaf for i, leaf in enumerate(leaves)]
        return Upload(self, slot, rest, spec, parts)

    def close(self) -> None:
        """Wait until the host's buffers were read, and let go of all memory.

        It may be called more than once, and by the garbage collector in the middle of
        any other method. So there are no locks here.
        """
        self._is_closed = True
        slots, self._slots = self._slots, []
        self._free.clear()
        for slot in slots:
            if slot.sent is not None:
                slot.sent.synchronize()
            if slot.taken is not None:
                self._stream.wait(slot.taken)

    def _free_slot(self, size: int) -> _Slot:
        """Return a slot of at least `size` bytes whose host buffer may be written."""
        slot = None
        with contextlib.suppress(IndexError):  # other threads may take the last one
            slot = self._free.popleft()
        if slot is None:
            slot = _Slot(self._stream.pin(size), self._stream.reserve(size), size)
            self._slots.append(slot)
            return slot
        assert slot.sent is not None
        slot.sent.synchronize()
        if slot.size < size:
            self._grow(slot, size + size // 4)  # sizes that grow will grow again
        return slot

    def _grow(self, slot: _Slot, size: int) -> None:
        assert slot.taken is not None
        self._stream.wait(slot.taken)  # what it reserves next may be the same memory
        slot.staged = slot.taken = None
        slot.staged = self._stream.reserve(size)
        slot.host = self._stream.pin(size)
        slot.size = size

    def _send(
        self, slot: _Slot, size: int, leaves: Sequence[Any], parts: dict[int, Part]
    ) -> Event:
        """Start to copy arrays to a slot; return the event that they are there."""
        stream = self._stream
        there = {i for i in parts if stream.holds(leaves[i])}
        for i in parts.keys() - there:
            _write(slot.host, parts[i], leaves[i])
        if slot.taken is not None:
            stream.wait(slot.taken)
        stream.send(slot.host[:size], slot.staged)
        for i in there:
            stream.send_array(leaves[i], slot.staged, parts[i])
        return stream.record()

    def take(self, upload: Upload) -> Any:
        """See the function `take`."""
        slot, upload.slot = upload.slot, None
        assert slot is not None, "a batch was taken twice"
        assert slot.sent is not None
        parts = list(upload.parts.values())
        fetched, slot.taken = self._stream.fetch(slot.staged, parts, slot.sent)
        if self._is_closed:  # and did not wait for this
            self._stream.wait(slot.taken)
        self._free.append(slot)
        leaves = list(upload.leaves)
        for i, array in zip(upload.parts, fetched, strict=True):
            leaves[i] = array
        return nest.unflatten(upload.spec, leaves)


def take(batch: Any) -> Any:
    """Return what `Uploads.upload` was given as arrays on the device, once.

    They belong to the current stream of the calling thread, which waits for the copies;
    the host does not. Anything else is returned as it is.
    """
    return batch.uploads.take(batch) if isinstance(batch, Upload) else batch


def _lay_out(leaves: Sequence[Any]) -> tuple[dict[int, Part], int]:
    """Return which leaves go to the device, and where in a slot of how many bytes."""
    parts, size = {}, 0
    for i, leaf in enumerate(leaves):
        if arrays.fits_device(leaf):
            part = Part(size, tuple(leaf.shape), leaf.dtype.newbyteorder("="))
            size += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
            parts[i] = part
    return parts, max(size, 1)


def _write(host: npt.NDArray[np.uint8], part: Part, array: Any) -> None:
    """Copy `array`, of any layout and byte order, to its place in a host buffer."""
    flat = host[part.start : part.start + part.nbytes].view(part.dtype)
    np.copyto(flat.reshape(part.shape), array)
