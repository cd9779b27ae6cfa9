"""Input for PyTorch models: batches as tensors, and PyTorch datasets as sources."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpidist.data.dataset import Dataset
from mpidist.data.distributed.converted import ConvertedDataset, ConvertedIterator
from mpidist.data.distributed.datasets import DistributedDataset
from mpidist.data.distributed.iterator import DistributedIterator
from mpidist.device import arrays
from mpidist.errors import ArgumentTypeError, DataError
from mpidist.torch.weights import note_batch
from mpidist.util import nest, validation


class TensorIterator(ConvertedIterator):
    """Batches of this replica as tensors; an iterator of a `TensorDataset`."""

    def __init__(self, iterator: DistributedIterator):
        super().__init__(iterator, to_tensors)

    def __next__(self) -> Any:
        """Return this replica's rows of the next batch. Collective.

        `DistributedDataParallel` knows their number.
        """
        batch = super().__next__()
        note_batch(self, batch)
        return batch


class TensorDataset(ConvertedDataset):
    """A distributed dataset whose batches are tensors; see `as_tensors`."""

    _iterator_type = TensorIterator


def as_tensors(dataset: DistributedDataset) -> TensorDataset:
    """Return a distributed dataset whose batches are tensors of this replica's rows.

    Arrays are not copied: tensors share the memory of the batch.

        data = mpidist.Dataset.from_hdf5("train-*.h5", ["x", "y"]).shuffle().batch(256)
        for x, y in as_tensors(strategy.experimental_distribute_dataset(data)):
            ...

    The last replicas may have fewer rows, or none: `DistributedDataParallel` weights by
    rows.

    Raises:
      ArgumentTypeError: it is not a distributed dataset.

    Example:
      >>> rows = mpidist.Dataset.range(8).batch(4)
      >>> data = strategy.experimental_distribute_dataset(rows)
      >>> next(iter(mpidist.torch.as_tensors(data)))  # on replica 0
      tensor([0, 1])
    """
    if not isinstance(dataset, DistributedDataset):
        raise ArgumentTypeError(
            "as_tensors needs what strategy.experimental_distribute_dataset returns, "
            f"not {validation.shown(dataset)}"
        )
    return TensorDataset(dataset)


def to_tensors(batch: Any) -> Any:
    """Convert a nest of arrays to tensors that share their memory.

    Raises:
      DataError: PyTorch has no such dtype, as for text and dates.
    """
    return nest.map_leaves(_to_tensor, batch)


def _to_tensor(array: Any) -> Any:
    if isinstance(array, torch.Tensor):
        return array
    if arrays.is_device_array(array):
        return torch.from_dlpack(array)
    arrays.require_plain(array, "a batch for PyTorch")
    array = np.asarray(array)
    # PyTorch has no read-only tensors, swapped bytes or negative strides
    if not (
        array.flags.writeable and array.dtype.isnative and array.flags.c_contiguous
    ):
        array = np.array(array, array.dtype.newbyteorder("="), order="C")
    try:
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    except TypeError as error:
        raise DataError(
            f"a batch of {array.dtype} cannot be a tensor: {error}"
        ) from None


def from_dataset(dataset: Any, num_parallel_calls: int | None = None) -> Dataset:
    """Return a `mpidist.Dataset` of the elements of a PyTorch dataset.

    With a map-style dataset, each rank reads only its own rows:

        data = from_dataset(MNIST(folder)).shuffle(seed=0).batch(256)
        data = as_tensors(strategy.experimental_distribute_dataset(data))

    Tensors, arrays and numbers are leaves; tuples, dicts, and lists that begin with
    tensors are structure.

    Args:
      dataset: with `__getitem__` and `__len__`, the same on all ranks (arrays, tensors
        and lists of numbers that it holds are compared when it is distributed); or an
        `IterableDataset`, which each rank reads completely.
      num_parallel_calls: the number of threads that call `__getitem__`.

    Raises:
      ArgumentTypeError: it is neither; a DataLoader (pass its `dataset`).

    Example:
      >>> numbers = torch.utils.data.TensorDataset(torch.arange(8.0))
      >>> data = mpidist.torch.from_dataset(numbers).batch(4)
      >>> next(iter(data))
      (array([0., 1., 2., 3.], dtype=float32),)
    """
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise ArgumentTypeError(
            "from_dataset needs the dataset of the DataLoader: from_dataset("
            "loader.dataset).shuffle(seed=0).batch(GLOBAL_BATCH_SIZE)"
        )
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return Dataset.from_generator(lambda: map(_arrays_of, dataset))
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ArgumentTypeError(
            "dataset must be a torch.utils.data.Dataset, not "
            f"{validation.shown(dataset)}"
        )
    rows = Dataset.range(len(dataset))
    return rows.map(_Reader(dataset), num_parallel_calls=num_parallel_calls)


class _Reader:
    """Reads elements of a dataset; ranks compare the arrays that `captured` holds."""

    def __init__(self, captured: Any):
        self.captured = captured

    def __call__(self, number: Any) -> Any:
        return _arrays_of(self.captured[int(number)])


def _arrays_of(element: Any) -> Any:
    """Convert an element: lists to tuples, and tensors to arrays."""
    if isinstance(element, list | tuple):
        parts = map(_arrays_of, element)
        return type(element)(*parts) if hasattr(element, "_fields") else tuple(parts)
    if isinstance(element, dict):
        return {key: _arrays_of(value) for key, value in element.items()}
    return arrays.to_array(element) if isinstance(element, torch.Tensor) else element
