"""Picking rows of many arrays, against NumPy's indexing."""

import ctypes
import functools
import gc
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mpidist import Dataset
from mpidist.hdf5.read import pick_rows
from mpidist.util.buffers import Buffers


def test_rows_of_objects():
    arrays = [np.array(["a", "b"], object), np.array([None, 3], object)]
    found = pick_rows(arrays, np.array([1, 0, 1]), np.array([1, 0, 0]), Buffers())
    assert found.tolist() == [3, "a", None]


def test_a_buffer_is_used_again_when_nobody_refers_to_it():
    buffers = Buffers()
    first = buffers.empty((4, 3), np.dtype("f4"))
    first[:] = 7
    views = [
        first[1:],
        first.T,
        memoryview(first),
        first.view("u1")[::2],
        first[2, 1:],
        first.view(np.recarray).reshape(-1)[3:],
        np.asarray(memoryview(first))[1:],
        np.from_dlpack(first)[:2],
        first.ctypes.data_as(ctypes.c_void_p),
    ]
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


def test_what_a_finalizer_of_a_cycle_still_reads_stays_as_it_is():
    buffers, found = Buffers(), []

    class Node:
        def __init__(self):
            self.array = buffers.empty((1000,), np.dtype("i8"))
            self.array[:] = 1
            self.itself = self

        def __del__(self):
            buffers.empty((1000,), np.dtype("i8"))[:] = 2
            found.append(self.array.sum())

    Node()
    gc.collect()
    assert found == [1000]


def test_a_signal_handler_does_not_get_the_memory_that_is_being_given():
    buffers, interrupted = Buffers(), []
    empty = functools.partial(buffers.empty, (1000,), np.dtype("i8"))
    empty()

    def interrupt(frame, event, argument):
        if not interrupted and frame.f_code.co_name == "lend" and event == "call":
            interrupted.append(empty())

    sys.setprofile(interrupt)
    try:
        array = empty()
    finally:
        sys.setprofile(None)
    assert interrupted
    assert not np.shares_memory(array, interrupted[0])


def test_threads_do_not_get_the_same_memory():
    buffers = Buffers(4)

    def fill(number):
        for _ in range(2000):
            array = buffers.empty((64,), np.dtype("i8"))
            array[:] = number
            if not (array == number).all():
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(fill, range(4)))


def test_buffers_of_objects_and_of_nothing_are_new():
    buffers = Buffers()
    assert buffers.empty((2,), np.dtype(object)).tolist() == [None, None]
    assert buffers.empty((0, 5), np.dtype("f8")).shape == (0, 5)


def test_memory_comes_from_who_is_told_to_allocate():
    buffers, given = Buffers(), []

    def allocate(size):
        given.append(np.empty(size, np.uint8))
        return given[-1]

    buffers.empty((4,), np.dtype("f8"))
    buffers.allocate_by(allocate)
    array = buffers.empty((4,), np.dtype("f8"))
    assert np.shares_memory(array, given[0])
    buffers.allocate_by(allocate)
    other = buffers.empty((4,), np.dtype("f8"))
    assert np.shares_memory(other, given[1])


def test_an_error_in_allocating_is_the_readers():
    buffers, sizes = Buffers(), []

    def allocate(size):
        sizes.append(size)
        if len(sizes) == 1:
            raise MemoryError("it is full")
        return np.empty(size, np.uint8)

    buffers.allocate_by(allocate)
    with pytest.raises(MemoryError, match="it is full"):
        buffers.empty((4,), np.dtype("f8"))
    assert buffers.empty((4,), np.dtype("f8")).shape == (4,)


def test_copies_and_forks_begin_without_memory(monkeypatch):
    buffers = Buffers()
    buffers.allocate_by(lambda size: pytest.fail("it is for one process"))
    copy = pickle.loads(pickle.dumps(buffers))
    assert copy.empty((4,), np.dtype("f8")).shape == (4,)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    assert buffers.empty((4,), np.dtype("f8")).shape == (4,)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(60_000).reshape(300, 200),
        np.arange(60_000).reshape(200, 300).T,
        np.arange(120_000.0).reshape(600, 200)[::2],
        np.arange(60_000).astype(">i4").reshape(300, 2, 100),
        np.ndarray((300, 200), "i8", bytes(range(241)) * 2000, offset=3),
        np.arange(60_000).astype("U5").reshape(300, 200),
    ],
)
def test_large_batches_of_arrays_in_memory(array):
    """They are kept, while the memory of others is used again."""
    whole = Dataset.from_tensor_slices(array).shuffle(seed=1).batch(100)
    expected = [b.tolist() for b in Dataset.range(300).shuffle(seed=1).batch(100)]
    kept = list(whole)
    for batch in whole.repeat(3):
        assert batch.dtype == array.dtype
    for batch, numbers in zip(kept, expected, strict=True):
        np.testing.assert_array_equal(batch, array[numbers])
