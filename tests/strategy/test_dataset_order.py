"""Rows written for the batches of a dataset, where the dataset has them."""

import gc
import itertools
import os

import h5py
import numpy as np
import pytest
from all_ranks import local

import mpidist
from mpidist import Dataset, Hdf5Writer
from mpidist.hdf5 import shard_writer
from mpidist.strategy import dataset_order

R = Dataset.range
FIVE = R(5).batch(2)
TWICE = np.tile(np.arange(10), 2)
BOTH = np.r_[:10, 20:25]
ORDERED = {
    "plain": (R(10).batch(4), np.arange(10)),
    "large": (R(70_000).shuffle().batch(1000), np.arange(70_000)),
    "repeated, shuffled": (R(10).repeat(2).shuffle().batch(3), TWICE),
    "mapped": (
        R(10).map(lambda x: x + 5).shuffle().batch(4).map(lambda x: x - 5),
        np.arange(10),
    ),
    "batches concatenated": (R(10).batch(4).concatenate(R(20, 25).batch(4)), BOTH),
    "twice the same": (FIVE.concatenate(FIVE), np.tile(range(5), 2)),
    "zipped": (
        Dataset.zip((R(9), R(9))).map(lambda x, y: x + 0 * y).shuffle().batch(2),
        np.arange(9),
    ),
}


@pytest.fixture
def path(mpi_tmp_path):
    return mpi_tmp_path / "predictions.h5"


def write(strategy, path, batches, **options):
    with Hdf5Writer(strategy, path, order="dataset", overwrite=True, **options) as out:
        for batch in batches:
            out.append(local(strategy, batch))


def read(path, name="data"):
    with h5py.File(path) as file:
        return file[name][:]


@pytest.mark.parametrize("case", ORDERED)
@pytest.mark.parametrize("round_bytes", [dataset_order._ROUND_BYTES, 50])
def test_rows_are_where_the_dataset_has_them(
    strategy, path, monkeypatch, case, round_bytes
):
    if round_bytes == 50 and case == "large":
        pytest.skip("ten thousand rounds")
    monkeypatch.setattr(dataset_order, "_ROUND_BYTES", round_bytes)
    dataset, expected = ORDERED[case]
    batches = strategy.experimental_distribute_dataset(dataset)
    for _ in range(2):  # epochs have unlike orders
        with Hdf5Writer(strategy, path, order="dataset", overwrite=True) as writer:
            for batch in batches:
                x = local(strategy, batch)
                pairs = np.stack([x, -x], 1).astype("f4")
                text, nothing = x.astype("S6"), np.zeros((len(x), 0))
                writer.append(
                    {"x": x, "pairs": pairs, "s": text, "b": x > 4, "none": nothing}
                )
        expected = np.asarray(expected)
        assert np.array_equal(read(path, "x"), expected)
        assert np.array_equal(read(path, "pairs"), np.stack([expected, -expected], 1))
        assert np.array_equal(read(path, "s"), expected.astype("S6"))
        assert np.array_equal(read(path, "b"), expected > 4)
        assert read(path, "none").shape == (len(expected), 0)


def test_the_rest_of_an_epoch_after_a_restore(strategy, path):
    dataset = R(10).shuffle(seed=1).batch(2)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    first = [strategy.gather(next(iterator), axis=0) for _ in range(2)]
    state = iterator.get_state()
    for options in ({}, {"fill_value": -1}):
        restored = iter(strategy.experimental_distribute_dataset(dataset))
        restored.set_state(state)
        if options:
            write(strategy, path, restored, **options)
        else:
            with pytest.raises(mpidist.DataError, match=r"row \d of the dataset"):
                write(strategy, path, restored)
    expected = np.arange(10)
    expected[np.concatenate(first)] = -1
    assert np.array_equal(read(path), expected)


def test_two_writers_watch_the_same_batches(strategy, path):
    batches = strategy.experimental_distribute_dataset(R(7).shuffle().batch(3))
    with Hdf5Writer(strategy, path, order="dataset") as writer:
        other = Hdf5Writer(strategy, path.with_name("other.h5"), order="dataset")
        for batch in batches:
            x = local(strategy, batch)
            writer.append(x)
            other.append(-x)
        other.close()
    assert np.array_equal(read(path), np.arange(7))
    assert np.array_equal(read(path.with_name("other.h5")), -np.arange(7))
    assert not strategy.extended.batch_watchers


