"""Copy batches to a GPU in the background, while it computes on earlier ones.

A batch passes through a slot: a host buffer and device memory. A copy stream copies it
to the slot's device memory asynchronously, which requires page-locked host memory.
Large arrays that were read into such memory (see `page_locked`) are copied from where
they are; all others are first packed into the slot's host buffer. The consumer gets
copies of the device memory, made by its own current stream.

Why the second copy: CuPy's memory pool gives freed memory to the next allocation on the
same stream at once, as the operations of one stream are ordered. If batches were memory
of the copy stream, that stream would overwrite a batch as soon as Python had freed it,
while another stream's kernels still read it. So batches are memory of the stream that
uses them, and can be kept and freed like any other array. Only the memory of slots is
used by two streams, each of which waits for the other's events. The second copy stays
within the GPU: it takes a few percent of the time of the copy from the host.
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
from mpidist.util.available_memory import round_up
from mpidist.util.buffers import Allocate

_ALIGNMENT_BYTES = 256  # as cudaMalloc's
# Launching one more copy costs about as much as packing this many bytes
_LEAST_BYTES = 128 << 10

# Live memory of `page_locked`, by id, since arrays are not hashable
_PAGE_LOCKED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def page_locked(stream: CopyStream) -> Allocate:
    """Return an allocator of page-locked memory, from which `Uploads` copies directly.

    What is read into it must not change while the batch refers to it. Small allocations
    are ordinary memory.
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
    """The memory through which one batch at a time is copied.

    Args:
      host: page-locked memory for packed leaves.
      staged: device memory of `size` bytes.
      size: of `staged`, in bytes.
      leaves: leaves that are copied from where they are, kept alive until `sent`.
      sent: the event after which `host` and `leaves` were read and `staged` written.
      taken: the event after which `staged` was read.
    """

    host: npt.NDArray[np.uint8]
    staged: Any
    size: int
    leaves: list[Any] = dataclasses.field(default_factory=list)
    sent: Event | None = None
    taken: Event | None = None

    def wait_until_sent(self) -> None:
        """Wait until the copy stream has read the host memory."""
        if self.sent is not None:
            self.sent.synchronize()
        self.leaves.clear()


class _Layout(NamedTuple):
    """The places of a batch's leaves in a slot; packed leaves come first.

    Args:
      parts: the place of each leaf in the device memory, by leaf number.
      packed: the leaves that are packed, at the same places in the host buffer.
      as_they_lie: the leaves that are copied from where they are on the host.
      there: the leaves that are on a device already.
      packed_bytes: the size of the host buffer.
      size: the size of the device memory, in bytes.
    """

    parts: dict[int, Part]
    packed: list[int]
    as_they_lie: list[int]
    there: list[int]
    packed_bytes: int
    size: int


@dataclasses.dataclass(eq=False)
class Upload:
    """A batch being copied: its slot, and the leaves that stay on the host.

    Args:
      uploads: where it came from.
      slot: None once it was taken.
      leaves: by leaf number; None for those in the slot.
      spec: the structure of the batch.
      parts: the place of each leaf in the slot, by leaf number.
    """

    uploads: Uploads
    slot: _Slot | None
    leaves: list[Any]
    spec: nest.Spec
    parts: dict[int, Part]


