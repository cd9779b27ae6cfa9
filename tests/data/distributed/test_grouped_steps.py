"""Small batches of files are read, and agreed on, several at a time."""

import threading

import h5py
import numpy as np
import pytest

import mpidist
from mpidist import Dataset, InputOptions
from mpidist.data.distributed import reader

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
    monkeypatch.setattr(reader, "_GROUPS", ((8 << 20, steps),))
    options = InputOptions(experimental_per_replica_buffer_size=depth)
    dataset = Dataset.from_hdf5(path, "x").shuffle(seed=1).batch(batch)
    divided = strategy.experimental_distribute_dataset(dataset, options)
    for _ in range(2):
        assert rows_of(strategy, divided) == list(range(ROWS))


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
    go_on = [threading.Event() for _ in range(2)]

    def wait(x):
        calls.append(len(calls))
        if len(calls) in (2, 3):  # behind the first batch, and behind the second
            assert go_on[len(calls) - 2].wait(60)
        return x

    dataset = Dataset.from_hdf5(path, "x").batch(8).map(wait)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    for event in go_on:
        next(iterator)
        event.set()
    for _ in iterator:
        pass
    assert calls == list(range(25))


@pytest.mark.parametrize("is_cached", [False, True])
def test_an_error_in_a_group_is_raised_at_its_step(strategy, path, is_cached):
    """And the function is called once for each batch before it."""
    calls = []

    def fail_once(x):
        calls.append(np.asarray(x).tolist())
        if len(calls) == 12:
            raise KeyError("the twelfth")
        return x

    dataset = Dataset.from_hdf5(path, "x").batch(8)
    if is_cached:
        dataset = dataset.cache()
    dataset = dataset.map(fail_once)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    batches = [next(iterator) for _ in range(11)]
    with pytest.raises(KeyError, match="the twelfth"):
        next(iterator)
    twelfth = calls[11]
    batches += iterator
    assert rows_of(strategy, batches) == list(range(ROWS))
    assert [calls.count(call) for call in calls[:12]] == [1] * 11 + [2]
    assert calls.index(twelfth) == 11


def test_a_function_of_rows_is_called_once_for_each(strategy, comm, path):
    """Also where a later one of those that are read together fails."""
    calls = []

    def fail_once(x):
        calls.append(int(x))
        if len(calls) == 30:
            raise KeyError("the thirtieth")
        return x

    dataset = Dataset.from_hdf5(path, "x").map(fail_once).batch(2 * comm.size)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    batches = [next(iterator) for _ in range(14)]
    with pytest.raises(KeyError, match="the thirtieth"):
        next(iterator)
    assert [calls.count(call) for call in calls[:28]] == [1] * 28
    iterator.close()
    assert len(batches) == 14


@pytest.fixture
def threads(monkeypatch):
    """The names of the threads that have read groups of steps."""
    names = []
    read_group = reader._MapReader.read_group

    def note(self, *args):
        names.append(threading.current_thread().name)
        return read_group(self, *args)

    monkeypatch.setattr(reader._MapReader, "read_group", note)
    return names


def go_through(strategy, dataset):
    for _ in strategy.experimental_distribute_dataset(dataset):
        pass


def test_slow_reads_are_left_to_a_thread(strategy, path, read_in_threads, threads):
    """The first one, and at times others, are not."""
    go_through(strategy, Dataset.from_hdf5(path, "x").repeat(240).batch(12))
    assert threads[0] == "MainThread"
    assert set(threads[1:17]) == {"mpidist-input_0"}
    assert "MainThread" in threads[17:]


def test_short_reads_are_not_handed_over(strategy, path, monkeypatch, threads):
    monkeypatch.setattr(reader, "_SHORT_SECONDS", 1e9)
    go_through(strategy, Dataset.from_hdf5(path, "x").batch(8))
    assert set(threads) == {"MainThread"}


def test_functions_are_never_called_in_the_thread_that_waits(
    strategy, path, monkeypatch, threads
):
    """They would be in its context, sometimes: how long reads take differs by rank."""
    monkeypatch.setattr(reader, "_SHORT_SECONDS", 1e9)
    dataset = Dataset.from_hdf5(path, "x").batch(8).map(lambda x: x).cache()
    with strategy.scope():
        for _ in range(2):
            go_through(strategy, dataset)
    assert set(threads) == {"mpidist-input_0"}


def test_functions_that_communicate(strategy, comm, path, monkeypatch):
    """They pair by position, however long each rank takes."""
    monkeypatch.setattr(reader, "_SHORT_SECONDS", -1.0 if comm.rank == 1 else 1e9)

    def total(x):
        return x + 0 * int(strategy.reduce("SUM", 1))

    dataset = Dataset.from_hdf5(path, "x").batch(8 * comm.size).map(total)
    with strategy.scope():
        batches = list(strategy.experimental_distribute_dataset(dataset))
    assert rows_of(strategy, batches) == list(range(ROWS))
