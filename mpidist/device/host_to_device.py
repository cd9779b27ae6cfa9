"""Batches on their way to a GPU, while it computes on those before.

A batch goes through a slot. A stream of copies brings it to the slot's device memory
while the processor goes on, for which it must lie in page-locked memory. Large arrays
that were read into such memory (see `page_locked`) are sent as they lie; all others are
packed into the slot's host buffer first. Whoever asks for the batch gets copies of the
device memory, made by the stream that is current there.

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
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpidist.device import arrays
from mpidist.device.streams import CopyStream, Event, Part
from mpidist.util import nest
from mpidist.util.buffers import Allocate

__all__ = ["Upload", "Uploads", "page_locked", "take"]

_ALIGNMENT = 256  # bytes, as cudaMalloc's
# To tell a stream of one more copy takes as long as packing so many
_LEAST_BYTES = 128 << 10

# What `page_locked` gave out and somebody holds, by id: an array cannot be hashed
_PAGE_LOCKED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def page_locked(stream: CopyStream) -> Allocate:
    """Return what allocates memory from which `Uploads` send arrays as they lie.

    So what is read into it must not change as long as the batch refers to it. Little
    memory is of the usual kind.
    """

    def allocate(size: int) -> npt.NDArray[np.uint8]:
        if size < _LEAST_BYTES:
            return np.empty(size, np.uint8)
        memory = stream.pin(size)
        _PAGE_LOCKED[id(memory)] = memory
        return memory

    return allocate


@dataclasses.dataclass(eq=False)
class _Slot:
    """What one batch at a time goes through.

    Args:
      host: page-locked, for what is packed.
      staged: on the device, of `size` bytes.
      leaves: what is sent as it lies, held until `sent`.
      sent: the event that `host` and `leaves` were read and `staged` written.
      taken: the event that `staged` was read.
    """

    host: npt.NDArray[np.uint8]
    staged: Any
    size: int
    leaves: list[Any] = dataclasses.field(default_factory=list)
    sent: Event | None = None
    taken: Event | None = None

    def wait_until_sent(self) -> None:
        """Wait until nobody reads memory of the host."""
        if self.sent is not None:
            self.sent.synchronize()
        self.leaves.clear()


class _Layout(NamedTuple):
    """Where in a slot the leaves of a batch go, those that are packed first.

    Args:
      parts: of the device memory, by the numbers of the leaves.
      packed: which leaves are packed: into the same parts of the host buffer.
      as_they_lie: which leaves are sent as they lie.
      there: which leaves are on a device already.
      packed_bytes: how much host memory that takes.
      size: how much device memory.
    """

    parts: dict[int, Part]
    packed: list[int]
    as_they_lie: list[int]
    there: list[int]
    packed_bytes: int
    size: int


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
        """Start to copy a nest of arrays. Any thread.

        They may be changed afterwards, but for those in memory of `page_locked`.

        Returns what `take` turns into the batch, or the batch itself if a device can
        hold nothing of it.

        Raises:
          MemoryError: page-locked memory, or memory on the device, does not suffice.
        """
        leaves, spec = nest.flatten(batch)
        layout = _lay_out(leaves, self._stream)
        parts = layout.parts
        if not parts:
            return batch
        slot = self._free_slot(layout)
        slot.sent = self._send(slot, layout, leaves)
        if self._is_closed:  # meanwhile, and did not wait for this
            slot.wait_until_sent()
        rest = [None if i in parts else leaf for i, leaf in enumerate(leaves)]
        return Upload(self, slot, rest, spec, parts)

    def close(self) -> None:
        """Wait until the host's memory was read, and let go of all memory.

        It may be called more than once, and by the garbage collector in the middle of
        any other method. So there are no locks here.
        """
        self._is_closed = True
        slots, self._slots = self._slots, []
        self._free.clear()
        for slot in slots:
            slot.wait_until_sent()
            if slot.taken is not None:
                self._stream.wait(slot.taken)

    def _free_slot(self, layout: _Layout) -> _Slot:
        """Return a slot with room for a batch whose host buffer may be written."""
        packed_bytes, size = layout.packed_bytes, layout.size
        slot = None
        with contextlib.suppress(IndexError):  # other threads may take the last one
            slot = self._free.popleft()
        if slot is None:
            slot = _Slot(self._pin(packed_bytes), self._stream.reserve(size), size)
            self._slots.append(slot)
            return slot
        slot.wait_until_sent()
        # Sizes that grow will grow again
        if slot.size < size:
            self._grow(slot, size + size // 4)
        if slot.host.size < packed_bytes:
            slot.host = self._pin(packed_bytes + packed_bytes // 4)
        return slot

    def _pin(self, size: int) -> npt.NDArray[np.uint8]:
        return self._stream.pin(size) if size else np.empty(0, np.uint8)

    def _grow(self, slot: _Slot, size: int) -> None:
        assert slot.taken is not None
        self._stream.wait(slot.taken)  # what it reserves next may be the same memory
        slot.staged = slot.taken = None
        slot.staged = self._stream.reserve(size)
        slot.size = size

    def _send(self, slot: _Slot, layout: _Layout, leaves: Sequence[Any]) -> Event:
        """Start to copy arrays to a slot; return the event that they are there."""
        stream, parts = self._stream, layout.parts
        for i in layout.packed:
            _write(slot.host, parts[i], leaves[i])
        if slot.taken is not None:
            stream.wait(slot.taken)
        slot.leaves.extend(leaves[i] for i in layout.as_they_lie)
        if layout.packed_bytes:
            stream.send(slot.host[: layout.packed_bytes], slot.staged, 0)
        for i in layout.as_they_lie:
            stream.send(_bytes_of(leaves[i]), slot.staged, parts[i].start)
        for i in layout.there:
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


def _lay_out(leaves: Sequence[Any], stream: CopyStream) -> _Layout:
    """Return which leaves go to the device, and where in a slot of how many bytes."""
    packed: list[int] = []
    as_they_lie: list[int] = []
    there: list[int] = []
    for i, leaf in enumerate(leaves):
        if not arrays.fits_device(leaf):
            continue
        if stream.holds(leaf):
            there.append(i)
        else:
            (as_they_lie if _is_page_locked(leaf) else packed).append(i)
    parts, size, packed_bytes = {}, 0, 0
    for i in (*packed, *as_they_lie, *there):
        leaf = leaves[i]
        part = Part(size, tuple(leaf.shape), leaf.dtype.newbyteorder("="))
        size += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        parts[i] = part
        if len(parts) == len(packed):
            packed_bytes = size
    return _Layout(parts, packed, as_they_lie, there, packed_bytes, max(size, 1))


def _is_page_locked(leaf: Any) -> bool:
    """Return whether a leaf can be sent as it lies, and is worth it."""
    if type(leaf) is not np.ndarray or leaf.nbytes < _LEAST_BYTES:
        return False
    memory: Any = leaf
    while isinstance(memory, np.ndarray | memoryview):  # back to what was allocated
        if _PAGE_LOCKED.get(id(memory)) is memory:
            return bool(leaf.flags.c_contiguous and leaf.dtype.isnative)
        memory = memory.obj if isinstance(memory, memoryview) else memory.base
    return False


def _bytes_of(array: Any) -> npt.NDArray[np.uint8]:
    """Return a view of the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8)  # type: ignore[no-any-return]


def _write(host: npt.NDArray[np.uint8], part: Part, array: Any) -> None:
    """Copy `array`, of any layout and byte order, to its place in a host buffer."""
    flat = host[part.start : part.start + part.nbytes].view(part.dtype)
    np.copyto(flat.reshape(part.shape), array)
