"""The format of a checkpoint's file: a header of text with checksums, then HDF5.

The first lines give the version, the length and the checksum of the header, which is
JSON: the checksums of large arrays block by block, one of everything else (the
structure), and the files that belong to the checkpoint. To HDF5 the header is a user
block, so any HDF5 program can read the file.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import io
import json
import math
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deflate

from mpidist.errors import CheckpointError
from mpidist.util.files import open_regular

__all__ = [
    "DamagedError",
    "FORMAT",
    "Header",
    "InMemoryFile",
    "LARGEST_STRUCTURE_BYTES",
    "Shard",
    "checked_read",
    "checked_write",
    "damage",
    "header_bytes",
    "header_crc32",
    "is_begun",
    "open_file",
    "parse",
    "read_header",
    "read_header_bytes",
    "render",
    "unwritable",
]


FORMAT = 1
_FIRST = "mpidist checkpoint {}, header of {:012} bytes, crc32 {:08x}\n"
_PATTERN = re.compile(
    rb"mpidist checkpoint (\d+), header of (\d{12}) bytes, crc32 ([0-9a-f]{8})\n"
)
_LINE_BYTES = len(_FIRST.format(FORMAT, 0, 0))
# Limits on what is read before its checksum is verified, as damaged files may claim any
# size. Enough for the header of 16 TiB of arrays, and for a million small arrays
_LARGEST_BYTES = 64 << 20
LARGEST_STRUCTURE_BYTES = 1 << 30
_SMALLEST = 4096  # the alignment of arrays, which HDF5 asks for
# Bytes of JSON at most: the fixed part, one block, one shard without its name
_FIXED_BYTES, _DATA_BYTES, _SHARD_BYTES = 1800, 60, 80


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of the checkpoint besides the index, and its header's checksum."""

    name: str
    size: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Header:
    """The content of the header.

    Args:
      serial: orders the checkpoints of a directory.
      size: of the file.
      structure_crc32: of everything after the header except `data`.
      data: offset, length and CRC-32 of blocks of arrays, in file order.
      shards: the other files of the checkpoint.
      job: the job that saved it, for humans; empty in shards and in older files.
      preserved: of the manager that saved it: serial and time of the latest checkpoint
        that was preserved for its hours; None in older files and of other saves.
      milliseconds: how long the save took; 0 in shards and in older files.
    """

    serial: int
    size: int
    structure_crc32: int
    data: tuple[tuple[int, int, int], ...] = ()
    shards: tuple[Shard, ...] = ()
    job: str = ""
    preserved: tuple[int, float] | None = None
    milliseconds: int = 0


def header_bytes(data: int, shards: list[str]) -> int:
    """Return the length of a header of `data` blocks and these shards.

    Raises:
      CheckpointError: it exceeds the limit.
    """
    # Quotes and escapes of JSON included.
    names = sum(len(json.dumps(name)) + _SHARD_BYTES for name in shards)
    needed = _LINE_BYTES + _FIXED_BYTES + data * _DATA_BYTES + names
    if needed > _LARGEST_BYTES:
        raise CheckpointError(
            f"{data} blocks of arrays and {len(shards)} shards need a header of "
            f"{needed} bytes, but the limit is {_LARGEST_BYTES}; join arrays, or save "
            "with more ranks"
        )
    # A power of two, as HDF5 wants of a user block.
    return max(_SMALLEST, 1 << (needed - 1).bit_length())


def render(header: Header, length: int) -> bytes:
    """Return the header as `length` bytes."""
    body = json.dumps(dataclasses.asdict(header), separators=(", ", ": "))
    # Padded: the header's length was fixed before its content was known.
    padded = body.encode().ljust(length - _LINE_BYTES - 1) + b"\n"
    first = _FIRST.format(FORMAT, length, zlib.crc32(padded)).encode()
    # Our own arithmetic, and no error of the user's.
    assert len(first + padded) == length, "header_bytes was too small"
    return first + padded


