"""Arrays that all ranks of a node share: MPI-3 shared-memory windows.

Creating and freeing them is collective, never done by a destructor: unused ones are
freed when the next is created, and all when the strategy is finalized.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpidist.comm.consensus.barrier import NodeBarrier
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.topology import Topology
from mpidist.errors import ArgumentError, LaunchError
from mpidist.util.available_memory import (
    LINE_BYTES,
    as_text,
    free_bytes,
    give_back,
    round_up,
)
from mpidist.util.buffers import Field, Storage, make_arrays
from mpidist.util.notices import warn

_CALL = "cache"


@dataclasses.dataclass
class _Share:
    """One storage; `window` is None if the node has one rank."""

    owner: weakref.ref[Any]
    storage: Storage
    window: MPI.Win | None
    node: MPI.Intracomm

    def free(self) -> None:
        """Free it on this node, whose ranks all call this."""
        self.storage.close()
        if self.window is not None:
            with Pending("freeing memory of a node", self.node):
                self.window.Unlock_all()
                self.window.Free()


class NodeMemory:
    """The storages of one strategy, one of each on every node.

    Each belongs to an owner object of every rank. It is freed after the owner is freed
    on all ranks.
    """

    def __init__(self, topology: Topology, consensus: Consensus):
        self._topology = topology
        self._consensus = consensus
        # By number: creation is collective, so a number means the same share on all
        # ranks.
        self._shares: dict[int, _Share] = {}
        self._numbers = itertools.count()
        # Where ranks have died windows cannot be freed; give their pages back instead.
        consensus.failures.at_end.append(self._abandon)

    def __len__(self) -> int:
        return len(self._shares)

    def find(self, owner: object) -> Storage | None:
        """Return the newest storage of `owner`, if all ranks have it. Collective.

        Frees those whose owners were deleted on all ranks.
        """
        owned = [n for n, s in self._shares.items() if s.owner() is owner]
        mine = max(owned, default=None)
        # Weak references die at different times on each rank, so freeing is decided
        # collectively.
        gone = {n for n, s in self._shares.items() if s.owner() is None}
        everyone = self._consensus.gather_objects(_CALL, lambda: (mine, gone))
        # In the order of their numbers: MPI_Win_free is collective, and must match.
        for number in sorted(set.intersection(*(gone for _, gone in everyone))):
            self._shares.pop(number).free()
        # If one rank lacks it, or has another one, no rank uses it.
        if mine is None or any(number != mine for number, _ in everyone):
            return None
        return self._shares[mine].storage

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
        # Bytes are compared, too: ranks that computed other sizes must not share a
        # window.
        total = _offsets(fields)[-1]
        self._consensus.run(
            _CALL,
            lambda: self._require_possible(fields, total),
            same=lambda _: (("bytes", total),),
        )
        node = self._topology.node

        def make() -> _Share:
            # A node of one rank needs no window, and its memory no synchronisation.
            if node.Get_size() == 1:
                storage, window = Storage(make_arrays(fields), None, note), None
            else:
                with Pending("making memory of a node", node):
                    window, arrays = _make_window(node, fields)
                storage = Storage(arrays, window.Sync, note)
            return _Share(weakref.ref(owner), storage, window, node)

        share = self._consensus.run(_CALL, make)
        self._shares[next(self._numbers)] = share
        return share.storage

    def empty(self, storage: Storage, note: Any) -> Storage:
        """Return the emptied storage; the old object becomes invalid.

        Collective.
        """
        share = next(s for s in self._shares.values() if s.storage is storage)
        window, node = share.window, self._topology.node

        def make() -> Storage:
            # `close` invalidates the old storage first: reading it raises instead of
            # returning cleared rows.
            arrays = storage.close()
            with Pending("emptying memory of a node", node):
                node.Barrier()
                _clear(arrays[0], window, node)
            return Storage(arrays, window.Sync if window else None, note)

        share.storage = self._consensus.run(_CALL, make)
        return share.storage

    def close(self) -> None:
        """Free all storages, once no thread uses them. Collective."""
        # Lowest number first, on all ranks.
        while self._shares:
            self._shares.pop(min(self._shares)).free()

    def release(self) -> None:
        """Wait until no thread uses a storage, and let none begin. Not collective."""
        for share in self._shares.values():
            share.storage.close()

    def _abandon(self) -> None:
        """Return memory to the system if ranks have died: windows cannot be freed."""
        while self._shares:
            share = self._shares.popitem()[1]
            arrays = share.storage.close()
            if share.window is not None:
                # The mapping stays (another thread may look at it), but its pages are
                # returned.
                for array in arrays:
                    give_back(array)

    def _require_possible(self, fields: Sequence[Field], total: int) -> None:
        is_shared = self._topology.node.Get_size() > 1
        if is_shared and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise LaunchError(
                "cache() of a distributed dataset needs MPI_THREAD_MULTIPLE for its "
                "prefetch threads, but MPI was initialised without; remove the "
                "program's setting of mpi4py.rc.thread_level, or omit cache()"
            )
        # Memory is allocated when written to, so part of the free memory is reserved
        # already
        storages = [share.storage for share in self._shares.values()]
        promised = sum(storage.count_missing_bytes() for storage in storages)
        limits = free_bytes(is_shared).items()
        where, free = min(limits, key=lambda item: item[1], default=("", 1 << 63))
        if total > free - promised:
            rows = fields[0].shape[0]
            raise ArgumentError(
                f"cache() needs {as_text(total)} on this node ({rows} rows of "
                f"{as_text(total / max(rows, 1))}), but {where} has {as_text(free)} "
                f"free, of which other caches need {as_text(promised)}; cache fewer or "
                "smaller rows, or omit cache()"
            )


def _offsets(fields: Sequence[Field]) -> list[int]:
    """Return where each array starts, and the end of the last one."""
    starts = [0]
    for shape, dtype in fields:
        used = dtype.itemsize * int(np.prod(shape, dtype=object))
        # Each array starts at a cache line of its own, so that writers do not share
        # lines.
        starts.append(starts[-1] + round_up(used))
    return starts


def _make_window(
    node: MPI.Intracomm, fields: Sequence[Field]
) -> tuple[MPI.Win, list[npt.NDArray[Any]]]:
    """Return a window and its arrays, in the memory of the node's first rank."""
    starts = _offsets(fields)
    # All memory is the first rank's: others contribute 0 bytes and map it.
    size = max(starts[-1], LINE_BYTES) if node.Get_rank() == 0 else 0
    window = MPI.Win.Allocate_shared(size, 1, comm=node)
    memory: Any = window.Shared_query(0)[0]
    arrays: list[npt.NDArray[Any]] = [
        np.ndarray(shape, dtype, buffer=memory, offset=start)
        for (shape, dtype), start in zip(fields, starts[:-1], strict=True)
    ]
    # Loads and stores are ordered by MPI_Win_sync, which needs an epoch
    window.Lock_all(MPI.MODE_NOCHECK)
    _clear(arrays[0], window, node)
    return window, arrays