def forget(objects):
    objects.clear()
    gc.collect()


def test_a_forgotten_writer_watches_nothing(strategy, path):
    writers = [Hdf5Writer(strategy, path, order="dataset")]
    assert len(strategy.extended.batch_watchers) == 1
    with pytest.warns(RuntimeWarning, match="was not closed"):
        forget(writers)
    strategy.barrier()  # each rank has removed its file
    assert os.listdir(path.parent) == []
    assert not strategy.extended.batch_watchers


def twice(strategy, writer, batches):
    for _ in range(2):
        for batch in batches:
            writer.append(local(strategy, batch))


def once_more(strategy, writer, batches):
    for batch in batches:
        writer.append(local(strategy, batch))
        writer.append(local(strategy, batch))


def other_rows(strategy, writer, batches):
    for _ in batches:
        writer.append(np.ones(20))


def skipped(strategy, writer, batches):
    for number, batch in enumerate(batches):
        if number:
            writer.append(local(strategy, batch))


def of_two(strategy, writer, batches):
    others = strategy.experimental_distribute_dataset(R(10).batch(4))
    for batch, _ in zip(batches, others):
        writer.append(local(strategy, batch))


PLAIN = R(10).batch(4)
FILTERED = R(10).filter(lambda x: True).shuffle(5).batch(4)
SHUFFLED = R(10).shuffle(seed=1)
ZIPPED = Dataset.zip((SHUFFLED, SHUFFLED)).batch(4).map(lambda x, y: x)


@pytest.mark.parametrize(
    ("dataset", "use", "error", "text"),
    [
        (
            PLAIN,
            twice,
            mpidist.ArgumentError,
            "of the dataset was appended more than once",
        ),
        (PLAIN, once_more, mpidist.ArgumentError, "no iterations"),
        (PLAIN, other_rows, mpidist.ArgumentError, "one row for each row"),
        (PLAIN, skipped, mpidist.ArgumentError, "several were taken"),
        (PLAIN, of_two, mpidist.ArgumentError, "2 iterations over"),
        (FILTERED, twice, mpidist.ArgumentError, "does not know the rows"),
        (ZIPPED, twice, mpidist.ArgumentError, "does not know the rows"),
    ],
)
def test_what_has_no_order_is_refused(strategy, path, dataset, use, error, text):
    batches = strategy.experimental_distribute_dataset(dataset)

    def write_wrongly():
        with Hdf5Writer(strategy, path, order="dataset") as writer:
            use(strategy, writer, batches)

    with pytest.raises(error, match=text):
        write_wrongly()
    strategy.barrier()
    assert os.listdir(path.parent) == []
    assert not strategy.extended.batch_watchers


NAMES = ["a", "", "bb", "c" * 5, "", "d", "e" * 300, "f"]


@pytest.mark.parametrize("block_bytes", [shard_writer.BLOCK_BYTES, 4])
@pytest.mark.parametrize("is_generated", [False, True])
@pytest.mark.parametrize("order", ["rank", "dataset"])
def test_text_of_functions_may_have_any_width(
    strategy, path, monkeypatch, order, is_generated, block_bytes
):
    monkeypatch.setattr(shard_writer, "BLOCK_BYTES", block_bytes)
    rows = R(24).filter(lambda i: True) if is_generated else R(24)
    rows = rows.map(lambda i: (i, NAMES[i % 8].encode(), [NAMES[-i % 8].encode()] * 2))
    batches = strategy.experimental_distribute_dataset(rows.batch(4))
    with Hdf5Writer(strategy, path, order=order) as writer:
        for i, name, pair in mpidist.as_arrays(batches):
            writer.append({"i": i, "name": name, "pair": pair})
    numbers = read(path, "i")
    assert sorted(numbers) == list(range(24))
    assert order == "rank" or numbers.tolist() == list(range(24))
    names = np.array(NAMES).astype("S300")
    assert read(path, "name").tolist() == names[numbers % 8].tolist()
    assert read(path, "name").dtype == names.dtype
    pairs = np.stack([names[-numbers % 8]] * 2, 1)
    assert read(path, "pair").tolist() == pairs.tolist()
    data = Dataset.from_hdf5(path, "name").batch(7)
    assert np.concatenate(list(data)).tolist() == names[numbers % 8].tolist()


