"""The steps that put elements of several datasets, or their numbers, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpidist.data.map_dataset import Epoch, Pipeline, Step
from mpidist.data.shuffling import Blocks
from mpidist.data.sources import Positions, RowSource
from mpidist.errors import ArgumentError
from mpidist.util import nest
from mpidist.util.hashing import hash62

__all__ = ["Enumerate", "Zip", "epoch_of_component"]


class Zip(Pipeline):
    """Elements of several pipelines, in a structure, up to the end of the shortest.

    Args:
      parts: the pipelines.
      spec: the structure of which they are the leaves.
    """

    def __init__(self, parts: Sequence[Pipeline], spec: nest.Spec):
        self._parts = tuple(parts)
        self._spec = spec

    @property
    def later_parts(self) -> tuple[Pipeline, ...]:
        """All parts but the first: see `epoch_of_component`."""
        return self._parts[1:]

    @property
    def length(self) -> int | None:
        lengths = [part.length for part in self._parts]
        return min((n for n in lengths if n is not None), default=None)

    @property
    def batch_size(self) -> int | None:
        sizes = {part.batch_size for part in self._parts}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def needs_entropy(self) -> bool:
        return any(part.needs_entropy for part in self._parts)

    @property
    def parallel_calls(self) -> int:
        return max(part.parallel_calls for part in self._parts)

    @property
    def is_mapped(self) -> bool:
        return any(part.is_mapped for part in self._parts)

    @property
    def file_count(self) -> int:
        return 0  # rows of one file belong to rows of several others

    @property
    def has_known_spec(self) -> bool:
        return all(part.has_known_spec for part in self._parts)

    @property
    def sources(self) -> list[RowSource]:
        return [source for part in self._parts for source in part.sources]

    @property
    def row_bytes(self) -> int | None:
        found = [part.row_bytes for part in self._parts]
        known = [size for size in found if size is not None]
        return sum(known) if len(known) == len(found) else None

    def blocks(self) -> Blocks | None:
        length = self.length
        found = [blocks for part in self._parts if (blocks := part.blocks())]
        if not found or length is None:
            return None
        # A shuffle behind keeps those together that cost most to be read singly
        costly = max(found, key=lambda b: (b.is_costly, b.rows * b.row_bytes))
        edges = np.cumsum([0, *costly.lengths]).clip(max=length)
        return dataclasses.replace(costly, lengths=tuple(np.diff(edges).tolist()))

    def keep(self, elements: int) -> None:
        for part in self._parts:
            part.keep(elements)

    def for_batches(self, batch_size: int) -> Pipeline:
        return self.over(lambda part: part.for_batches(batch_size))

    def describe(self) -> str:
        return f"zip({self._spec}, {', '.join(p.describe() for p in self._parts)})"

    def describe_source(self) -> str:
        return ", ".join(part.describe_source() for part in self._parts)

    def over(self, change: Callable[[Pipeline], Pipeline]) -> Pipeline:
        return Zip([change(part) for part in self._parts], self._spec)

    def rebatch(self, workers: int) -> Pipeline:
        return self.over(lambda part: part.rebatch(workers))

    def _join(self, get: Callable[[Pipeline, Epoch], Any], epoch: Epoch) -> Any:
        """Return the structure of `get(component, epoch of the component)`."""
        found = [
            get(p, epoch_of_component(epoch, i)) for i, p in enumerate(self._parts)
        ]
        return nest.unflatten(self._spec, found)

    def element(self, epoch: Epoch, i: int) -> Any:
        return self._join(lambda part, epoch: part.element(epoch, i), epoch)

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        return self._join(lambda part, epoch: part.elements(epoch, positions), epoch)

    def rows_in(self, epoch: Epoch, i: int) -> int:
        rows = [
            part.rows_in(epoch_of_component(epoch, k), i)
            for k, part in enumerate(self._parts)
        ]
        if len(set(rows)) > 1:
            raise ArgumentError(
                f"zip: batch {i} has {', '.join(map(str, rows))} rows in the datasets, "
                "so it cannot be divided over replicas; zip() rows, then batch() them"
            )
        return rows[0]

    def part(self, epoch: Epoch, i: int, replicas: int, replica: int) -> Any:
        self.rows_in(epoch, i)
        return self._join(lambda p, epoch: p.part(epoch, i, replicas, replica), epoch)

    def parts(
        self, epoch: Epoch, steps: range, replicas: int, replica: int
    ) -> Iterator[Any]:
        for i in steps:
            self.rows_in(epoch, i)
        given = [
            part.parts(epoch_of_component(epoch, k), steps, replicas, replica)
            for k, part in enumerate(self._parts)
        ]
        return (nest.unflatten(self._spec, parts) for parts in zip(*given))

    def example(self, epoch: Epoch) -> Any:
        return self._join(lambda part, epoch: part.example(epoch), epoch)

    def empty_part(self, epoch: Epoch) -> Any:
        return self._join(lambda part, epoch: part.empty_part(epoch), epoch)


def epoch_of_component(epoch: Epoch, number: int) -> Epoch:
    """Return the epoch of one of several datasets that are read together.

    Shuffles without a seed must differ between them: otherwise equal permutations
    would keep the same rows paired in every epoch.
    """
    if number == 0 or epoch.entropy == 0:
        return epoch
    return dataclasses.replace(
        epoch, entropy=hash62(f"part {number} of {epoch.entropy}")
    )


class Enumerate(Step):
    """The elements with their numbers, from `start` on, before them."""

    def __init__(self, parent: Pipeline, start: int):
        super().__init__(parent)
        self._start = start

    @property
    def batch_size(self) -> None:
        return None  # a number has no rows

    @property
    def row_bytes(self) -> int | None:
        parent = self._parent.row_bytes
        return None if parent is None else parent + np.dtype(np.int64).itemsize

    def describe(self) -> str:
        return f"{self._parent.describe()}.enumerate({self._start})"

    def blocks(self) -> Blocks | None:
        return self._parent.blocks()

    def element(self, epoch: Epoch, i: int) -> Any:
        return np.int64(self._start + i), self._parent.element(epoch, i)

    def elements(self, epoch: Epoch, positions: Positions) -> Any:
        return positions + self._start, self._parent.elements(epoch, positions)

    def example(self, epoch: Epoch) -> Any:
        return np.int64(self._start), self._parent.example(epoch)
