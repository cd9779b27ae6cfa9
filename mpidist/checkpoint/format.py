"""The format of a checkpoint's file: a header of text with checksums, then HDF5.

The first lines give the version, the length and the checksum of the header, which is
JSON: the checksums of large arrays block by block, one of everything else (the
structure), and the files that belong to the checkpoint. To HDF5 the header is a user
block, so any HDF5 program can read the file.

Datasets are contiguous, so each is a range of the file. HDF5 writes the structure to
a file in memory; arrays are written directly to their ranges, which HDF5 has allocated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import io
import json
import math
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any

import deflate
import h5py
import numpy as np

from mpidist.checkpoint.tree import (
    LEAF_KINDS,
    Group,
    Leaf,
    Link,
    Nodes,
    Path,
    storage,
    stored_as,
)
from mpidist.errors import CheckpointError
from mpidist.hdf5.shard_writer import escape_source
from mpidist.util.files import AtomicFile, close, open_regular, read_fully

FORMAT = 1
_FIRST = "mpidist checkpoint {}, header of {:012} bytes, crc32 {:08x}\n"
_PATTERN = re.compile(
    rb"mpidist checkpoint (\d+), header of (\d{12}) bytes, crc32 ([0-9a-f]{8})\n"
)
_LINE_BYTES = len(_FIRST.format(FORMAT, 0, 0))
# How each file of a checkpoint begins, from its first byte on the disk on
_BEGIN = _FIRST.partition("{")[0].encode()
_BEGUN = re.compile(rb"mpidist checkpoint \d+, header of \d")
_INCOMPLETE = _BEGIN + b"that is not complete\n"
# Limits on what is read before its checksum is verified, as damaged files may claim any
# size. Enough for the header of 16 TiB of arrays, and for a million small arrays
_LARGEST_BYTES = 64 << 20
LARGEST_STRUCTURE_BYTES = 1 << 30
_SMALLEST = 4096  # the alignment of arrays, which HDF5 asks for
# Bytes of JSON at most: the fixed part, one block, one shard without its name
_FIXED_BYTES, _DATA_BYTES, _SHARD_BYTES = 2400, 60, 80


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of the checkpoint besides the index, and its header's checksum."""

    name: str
    size: int
    crc32: int

    def marks(self, id: str) -> frozenset[str]:
        """Return what tells which index it belongs to; older ones have no id."""
        return frozenset([f"{self.name} {self.crc32:08x}", id]) - {""}


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
      id: of the save; the shards have that of their index. Empty in older files.
      writer: host and process that wrote the file; None in older files.
    """

    serial: int
    size: int = 0
    structure_crc32: int = 0
    data: tuple[tuple[int, int, int], ...] = ()
    shards: tuple[Shard, ...] = ()
    job: str = ""
    preserved: tuple[int, float] | None = None
    milliseconds: int = 0
    id: str = ""
    writer: tuple[str, int] | None = None

    @property
    def is_index(self) -> bool:
        """Whether the file is a checkpoint, and no shard of one."""
        return self.serial > 0

    @property
    def needs(self) -> frozenset[str]:
        """What shards show that belong to this index; see `Shard.marks`."""
        return frozenset().union(*(shard.marks(self.id) for shard in self.shards))


def header_bytes(data: int, shards: list[str]) -> int:
    """Return the length of a header of `data` blocks and these shards.

    Raises:
      CheckpointError: it exceeds the limit.
    """
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
    if len(first + padded) != length:  # our own arithmetic, and no error of the user's
        raise RuntimeError("header_bytes was too small")
    return first + padded


def parse_first(data: bytes) -> tuple[int, int]:
    """Return length and checksum of the header that starts with `data`.

    Raises:
      ValueError: not a header that this version reads.
    """
    # The first line is read alone: it says how much more to read.
    if not data.startswith(_BEGIN):
        raise _ForeignError("it does not begin like a checkpoint of mpidist")
    match = _PATTERN.match(data)
    if match is None:
        raise ValueError("it was not completed, or its first line is damaged")
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
    if len(data) < length or zlib.crc32(body) != crc32:
        raise ValueError("the checksum of its header does not match")
    fields = json.loads(body)
    header = Header(
        _integer(fields["serial"]),
        _integer(fields["size"]),
        _integer(fields["structure_crc32"]),
        tuple((_integer(a), _integer(b), _integer(c)) for a, b, c in fields["data"]),
        tuple(
            Shard(_file_name(s["name"]), _integer(s["size"]), _integer(s["crc32"]))
            for s in fields["shards"]
        ),
        str(fields.get("job", "")),
        _preserved(fields.get("preserved")),
        _integer(fields.get("milliseconds", 0)),
        str(fields.get("id", "")),
        _writer(fields.get("writer")),
    )
    _require_order(header, length)
    structure = header.size - length - sum(size for _, size, _ in header.data)
    if structure > LARGEST_STRUCTURE_BYTES:
        raise ValueError(f"it claims a structure of {structure} bytes")
    return header


def _require_order(header: Header, end: int) -> None:
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


def _writer(value: Any) -> tuple[str, int] | None:
    return None if value is None else (str(value[0]), _integer(value[1]))


def _file_name(value: Any) -> str:
    # A name with a path could refer to a file outside the directory.
    if type(value) is not str or "/" in value or value.strip(".") == "":
        raise ValueError(f"its header has {value!r} where a file's name belongs")
    return value


def is_begun(descriptor: int) -> bool:
    """Return whether an open file begins as those of a checkpoint do."""
    begin = read_fully(descriptor, _LINE_BYTES, 0)
    return begin.startswith(_INCOMPLETE) or _BEGUN.match(begin) is not None


def read_header(path: FilePath) -> Header:
    """Read the header of a file.

    Raises:
      CheckpointError: the file is missing, damaged, or not a checkpoint.
    """
    with open_file(path) as descriptor:
        return parse(read_header_bytes(descriptor))


def header_crc32(path: FilePath) -> int:
    """Return the checksum of a file's header."""
    with open_file(path) as descriptor:
        return parse_first(read_header_bytes(descriptor))[1]