def parse_first(data: bytes) -> tuple[int, int]:
    """Return length and checksum of the header that starts with `data`.

    Raises:
      ValueError: not a header that this version reads.
    """
    # The first line is read alone: it says how much more to read.
    match = _PATTERN.match(data)
    if match is None:
        raise ValueError("it does not begin like a checkpoint of mpidist")
    version, length, crc32 = int(match[1]), int(match[2]), int(match[3], 16)
    if version != FORMAT:
        raise ValueError(f"its format is {version}; this mpidist reads {FORMAT}")
    # A damaged length must not make us allocate.
    if length > _LARGEST_BYTES:
        raise ValueError(f"it claims a header of {length} bytes")
    return length, crc32


def parse(data: bytes) -> Header:
    """Parse a whole header, and verify its checksum.

    Raises:
      ValueError, KeyError, TypeError: it is damaged.
    """
    length, crc32 = parse_first(data)
    body = data[_LINE_BYTES:length]
    # Checked before it is parsed.
    if len(data) < length or zlib.crc32(body) != crc32:
        raise ValueError("the checksum of its header does not match")
    found = json.loads(body)
    header = Header(
        _integer(found["serial"]),
        _integer(found["size"]),
        _integer(found["structure_crc32"]),
        tuple((_integer(a), _integer(b), _integer(c)) for a, b, c in found["data"]),
        tuple(
            Shard(_file_name(s["name"]), _integer(s["size"]), _integer(s["crc32"]))
            for s in found["shards"]
        ),
        str(found.get("job", "")),
        _preserved(found.get("preserved")),
        _integer(found.get("milliseconds", 0)),
    )
    _require_order(header, length)
    # Of what is left besides header and arrays.
    structure = header.size - length - sum(size for _, size, _ in header.data)
    if structure > LARGEST_STRUCTURE_BYTES:
        raise ValueError(f"it claims a structure of {structure} bytes")
    return header


def _require_order(header: Header, end: int) -> None:
    """Raise if blocks overlap, or exceed the file."""
    # Ascending and disjoint; so the sizes cannot add up to more than the file.
    for offset, size, _ in header.data:
        if offset < end or size < 1:
            raise ValueError(f"its header has a block of {size} bytes at {offset}")
        end = offset + size
    if end > header.size:
        raise ValueError(f"its header has blocks up to {end} of {header.size} bytes")


def _integer(value: Any) -> int:
    # bool is an int by isinstance, and no number here.
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"its header has {value!r} where an integer belongs")
    return value


def _preserved(value: Any) -> tuple[int, float] | None:
    if value is None:
        return None
    serial, seconds = value
    if type(seconds) is not float or not math.isfinite(seconds):
        raise ValueError(f"its header has {seconds!r} where a time belongs")
    return _integer(serial), seconds


def _file_name(value: Any) -> str:
    """Return the name of a file if it is one in the same directory."""
    # A name with a path could refer to a file outside the directory.
    if type(value) is not str or "/" in value or value.strip(".") == "":
        raise ValueError(f"its header has {value!r} where a file's name belongs")
    return value


def is_begun(path: Path) -> bool:
    """Return whether a file begins as a checkpoint does, or cannot be read."""
    begin = _FIRST.partition("{")[0].encode()
    try:
        with open_file(path) as descriptor:
            return os.pread(descriptor, len(begin), 0) == begin
    except CheckpointError:
        # An unreadable file may be readable later: do not treat it as a foreign file.
        return True


def read_header(path: Path) -> Header:
    """Read the header of a file.

    Raises:
      CheckpointError: the file is missing, damaged, or not a checkpoint.
    """
    with open_file(path) as descriptor:
        return parse(read_header_bytes(descriptor))


