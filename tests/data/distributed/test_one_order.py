"""All that is made from one shuffle has its order, and no later step changes it."""

from __future__ import annotations

import itertools
import pickle

import h5py
import numpy as np
import pytest
from all_ranks import in_order, on_all_ranks
from datasets import generated, joined, lists, numbers

from mpidist import AutoShardPolicy, Dataset, Options
from mpidist.errors import ArgumentError
from mpidist.hdf5 import read as hdf5_read

ROWS = 300
OFF = Options(AutoShardPolicy.OFF)
SIZES = (7, 100, 32)


def files(folder):
    """Rows in compressed chunks, too many to keep them decoded."""
    paths = [folder / f"{i}.h5" for i in range(2)]
    for i, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            rows = np.arange(i * ROWS // 2, (i + 1) * ROWS // 2)
            file.create_dataset("x", data=rows, chunks=(3,), compression="gzip")
    return Dataset.from_hdf5(paths, "x")


SOURCES = {
    "range": lambda folder: numbers(ROWS),
    "generator": lambda folder: generated(ROWS),
    "files": files,
}


@pytest.fixture(params=SOURCES)
def rows(request, tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5_read, "KEPT_BYTES", 1000)
    return SOURCES[request.param](tmp_path)


def distributed(strategy, comm, parts):
    """Return the rows of all ranks of datasets of rows, in batches of unlike sizes."""
    found = []
    for part, size in zip(parts, itertools.cycle(SIZES)):
        divided = strategy.experimental_distribute_dataset(part.batch(size))
        found += in_order(on_all_ranks(strategy, comm, divided))
    return found


def alone(parts):
    sized = zip(parts, itertools.cycle(SIZES))
    return joined(joined(lists(d.batch(n).with_options(OFF))) for d, n in sized)


def test_an_order_is_that_of_rank_0_also_if_it_has_read_before(strategy, comm, rows):
    data = rows.shuffle(ROWS, reshuffle_each_iteration=False)
    before = alone([data.take(40)]) if comm.rank == 0 else None
    found = distributed(strategy, comm, [data.skip(40)])
    assert alone([data.take(40)]) == (before or alone([data.take(40)]))
    assert sorted(comm.bcast(before) + found) == list(range(ROWS))


@pytest.mark.mpi(min_size=2)
def test_an_order_that_a_rank_has_used_does_not_change(strategy, comm):
    data = numbers(60).shuffle(reshuffle_each_iteration=False)
    if comm.rank == comm.size - 1:
        alone([data.take(1)])
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"rank {comm.size - 1}, .*a seed"):
            strategy.experimental_distribute_dataset(data.batch(8))
    seeded = numbers(60).shuffle(seed=1, reshuffle_each_iteration=False)
    first = alone([seeded])
    assert distributed(strategy, comm, [seeded]) == first
    # An order for one epoch binds nobody
    free = numbers(60).shuffle()
    alone([free.take(comm.rank)])
    assert sorted(distributed(strategy, comm, [free])) == list(range(60))


def test_a_pickled_dataset_has_its_order(strategy, comm):
    data = numbers(60).shuffle(reshuffle_each_iteration=False)
    copied = pickle.loads(pickle.dumps(data))
    order = distributed(strategy, comm, [data])
    assert distributed(strategy, comm, [copied.take(9), copied.skip(9)]) == order


def test_seeds_that_interleave_draws_are_the_same_on_all_ranks(strategy, comm):
    parts = Dataset.range(3).interleave(
        lambda i: numbers(30).map(lambda x: 100 * i + x).shuffle(), 2
    )
    found = distributed(strategy, comm, [parts])
    assert sorted(found) == [100 * i + x for i in range(3) for x in range(30)]
    outer = numbers(30).shuffle(reshuffle_each_iteration=False)
    halves = Dataset.range(2).interleave(lambda i: outer.shard(2, i), 2)
    order = alone([outer])
    assert alone([halves]) == order
    divided = strategy.experimental_distribute_dataset(halves.batch(4))
    if comm.size == 1:
        assert in_order(on_all_ranks(strategy, comm, divided)) == order
    else:
        with pytest.raises(ArgumentError, match="shuffled without a seed outside"):
            list(divided)


@pytest.mark.mpi(min_size=2)
def test_ranks_whose_shuffles_are_not_the_same_raise(strategy, comm):
    a, b = (numbers(9).shuffle() for _ in range(2))
    data = Dataset.zip(a, a if comm.rank else b).batch(3)
    with pytest.raises(ValueError, match="shuffles without a seed"):
        strategy.experimental_distribute_dataset(data)