def read_shard(path: FilePath) -> tuple[Header, Shard]:
    """Return the header of a shard, and what an index says of the shard.

    Raises:
      CheckpointError: the file is missing, damaged, or not of a checkpoint.
    """
    with open_file(path) as descriptor:
        data = read_header_bytes(descriptor)
        size = os.fstat(descriptor).st_size
        return parse(data), Shard(path.name, size, parse_first(data)[1])


@contextlib.contextmanager
def open_file(path: FilePath) -> Iterator[int]:
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
    begin = read_fully(descriptor, _SMALLEST, 0)
    length, _ = parse_first(begin)
    if length <= len(begin):
        return begin[:length]
    # Less would be read, and the checksum would be blamed.
    if length > os.fstat(descriptor).st_size:
        raise ValueError("it ends in its header")
    return read_fully(descriptor, length, 0)


class DamagedError(CheckpointError):
    """A file is missing or damaged; an earlier checkpoint may be used instead."""


class ForeignError(DamagedError):
    """A file that is not of a checkpoint."""


class _ForeignError(ValueError):
    """Bytes that are not of a checkpoint."""


class MissingError(DamagedError):
    """A file is missing; perhaps another job has just removed it."""


@contextlib.contextmanager
def unwritable(path: FilePath) -> Iterator[None]:
    """Raise an OSError of a write as a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error


# Of what is no file, or of offsets in a damaged one; after other errors of the system
# the file may be whole, and an older one must not be taken instead
_DAMAGE = {
    *(errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG),
    *(errno.EINVAL, errno.EOVERFLOW, errno.EFBIG),
}


@contextlib.contextmanager
def damage(path: FilePath) -> Iterator[None]:
    """Raise any error of a read as a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # damaged files make HDF5 raise almost anything
        reason = str(error) or type(error).__name__
        number = getattr(error, "errno", None)
        # NFS tells of a file that was removed while it was read
        is_gone = number == errno.ESTALE and not os.path.lexists(path)
        if number == errno.ENOENT or is_gone:
            raise MissingError(f"{path}: there is no such file") from None
        if isinstance(error, MemoryError) or (number and number not in _DAMAGE):
            raise CheckpointError(f"{path}: cannot be read now: {reason}") from error
        kind = ForeignError if isinstance(error, _ForeignError) else DamagedError
        raise kind(f"{path}: the checkpoint is damaged: {reason}") from error


