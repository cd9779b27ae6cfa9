"""Global batches, of which Keras reads the rows of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import tree

from mpidist.data.dataset import Dataset
from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.keras import compat
from mpidist.options import InputOptions
from mpidist.strategy.strategy import Strategy

unpack: Callable[[Any], Any] = keras.utils.unpack_x_y_sample_weight


class Batches(compat.DataAdapter):
    """One rank's rows of global batches. Creating it, and reading, is collective.

    Args:
      strategy: of the ranks.
      dataset: of global batches.
      pack: makes of an element what Keras reads.
    """

    batch_size = has_partial_batch = partial_batch_size = None
    unknown: int | None = None  # Keras would take what is left of an epoch for it

    def __init__(
        self, strategy: Strategy, dataset: Dataset, pack: Callable[[Any], Any]
    ):
        options = InputOptions(balance_batches=True)
        divided = strategy.experimental_distribute_dataset(dataset, options)
        self._batches, self._pack = compat.ranks.convert(divided), pack
        self.batch_rows = dataset.pipeline.batch_size or 1
        self.example = pack(tree.map_structure(_example_of, dataset.element_spec))
        self.rows: list[int] = []  # of this rank, in the batches of the epoch
        self.iterator: Any = None
        self._waits = self._is_over = False  # the iterator: for its epoch; at its end
        self._left: int | None = None  # batches of an epoch that goes on

    @property
    def num_batches(self) -> int | None:
        """The number of batches; if it is endless, or unknown, `unknown`."""
        count = self._batches.cardinality
        return count if count >= 0 else self.unknown

    def read(self) -> Iterator[Any]:
        """Yield the batches of an epoch."""
        iterator = self.iterator if self._waits else iter(self._batches)
        self.iterator, self.rows, self._is_over = iterator, [], False
        left, self._left, self._waits = self._left, None, False
        try:
            for batch in map(self._pack, iterator):
                self.rows.append(rows_of(batch))
                yield batch
                left = left and left - 1
                if left == 0:  # the epoch ends before the data do
                    self._waits = True
                    return
            self._is_over = iterator is self.iterator
        finally:
            if not (self._waits and iterator is self.iterator):
                iterator.close()

    get_numpy_iterator = get_jax_iterator = get_torch_dataloader = read

    def go_on(self, position: dict[str, int], left: int | None) -> None:
        """Let the next epoch begin at a position, and end after `left` batches."""
        self.iterator = iter(self._batches)
        self.iterator.set_state(position)
        self._waits, self._left = True, left

    def next_epoch(self) -> dict[str, int]:
        """Return the position where the next epoch begins. Collective."""
        if self._is_over or self.iterator.get_state()["step"] == self.num_batches:
            self.iterator, self._waits = iter(self._batches), True
        return dict(self.iterator.get_state())


def read(
    strategy: Strategy, arrays: Any, seed: int | None = None, **options: Any
) -> Batches:
    """Return this rank's rows of what `fit` and its like are given. Collective.

    Args:
      strategy: of the ranks.
      arrays: `(x, y, sample_weight)`; or x is a Dataset of these.
      seed: of the order of rows; None for that of the arrays.
      options: class_weight, batch_size and steps, as in `fit`.
    """
    x, *others = arrays
    if isinstance(x, Dataset):
        if any(part is not None for part in (*others, options.get("class_weight"))):
            raise ArgumentError(
                "mpidist.keras: the elements of a Dataset are (x, y, sample_weight), "
                "so y, sample_weight and class_weight must be None"
            )
        return Batches(strategy, x, lambda batch: batch)
    places, leaves = None, [x]
    if x is not None and compat.can_convert_arrays(arrays):
        inputs, size = compat.array_inputs(*arrays, **options)
        leaves = []

        def place(leaf: Any) -> int | None:  # flattened dicts have another order
            if leaf is not None:
                leaves.append(leaf)
            return None if leaf is None else len(leaves) - 1

        places = tree.map_structure(place, inputs)
    for leaf in leaves:
        if places is None or not isinstance(leaf, np.ndarray):
            raise ArgumentTypeError(
                f"mpidist.keras cannot divide a {type(leaf).__name__} over the ranks; "
                "pass arrays, or a mpidist.Dataset of global batches, such as "
                "Dataset.from_hdf5, Dataset.from_generator or "
                "mpidist.torch.from_dataset(loader.dataset), then .batch(...)"
            )

    def pack(rows: Any) -> Any:
        return tree.map_structure(lambda i: None if i is None else rows[i], places)

    rows = Dataset.from_tensor_slices(tuple(leaves))
    rows = rows if seed is None else rows.shuffle(seed=seed)
    return Batches(strategy, rows.batch(size), pack)


def rows_of(batch: Any) -> int:
    """Return the number of rows in what Keras reads."""
    leaves = tree.flatten(unpack(batch)[0])
    return int(next(leaf for leaf in leaves if leaf is not None).shape[0])


def one_row(leaf: Any) -> Any:
    """Return a row that stands for none; its logarithm is finite."""
    if leaf is None:
        return None
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    number = 0.5 if keras.backend.is_float_dtype(dtype) else 0
    return keras.ops.full((1, *leaf.shape[1:]), number, dtype)


def _example_of(spec: Any) -> Any:
    shape = (2, *(length or 1 for length in spec.shape[1:]))
    return keras.ops.convert_to_tensor(np.zeros(shape, spec.dtype))