def header_crc32(path: Path) -> int:
    """Return the checksum of a file's header."""
    with open_file(path) as descriptor:
        return parse_first(read_header_bytes(descriptor))[1]


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[int]:
    """Yield a descriptor for reading; raise errors as a CheckpointError."""
    with damage(path):
        descriptor = open_regular(path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def read_header_bytes(descriptor: int) -> bytes:
    """Return the header of an open file, which may be damaged.

    Raises:
      ValueError: there is none that this version reads.
    """
    length, _ = parse_first(os.pread(descriptor, _LINE_BYTES, 0))
    # pread would return less, and the checksum would be blamed.
    if length > os.fstat(descriptor).st_size:
        raise ValueError("it ends in its header")
    return os.pread(descriptor, length, 0)


class DamagedError(CheckpointError):
    """A file is missing or damaged; an earlier checkpoint may be used instead."""


class MissingError(DamagedError):
    """A file is missing; perhaps another job has just removed it."""


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Raise an OSError of a write as a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """Raise any error of a read as a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise MissingError(f"{path}: there is no such file") from None
    except PermissionError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except Exception as error:  # damaged files make HDF5 raise almost anything
        reason = str(error) or type(error).__name__
        raise DamagedError(f"{path}: the checkpoint is damaged: {reason}") from error


# Bytes that are hashed and written in turn: they stay in the CPU cache in between
_STEP_BYTES = 4 << 20


def checked_write(descriptor: int, offset: int, data: Any) -> int:
    """Write all of a contiguous buffer to a file at an offset; return its CRC-32."""
    rest = memoryview(data).cast("B")
    crc32 = 0
    # One pass: the step is still in the CPU's cache when it is written.
    while rest.nbytes:
        step = rest[:_STEP_BYTES]
        crc32 = deflate.crc32(step, crc32)
        rest = rest[step.nbytes :]
        # pwrite may write less than it was given, say on a full disk.
        while step.nbytes:
            written = os.pwrite(descriptor, step, offset)
            offset += written
            step = step[written:]
    return crc32


def checked_read(descriptor: int, offset: int, into: Any, crc32: int) -> None:
    """Fill a buffer from a file, and verify its CRC-32.

    Raises:
      ValueError: the file is too short, or the checksum differs.
    """
    view = memoryview(into).cast("B")
    found, at, done = 0, offset, 0
    # preadv may return less; 0 is the end of the file.
    while done < view.nbytes:
        step = view[done : done + _STEP_BYTES]
        count = os.preadv(descriptor, [step], at)
        if not count:
            raise ValueError(f"it ends at byte {at}, in the middle of an array")
        found = deflate.crc32(step[:count], found)
        at += count
        done += count
    if found != crc32:
        raise ValueError(
            f"bytes {offset} to {at} have the checksum {found:08x} instead of "
            f"{crc32:08x}"
        )


class InMemoryFile(io.RawIOBase):
    """A sparse in-memory file for `h5py.File`, without the bytes of large arrays.

    HDF5 cannot recover from failed writes; in memory they do not fail.

    Args:
      size: of the file.
    """

    def __init__(self, size: int = 0):
        self._parts: dict[int, bytes] = {}  # by offset
        # Sorted offsets, after `compact`
        self._starts: list[int] = []
        self._position = 0
        self.size = size

    def put(self, offset: int, data: bytes) -> None:
        """Write bytes at an offset."""
        # Keep insertion order: the latest write wins
        # (A dict keeps the place of a key that is overwritten.)
        self._parts.pop(offset, None)
        self._parts[offset] = data
        self._starts.clear()
        self.size = max(self.size, offset + len(data))

    def get(self, offset: int, size: int) -> bytes:
        """Return bytes; zeros where none were written."""
        found = bytearray(size)
        # Before `compact` any part may overlap any other one.
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
        """Yield offset and bytes of the ranges from `start` on between the holes.

        Holes are sorted offsets and lengths.
        """
        for offset, size in [*holes, (self.size, 0)]:
            if start < offset:
                yield start, self.get(start, offset - start)
            start = offset + size

    def compact(self) -> None:
        """Join parts that touch or overlap, which makes `get` fast."""
        joined: list[tuple[int, int]] = []
        for at in sorted(self._parts):
            end = at + len(self._parts[at])
            # They touch or overlap.
            if joined and at <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(joined[-1][1], end)
            else:
                joined.append((at, end))
        starts = [first for first, _ in joined]
        buffers = [bytearray(last - first) for first, last in joined]
        # In the order of writing, so that later parts overwrite earlier ones.
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
        """Write bytes at the position."""
        copy = bytes(data)
        self.put(self._position, copy)
        self._position += len(copy)
        return len(copy)

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the position on."""
        view = memoryview(buffer).cast("B")
        view[:] = self.get(self._position, view.nbytes)
        self._position += view.nbytes
        return view.nbytes

    def truncate(self, size: int | None = None) -> int:
        """Set the size of the file."""
        self.size = self._position if size is None else size
        return self.size