# Bytes that are hashed and written in turn: they stay in the CPU cache in between
_STEP_BYTES = 4 << 20
_PAGE_BYTES = 4096
_EMPTY_PAGE = bytes(_PAGE_BYTES)


def checked_write(descriptor: int, offset: int, data: Any, crc32: int = 0) -> int:
    """Write all of a contiguous buffer to a file at an offset.

    Returns its CRC-32, or that of all bytes so far if `crc32` is that of the former.
    """
    rest = memoryview(data).cast("B")
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
    actual, at, done = 0, offset, 0
    # preadv may return less; 0 is the end of the file.
    while done < view.nbytes:
        step = view[done : done + _STEP_BYTES]
        count = os.preadv(descriptor, [step], at)
        if not count:
            raise ValueError(f"it ends at byte {at}, in the middle of an array")
        actual = deflate.crc32(step[:count], actual)
        at += count
        done += count
    if actual != crc32:
        raise ValueError(
            f"bytes {offset} to {at} have the checksum {actual:08x} instead of "
            f"{crc32:08x}"
        )


class SparseFile(io.RawIOBase):
    """A file in memory; ranges that were never written read as zeros and take none.

    HDF5 cannot recover from failed writes; in memory they do not fail.
    """

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._position = self._size = 0

    def _spans(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Move on by `size` bytes; yield each page with the range in it."""
        end = self._position + size
        while self._position < end:
            page, start = divmod(self._position, _PAGE_BYTES)
            stop = min(_PAGE_BYTES, start + end - self._position)
            self._position += stop - start
            yield page, start, stop

    def write(self, data: Any) -> int:
        """Write bytes at the position."""
        view, done = memoryview(data).cast("B"), 0
        for page, start, stop in self._spans(view.nbytes):
            content = self._pages.setdefault(page, bytearray(_PAGE_BYTES))
            content[start:stop] = view[done : done + stop - start]
            done += stop - start
        self._size = max(self._size, self._position)
        return done

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the position on."""
        view, done = memoryview(buffer).cast("B"), 0
        for page, start, stop in self._spans(view.nbytes):
            content = self._pages.get(page, _EMPTY_PAGE)
            view[done : done + stop - start] = content[start:stop]
            done += stop - start
        return done

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position, as files do."""
        self._position = (0, self._position, self._size)[whence] + offset
        return self._position

    def truncate(self, size: int | None = None) -> int:
        """Set the size of the file."""
        self._size = self._position if size is None else size
        return self._size

    def readable(self) -> bool:
        """Return True, as files do."""
        return True

    writable = seekable = readable


# One without large arrays needs no holes
MemoryFile = SparseFile | io.BytesIO


def between(
    start: int, holes: Sequence[tuple[int, int]], size: int
) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the ranges of a file from `start` on between holes.

    Args:
      start: offset of the first range.
      holes: sorted offsets and lengths.
      size: of the file.
    """
    for offset, length in [*holes, (size, 0)]:
        if start < offset:
            yield start, offset - start
        start = offset + length


_FLOCK = "@hhqqi0q"  # struct flock: type, whence, start, length, pid
_BYTE = 1 << 62  # the locked byte, far beyond any data
_SHARED, _EXCLUSIVE = (
    struct.pack(_FLOCK, kind, os.SEEK_SET, _BYTE, 1, 0)
    for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK)
)


