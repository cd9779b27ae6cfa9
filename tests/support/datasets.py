"""Small datasets, what is in them, and what their readers leave, for tests."""

import itertools
import threading

import numpy as np

from mpidist import AutoShardPolicy, Dataset, InputOptions, Options
from mpidist.data.sharding import Permutation


def numbers(n, dtype=np.int64):
    """The numbers below n, from memory."""
    return Dataset.from_tensor_slices(np.arange(n, dtype=dtype))


def generated(n):
    """The numbers below n, from a generator."""
    return Dataset.from_generator(lambda: iter(range(n)))


def shuffled(n, seed, epoch=0):
    """The numbers below n in the order that a shuffle gives them."""
    return Permutation(n, seed, epoch)(np.arange(n)).tolist()


def lists(elements):
    """The elements of a dataset of plain arrays as numbers or lists."""
    return [np.asarray(element).tolist() for element in elements]


def joined(parts):
    return list(itertools.chain.from_iterable(parts))


def in_batches(rows, size, drop_remainder=False):
    cut = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [b for b in cut if len(b) == size or not drop_remainder]


def reading_ahead(depth):
    return InputOptions(experimental_per_replica_buffer_size=depth)


def with_policy(dataset, name):
    return dataset.with_options(Options(auto_shard_policy=AutoShardPolicy[name]))


def new_threads(before):
    return [t for t in threading.enumerate() if t not in before]


def require_no_new_threads(before):
    """Require that all threads but those in `before` have ended, or do so now."""
    for thread in new_threads(before):
        thread.join(600)
    assert not new_threads(before)
