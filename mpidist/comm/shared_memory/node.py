"""Memory that the ranks of a node share: an unnamed file that each of them maps.

It is freed when no rank refers to an array in it any more, or when all processes have
ended, in any way. So ranks may let go of it at different times, and nobody crashes who
still reads it. (An MPI window is freed by all ranks at once, which the death of one
makes impossible.)
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus.barrier import NodeBarrier, memory_fence
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.pending import Pending, highest
from mpidist.comm.topology import Topology
from mpidist.errors import ArgumentError, LaunchError
from mpidist.util.available_memory import LINE_BYTES, as_text, free_bytes, round_up
from mpidist.util.buffers import Field, Storage, make_arrays
from mpidist.util.logs import warn

# Given what limits memory most, and how many bytes are free there, raises if these are
# too few
RequireFree = Callable[[str, int], None]


def map_together(
    consensus: Consensus,
    operation: str,
    node: MPI.Intracomm,
    size_bytes: int,
    require_free: RequireFree,
    *,
    is_sparse: bool = False,
) -> Any:
    """Return new memory of this node, as bytes that are zero. Collective.

    Args:
      consensus: of all ranks.
      operation: the public call that this is, for messages.
      node: the ranks that share memory with this one; borrowed.
      size_bytes: of all these ranks together.
      require_free: called on one rank of the node.
      is_sparse: whether pages are allocated when they are first written to. Otherwise
        all are now, as a page that is missing later would end the process (SIGBUS):
        each rank allocates an equal part, near its core.

    Raises, on all ranks, what `require_free` raises, or why a rank cannot map it.
    """
    rank, memory = node.Get_rank(), None
    with Pending("making memory of a node", node):
        file, is_named, error = _open_together(node)

    def check() -> None:
        if rank == 0:
            require_free(*least_free(is_named))

    def reserve() -> None:
        if not is_sparse:
            part_bytes = size_bytes // node.Get_size()
            os.posix_fallocate(file, rank * part_bytes, part_bytes)
        elif rank == 0:
            os.ftruncate(file, size_bytes)

    def map_file() -> None:
        nonlocal memory
        memory = np.frombuffer(mmap.mmap(file, size_bytes), np.uint8)

    try:
        # Errors are kept: the other ranks of the node are at the next collective
        for step in (check, reserve, map_file):
            with Pending("making memory of a node", node):
                is_well = highest(node, error is not None) == [0]
            try:
                if is_well:
                    step()
            except Exception as caught:
                error = caught
        consensus.require_same(operation, error)
    finally:  # the mapping needs no descriptor
        if file >= 0:
            os.close(file)
    return memory


def least_free(is_shared: bool) -> tuple[str, int]:
    """Return what limits memory most, and how many bytes are free there."""
    limits = free_bytes(is_shared).items()
    return min(limits, key=lambda item: item[1], default=("", 1 << 63))


def advice(where: str) -> str:
    """Return what to do where a folder for shared memory is small."""
    is_folder = where.startswith("/")
    return ". In a container, raise the limit with --shm-size" if is_folder else ""


def lay_out(fields: Sequence[Field], first_byte: int = 0) -> list[int]:
    """Return where each array starts, and the end of the last one."""
    starts = [first_byte]
    for shape, dtype in fields:
        # Each begins at a cache line of its own, so that writers do not share lines
        starts.append(starts[-1] + round_up(dtype.itemsize * math.prod(shape)))
    return starts


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
    if highest(node, file < 0) == [0]:
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


_CALL = "cache"


class NodeMemory:
    """The storages of the caches of one strategy, one of each on every node.

    Each belongs to an owner object of every rank. A rank lets go of it with the owner
    and what uses the storage.
    """

    def __init__(self, topology: Topology, consensus: Consensus):
        self._topology = topology
        self._consensus = consensus
        # The newest of each owner, with its number: creation is collective, so a number
        # means the same storage on all ranks
        self._newest: weakref.WeakKeyDictionary[Any, tuple[int, Storage]]
        self._newest = weakref.WeakKeyDictionary()
        self._made = 0
        self._open: weakref.WeakSet[Storage] = weakref.WeakSet()
        consensus.failures.at_end.append(self.close)

    def __len__(self) -> int:
        return len(self._open)

    def find(self, owner: object) -> Storage | None:
        """Return the newest storage of `owner`, if all ranks have it. Collective."""
        number, storage = self._newest.get(owner, (-1, None))
        numbers = self._consensus.gather_objects(_CALL, lambda: number)
        # If one rank lacks it, or has another one, no rank uses it
        return storage if len(set(numbers)) == 1 else None

    def allocate(self, owner: object, fields: Sequence[Field], note: Any) -> Storage:
        """Return a new storage of `owner`, shared by the ranks of a node. Collective.

        Args:
          owner: can be referred to weakly.
          fields: the arrays, equal on all ranks. The first is filled with zeros; the
            contents of the others are undefined.
          note: see `Storage`.

        Raises, on all ranks:
          ArgumentError: a node has too little free memory.
          LaunchError: MPI was initialised without MPI_THREAD_MULTIPLE.
        """
        *starts, total = lay_out(fields)
        is_shared, fence = self._topology.has_neighbours, None

        def require_free(where: str, free: int) -> None:
            self._require_free(where, free, total, fields[0].shape[0])

        def prepare() -> list[Any]:
            if is_shared:
                _require_threads()
                return []
            require_free(*least_free(is_shared=False))
            return make_arrays(fields)

        # Bytes are compared, too: ranks that computed other sizes must not share memory
        same = (("bytes", total),)
        arrays = self._consensus.run(_CALL, prepare, same=lambda _: same)
        if is_shared:
            memory = map_together(
                self._consensus,
                _CALL,
                self._topology.node,
                max(total, LINE_BYTES),
                require_free,
                is_sparse=True,
            )
            fence = memory_fence()
            arrays = [np.ndarray(*f, memory, start) for f, start in zip(fields, starts)]
        storage = Storage(arrays, fence, note)
        self._open.add(storage)
        self._newest[owner] = self._made, storage
        self._made += 1
        return storage

    def empty(self, storage: Storage, note: Any) -> Storage:
        """Return the emptied storage; the old object becomes invalid. Collective."""
        node = self._topology.node

        def make() -> Storage:
            # Reading the old one raises from now on, instead of returning cleared rows
            emptied = Storage(storage.close(), storage.fence, note)
            with Pending("emptying memory of a node", node):
                node.Barrier()
                if node.Get_rank() == 0:
                    emptied.clear()
                with emptied.ordered():  # the others see it
                    node.Barrier()
            return emptied

        emptied = self._consensus.run(_CALL, make)
        self._open.remove(storage)
        self._open.add(emptied)
        for owner, (number, newest) in list(self._newest.items()):
            if newest is storage:
                self._newest[owner] = number, emptied
        return emptied

    def close(self) -> None:
        """Wait until no thread uses a storage, and let none begin. Not collective."""
        for storage in list(self._open):
            storage.close()
        self._open.clear()
        self._newest.clear()

    def _require_free(self, where: str, free: int, total: int, rows: int) -> None:
        # Memory is allocated when written to, so part of the free memory is reserved
        # already
        promised = sum(storage.count_missing_bytes() for storage in self._open)
        if total > free - promised:
            raise ArgumentError(
                f"cache() needs {as_text(total)} on this node ({rows} rows of "
                f"{as_text(total / max(rows, 1))}), but {where} has {as_text(free)} "
                f"free, of which other caches need {as_text(promised)}; cache fewer or "
                "smaller rows, or omit cache()"
            )


def _require_threads() -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise LaunchError(
            "cache() of a distributed dataset needs MPI_THREAD_MULTIPLE for its "
            "prefetch threads, but MPI was initialised without; remove the program's "
            "setting of mpi4py.rc.thread_level, or omit cache()"
        )


# Of an array at a time: two of these fit into a core's cache
_SLOT_BYTES = 512 << 10


def make_barrier(
    operation: str,
    consensus: Consensus,
    node: MPI.Intracomm,
    page_bytes: int,
    *,
    yield_cpu: bool = False,
) -> NodeBarrier | None:
    """Return a barrier for the ranks of each node, or None on all ranks. Collective.

    If a node has too little shared memory, there is no barrier on any, so that ranks
    choose the same transports; and rank 0 warns (RuntimeWarning).

    Args:
      operation: its purpose, for messages.
      consensus: of all ranks.
      node: the ranks that share memory with this one; borrowed.
      page_bytes: see `NodeBarrier`.
      yield_cpu: see `NodeBarrier`.
    """
    size_bytes = NodeBarrier.count_bytes(node.Get_size(), page_bytes, _SLOT_BYTES)

    def require_free(where: str, free: int) -> None:
        if size_bytes > free:
            raise ArgumentError(
                f"the ranks of a node need {as_text(size_bytes)} of shared memory for "
                f"fast collectives, but only {as_text(free)} are free; they use MPI "
                f"alone, which is slower{advice(where)}"
            )

    try:
        memory = map_together(consensus, operation, node, size_bytes, require_free)
    except ArgumentError as error:  # on all ranks
        if consensus.rank == 0:
            warn(str(error), stacklevel=2)
        return None
    # Ranks of the node as the strategy numbers them, for messages.
    names = node.group.Translate_ranks(None, consensus.comm.group)
    sizes = page_bytes, _SLOT_BYTES
    others = names, yield_cpu, consensus.departures
    return consensus.run(operation, NodeBarrier, node, memory, *sizes, *others)
