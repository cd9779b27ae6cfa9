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

# Of all buckets of a group, on each rank; further ones are reduced as all tensors
_MOST_BYTES = 1 << 30
_MOST_BUCKETS = 1000
# Those of models that are gone: not reduced in as many calls for each bucket
_UNUSED_CALLS = 100


@dataclasses.dataclass
class Bucket:
    """A bucket that was reduced before.

    Args:
      number: the same on all ranks.
      used: the number of the call that reduced it last.
      everyone: the arrays of all ranks, from the second time on.
      sum: this rank's array, as a tensor.
    """

    number: int
    used: int
    everyone: Any = None
    sum: Any = None

    @property
    def nbytes(self) -> int:
        """The memory of this rank."""
        return 0 if self.sum is None else int(self.sum.nbytes)


class SharedBuckets:
    """The buckets of one process group.

    All ranks reduce the same buckets in the same order, so they keep the same ones; a
    bucket is found by its address, though, which may be that of a former one on some
    ranks only. Then their numbers differ, and all ranks `add` it again.
    """

    def __init__(self, group: ReplicaGroup):
        self._group = group
        self._buckets: dict[Any, Bucket] = {}  # by address, elements and dtype
        self._calls = self._made = 0
        self._is_full = False  # a node had too little memory

    def find(self, flat: FlatTensor) -> Bucket | None:
        """Return the bucket that a tensor is, if it was added before."""
        self._calls += 1
        bucket = self._buckets.get(_key_of(flat))
        if bucket is not None:
            bucket.used = self._calls
        return bucket

    def address_of(self, bucket: Bucket | None, flat: FlatTensor) -> int:
        """Return what is the same on all ranks if all can use their buckets; or 0."""
        if bucket is None:
            return 0
        can_use = bucket.sum is not None or self._has_room(flat)
        return 2 * bucket.number + can_use + 1

    def _has_room(self, flat: FlatTensor) -> bool:
        used = sum(bucket.nbytes for bucket in self._buckets.values())
        return not self._is_full and used + flat.nbytes <= _MOST_BYTES

    def add(self, flat: FlatTensor) -> None:
        """Know a tensor when it comes again. All ranks call it together."""
        if len(self._buckets) >= _MOST_BUCKETS:
            self._buckets.clear()
        self._made += 1
        self._buckets[_key_of(flat)] = Bucket(self._made, self._calls)

    def allocate(self, bucket: Bucket, flat: FlatTensor) -> None:
        """Give a bucket its memory, if there is enough. Collective."""
        oldest = self._calls - _UNUSED_CALLS * len(self._buckets)
        for key in [k for k, b in self._buckets.items() if b.used < oldest]:
            del self._buckets[key]
        memory = self._group.symmetric_memory
        if not self._has_room(flat):
            return
        try:
            (mine,) = memory.allocate(
                "all_reduce of gradients", [Field((flat.size,), flat.array.dtype)]
            )
        except ArgumentError:  # on all ranks
            self._is_full = True
            return
        bucket.everyone, bucket.sum = memory.everyone(mine), torch.from_numpy(mine)


def _key_of(flat: FlatTensor) -> tuple[int, int, Any]:
    return flat.tensor.data_ptr(), flat.size, flat.tensor.dtype