# Descriptors of files that this process has locked, until `unlock`
locked: set[int] = set()


def lock(path: FilePath) -> int:
    """Lock a file until `unlock`, if its file system has locks; return a descriptor.

    Who may only read the file can hold no lock that counts, nor can a forked child.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    locked.add(descriptor)
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _EXCLUSIVE)
    return descriptor


def unlock(descriptor: int) -> None:
    """Give up the lock that `lock` has returned."""
    locked.discard(descriptor)
    close(descriptor)


def _unlock_in_child() -> None:
    """Close what a forked child has inherited, which would keep the locks alive."""
    for descriptor in locked:
        close(descriptor)
    locked.clear()


os.register_at_fork(after_in_child=_unlock_in_child)


def is_locked(path: FilePath) -> bool | None:
    """Return whether a running process, on any host, has locked a file by `lock`.

    None if that cannot be known: the file system has no locks, or the file cannot be
    opened.
    """
    try:
        descriptor = open_regular(path)
    except OSError:
        return None
    try:
        blocking = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _SHARED)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    kind, _, start, size, _ = struct.unpack(_FLOCK, blocking)
    # NFS reports HDF5's flock() as a lock of the whole file: not of a saving job
    return bool(kind != fcntl.F_UNLCK and (start, size) == (_BYTE, 1))


# Arrays up to this size are part of the structure; others have checksums per block
INLINE_BYTES = 32 << 10
BLOCK_BYTES = 16 << 20
_LARGE_BYTES = 64 << 20
_ALIGNMENT = 4096
_LIBVER = ("v108", "v110")  # what HDF5 1.10 can read


@dataclasses.dataclass(frozen=True)
class Split:
    """An array whose consecutive parts are in shards.

    Args:
      leaf: the whole array, without its values.
      parts: number of the shard, first element, end.
    """

    leaf: Leaf
    parts: tuple[tuple[int, int, int], ...]


def write_file(
    path: FilePath,
    nodes: Nodes,
    attributes: dict[str, Any],
    header: Header,
    publish: Callable[[AtomicFile], None] = lambda file: file.publish(),
    locks: list[int] | None = None,
    begun: float | None = None,
) -> Header:
    """Write nodes to a file, atomically; return the whole header.

    Args:
      path: of the file.
      nodes: with `Split` and `Link`.
      attributes: of the root.
      header: without sizes and checksums of this file, and without a time.
      publish: gives the file, which is complete and on the disk, its name.
      locks: what `lock` returns for the file is appended, for the caller to unlock.
      begun: when the save began, on `time.monotonic`'s clock; None if its time does
        not belong in the header.
    """
    plan = lay_out(nodes, attributes, [shard.name for shard in header.shards])
    with unwritable(path):
        file = AtomicFile(path)
        try:
            descriptor = file.fileno()
            # Before the first byte, so that no other job takes it for a leftover
            if locks is not None:
                locks.append(lock(file.temporary))
            file.write(_INCOMPLETE)
            header = _write_content(descriptor, plan, header, begun)
            file.complete()
            publish(file)
        except BaseException:
            file.discard()
            raise
    return header


def _write_content(
    descriptor: int, plan: FileLayout, header: Header, begun: float | None
) -> Header:
    """Write arrays, structure, and at last the header, which is returned."""
    data = tuple(
        (offset, block.nbytes, checked_write(descriptor, offset, block))
        for offset, block in plan.data
    )
    # Structure is everything between the arrays: one checksum over its parts in order.
    image, crc32 = plan.image, 0
    holes = [(offset, size) for offset, size, _ in data]
    for offset, size in between(plan.header_bytes, holes, plan.size):
        image.seek(offset)
        part = image.read(size) or b""
        # The end of the file may never have been written
        crc32 = checked_write(descriptor, offset, part.ljust(size, b"\0"), crc32)
    # The header says how long the rest took. Of a small file, what the disk takes does
    # not count.
    if plan.size > _LARGE_BYTES:
        os.fsync(descriptor)
    took = 0 if begun is None else math.ceil(1000 * (time.monotonic() - begun))
    header = dataclasses.replace(
        header, size=plan.size, structure_crc32=crc32, data=data, milliseconds=took
    )
    checked_write(descriptor, 0, render(header, plan.header_bytes))
    return header


@dataclasses.dataclass
class FileLayout:
    """The content of a file.

    Args:
      image: everything except the header and the arrays of `data`.
      header_bytes: length of the header.
      size: of the file.
      data: offsets and bytes of the blocks of large arrays, in file order.
    """

    image: MemoryFile
    header_bytes: int
    size: int
    data: list[tuple[int, Any]]


def lay_out(
    nodes: Nodes, attributes: dict[str, Any], shards: Sequence[str] = ()
) -> FileLayout:
    """Lay out nodes in a file.

    Args:
      nodes: with `Split` and `Link`.
      attributes: of the root, for humans.
      shards: names of all shards, for which to reserve space in the header.

    Raises:
      CheckpointError: too many names and small arrays for one file.
    """
    sizes = [node.size_bytes for node in nodes.values() if isinstance(node, Leaf)]
    # Very many small arrays do not all fit in the structure, which is read at once
    small = sum(size for size in sizes if size <= INLINE_BYTES)
    is_much = small > LARGEST_STRUCTURE_BYTES // 2
    inline_bytes = _ALIGNMENT if is_much else INLINE_BYTES
    # Counted before the layout, as the header precedes all blocks.
    blocks = sum(-(-size // BLOCK_BYTES) for size in sizes if size > inline_bytes)
    user_block_bytes = header_bytes(blocks, list(shards))
    # HDF5 writes into memory: its data structures, but none of the large arrays.
    image = SparseFile() if blocks else io.BytesIO()
    placed: list[tuple[int, Any]] = []
    with h5py.File(
        image,
        "w",
        libver=_LIBVER,
        userblock_size=user_block_bytes,
        alignment_threshold=inline_bytes,
        alignment_interval=_ALIGNMENT,
    ) as file:
        file.attrs.update(attributes)
        for path, node in _in_order(nodes):
            placed += _create(file, path, node, shards)
        file.flush()
        size = file.id.get_filesize()
    end = image.seek(0, io.SEEK_END)
    assert end <= size
    data = []
    # In the order of the file, so that the disk is written in one direction.
    for offset, array in sorted(placed, key=lambda pair: pair[0]):
        if array.nbytes > inline_bytes:
            for start in range(0, array.nbytes, BLOCK_BYTES):
                data.append((offset + start, array[start : start + BLOCK_BYTES]))
        else:
            image.seek(offset)
            image.write(array)
    # What a reader has to hold in memory before it can verify anything.
    structure = size - sum(block.nbytes for _, block in data)
    if structure > LARGEST_STRUCTURE_BYTES:
        raise CheckpointError(
            f"the names, numbers and small arrays of {len(sizes)} objects need "
            f"{structure} bytes, but the limit is {LARGEST_STRUCTURE_BYTES}; join "
            "small arrays"
        )
    return FileLayout(image, user_block_bytes, size, data)


def _in_order(nodes: Nodes) -> Iterator[tuple[Path, Any]]:
    """Yield nodes in the order in which HDF5 has to get the members of dicts."""
    names: dict[Path, list[str]] = {}
    for path in nodes:
        if path:
            names.setdefault(path[:-1], []).append(path[-1])
    waiting: list[Path] = [()] if nodes else []
    while waiting:
        path = waiting.pop()
        node = nodes[path]
        yield path, node
        below = getattr(node, "names", ()) or names.get(path, ())
        waiting += [(*path, name) for name in reversed(below)]


def _create(
    file: h5py.File, path: Path, node: Any, shards: Sequence[str]
) -> Iterator[tuple[int, Any]]:
    """Create a group, dataset or link; yield offset and bytes of an array."""
    name = "/" + "/".join(path)
    # Per-rank state is in the shard, at the same path.
    if isinstance(node, Link):
        file[name] = h5py.ExternalLink(shards[node.shard], name)
        return
    if isinstance(node, Group):
        made = file
        if path:
            how = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
            # HDF5 keeps the order of a dict
            how.set_link_creation_order(h5py.h5p.CRT_ORDER_TRACKED * bool(node.names))
            made = h5py.Group(h5py.h5g.create(file.id, name.encode(), gcpl=how))
    elif isinstance(node, Split):
        made = _create_virtual(file, name, node, shards)
        node = node.leaf
    else:
        made = _create_contiguous(file, name, node)
        # Nothing to place for empty arrays: HDF5 gives them no address.
        if node.size_bytes:
            flat = np.ascontiguousarray(node.array).reshape(-1)
            # HDF5 has allocated the range already; its bytes are written past HDF5.
            yield made.id.get_offset(), flat.view(np.uint8)
    made.attrs["kind"] = node.kind
    if node.type is not None and (isinstance(node, Group) or node.family):
        made.attrs["type"] = json.dumps(node.type)
    if node.role:
        made.attrs["role"] = node.role
    kind = storage(node.dtype) if isinstance(node, Leaf) else None
    if kind is not None and kind.text:
        made.attrs["dtype"] = kind.text


def _create_virtual(
    file: h5py.File, name: str, split: Split, shards: Sequence[str]
) -> h5py.Dataset:
    shape = split.leaf.shape
    dtype, stored_shape = stored_as(split.leaf)
    inner = stored_shape[len(shape) :]  # the characters of str
    layout = h5py.VirtualLayout(stored_shape, dtype)
    for shard, start, stop in split.parts:
        names = escape_source(shards[shard]), escape_source(name)
        source = h5py.VirtualSource(*names, (stop - start, *inner), dtype)
        first = 0
        for box in boxes(shape, start, stop):
            count = math.prod(part.stop - part.start for part in box)
            layout[box] = source[first : first + count]
            first += count
    return file.create_virtual_dataset(name, layout)


def _create_contiguous(file: h5py.File, name: str, leaf: Leaf) -> h5py.Dataset:
    """Create a contiguous dataset, whose range of the file is allocated at once."""
    is_text = leaf.dtype == np.uint8 and LEAF_KINDS[leaf.kind].is_text
    if is_text and not leaf.size_bytes:
        space = h5py.h5s.create(h5py.h5s.NULL)
        dtype = np.dtype(np.int8)
    elif is_text:
        space = h5py.h5s.create(h5py.h5s.SCALAR)
        dtype = h5py.string_dtype("utf-8", leaf.size_bytes)
    else:
        dtype, shape = stored_as(leaf)
        space = h5py.h5s.create_simple(shape)
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    # Contiguous, early, and never filled: HDF5 reserves the range and writes nothing.
    how.set_layout(h5py.h5d.CONTIGUOUS)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    kind = h5py.h5t.py_create(dtype, logical=True)
    return h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, space, how))


def boxes(
    shape: Sequence[int], start: int, stop: int, before: tuple[slice, ...] = ()
) -> Iterator[tuple[slice, ...]]:
    """Yield the hyperslabs of a range of elements, in C order."""
    if len(shape) <= 1:
        yield (*before, slice(start, stop)) if shape else before
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    # The range is inside one row: go down one dimension.
    if first > last:
        within = slice(last, last + 1)
        skipped = last * inner
        yield from boxes(shape[1:], start - skipped, stop - skipped, (*before, within))
        return
    if start < first * inner:
        tail = (*before, slice(first - 1, first))
        yield from boxes(shape[1:], start - (first - 1) * inner, inner, tail)
    if first < last:
        yield (*before, slice(first, last), *(slice(0, n) for n in shape[1:]))
    if last * inner < stop:
        head = (*before, slice(last, last + 1))
        yield from boxes(shape[1:], 0, stop - last * inner, head)
