"""An HDF5 file in memory that has holes, for h5py to write or to read."""

from __future__ import annotations

import bisect
import io
from collections.abc import Iterator
from typing import Any

__all__ = ["Image"]


class Image(io.RawIOBase):
    """The bytes of a file, but not those of large arrays: as a file for `h5py.File`.

    Nothing can fail here as disks do, where HDF5 cannot go on, or clean up.

    Args:
      size: of the file.
    """

    def __init__(self, size: int = 0):
        self._parts: dict[int, bytes] = {}  # by offset
        self._starts: list[int] = []  # of the parts, in order, if none overlap
        self._position = 0
        self.size = size

    def put(self, offset: int, data: bytes) -> None:
        """Have bytes at an offset; later ones hide those that were there before."""
        # The latest come last, also where the offset is the same
        self._parts.pop(offset, None)
        self._parts[offset] = data
        self._starts.clear()
        self.size = max(self.size, offset + len(data))

    def get(self, offset: int, size: int) -> bytes:
        """Return bytes; zeros where there are none."""
        found = bytearray(size)
        near = list(self._parts)
        if self._starts:
            before = max(0, bisect.bisect_right(self._starts, offset) - 1)
            end = bisect.bisect_left(self._starts, offset + size)
            near = self._starts[before:end]
        for at in near:
            part = self._parts[at]
            first, last = max(at, offset), min(at + len(part), offset + size)
            if first < last:
                found[first - offset : last - offset] = part[first - at : last - at]
        return bytes(found)

    def solid(self, start: int, holes: list[tuple[int, int]]) -> Iterator[Any]:
        """Yield offset and bytes of all from `start` on that is in no hole.

        Holes are offsets and lengths, in order.
        """
        for offset, size in [*holes, (self.size, 0)]:
            if start < offset:
                yield start, self.get(start, offset - start)
            start = offset + size

    def compact(self) -> None:
        """Make `get` quick after many writes: join parts that touch or overlap."""
        joined: list[tuple[int, int]] = []
        for at in sorted(self._parts):
            end = at + len(self._parts[at])
            if joined and at <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(joined[-1][1], end)
            else:
                joined.append((at, end))
        starts = [first for first, _ in joined]
        buffers = [bytearray(last - first) for first, last in joined]
        for at, part in self._parts.items():
            i = bisect.bisect_right(starts, at) - 1
            buffers[i][at - starts[i] : at - starts[i] + len(part)] = part
        self._parts = {
            first: bytes(buffer) for first, buffer in zip(starts, buffers, strict=True)
        }
        self._starts = starts

    def readable(self) -> bool:
        """Return True, as files do."""
        return True

    def writable(self) -> bool:
        """Return True, as files do."""
        return True

    def seekable(self) -> bool:
        """Return True, as files do."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position, as files do."""
        base = (0, self._position, self.size)[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def write(self, data: Any) -> int:
        """Put bytes at the position."""
        copy = bytes(data)
        self.put(self._position, copy)
        self._position += len(copy)
        return len(copy)

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the position on; with zeros where there is nothing."""
        view = memoryview(buffer).cast("B")
        view[:] = self.get(self._position, view.nbytes)
        self._position += view.nbytes
        return view.nbytes

    def truncate(self, size: int | None = None) -> int:
        """Set the size of the file."""
        self.size = self._position if size is None else size
        return self.size
