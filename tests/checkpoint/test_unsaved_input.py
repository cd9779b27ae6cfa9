"""A checkpoint without the place in the input of a job: rank 0 says so, once."""

import warnings

import numpy as np
import pytest

import mpidist
from mpidist import Dataset
from mpidist.data.distributed import datasets

ROWS = Dataset.range(12)
SHUFFLED = ROWS.shuffle(seed=0).batch(4)


@pytest.fixture
def warned(monkeypatch):
    """The warnings of this rank."""
    texts = []
    monkeypatch.setattr(datasets, "_has_warned", False)
    monkeypatch.setattr(datasets, "warn", texts.append)
    return texts


@pytest.fixture
def save(strategy, mpi_tmp_path):
    def save(**objects):
        return mpidist.Checkpoint(strategy=strategy, **objects).save(
            mpi_tmp_path / "ckpt"
        )

    return save


def distribute(strategy, dataset):
    return strategy.experimental_distribute_dataset(dataset)


def read_all(strategy, dataset, save):
    train = distribute(strategy, dataset)
    list(train)
    save(w=1)


def within(strategy, dataset, save):
    for _ in distribute(strategy, dataset):
        save(w=1)


def held(strategy, dataset, save):
    batches = iter(mpidist.as_arrays(distribute(strategy, dataset)))
    next(batches)
    save(w=1)


def another_strategy(strategy, dataset, save):
    other = mpidist.MirroredStrategy(["CPU:0"])
    train = other.experimental_distribute_dataset(dataset)
    list(train)
    save(w=1)


def unread(strategy, dataset, save):
    train = distribute(strategy, dataset)
    save(w=1)
    assert len(train) == 3


def saved(strategy, dataset, save):
    train = distribute(strategy, dataset)
    batches = iter(train)
    for _ in batches:
        save(w=1, batches=batches)
    save(batches=iter(train))
    save(w=1)


def saved_in_a_list(strategy, dataset, save):
    batches = iter(mpidist.as_arrays(distribute(strategy, dataset)))
    for _ in batches:
        save(nested={"inputs": [batches]})


def saved_as_numbers(strategy, dataset, save):
    batches = iter(distribute(strategy, dataset))
    for _ in batches:
        save(w=1, place=batches.get_state())


def saved_later(strategy, dataset, save):
    train = mpidist.as_arrays(distribute(strategy, dataset))
    whole = mpidist.Checkpoint(strategy=strategy, w=1, batches=iter(train))
    for _ in whole.batches:
        save(best=1)


def resumed(strategy, dataset, save):
    state = iter(distribute(strategy, dataset)).get_state()
    train = distribute(strategy, dataset)
    batches = iter(train)
    batches.set_state(state)
    list(batches)
    save(w=1)


@pytest.mark.parametrize(
    ("use", "dataset"),
    [
        (read_all, SHUFFLED),
        (read_all, ROWS.batch(4).shuffle()),
        (read_all, ROWS.filter(lambda x: True).shuffle(4).batch(4)),
        (within, ROWS.batch(4)),
        (within, ROWS.batch(4).repeat(2)),
        (held, ROWS.batch(4).repeat()),
        (held, lambda: iter([np.zeros(4), np.ones(4)])),
    ],
)
def test_rows_that_would_be_read_again_are_said_once(
    strategy, save, warned, use, dataset
):
    for _ in range(2):
        use(strategy, dataset, save)
    assert len(warned) == strategy.is_first
    assert all("batches=iter(dataset)" in text for text in warned)


@pytest.mark.parametrize(
    ("use", "dataset"),
    [
        (read_all, ROWS.batch(4)),
        (read_all, ROWS.shuffle(reshuffle_each_iteration=False).batch(4)),
        (read_all, ROWS.shuffle(seed=1).cache().batch(4)),
        (another_strategy, SHUFFLED),
        (unread, SHUFFLED),
        (saved, SHUFFLED),
        (saved_in_a_list, SHUFFLED),
        (saved_as_numbers, SHUFFLED),
        (saved_later, SHUFFLED),
        (resumed, SHUFFLED),
    ],
)
def test_jobs_that_lose_no_place_hear_nothing(strategy, save, warned, use, dataset):
    use(strategy, dataset, save)
    assert not warned


def test_a_warning_that_is_an_error_ends_no_rank(strategy, save, monkeypatch, caplog):
    monkeypatch.setattr(datasets, "_has_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_all(strategy, SHUFFLED, save)
    assert ("place in the input" in caplog.text) == strategy.is_first
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync
