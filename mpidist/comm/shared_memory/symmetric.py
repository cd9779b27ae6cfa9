"""Symmetric arrays: at the same offset in each rank's part of shared memory.

The memory is an unnamed file that each rank of the node maps. It is not an MPI window:
those are freed by all ranks at once, and a rank that still used an array would crash.
This memory is freed when no rank refers to any of its arrays, or when all processes
have ended, in any way.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import socket
import struct
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus.consensus import Consensus
from mpidist.errors import ArgumentError
from mpidist.util.available_memory import as_text, free_bytes, round_up
from mpidist.util.buffers import Field

_PAGE_BYTES = 4096
# Offset of arrays in a page: other arrays usually begin at its start, and processors
# first compare only the last 12 bits of addresses
_FIRST_BYTE = 2048
_BITS = (1 << 62) - 1


class _Region(NamedTuple):
    """The memory of one allocation on this node.

    Args:
      number: the same on all ranks.
      root: the bytes of all ranks of the node; referred to weakly.
      address: of this rank's part.
      part_bytes: how large the part of each rank is.
    """

    number: int
    root: weakref.ref[Any]
    address: int
    part_bytes: int


class SymmetricMemory:
    """Creates symmetric arrays, and recognizes them and their views.

    Args:
      consensus: of all ranks.
      node: the ranks that share memory with this one; borrowed.

    Attributes:
      regions: those in use, by the identity of their roots. Read only.
    """

    def __init__(self, consensus: Consensus, node: MPI.Intracomm):
        self._consensus = consensus
        self._node = node
        self._made = 0
        self.regions: dict[int, _Region] = {}

    def allocate(self, operation: str, fields: Sequence[Field]) -> list[Any]:
        """Return this rank's arrays, filled with zeros. Collective.

        Args:
          operation: the public call that this is, for messages.
          fields: the arrays to create, equal on all ranks.

        Raises, on all ranks:
          ArgumentError: a node has too little free memory.
        """
        *starts, end = _offsets(fields)
        # Whole pages, so that the parts of all ranks begin alike in a page
        part_bytes = round_up(end, _PAGE_BYTES)
        node, rank = self._node, self._node.Get_rank()
        size_bytes = part_bytes * node.Get_size()
        root = None
        # Errors are kept, not raised: the other ranks of the node are at the next
        # collective.
        file, is_named, error = _open_together(node)
        try:
            try:
                # Only one rank reserves the pages; all map the same file.
                if rank == 0 and error is None:
                    _reserve(file, size_bytes, is_named)
            except Exception as caught:
                error = caught
            # All ranks of the node come here, with or without an error.
            is_reserved = node.bcast(error is None)
            try:
                if is_reserved and error is None:
                    root = _map(file, size_bytes)
            except Exception as caught:
                error = caught
            # All have mapped it, or all raise
            self._consensus.require_same(operation, error)
        # The mapping keeps the memory; the descriptor is needed no more.
        finally:
            if file >= 0:
                os.close(file)
        assert root is not None
        self._register(root, rank * part_bytes, part_bytes)
        mine = root[rank * part_bytes :]
        return [
            _view(mine, start, shape, dtype)
            for start, (shape, dtype) in zip(starts, fields, strict=True)
        ]

    def _register(self, root: Any, start: int, part_bytes: int) -> None:
        # A region is removed when the last view of its memory was deleted.
        key, regions = id(root), self.regions
        regions[key] = _Region(
            self._made,
            weakref.ref(root, lambda _: regions.pop(key, None)),
            _address(root) + start,
            part_bytes,
        )
        # Counted on all ranks alike, so that numbers of regions agree.
        self._made += 1

    def place_of(self, values: Sequence[Any]) -> int:
        """Return a number for the location of arrays; 0 if none is symmetric.

        Ranks get the same 62-bit number if their arrays are at the same offsets of the
        same allocations.
        """
        if not self.regions:
            return 0
        # A pair (region, offset) is independent of addresses, which differ between
        # processes.
        places = [self._find(value) for value in values]
        if not any(places):
            return 0
        offsets = tuple((p[0].number, p[1]) if p else (-1, -1) for p in places)
        return (hash(offsets) & _BITS) or 1  # of integers: alike in each process

    def everyone(self, value: Any) -> list[Any] | None:
        """Return the array of each rank of the node that is symmetric to `value`.

        None if it is not symmetric.
        """
        location = self._find(value)
        root = location[0].root() if location else None
        if location is None or root is None:
            return None
        region, offset = location
        # The same offset in the part of each rank: that is what symmetric means.
        starts = range(offset, root.size, region.part_bytes)
        return [_view(root, start, value.shape, value.dtype) for start in starts]

    def _find(self, value: Any) -> tuple[_Region, int] | None:
        """Return the region of an array, and its offset in this rank's part."""
        # Views with steps are not recognized; they are reduced by copying.
        if not isinstance(value, np.ndarray) or not value.flags.c_contiguous:
            return None
        region = self.regions.get(id(value.base))
        if region is None and value.size and not isinstance(value.base, np.ndarray):
            return self._find_foreign(value)
        # An id may be reused after its array died, hence the check of identity.
        if region is None or not value.size or value.base is not region.root():
            return None
        return region, _address(value) - region.address

    def _find_foreign(self, value: Any) -> tuple[_Region, int] | None:
        """Like `_find`, for the memory of another library's array."""
        if value.base is None:
            return None
        address = _address(value)
        # DLPack's arrays have no base to look at, so compare addresses.
        for region in self.regions.values():
            offset = address - region.address
            if 0 <= offset <= region.part_bytes - value.nbytes:
                return region, offset
        return None


