"""Batches as JAX arrays."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpidist.comm.topology import job_size
from mpidist.data.dataset import Dataset
from mpidist.data.distributed.converted import ConvertedDataset, ConvertedIterator
from mpidist.device import arrays
from mpidist.errors import ArgumentTypeError
from mpidist.util import nest
from mpidist.util.dtypes import require_range


def as_jax(dataset: Any) -> JaxDataset:
    """Return a distributed dataset whose batches are this replica's rows in JAX arrays.

    Large batches are not copied: JAX uses their memory until the arrays are freed. (JAX
    copies arrays that do not begin at a cache line, and 64-bit numbers without
    jax_enable_x64.)

    Args:
      dataset: a distributed dataset, or another iterable of nests of arrays. In a job
        of several ranks no `Dataset`, of which each would read all rows.

    Example:
      >>> rows = mpidist.Dataset.range(8).batch(4)
      >>> data = mpidist.jax.as_jax(strategy.experimental_distribute_dataset(rows))
      >>> next(iter(data))
      Array([0, 1], dtype=int32)
    """
    if isinstance(dataset, Dataset) and job_size() > 1:
        raise ArgumentTypeError(
            "as_jax got a dataset that is not distributed: each replica would read all "
            "of it. Pass what strategy.experimental_distribute_dataset returns, or "
            "iter(dataset) if that is meant"
        )
    if not hasattr(dataset, "__iter__"):
        raise ArgumentTypeError(
            f"as_jax needs a distributed dataset, not {type(dataset).__name__}"
        )
    return JaxDataset(dataset)


class JaxIterator(ConvertedIterator):
    """Gives batches as JAX arrays; a `Checkpoint` saves it like an iterator.

    Example:
      >>> rows = mpidist.Dataset.range(8).batch(4)
      >>> data = mpidist.jax.as_jax(strategy.experimental_distribute_dataset(rows))
      >>> batches = iter(data)
      >>> next(batches)
      Array([0, 1], dtype=int32)
      >>> checkpoint = mpidist.Checkpoint(strategy=strategy, batches=batches)
    """

    def __init__(self, iterator: Any):
        super().__init__(iterator, functools.partial(nest.map_leaves, _to_jax))


class JaxDataset(ConvertedDataset):
    """The result of `as_jax`. Iterating over it is collective.

    Example:
      >>> rows = mpidist.Dataset.range(8).batch(4)
      >>> data = mpidist.jax.as_jax(strategy.experimental_distribute_dataset(rows))
      >>> len(data)
      2
    """

    _iterator_type = JaxIterator


def _to_jax(leaf: Any) -> Any:
    """Return an array of numbers as a JAX array, and other leaves unchanged."""
    arrays.require_plain(leaf, "a batch for JAX")
    array = leaf if arrays.is_device_array(leaf) else np.asarray(leaf)
    if not arrays.fits_device(array):
        return leaf
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype != array.dtype:
        require_range(array, dtype, "a batch for JAX")
        array = array.astype(dtype)
    # Read-only memory may belong to a file, or to code that can still change it
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        return jnp.array(array, copy=True)
    return arrays.like(array, jnp.zeros(()))