class Uploads:
    """Copies the batches of one iteration to a device.

    It makes as many slots as there are batches in flight at the same time.
    """

    def __init__(self, stream: CopyStream):
        self._stream = stream
        self._slots: list[_Slot] = []
        self._free: collections.deque[_Slot] = collections.deque()
        self._is_closed = False

    def upload(self, batch: Any) -> Any:
        """Start copying a nest of arrays. Any thread may call it.

        The caller may change the arrays afterwards, except those in memory of
        `page_locked`.

        Returns:
          What `take` turns into the batch; the batch itself if the device supports the
          dtype of none of its leaves.

        Raises:
          MemoryError: there is not enough page-locked memory, or device memory.
        """
        leaves, spec = nest.flatten(batch)
        layout = _lay_out(leaves, self._stream)
        parts = layout.parts
        if not parts:
            return batch
        slot = self._free_slot(layout)
        slot.sent = self._send(slot, layout, leaves)
        if self._is_closed:  # meanwhile, without waiting for this slot
            slot.wait_until_sent()
        rest = [None if i in parts else leaf for i, leaf in enumerate(leaves)]
        return Upload(self, slot, rest, spec, parts)

    def close(self) -> None:
        """Wait until the host memory was read, and release all memory.

        It may be called repeatedly, and by the garbage collector in the middle of any
        other method: therefore this class has no locks.
        """
        self._is_closed = True
        slots, self._slots = self._slots, []
        self._free.clear()
        for slot in slots:
            slot.wait_until_sent()
            if slot.taken is not None:
                self._stream.wait(slot.taken)

    def _free_slot(self, layout: _Layout) -> _Slot:
        """Return a slot that is large enough, and whose host buffer was read."""
        packed_bytes, size = layout.packed_bytes, layout.size
        slot = None
        with contextlib.suppress(IndexError):  # another thread may take the last one
            slot = self._free.popleft()
        if slot is None:
            slot = _Slot(self._pin(packed_bytes), self._stream.reserve(size), size)
            self._slots.append(slot)
            return slot
        slot.wait_until_sent()
        # A size that grew is likely to grow again
        if slot.size < size:
            self._grow(slot, size + size // 4)
        if slot.host.size < packed_bytes:
            slot.host = self._pin(packed_bytes + packed_bytes // 4)
        return slot

    def _pin(self, size: int) -> npt.NDArray[np.uint8]:
        return self._stream.pin(size) if size else np.empty(0, np.uint8)

    def _grow(self, slot: _Slot, size: int) -> None:
        assert slot.taken is not None
        self._stream.wait(slot.taken)  # `reserve` may return the same memory
        slot.staged = slot.taken = None
        slot.staged = self._stream.reserve(size)
        slot.size = size

    def _send(self, slot: _Slot, layout: _Layout, leaves: Sequence[Any]) -> Event:
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
        """Return the batch on the device; see the function `take`."""
        slot, upload.slot = upload.slot, None
        assert slot is not None, "a batch was taken twice"
        assert slot.sent is not None
        parts = list(upload.parts.values())
        fetched, slot.taken = self._stream.fetch(slot.staged, parts, slot.sent)
        if self._is_closed:  # without waiting for this copy
            self._stream.wait(slot.taken)
        self._free.append(slot)
        leaves = list(upload.leaves)
        for i, array in zip(upload.parts, fetched, strict=True):
            leaves[i] = array
        return nest.unflatten(upload.spec, leaves)


def take(batch: Any) -> Any:
    """Return the batch of an `Upload`, with arrays on the device; call it once.

    The arrays belong to the calling thread's current stream, which waits for the copies
    (the host does not). Anything but an `Upload` is returned unchanged.
    """
    return batch.uploads.take(batch) if isinstance(batch, Upload) else batch


def _lay_out(leaves: Sequence[Any], stream: CopyStream) -> _Layout:
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
        size += round_up(part.nbytes, _ALIGNMENT_BYTES)
        parts[i] = part
        if len(parts) == len(packed):
            packed_bytes = size
    return _Layout(parts, packed, as_they_lie, there, packed_bytes, max(size, 1))


def _is_page_locked(leaf: Any) -> bool:
    """Return whether a leaf is in page-locked memory and large enough to copy alone."""
    if type(leaf) is not np.ndarray or leaf.nbytes < _LEAST_BYTES:
        return False
    memory: Any = leaf
    while isinstance(memory, np.ndarray | memoryview):  # find the allocation
        if _PAGE_LOCKED.get(id(memory)) is memory:
            return bool(leaf.flags.c_contiguous and leaf.dtype.isnative)
        memory = memory.obj if isinstance(memory, memoryview) else memory.base
    return False


def _bytes_of(array: Any) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)  # type: ignore[no-any-return]


def _write(host: npt.NDArray[np.uint8], part: Part, array: Any) -> None:
    """Copy `array`, of any layout and byte order, to its place in a host buffer."""
    flat = host[part.start : part.start + part.nbytes].view(part.dtype)
    np.copyto(flat.reshape(part.shape), array)
