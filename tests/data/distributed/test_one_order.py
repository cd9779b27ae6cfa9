"""All that is made from one shuffle has its order, and no later step changes it."""

from __future__ import annotations

import copy
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

# What is made of a shuffle, and of its order
WAYS = {
    "take and skip": (lambda d: [d.take(99), d.skip(99)], lambda x: x),
    "batches": (
        lambda d: [
            d.take(99).batch(2).unbatch(),
            d.skip(99).batch(20).map(lambda rows: rows).unbatch(),
        ],
        lambda x: x,
    ),
    "shards": (lambda d: [d.shard(3, i) for i in range(3)], lambda x: x),
    "features and labels": (
        lambda d: [Dataset.zip(d.map(lambda x: x), d.map(lambda x: 3 * x)).map(np.add)],
        lambda x: [4 * i for i in x],
    ),
    "nested zips": (
        lambda d: [
            Dataset.zip(Dataset.zip(d, d.skip(0)), d.prefetch(1)).map(
                lambda pair, z: pair[0] + pair[1] - 2 * z
            )
        ],
        lambda x: [0] * len(x),
    ),
    "concatenated": (lambda d: [d.concatenate(d.take(50))], lambda x: x + x[:50]),
    "repeated": (lambda d: [d.repeat(2)], lambda x: x + x),
    "filtered": (
        lambda d: [d.filter(lambda x: x % 3 == 0), d.filter(lambda x: x % 3 == 1)],
        lambda x: [i for n in range(2) for i in x if i % 3 == n],
    ),
    "interleaved": (
        lambda d: [d.interleave(lambda x: Dataset.range(x, x + 1), 1)],
        lambda x: x,
    ),
    "enumerated": (
        lambda d: [d.enumerate().map(lambda i, x: x)],
        lambda x: x,
    ),
    "shuffled again": (
        lambda d: [d.shuffle(ROWS, seed=1).batch(40).unbatch().take(0), d],
        lambda x: x,
    ),
    "cached": (
        lambda d: [d.batch(30).unbatch().take(20), d.take(99).skip(20), d.skip(99)],
        lambda x: x,
    ),
    "copied": (
        lambda d: [copy.deepcopy(d).take(99), copy.copy(d).skip(99)],
        lambda x: x,
    ),
}


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


def in_parts(way, order):
    """Return the rows that a way should give, from the order of the shuffle."""
    if way == "shards":
        return joined(order[i::3] for i in range(3))
    return WAYS[way][1](order)


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("way", WAYS)
def test_one_shuffle_is_one_order(strategy, comm, rows, way, seed):
    data = rows.shuffle(ROWS, seed, reshuffle_each_iteration=False)
    if way == "cached" and not hasattr(rows.pipeline, "iterate"):
        data = data.cache()
    order = distributed(strategy, comm, [data])
    assert sorted(order) == list(range(ROWS))
    assert order != list(range(ROWS))
    for _ in range(2):
        parts = WAYS[way][0](data)
        assert distributed(strategy, comm, parts) == in_parts(way, order)
        assert alone(parts) == in_parts(way, order)


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


def test_shuffles_without_a_seed_differ_however_they_are_combined(strategy, comm):
    a, b, c = (numbers(60).shuffle() for _ in range(3))
    zipped = Dataset.zip(Dataset.zip(a, b), Dataset.zip(c, a)).map(
        lambda x, y: np.stack([*x, *y])
    )
    orders = np.array(distributed(strategy, comm, [zipped])).reshape(-1, 4).T.tolist()
    assert orders[0] == orders[3]
    assert len(set(map(tuple, orders))) == 3
    assert sorted(orders[1]) == list(range(60))


def test_an_epoch_has_one_order_and_each_has_another(strategy, comm):
    data = numbers(60).shuffle()
    zipped = Dataset.zip(data.map(lambda x: x), data.map(lambda x: -x)).batch(8)
    divided = strategy.experimental_distribute_dataset(zipped)
    orders = []
    for _ in range(3):
        for x, y in divided:
            assert (np.asarray(x.values[0]) == -np.asarray(y.values[0])).all()
    for _ in range(2):  # a dataset that is made again is no old epoch
        orders += [distributed(strategy, comm, [data]), alone([data])]
    assert len(set(map(tuple, orders))) == 4


@pytest.mark.parametrize("is_local", [False, True])
def test_a_resumed_half_takes_the_other_half_along(strategy, comm, rows, is_local):
    def start(data):
        part = data.skip(40).batch(16)
        return iter(part) if is_local else iter(divide(part))

    def divide(part):
        return strategy.experimental_distribute_dataset(part)

    def rest(iterator):
        if is_local:
            return joined(lists(iterator))
        return in_order(on_all_ranks(strategy, comm, iterator))

    def make():
        return rows.shuffle(ROWS, reshuffle_each_iteration=False).with_options(OFF)

    before, after = make(), make()
    if not is_local:
        before, after = (x.with_options(Options()) for x in (before, after))
    other = alone([before.take(40)]) if is_local else None
    iterator = start(before)
    next(iterator)
    state, expected = iterator.get_state(), rest(iterator)
    resumed = start(after)
    resumed.set_state(state)
    assert rest(resumed) == expected
    if is_local:
        assert alone([after.take(40)]) == other
    else:
        first = distributed(strategy, comm, [before.take(40)])
        assert distributed(strategy, comm, [after.take(40)]) == first
    assert rest(start(after))[16:] == expected


def test_a_pickled_dataset_has_its_order(strategy, comm):
    data = numbers(60).shuffle(reshuffle_each_iteration=False)
    copied = pickle.loads(pickle.dumps(data))
    order = distributed(strategy, comm, [data])
    assert distributed(strategy, comm, [copied.take(9), copied.skip(9)]) == order


def test_each_replica_takes_its_shard_of_one_order(strategy, comm):
    data = numbers(60).shuffle(reshuffle_each_iteration=False)

    def make(context):
        where = context.num_input_pipelines, context.input_pipeline_id
        return data.take(40).shard(*where).batch(3)

    own = strategy.distribute_datasets_from_function(make)
    train = in_order(on_all_ranks(strategy, comm, own))
    test = distributed(strategy, comm, [data.skip(40)])
    assert sorted(train + test) == list(range(60))


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
