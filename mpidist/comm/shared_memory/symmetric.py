"""Symmetric arrays: at the same offset in each rank's part of shared memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.shared_memory.node import advice, lay_out, map_together
from mpidist.errors import ArgumentError
from mpidist.util.available_memory import PAGE_BYTES, as_text, round_up
from mpidist.util.buffers import Field

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
        *starts, end = lay_out(fields, _FIRST_BYTE)
        # Whole pages, so that the parts of all ranks begin alike in a page
        part_bytes = round_up(end, PAGE_BYTES)
        size_bytes = part_bytes * self._node.Get_size()

        def require_free(where: str, free: int) -> None:
            if size_bytes > free:
                raise ArgumentError(
                    f"symmetric arrays need {as_text(size_bytes)} on this node, but "
                    f"{where} has {as_text(free)} free{advice(where)}"
                )

        root = map_together(
            self._consensus, operation, self._node, size_bytes, require_free
        )
        rank = self._node.Get_rank()
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


def _view(memory: Any, start: int, shape: tuple[int, ...], dtype: Any) -> Any:
    size = math.prod(shape) * dtype.itemsize
    if not size:  # no bytes can be viewed as elements without any
        return np.zeros(shape, dtype)
    return memory[start : start + size].view(dtype).reshape(shape)


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
