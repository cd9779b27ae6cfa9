"""Memory that stands at several places of a state: one array twice, or its views.

A restore writes into it at each place. Values that fit together keep the memory shared;
a value that would overwrite another one needs memory of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpidist.checkpoint.tree import Path
from mpidist.device import arrays


@dataclasses.dataclass(eq=False)
class Write:
    """A value to be written into memory.

    Args:
      path: where in the state.
      value: returns the value, a NumPy array of the memory's shape and dtype.
      address, shape, strides, item_bytes: the memory, on the host or a GPU.
      is_fixed: whether the value cannot have other memory.
      has_conflict: whether it would overwrite another value.
    """

    path: Path
    value: Callable[[], Any]
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    is_fixed: bool = False
    has_conflict: bool = False

    @property
    def bounds(self) -> tuple[int, int]:
        """The addresses of the first byte, and behind the last."""
        steps = [(n - 1) * step for n, step in zip(self.shape, self.strides)]
        first = self.address + sum(min(step, 0) for step in steps)
        end = self.address + sum(max(step, 0) for step in steps) + self.item_bytes
        return (first, end) if 0 not in self.shape else (first, first)

    def view(self, image: Any, start: int) -> Any:
        """Return the bytes of this memory in an image of the memory from `start` on."""
        shape, strides = (*self.shape, self.item_bytes), (*self.strides, 1)
        offset = self.address - start
        return np.ndarray(shape, image.dtype, image, offset, strides)


def write_to(array: Any, path: Path, value: Callable[[], Any]) -> Write:
    """Return the write of a value into a NumPy or CuPy array."""
    on_gpu = arrays.is_device_array(array)
    address = array.data.ptr if on_gpu else array.ctypes.data
    return Write(path, value, address, array.shape, array.strides, array.itemsize)


def conflicts(writes: Sequence[Write]) -> Iterator[tuple[Write, Write]]:
    """Yield each write that would overwrite a value, and the earlier write of that."""
    ranges = sorted((*w.bounds, i) for i, w in enumerate(writes))
    group: list[int] = []
    end = 0
    for first, last, i in ranges:
        if first >= end:
            yield from _simulate([writes[j] for j in sorted(group)])
            group = []
        if first < last:
            group.append(i)
            end = max(end, last)
    yield from _simulate([writes[j] for j in sorted(group)])


def _simulate(writes: Sequence[Write]) -> Iterator[tuple[Write, Write]]:
    """Do the writes in an image of the memory; yield those that conflict."""
    if len(writes) < 2:
        return
    start = min(write.bounds[0] for write in writes)
    size = max(write.bounds[1] for write in writes) - start
    image, is_written = np.zeros(size, np.uint8), np.zeros(size, np.bool_)
    done: list[Write] = []
    for write in writes:
        data = np.ascontiguousarray(write.value()).view(np.uint8)
        memory, before = write.view(image, start), write.view(is_written, start)
        data = data.reshape(memory.shape)
        if np.any(before & (memory != data)):
            # All of them together do; find one that does alone
            alone = (other for other in done[1:] if any(_simulate([other, write])))
            yield write, next(alone, done[0])
        else:
            memory[...] = data
            before[...] = True
            done.append(write)