def test_text_in_place_of_missing_rows_may_be_the_longest(strategy, path):
    rows = R(8).map(lambda i: b"ab"[: i % 3]).batch(4)
    batches = strategy.experimental_distribute_dataset(rows)
    write(strategy, path, itertools.islice(batches, 1), fill_value=b"none")
    assert read(path).tolist() == [b"", b"a", b"ab", b"", *[b"none"] * 4]


def ends_early(strategy, writer, batches):
    for batch in itertools.islice(batches, 2):
        writer.append(local(strategy, batch))


def reads_ahead(strategy, writer, batches):
    for batch, _ in itertools.pairwise(batches):
        writer.append(local(strategy, batch))


SHORT = [
    (PLAIN, ends_early),
    (R(10).shuffle(seed=1).take(6).batch(2), None),
    (R(10).batch(4, drop_remainder=True), None),
    (R(10).batch(3).take(3), ends_early),
    (R(10).repeat(2).batch(4), ends_early),
    (Dataset.zip((PLAIN, PLAIN)).map(lambda x, y: x), ends_early),
]


@pytest.mark.parametrize("case", range(len(SHORT)))
def test_rows_that_are_left_out_are_missed(strategy, path, case):
    """Also at the end of the dataset."""
    dataset, use = SHORT[case]
    batches = strategy.experimental_distribute_dataset(dataset)
    with (
        pytest.raises(mpidist.DataError, match="was not appended"),
        Hdf5Writer(strategy, path, order="dataset") as writer,
    ):
        if use is None:
            for batch in batches:
                writer.append(local(strategy, batch))
        else:
            use(strategy, writer, batches)


def test_the_value_of_rows_that_are_left_out(strategy, path):
    batches = strategy.experimental_distribute_dataset(R(11).batch(4))
    write(strategy, path, itertools.islice(batches, 2), fill_value=-1)
    assert read(path).tolist() == [*range(8), -1, -1, -1]
    for bad in (np.nan, 1.5, "x", {}, 1 << 70):
        with pytest.raises(mpidist.ArgumentError, match="cannot be a value of dataset"):
            write(strategy, path, batches, fill_value=bad)
    assert read(path).tolist() == [*range(8), -1, -1, -1]


def generated():
    return iter(np.split(np.arange(11), [4, 6, 6]))


LAST = [0, 1, 2, 3, 6, 7, 8]
# Rows without numbers, and the rows
UNNUMBERED = {
    "filter": (R(12).filter(lambda x: x > 1).batch(4), range(2, 12)),
    "batches filtered": (R(9).batch(2).filter(lambda x: 4 not in x), LAST),
    "unbatch": (R(11).batch(3).map(lambda x: x).unbatch().batch(4), range(11)),
    "generator": (Dataset.from_generator(lambda: iter(range(11))).batch(3), range(11)),
    "batches": (generated, range(11)),
    "mapped": (R(9).filter(lambda x: True).batch(2).map(lambda x: x), range(9)),
    "sharded": (R(16).batch(3).shard(2, 0), [*range(3), *range(6, 9), *range(12, 15)]),
}


def resumed(strategy, writer, batches):
    iterator = iter(batches)
    next(iterator), next(iterator)
    state, iterator = iterator.get_state(), iter(batches)
    iterator.set_state(state)
    once(strategy, writer, iterator)


def once(strategy, writer, batches):
    for batch in batches:
        writer.append(local(strategy, batch))


def set_back(strategy, writer, batches):
    iterator = iter(batches)
    state = iterator.get_state()
    for _ in range(2):
        writer.append(local(strategy, next(iterator)))
    iterator.set_state(state)
    once(strategy, writer, iterator)


def another_too(strategy, writer, batches):
    once(strategy, writer, batches)
    others = R(40).batch(4).filter(lambda x: True)
    once(strategy, writer, strategy.experimental_distribute_dataset(others))


def numbered_too(strategy, writer, batches):
    others = strategy.experimental_distribute_dataset(R(4).batch(4))
    once(strategy, writer, others)
    once(strategy, writer, batches)


def last_not(strategy, writer, batches):
    for batch, following in itertools.zip_longest(batches, range(2)):
        if following is not None:
            writer.append(local(strategy, batch))