def _offsets(fields: Sequence[Field]) -> Iterator[int]:
    """Yield where each array starts in a part, and the end of the last one."""
    start = _FIRST_BYTE
    for shape, dtype in fields:
        yield start
        used = dtype.itemsize * math.prod(shape)
        # Cache lines again: arrays that others read must not share one with another
        # array.
        start += round_up(used)
    yield start


def _open_together(node: MPI.Intracomm) -> tuple[int, bool, Exception | None]:
    """Open a new, empty file in memory on all ranks of a node. Collective over it.

    It has no name when this returns, so no file is left if all ranks are killed. If
    ranks cannot send it to each other (containers with separate networks), it has a
    name for an instant, and a kill in that instant leaves the empty file.

    Returns:
      A descriptor, or -1; whether the file was made in a folder, whose file system has
      limits of its own; and this rank's error, if any.
    """
    file = _pass_file(node)
    # All ranks of the node choose the same kind of file, or messages would not match.
    if node.allreduce(file >= 0, MPI.LAND):
        return file, False, None
    if file >= 0:
        os.close(file)
    file, path, error = -1, "", None
    try:
        if node.Get_rank() == 0:
            folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
            file, path = tempfile.mkstemp(prefix="mpidist-", dir=folder)
    except OSError as caught:
        error = caught
    # All ranks come to this bcast; an empty path says that rank 0 failed.
    try:
        path = node.bcast(path)
        try:
            if path and node.Get_rank() > 0:
                file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as caught:
            error = caught
        # Unlink only once all have opened it.
        node.Barrier()
    finally:
        if path and node.Get_rank() == 0:
            Path(path).unlink(missing_ok=True)
    return file, True, error


def _pass_file(node: MPI.Intracomm) -> int:
    """Create an unnamed file, and send it from rank 0 to all; -1 on failure.

    Collective over the node. It uses messages of local sockets (SCM_RIGHTS), whose
    addresses vanish with their processes. There are no connections, so no rank waits
    for another.
    """
    # No rank may leave this function early: it has a gather and a bcast for all.
    file, status, rank = -1, None, node.Get_rank()
    with contextlib.ExitStack() as stack:
        own, address = None, b""
        with contextlib.suppress(OSError, AttributeError):  # not allowed, or no Linux
            if rank == 0:
                file = os.memfd_create("mpidist")
                status = os.fstat(file)
            own = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            own.setblocking(False)
            own.bind("")  # the system chooses an abstract address
            address = own.getsockname()
        addresses = node.gather(address)
        # An empty address: that rank cannot receive, and reports -1.
        if addresses is not None and own is not None and file >= 0:
            # Not `socket.send_fds`, which ignores the address
            rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file)
            for other in addresses[1:]:
                with contextlib.suppress(OSError):
                    own.sendmsg([b"file"], [rights], 0, other)
        status = node.bcast(status)  # after that all messages are there
        if rank > 0 and own is not None and status is not None:
            with contextlib.suppress(OSError):
                file = _receive(own, status)
    return file


def _receive(own: socket.socket, status: os.stat_result) -> int:
    """Return the file sent to a socket if its status matches; else -1."""
    # Room for one descriptor: a sender cannot fill this process with more.
    room = socket.CMSG_LEN(struct.calcsize("i"))
    _, ancillary, _, _ = own.recvmsg(4, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            (file,) = struct.unpack("i", data)
            # Any local process may send to the socket: only the file whose inode rank 0
            # announced is accepted.
            if os.path.samestat(os.stat(file), status):
                return int(file)
            os.close(file)
    return -1


def _reserve(file: int, size_bytes: int, is_named: bool) -> None:
    """Set the size of a file and allocate all its pages, to avoid SIGBUS later."""
    limits = free_bytes(is_shared=is_named).items()
    where, free = min(limits, key=lambda item: item[1], default=("", 1 << 63))
    # Better an error on all ranks than SIGBUS on one when a page is missing.
    if size_bytes > free:
        more = ". In a container, raise the limit with --shm-size" if is_named else ""
        raise ArgumentError(
            f"symmetric arrays need {as_text(size_bytes)} on this node, but {where} "
            f"has {as_text(free)} free{more}"
        )
    os.posix_fallocate(file, 0, size_bytes)


def _map(file: int, size_bytes: int) -> Any:
    """Return the bytes of a file, shared with others that map it."""
    return np.frombuffer(mmap.mmap(file, size_bytes), np.uint8)


def _view(memory: Any, start: int, shape: tuple[int, ...], dtype: Any) -> Any:
    size = math.prod(shape) * dtype.itemsize
    return memory[start : start + size].view(dtype).reshape(shape)


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
