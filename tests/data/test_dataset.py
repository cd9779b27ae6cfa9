"""Datasets in one process, against plain lists."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from datasets import lists, numbers, shuffled

import mpidist
from mpidist import Dataset
from mpidist.data.map_dataset import Epoch
from mpidist.util.shares import BatchShare


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


def test_rows_of_an_array_have_its_dtype_and_shape():
    array = np.arange(12, dtype=">f4").reshape(3, 2, 2)
    rows = list(Dataset.from_tensor_slices(array))
    assert [row.dtype for row in rows] == [array.dtype] * 3
    np.testing.assert_array_equal(np.stack(rows), array)


@pytest.mark.parametrize(
    "build", [lambda x, y: (x, y), lambda x, y: {"b": x, "a": (y,)}, Pair]
)
def test_tuples_and_mappings_are_structure(build):
    x, y = np.arange(5), np.ones((5, 2), np.float16)
    for i, batch in enumerate(Dataset.from_tensor_slices(build(x, y)).batch(2)):
        rows = slice(2 * i, 2 * i + 2)
        np.testing.assert_equal(batch, build(x[rows], y[rows]))
        assert type(batch) is type(build(x, y))


def test_lists_are_arrays():
    assert lists(Dataset.from_tensor_slices([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "tensors", [3.0, (np.zeros(3), np.zeros(4)), {"a": np.zeros(3), "b": 1}, {}, ()]
)
def test_arrays_without_common_rows_are_refused(tensors):
    with pytest.raises(ValueError, match="from_tensor_slices"):
        Dataset.from_tensor_slices(tensors)


@pytest.mark.parametrize("forever", [None, -1])
def test_endless_repeat(forever):
    dataset = numbers(3).repeat(forever)
    assert lists(itertools.islice(dataset, 8)) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert lists(itertools.islice(dataset.batch(4), 2)) == [[0, 1, 2, 0], [1, 2, 0, 1]]
    assert lists(dataset.skip(2).take(3)) == [2, 0, 1]
    assert lists(dataset.shard(2, 1).take(3)) == [1, 0, 2]
    assert dataset.cardinality() == -1
    with pytest.raises(TypeError, match="no length"):
        len(dataset)


def test_seed_may_be_a_numpy_integer():
    assert lists(numbers(9).shuffle(seed=np.int64(3))) == shuffled(9, 3)


def test_batches_of_unequal_batches_are_an_error():
    with pytest.raises(mpidist.DataError, match="elements that differ"):
        list(numbers(3).batch(2).batch(2))


def test_no_rows_of_a_batch_of_batches_keep_the_trailing_shape():
    pipeline = numbers(8, np.float32).batch(2).batch(4).pipeline
    part = pipeline.local_batch(Epoch(), 0, BatchShare(8, 7))
    assert part.shape == (0, 2)
    assert part.dtype == np.float32


def test_a_map_that_loses_rows_is_refused_also_where_there_are_none():
    pipeline = numbers(2).batch(2).map(np.sum).pipeline
    for replica in range(4):
        with pytest.raises(ValueError, match="one row for each row"):
            pipeline.local_batch(Epoch(), 0, BatchShare(4, replica))


def test_map_sees_rows_before_batch_and_batches_after_it():
    seen = []

    def twice(x):
        seen.append(np.shape(x))
        return x * 2

    expected = [[0, 2, 4], [6, 8]]
    assert lists(numbers(5).map(twice).batch(3)) == expected
    assert lists(numbers(5).batch(3).map(twice)) == expected
    assert seen == [()] * 5 + [(3,), (2,)]


def test_map_result_of_unequal_shapes_cannot_be_batched():
    with pytest.raises(mpidist.DataError, match="elements that differ"):
        list(numbers(3).map(lambda i: np.zeros(i)).batch(3))


def test_what_a_mapped_function_raises_propagates():
    with pytest.raises(ZeroDivisionError):
        list(numbers(3).map(lambda i: 1 // int(i)))


def test_elements_do_not_share_memory_with_the_source():
    array = np.zeros((3, 2))
    for element in Dataset.from_tensor_slices(array).batch(2):
        element += 1
    assert not array.any()


def test_an_endless_dataset_cannot_be_shuffled():
    with pytest.raises(ValueError, match="shuffle first"):
        next(iter(numbers(4).repeat().shuffle()))