def not_by_rank_0(strategy, writer, batches):
    rank = strategy.extended.replica_id
    for batch in batches:
        if rank > 0:
            writer.append(local(strategy, batch))


WRONG = [resumed, set_back, twice, ends_early, last_not, skipped, not_by_rank_0]
WRONG += [another_too, numbered_too]


@pytest.mark.parametrize("options", [{}, {"fill_value": -1}])
@pytest.mark.parametrize("use", WRONG)
@pytest.mark.parametrize("case", UNNUMBERED)
def test_without_numbers_no_rows_may_be_missing(strategy, path, case, use, options):
    batches = strategy.experimental_distribute_dataset(UNNUMBERED[case][0])

    def write_wrongly():
        with Hdf5Writer(strategy, path, order="dataset", **options) as writer:
            use(strategy, writer, batches)

    with pytest.raises(mpidist.MpidistError) as info:
        write_wrongly()
    assert not isinstance(info.value, mpidist.DivergenceError)
    strategy.barrier()
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("twice", ["repeat", "concatenate"])
def test_what_is_left_out_moves_no_later_rows(strategy, path, by_batch, twice):
    part = R(10).shuffle(seed=1, reshuffle_each_iteration=False).take(6)
    part = part.batch(2) if by_batch else part
    dataset = part.repeat(2) if twice == "repeat" else part.concatenate(part)
    dataset = dataset if by_batch else dataset.batch(4)
    batches = strategy.experimental_distribute_dataset(dataset)
    write(strategy, path, batches, fill_value=-1)
    found = read(path).reshape(2, 10)
    assert np.count_nonzero(found >= 0) == 12
    assert set(np.nonzero(found - np.arange(10))[1]) == set(np.nonzero(found < 0)[1])


def test_the_same_rows_may_be_read_for_another_purpose(strategy, path):
    batches = strategy.experimental_distribute_dataset(R(10).shuffle(seed=1).batch(3))
    with Hdf5Writer(strategy, path, order="dataset") as writer:
        assert strategy.statistics_of(batches).mean == 4.5
        for batch in batches:
            assert strategy.statistics_of(batches).mean == 4.5
            writer.append(local(strategy, batch))
    assert np.array_equal(read(path), np.arange(10))


def test_batches_must_not_be_read_ahead(strategy, path):
    batches = strategy.experimental_distribute_dataset(R(16).batch(4))
    with (
        pytest.raises(mpidist.ArgumentError, match="several were taken"),
        Hdf5Writer(strategy, path, order="dataset", fill_value=-1) as writer,
    ):
        reads_ahead(strategy, writer, batches)


@pytest.mark.parametrize("order", ["rank", "dataset"])
def test_a_rank_without_rows_decides_no_dtype(strategy, path, order):
    batches = strategy.experimental_distribute_dataset(R(3).batch(1))
    with Hdf5Writer(strategy, path, order=order) as writer:
        for batch in batches:
            writer.append(np.array([int(x) for x in local(strategy, batch)]))
    assert read(path).tolist() == [0, 1, 2]
    assert read(path).dtype == np.int64


def test_an_error_in_the_loop_leaves_the_strategy_usable(strategy, comm, path):
    batches = strategy.experimental_distribute_dataset(R(24).batch(4))
    with (
        pytest.raises(KeyError, match="on purpose"),
        Hdf5Writer(strategy, path, order="dataset") as writer,
    ):
        for number, batch in enumerate(batches):
            if number == 2 and comm.rank == comm.size - 1:
                raise KeyError("on purpose")
            writer.append(local(strategy, batch))
    assert strategy.reduce("SUM", 1) == comm.size
    write(strategy, path, batches)
    assert np.array_equal(read(path), np.arange(24))


def test_own_batches_are_refused(strategy, path):
    batches = strategy.distribute_datasets_from_function(lambda context: R(4).batch(2))
    with pytest.raises(mpidist.ArgumentError, match="a dataset of its own"):
        write(strategy, path, batches)


@pytest.mark.parametrize(
    "options", [{"order": "file"}, {"order": None}, {"fill_value": 0}]
)
def test_wrong_options_are_refused(strategy, path, options):
    with pytest.raises(mpidist.ArgumentError, match="order"):
        Hdf5Writer(strategy, path, **options)
