"""What iterating over files leaves behind: no thread, no open file."""

import os
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest

import mpidist
from mpidist import Dataset, InputOptions

ROWS = 64
DATA = np.arange(ROWS * 6, dtype="f4").reshape(ROWS, 6)
DEPTHS = [0, 1, 3]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["bytes"] = DATA
        file.create_dataset("gzip", data=DATA, chunks=(4, 6), compression="gzip")
        file.create_dataset("lzf", data=DATA, chunks=(4, 6), compression="lzf")
    return path


def left_open(path):
    """Return the descriptors and maps of a file that this process has."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    open_files = [str(link.readlink()) for link in links if link.is_symlink()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in open_files + maps if str(path) in line]


def wait_for_threads():
    """Wait until the threads that were told to end have ended; return the others."""
    for thread in threading.enumerate():
        if thread.name.startswith("mpidist"):
            thread.join(600)
    return [t.name for t in threading.enumerate() if t.name.startswith("mpidist")]


def require_nothing_left(path):
    assert wait_for_threads() == []
    assert left_open(path) == []


def distribute(strategy, path, name, depth, dataset=lambda d: d):
    rows = dataset(Dataset.from_hdf5(path, name)).shuffle(seed=0, window_chunks=2)
    options = InputOptions(experimental_per_replica_buffer_size=depth)
    return strategy.experimental_distribute_dataset(rows.batch(8), options)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", ["bytes", "gzip", "lzf"])
def test_a_loop_that_is_left_leaves_nothing_behind(strategy, path, name, depth):
    """By a break, by an error in the loop, or by one of a mapped function."""

    def fail(row):
        if row[0] > 200:
            raise OSError("no such row")
        return row

    for _ in distribute(strategy, path, name, depth):
        break
    require_nothing_left(path)
    with pytest.raises(ZeroDivisionError):
        for step, _ in enumerate(distribute(strategy, path, name, depth)):
            1 / (step - 2)
    require_nothing_left(path)
    with pytest.raises(OSError, match="no such row"):
        list(distribute(strategy, path, name, depth, lambda d: d.map(fail)))
    require_nothing_left(path)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", ["bytes", "gzip", "lzf"])
@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_closing_leaves_nothing_behind(strategy, path, name, depth, steps):
    iterator = iter(distribute(strategy, path, name, depth))
    for _ in range(steps):
        next(iterator)
    if steps == ROWS // 8:
        with pytest.raises(StopIteration):
            next(iterator)
    iterator.close()
    require_nothing_left(path)


def test_the_end_leaves_no_thread_and_forgetting_the_dataset_no_file(strategy, path):
    divided = distribute(strategy, path, "gzip", 1)
    for _ in divided:
        assert left_open(path)
    assert wait_for_threads() == []
    del divided
    assert left_open(path) == []


def test_another_iterator_keeps_its_files(strategy, path):
    divided = distribute(strategy, path, "bytes", 1)
    one, two = iter(divided), iter(divided)
    next(one)
    next(two)
    one.close()
    assert left_open(path)
    assert sum(1 for _ in two) == ROWS // 8 - 1
    two.close()
    assert left_open(path) == []


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_break_from_a_local_dataset_leaves_nothing_behind(path, ahead):
    dataset = Dataset.from_hdf5(path, "gzip").batch(4).prefetch(ahead)
    for _ in dataset:
        break
    require_nothing_left(path)
    with pytest.raises(ZeroDivisionError):
        list(Dataset.from_hdf5(path, "gzip").map(lambda row: 1 // 0))
    assert left_open(path) == []


def test_many_files_are_not_open_all_at_once(tmp_path):
    paths = [tmp_path / f"{i}.h5" for i in range(300)]
    for i, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            file["x"] = np.full(2, i)
    found = []
    for batch in Dataset.from_hdf5(paths, "x").shuffle(seed=1).batch(100):
        found.extend(batch.tolist())
        open_files = {line for line in left_open(tmp_path) if line.startswith("/")}
        assert len(open_files) <= 128
    assert sorted(found) == sorted([*range(300)] * 2)
    assert mpidist.Dataset.from_hdf5(paths, "x").cardinality() == 600
