"""Generators and mapped functions may reuse their arrays: each element is its own."""

import sys
import threading

import numpy as np
import pytest

from mpidist import Dataset
from mpidist.data import elements


@pytest.mark.parametrize("threads", [None, 3])
def test_generators_and_functions_that_reuse_their_arrays(threads):
    """With all that may follow: tests/fuzz/rows.py."""
    local = threading.local()

    def reuse(i):
        if not hasattr(local, "memory"):
            local.memory = np.empty((2, 2))
        local.memory[...] = i
        return {"x": local.memory, "y": (local.memory[0], local.memory.T)}

    expected = [[[i, i]] * 2 for i in range(9)]
    for dataset in (
        Dataset.from_generator(lambda: map(reuse, range(9))),
        Dataset.range(9).map(reuse, threads),
        Dataset.from_generator(lambda: iter(range(9))).map(reuse, threads),
    ):
        for steps in (
            dataset,
            dataset.prefetch(3),
            dataset.cache(),
        ):
            found = list(steps)
            assert [e["x"].tolist() for e in found] == expected
            assert [[e["y"][0].tolist()] * 2 for e in found] == expected


def test_a_function_that_returns_what_it_got_before():
    before = []

    def previous(x):
        before.append(x)
        return before[-2] if len(before) > 1 else x

    rows = np.arange(10.0).reshape(5, 2)
    found = list(Dataset.from_tensor_slices(rows).map(previous))
    for array in before:
        array[...] = -1
    # The first is what it got: nobody but the function could change it
    np.testing.assert_array_equal(found[1:], rows[:-1])


def test_buffers_that_are_no_arrays():
    data = bytearray(4)

    def generate():
        for i in range(3):
            data[:] = bytes([i] * 4)
            yield np.frombuffer(data, np.uint8), memoryview(data)

    for found in zip(*Dataset.from_generator(generate), strict=True):
        assert [a.tolist() for a in found] == [[i] * 4 for i in range(3)]


def test_tensors_of_pytorch():
    torch = pytest.importorskip("torch")
    buffer = torch.zeros(2)
    found = list(Dataset.range(3).map(lambda i: buffer.fill_(int(i))))
    assert [x.tolist() for x in found] == [[i, i] for i in range(3)]


@pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(),
    reason="without a global lock new arrays cannot be told",
)
def test_new_arrays_are_not_copied(monkeypatch):
    monkeypatch.setattr(elements, "_copy", lambda array: pytest.fail("copied"))

    def generate():
        for i in range(3):
            yield np.full(6, i).reshape(2, 3), {"x": np.full(2, i)}, 3, [i]

    rows = np.arange(12.0).reshape(4, 3)
    arrays = Dataset.from_tensor_slices((rows, rows[:, 0]))
    windows = np.lib.stride_tricks.sliding_window_view
    for dataset in [
        Dataset.from_generator(generate),
        Dataset.from_generator(generate).map(lambda *e: e).batch(2),
        arrays.map(lambda x, y: (x / 2, y)),
        arrays.map(lambda x, y: {"x": x[1:], "y": [y, y]}, 2).batch(3),
        arrays.batch(2).map(lambda x, y: (x, x.reshape(-1), np.multiply(x, 2, out=x))),
        arrays.batch(2).map(lambda x, y: windows(x, 2, axis=1)),
        arrays.map(lambda x, y: x).cache().map(lambda x: x.T),
    ]:
        assert len(list(dataset)) > 0
