"""Picking rows of many arrays, against NumPy's indexing."""

from __future__ import annotations

import numpy as np
import pytest

from mpidist.data.hdf5.memory import pick_rows
from mpidist.memory.buffers import Buffers

SHAPES = [(), (1,), (3, 5), (4096,), (5000, 3), (0,), (2, 0)]
DTYPES = ["u1", "<f4", ">i2", "c16", "S3", "?", "i4,f8"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_the_arrays(shape, dtype):
    random = np.random.default_rng(1)
    arrays = []
    for length in [7, 1, 30]:
        count = length * int(np.prod(shape)) * np.dtype(dtype).itemsize
        data = random.integers(0, 2, count, dtype="u1").view(dtype)
        arrays.append(data.reshape(length, *shape))
    which = random.integers(0, 3, 50)
    rows = random.integers(0, 30, 50) % np.array([7, 1, 30])[which]
    found = pick_rows(arrays, which, rows, Buffers())
    expected = [arrays[w][r] for w, r in zip(which, rows)]
    assert found.dtype == np.dtype(dtype)
    assert found.tobytes() == np.array(expected, dtype).tobytes()
    assert found.shape == (50, *shape)
    assert found.flags.writeable


def test_rows_of_objects():
    arrays = [np.array(["a", "b"], object), np.array([None, 3], object)]
    found = pick_rows(arrays, np.array([1, 0, 1]), np.array([1, 0, 0]), Buffers())
    assert found.tolist() == [3, "a", None]


def test_a_buffer_is_used_again_when_nobody_refers_to_it():
    buffers = Buffers()
    first = buffers.empty((4, 3), np.dtype("f4"))
    first[:] = 7
    views = [first[1:], first.T, memoryview(first), first.view("u1")[::2], first[2, 1:]]
    place = first.ctypes.data
    del first
    while views:
        other = buffers.empty((4, 3), np.dtype("f4"))
        assert other.ctypes.data != place
        del other
        views.pop()
    assert buffers.empty((4, 3), np.dtype("f4")).ctypes.data == place
    assert buffers.empty((11,), np.dtype("i4")).ctypes.data == place


def test_arrays_that_are_kept_stay_as_they_are():
    buffers, random = Buffers(), np.random.default_rng(0)
    kept = []
    for number in range(300):
        array = buffers.empty((int(random.integers(1, 60)),), np.dtype("i8"))
        array[:] = number
        if random.random() < 0.3:
            kept.append((array[: len(array) // 2 + 1], number))
    assert all((array == number).all() for array, number in kept)


def test_buffers_of_objects_and_of_nothing_are_new():
    buffers = Buffers()
    assert buffers.empty((2,), np.dtype(object)).tolist() == [None, None]
    assert buffers.empty((0, 5), np.dtype("f8")).shape == (0, 5)
