"""Where rows come from: the contract of a source, and arrays in memory as one."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mpidist import nest
from mpidist.errors import ArgumentError

__all__ = ["ArrayRows", "Positions", "RowSource", "from_lists"]

Positions = npt.NDArray[np.int64]


class RowSource(Protocol):
    """Rows in storage: arrays in memory or datasets in files."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def read(self, rows: Positions) -> Any:
        """Return a nest of arrays with the given rows along the first dimension."""

    def describe(self) -> str:
        """Return what must be the same on every replica, as text."""


class ArrayRows:
    """Rows of arrays in memory."""

    def __init__(self, arrays: Any):
        leaves, _ = nest.flatten(arrays)
        if not leaves:
            raise ArgumentError("from_tensor_slices needs at least one array")
        shapes = [np.shape(leaf) for leaf in leaves]
        if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
            raise ArgumentError(
                "from_tensor_slices needs arrays of equal first dimension, not of "
                f"shapes {', '.join(map(str, shapes))}"
            )
        self._arrays = nest.map_leaves(np.asarray, arrays)
        self._length = int(shapes[0][0])

    def __len__(self) -> int:
        return self._length

    def read(self, rows: Positions) -> Any:
        """See `RowSource.read`."""
        return nest.map_leaves(lambda a: a[rows], self._arrays)

    def describe(self) -> str:
        """See `RowSource.describe`."""
        leaves, spec = nest.flatten(self._arrays)
        return (
            f"from_tensor_slices({spec}, {[(a.dtype.name, a.shape) for a in leaves]})"
        )


def from_lists(value: Any) -> Any:
    """Return `value` with arrays in place of lists, which are no structure in data."""
    if isinstance(value, list):
        return np.asarray(value)
    if type(value) is tuple:
        return tuple(map(from_lists, value))
    if isinstance(value, dict):
        return {key: from_lists(item) for key, item in value.items()}
    return value
