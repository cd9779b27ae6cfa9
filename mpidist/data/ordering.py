"""The steps that change which elements there are, and in which order.

They turn the number of an element into the number of the parent's element; random
orders come from `sharding.Permutation`, without a table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mpidist import nest, sharding
from mpidist.data.pipeline import Pass, Pipeline, Step
from mpidist.data.sources import Positions
from mpidist.errors import ArgumentError

__all__ = ["Repeat", "Shard", "Shuffle", "Window"]


class Shuffle(Step):
    """All elements in the order of a permutation."""

    def __init__(self, parent: Pipeline, seed: int | None, reshuffle: bool):
        super().__init__(parent)
        self._seed = seed
        self._reshuffle = reshuffle

    @property
    def needs_entropy(self) -> bool:
        return self._seed is None or self._parent.needs_entropy

    def describe(self) -> str:
        return f"{self._parent.describe()}.shuffle({self._seed}, {self._reshuffle})"

    def locate(self, order: Pass, positions: Positions) -> Positions:
        length = self.length
        if length is None:
            raise ArgumentError("an infinite dataset cannot be shuffled; shuffle first")
        seed = order.entropy if self._seed is None else self._seed
        epoch = order.epoch if self._reshuffle else 0
        return sharding.Permutation(length, seed, epoch)(positions)


class Window(Step):
    """A run of elements: take and skip."""

    def __init__(self, parent: Pipeline, start: int, count: int | None):
        super().__init__(parent)
        self._start = start
        self._count = count

    @property
    def length(self) -> int | None:
        whole = self._parent.length
        rest = None if whole is None else max(0, whole - self._start)
        if self._count is None:
            return rest
        return self._count if rest is None else min(self._count, rest)

    def describe(self) -> str:
        return f"{self._parent.describe()}.window({self._start}, {self._count})"

    def locate(self, order: Pass, positions: Positions) -> Positions:
        return positions + self._start


class Shard(Step):
    """Every n-th element."""

    def __init__(self, parent: Pipeline, num_shards: int, index: int):
        super().__init__(parent)
        self._num_shards = num_shards
        self._index = index

    @property
    def length(self) -> int | None:
        whole = self._parent.length
        if whole is None:
            return None
        return max(0, -(-(whole - self._index) // self._num_shards))

    def describe(self) -> str:
        return f"{self._parent.describe()}.shard({self._num_shards}, {self._index})"

    def locate(self, order: Pass, positions: Positions) -> Positions:
        return positions * self._num_shards + self._index


class Repeat(Step):
    """The elements several times, or without end; each lap is an epoch of its own."""

    # Epochs of passes over an endless repetition are kept this far apart
    _ENDLESS = 1 << 40

    def __init__(self, parent: Pipeline, count: int | None):
        super().__init__(parent)
        self._count = count

    @property
    def length(self) -> int | None:
        whole = self._parent.length
        if whole == 0 or self._count == 0:
            return 0
        return None if self._count is None or whole is None else whole * self._count

    def describe(self) -> str:
        return f"{self._parent.describe()}.repeat({self._count})"

    def _pass(self, order: Pass, lap: int) -> Pass:
        laps = self._ENDLESS if self._count is None else self._count
        return dataclasses.replace(order, epoch=order.epoch * laps + lap)

    def locate_one(self, order: Pass, i: int) -> tuple[Pass, int]:
        whole = self._parent.length
        lap, i = (0, i) if whole is None else divmod(i, whole)
        return self._pass(order, lap), i

    def elements(self, order: Pass, positions: Positions) -> Any:
        whole = self._parent.length
        if whole is None or positions.size == 0:
            return self._parent.elements(self._pass(order, 0), positions)
        laps, positions = np.divmod(positions, whole)
        distinct = np.unique(laps).tolist()
        # Read lap by lap, then put the rows back into the order asked for
        parts = [
            self._parent.elements(self._pass(order, lap), positions[laps == lap])
            for lap in distinct
        ]
        if len(parts) == 1:
            return parts[0]
        back = np.argsort(np.argsort(laps, kind="stable"))
        return nest.map_leaves(lambda *xs: np.concatenate(xs)[back], *parts)
