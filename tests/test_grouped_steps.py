"""Small batches of files are read, and agreed on, several at a time."""

from __future__ import annotations

import threading

import h5py
import numpy as np
import pytest

import mpidist
from mpidist import Dataset, InputOptions
from mpidist.data.distributed import ahead, feed

ROWS = 200


@pytest.fixture
def path(comm, mpi_tmp_path):
    path = mpi_tmp_path / "x.h5"
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(ROWS)
    comm.Barrier()
    return path


def rows_of(strategy, batches):
    parts = [np.asarray(strategy.experimental_local_results(b)[0]) for b in batches]
    found = strategy.gather(np.concatenate(parts), axis=0)
    return sorted(found.tolist())


@pytest.mark.parametrize("steps", [1, 3, 16])
@pytest.mark.parametrize("depth", [0, 1, 2, 40])
@pytest.mark.parametrize("batch", [7, 8, 300])
def test_every_row_comes_once(strategy, path, monkeypatch, steps, depth, batch):
    monkeypatch.setattr(feed, "_GROUP_STEPS", steps)
    options = InputOptions(experimental_per_replica_buffer_size=depth)
    dataset = Dataset.from_hdf5(path, "x").shuffle(seed=1).batch(batch)
    divided = strategy.experimental_distribute_dataset(dataset, options)
    for _ in range(2):
        assert rows_of(strategy, divided) == list(range(ROWS))


def test_an_endless_dataset(strategy, path):
    dataset = Dataset.from_hdf5(path, "x").repeat().batch(30)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    found = rows_of(strategy, [next(iterator) for _ in range(40)])
    assert found == sorted([*range(ROWS)] * 6)
    iterator.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("behind", [1, 2, 5])
def test_a_replica_behind_the_others_is_noticed_by_the_next_collective(
    strategy, comm, path, behind
):
    """Also within steps that all have agreed on, where `next` does not communicate."""
    dataset = Dataset.from_hdf5(path, "x").batch(10)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    for _ in range(8 - behind * (comm.rank == 1)):
        next(iterator)
    message = rf"step in epoch 0 of dataset \d+ is 8 .*{8 - behind} on rank 1"
    with pytest.raises(mpidist.MismatchError, match=message):
        strategy.reduce("SUM", np.ones(3))
    for _ in range(behind * (comm.rank == 1)):
        next(iterator)
    assert strategy.reduce("SUM", 1) == comm.size
    iterator.close()


@pytest.mark.mpi(min_size=2)
def test_unlike_steps_at_a_time_are_noticed(strategy, comm, path):
    options = InputOptions(experimental_per_replica_buffer_size=comm.rank)
    dataset = Dataset.from_hdf5(path, "x").batch(10)
    iterator = iter(strategy.experimental_distribute_dataset(dataset, options))
    with pytest.raises(mpidist.MismatchError, match="steps at a time is 1 on rank 0"):
        next(iterator)


def test_two_iterators_in_turn(strategy, path):
    dataset = Dataset.from_hdf5(path, "x").batch(10)
    divided = strategy.experimental_distribute_dataset(dataset)
    one, two = iter(divided), iter(divided)
    found = ([], [])
    for _ in range(20):
        found[0].append(next(one))
        found[1].append(next(two))
        strategy.reduce("SUM", 1)
    for batches in found:
        assert rows_of(strategy, batches) == list(range(ROWS))
    one.close()
    two.close()


def test_functions_of_few_steps_are_called_first(strategy, path):
    """So that the first batches need not wait for those of many steps."""
    calls = []

    def note(x):
        calls.append(len(calls))
        return x

    dataset = Dataset.from_hdf5(path, "x").batch(8).map(note)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    called = []
    for _ in iterator:
        called.append(len(calls))
    assert called[0] == 1
    assert calls == list(range(25))


@pytest.mark.parametrize("is_cached", [False, True])
def test_an_error_in_a_group_is_raised_at_its_step(
    strategy, path, monkeypatch, is_cached
):
    """And the function is called once for each batch, before and behind it too."""
    monkeypatch.setattr(ahead, "_SHORT_SECONDS", 1e9)  # none is read ahead
    calls = []

    def fail_once(x):
        calls.append(x)
        if len(calls) == 12:
            raise KeyError("the twelfth")
        return x

    dataset = Dataset.from_hdf5(path, "x").batch(8)
    if is_cached:
        dataset = dataset.cache()
    dataset = dataset.map(fail_once)
    divided = strategy.experimental_distribute_dataset(dataset)
    iterator = iter(divided)
    batches = [next(iterator) for _ in range(11)]
    with pytest.raises(KeyError, match="the twelfth"):
        next(iterator)
    batches += iterator
    assert rows_of(strategy, batches) == list(range(ROWS))
    assert len(calls) == 26


def test_slow_reads_are_left_to_a_thread(strategy, path, read_in_threads):
    """Those of the first steps, and at times others, are not."""
    names = []

    def note(x):
        names.append(threading.current_thread().name)
        return x

    dataset = Dataset.from_hdf5(path, "x").repeat(60).batch(12).map(note)
    for _ in strategy.experimental_distribute_dataset(dataset):
        pass
    assert names[0] == "MainThread"
    assert set(names[1:200]) == {"mpidist-input_0"}
    assert "MainThread" in names[200:]


def test_short_reads_are_not_handed_over(strategy, path, monkeypatch):
    monkeypatch.setattr(ahead, "_SHORT_SECONDS", 1e9)
    names = set()

    def note(x):
        names.add(threading.current_thread().name)
        return x

    dataset = Dataset.from_hdf5(path, "x").batch(8).map(note)
    for _ in strategy.experimental_distribute_dataset(dataset):
        pass
    assert names == {"MainThread"}