def _clear(
    flags: npt.NDArray[Any], window: MPI.Win | None, node: MPI.Intracomm
) -> None:
    """Fill an array of this node with zeros. Collective over the node."""
    # One rank clears; the barrier makes the others wait for it.
    if node.Get_rank() == 0:
        flags[...] = 0
    if window is not None:
        # Sync, barrier, sync: MPI's recipe to make stores of one rank visible to loads
        # of others in a shared window.
        window.Sync()
        node.Barrier()
        window.Sync()


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

    A missing page of shared memory would end the process with SIGBUS. So if a node has
    too little, there is no barrier, and rank 0 warns (RuntimeWarning).

    Args:
      operation: its purpose, for messages.
      consensus: of all ranks.
      node: the ranks that share memory with this one; borrowed.
      page_bytes: see `NodeBarrier`.
      yield_cpu: see `NodeBarrier`.
    """
    # The first node that lacks memory decides for all: a barrier on some nodes only
    # would let ranks choose different transports.
    needed = node.Get_size() * NodeBarrier.count_bytes(page_bytes, _SLOT_BYTES)
    free = min(free_bytes(is_shared=True).values(), default=needed)
    memory = consensus.gather_objects(operation, lambda: (needed, free))
    short = [(n, f) for n, f in memory if n > f]
    if not short:
        # Ranks of the node as the strategy numbers them, for messages.
        names = node.group.Translate_ranks(None, consensus.comm.group)
        return consensus.run(
            operation,
            lambda: NodeBarrier(
                node,
                page_bytes,
                _SLOT_BYTES,
                names,
                yield_cpu,
                consensus.departures,
            ),
        )
    if consensus.rank == 0:
        needed, free = short[0]
        warn(
            f"the ranks of a node need {as_text(needed)} of shared memory for fast "
            f"collectives, but only {as_text(free)} are free; they use MPI alone, "
            "which is slower. In a container, raise the limit with --shm-size",
            stacklevel=2,
        )
    return None
