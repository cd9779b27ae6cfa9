"""Rows written for the batches of a dataset, where the dataset has them."""

import gc
import itertools
import os

import h5py
import numpy as np
import pytest
from all_ranks import local, on_root

import mpidist
from mpidist import Dataset, Hdf5Writer
from mpidist.strategy import dataset_order

R = Dataset.range
FIVE = R(5).batch(2)
TWICE = np.tile(np.arange(10), 2)
BOTH = np.r_[:10, 20:25]
ORDERED = {
    "plain": (R(10).batch(4), np.arange(10)),
    "shuffled": (R(10).shuffle(seed=1).batch(4), np.arange(10)),
    "without a seed": (R(10).shuffle().batch(3), np.arange(10)),
    "large": (R(70_000).shuffle().batch(1000), np.arange(70_000)),
    "shuffled, repeated": (R(10).shuffle().repeat(2).batch(3), TWICE),
    "repeated, shuffled": (R(10).repeat(2).shuffle().batch(3), TWICE),
    "batches shuffled": (R(10).batch(3).shuffle(seed=3), np.arange(10)),
    "batches repeated": (R(10).batch(3).shuffle(seed=3).repeat(2), TWICE),
    "batches skipped": (R(10).batch(3).skip(1), np.arange(3, 10)),
    "cached": (R(10).shuffle(seed=1).cache().batch(3), np.arange(10)),
    "batches cached": (R(10).batch(3).cache().shuffle(), np.arange(10)),
    "mapped": (
        R(10).map(lambda x: x + 5).shuffle().batch(4).map(lambda x: x - 5),
        np.arange(10),
    ),
    "concatenated": (R(10).concatenate(R(20, 25)).shuffle().batch(4), BOTH),
    "each shuffled": (R(10).shuffle().concatenate(R(20, 25).shuffle()).batch(4), BOTH),
    "batches concatenated": (R(10).batch(4).concatenate(R(20, 25).batch(4)), BOTH),
    "twice the same": (FIVE.concatenate(FIVE), np.tile(range(5), 2)),
    "sharded": (R(10).shard(2, 1).shuffle().batch(2), np.arange(1, 10, 2)),
    "zipped": (
        Dataset.zip((R(9), R(9))).map(lambda x, y: x + 0 * y).shuffle().batch(2),
        np.arange(9),
    ),
    "filtered": (R(10).filter(lambda x: x % 3 != 0).batch(2), [1, 2, 4, 5, 7, 8]),
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


def test_rows_of_a_compressed_file_are_where_it_has_them(comm, strategy, path):
    source = path.with_name("source.h5")

    def make():
        with h5py.File(source, "w") as file:
            file.create_dataset(
                "x", data=np.arange(5000), chunks=(64,), compression="gzip"
            )

    on_root(comm, make)
    dataset = Dataset.from_hdf5(source, "x").shuffle().batch(100)
    batches = strategy.experimental_distribute_dataset(dataset)
    write(strategy, path, batches, compression="gzip", chunk_rows=7)
    assert np.array_equal(read(path), np.arange(5000))


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
