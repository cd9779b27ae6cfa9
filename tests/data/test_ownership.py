"""Generators and mapped functions may reuse their arrays: each element is its own."""

import sys
import threading

import numpy as np
import pytest
from datasets import generated

import mpidist
from mpidist import Dataset
from mpidist.data import elements

ROWS = 12


def reusing():
    """Yield nests of one buffer, of a view of it, and of an array that it is copied to.

    As `anew` does, but in the same memory each time.
    """
    buffer, other = np.empty((2, 3)), np.empty(2, "i4")
    for i in range(ROWS):
        buffer[...], other[...] = i, -i
        yield {"x": buffer, "y": (buffer[1, :2], other)}


def anew():
    for i in range(ROWS):
        x = np.full((2, 3), float(i))
        yield {"x": x, "y": (x[1, :2], np.full(2, -i, "i4"))}


STEPS = {
    "none": lambda d: d,
    "batch": lambda d: d.batch(5),
    "batches of batches": lambda d: d.batch(2).batch(3),
    "shuffle": lambda d: d.shuffle(4, seed=1),
    "prefetch": lambda d: d.prefetch(3),
    "cache": lambda d: d.cache().repeat(2),
    "map": lambda d: d.map(lambda e: e),
    "map in threads": lambda d: d.map(lambda e: e, 3),
    "window": lambda d: d.skip(1).take(7),
    "concatenate": lambda d: d.concatenate(d),
    "shard": lambda d: d.shard(2, 1),
}


def require_equal(found, expected):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        leaves, spec = mpidist.util.nest.flatten(one)
        other_leaves, other_spec = mpidist.util.nest.flatten(other)
        assert spec == other_spec
        for a, b in zip(leaves, other_leaves, strict=True):
            assert np.asarray(a).dtype == np.asarray(b).dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_generator_that_reuses_its_arrays(steps):
    found = steps(Dataset.from_generator(reusing))
    require_equal(found, steps(Dataset.from_generator(anew)))


@pytest.mark.parametrize("source", [Dataset.range, lambda n: generated(n)])
@pytest.mark.parametrize("threads", [None, 3])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_function_that_reuses_its_arrays(source, threads, steps):
    local = threading.local()

    def reuse(i):
        if not hasattr(local, "buffer"):
            local.buffer = np.empty((2, 3))
        local.buffer[...] = i
        return {"x": local.buffer, "y": (local.buffer[1], local.buffer.T, i)}

    def make(i):
        x = np.full((2, 3), float(i))
        return {"x": x, "y": (x[1], x.T, i)}

    found = steps(source(ROWS).map(reuse, threads))
    require_equal(found, steps(source(ROWS).map(make)))


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


@pytest.mark.parametrize("depth", [0, 3])
def test_replicas_get_their_own_arrays(strategy, depth):
    n, buffer = strategy.num_replicas_in_sync, np.empty((6, 2))

    def generate():
        for i in range(8):
            buffer[...] = i
            yield buffer

    def reuse(x):
        out = outs.setdefault(len(x), np.empty(x.shape))
        out[...] = x
        return out

    outs = {}
    options = mpidist.InputOptions(experimental_per_replica_buffer_size=depth)
    rows = np.repeat(np.arange(8.0), 6)[:, np.newaxis] * np.ones(2)
    for dataset in [
        generate,
        Dataset.from_generator(lambda: (b[0] for b in generate() for _ in b)).batch(6),
        Dataset.from_tensor_slices(rows).batch(6).map(reuse),
    ]:
        divided = strategy.experimental_distribute_dataset(dataset, options)
        kept = list(divided)
        for i, batch in enumerate(kept):
            found = strategy.gather(batch, 0)
            np.testing.assert_array_equal(found, np.full((6, 2), i), f"{n} replicas")


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
