"""Gradients of DistributedDataParallel in memory that all ranks of a node see.

PyTorch takes the sum of a bucket of gradients from the future of the reduction, so it
may lie elsewhere than the bucket. Here it lies where each rank has added a part of it,
in place, without copies through the small slots of other reductions: other ranks read
those out of this one's cache, which takes long between cores that share none.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mpidist.comm.replica_group import ReplicaGroup
from mpidist.errors import ArgumentError
from mpidist.torch.flat_tensors import FlatTensor
from mpidist.util.buffers import Field

__all__ = ["Bucket", "SharedBuckets"]

# Of all buckets of a group, on each rank; further ones are reduced as all tensors
_MOST_BYTES = 1 << 30
_MOST_KEYS = 1000


@dataclasses.dataclass
class Bucket:
    """A bucket that was reduced before.

    Args:
      number: the same on all ranks.
      everyone: the arrays of all ranks, from the second time on.
      sum: this rank's array, as a tensor.
    """

    number: int
    everyone: Any = None
    sum: Any = None


class SharedBuckets:
    """The buckets of one process group."""

    def __init__(self, group: ReplicaGroup):
        self._group = group
        self._buckets: dict[Any, Bucket] = {}  # by address, elements and dtype
        self._made = 0
        self._bytes = 0

    def find(self, flat: FlatTensor) -> Bucket | None:
        """Return the bucket that a tensor is, if it was added before."""
        return self._buckets.get(_key_of(flat))

    def address_of(self, bucket: Bucket | None, flat: FlatTensor) -> int:
        """Return what is the same on all ranks if all can use their buckets; or 0."""
        if bucket is None:
            return 0
        has_room = self._bytes + flat.nbytes <= _MOST_BYTES
        return 2 * bucket.number + (bucket.everyone is not None or has_room) + 1

    def add(self, flat: FlatTensor) -> None:
        """Know a tensor when it comes again. All ranks call it together."""
        if len(self._buckets) >= _MOST_KEYS:
            self._buckets.clear()
            self._bytes = 0
        former = self._buckets.get(_key_of(flat))
        if former is not None and former.sum is not None:
            self._bytes -= flat.nbytes
        self._made += 1
        self._buckets[_key_of(flat)] = Bucket(self._made)

    def allocate(self, bucket: Bucket, flat: FlatTensor) -> None:
        """Give a bucket its memory, if there is enough. Collective."""
        memory = self._group.symmetric_memory
        if self._bytes + flat.nbytes > _MOST_BYTES:
            return
        try:
            (mine,) = memory.allocate(
                "all_reduce of gradients", [Field((flat.size,), flat.array.dtype)]
            )
        except ArgumentError:  # on all ranks: a node has too little memory
            self._bytes = _MOST_BYTES
            return
        bucket.everyone, bucket.sum = memory.everyone(mine), torch.from_numpy(mine)
        self._bytes += flat.nbytes


def _key_of(flat: FlatTensor) -> tuple[int, int, Any]:
    return flat.tensor.data_ptr(), flat.size, flat.tensor.dtype
