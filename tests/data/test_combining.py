"""Zip, enumerate, unbatch, filter, interleave and reduce, against plain lists."""

import itertools
import threading

import h5py
import numpy as np
import pytest
from all_ranks import in_order, local, on_all_ranks
from datasets import generated, joined
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist import AutoShardPolicy, Dataset, Options, TensorSpec
from mpidist.data.iter_dataset import IterDataset
from mpidist.data.map_dataset import Epoch
from mpidist.util.shares import BatchShare

numbers = Dataset.range


def plain(element):
    """An element with lists and Python's numbers in place of arrays."""
    if isinstance(element, tuple):
        return tuple(map(plain, element))
    if isinstance(element, dict):
        return {key: plain(value) for key, value in element.items()}
    return np.asarray(element).tolist()


def plains(elements):
    return list(map(plain, elements))


def is_stream(dataset):
    return isinstance(dataset.pipeline, IterDataset)


# Zip


@pytest.mark.parametrize("make", [numbers, generated])
def test_zip_pairs_elements_up_to_the_shortest(make):
    rows = make(5).map(lambda x: x * x)
    for zipped in (
        Dataset.zip(numbers(7), rows),
        Dataset.zip((numbers(7), rows)),
        Dataset.zip(datasets=(numbers(7), rows)),
    ):
        assert plains(zipped) == [(i, i * i) for i in range(5)]
    assert is_stream(zipped) == is_stream(rows)


def test_zip_takes_nests():
    pairs = Dataset.from_tensor_slices((np.arange(3), np.arange(3) + 10))
    zipped = Dataset.zip({"b": pairs, "a": (numbers(4), numbers(9))})
    assert plains(zipped) == [{"b": (i, i + 10), "a": (i, i)} for i in range(3)]
    assert len(zipped) == 3
    assert zipped.element_spec["b"][1] == TensorSpec((), np.int64)
    assert plains(Dataset.zip(numbers(3))) == [0, 1, 2]
    assert plains(zipped.batch(2))[1] == {"b": ([2], [12]), "a": ([2], [2])}


def test_zip_of_endless_datasets():
    zipped = Dataset.zip(numbers(2).repeat(), numbers(3).repeat())
    assert zipped.cardinality() == -1
    assert plains(zipped.skip(4).take(2)) == [(0, 1), (1, 2)]
    assert Dataset.zip(numbers(2).repeat(), numbers(3)).cardinality() == 3


def test_shuffles_without_a_seed_in_a_zip_have_orders_of_their_own():
    zipped = Dataset.zip(numbers(50).shuffle(), numbers(50).shuffle())
    first, second = zip(*plains(zipped))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    alike = Dataset.zip(numbers(50).shuffle(seed=1), numbers(50).shuffle(seed=1))
    assert all(a == b for a, b in plains(alike))


def test_what_zip_does_not_take():
    with pytest.raises(ValueError, match="zip needs at least one dataset"):
        Dataset.zip()
    for wrong in ([numbers(2), numbers(2)], (numbers(2), 3), ((), [numbers(2)])):
        with pytest.raises(TypeError, match=r"zip needs .*datasets"):
            Dataset.zip(wrong)
    with pytest.raises(TypeError, match="not both"):
        Dataset.zip(numbers(2), datasets=numbers(2))


def test_zipped_options():
    off, data = Options(AutoShardPolicy.OFF), Options(AutoShardPolicy.DATA)
    zipped = Dataset.zip(numbers(2), numbers(2).with_options(off))
    assert zipped.options() == off
    with pytest.raises(ValueError, match="auto_shard_policy"):
        Dataset.zip(numbers(2).with_options(data), numbers(2).with_options(off))


def test_zipped_batches_of_unlike_sizes(strategy, comm):
    zipped = Dataset.zip(numbers(6).batch(2), numbers(6).batch(3))
    assert plains(zipped) == [([0, 1], [0, 1, 2]), ([2, 3], [3, 4, 5])]
    with pytest.raises(ValueError, match="batch"):
        strategy.experimental_distribute_dataset(zipped)
    # The last of them has fewer rows in one
    zipped = Dataset.zip(numbers(5).batch(2), numbers(6).batch(2))
    assert plains(zipped)[2] == ([4], [4, 5])
    with pytest.raises(ValueError, match="batch 2 has 1, 2 rows"):
        list(strategy.experimental_distribute_dataset(zipped))


def test_files_are_not_divided_after_zip(strategy, comm):
    options = Options(AutoShardPolicy.FILE)
    zipped = Dataset.zip(numbers(6), numbers(6)).batch(2).with_options(options)
    with pytest.raises(ValueError, match="DATA"):
        strategy.experimental_distribute_dataset(zipped)


# Enumerate


@pytest.mark.parametrize("make", [numbers, generated])
@pytest.mark.parametrize("start", [0, -2])
def test_enumerate(make, start):
    rows = make(4).map(lambda x: 2 * x).enumerate(start)
    assert plains(rows) == [(start + i, 2 * i) for i in range(4)]
    assert {type(i) for i, _ in rows} == {np.int64}
    again = make(3).repeat(2).enumerate()
    assert plains(again) == [(i, i % 3) for i in range(6)]
    assert plains(make(3).enumerate().repeat(2)) == [(i % 3, i % 3) for i in range(6)]
    assert is_stream(rows) == is_stream(make(1))


def test_enumerated_rows_keep_their_numbers_in_any_order():
    rows = numbers(20).enumerate(5).shuffle(seed=1).batch(6)
    for i, x in rows:
        np.testing.assert_array_equal(i, x + 5)
    assert rows.element_spec[0] == TensorSpec((None,), np.int64)
    assert plains(numbers(0).enumerate()) == []
    batches = numbers(5).batch(2).enumerate()
    assert plains(batches) == [(0, [0, 1]), (1, [2, 3]), (2, [4])]


# Unbatch


BATCHED = {
    "batches": lambda n, b: numbers(n).batch(b),
    "full batches": lambda n, b: numbers(n).batch(b, drop_remainder=True),
    "shuffled": lambda n, b: numbers(n).shuffle(seed=3).batch(b),
    "repeated": lambda n, b: numbers(n).batch(b).repeat(2),
    "parts": lambda n, b: numbers(n).batch(b).skip(1).take(2),
    "parts of full": lambda n, b: numbers(n).batch(b, True).skip(1).take(2),
    "cached": lambda n, b: numbers(n).batch(b).cache(),
    "concatenated": lambda n, b: numbers(n).batch(b).concatenate(numbers(4).batch(3)),
    "batches of batches": lambda n, b: numbers(n).batch(b, True).batch(2),
    "full batches of batches": lambda n, b: numbers(n).batch(b, True).batch(3, True),
}
IN_ORDER = {
    "mapped": lambda n, b: numbers(n).batch(b).map(lambda x: x[x % 3 > 0]),
    "shuffled batches": lambda n, b: numbers(n).batch(b).shuffle(seed=1),
    "sharded batches": lambda n, b: numbers(n).batch(b).shard(2, 1),
    "parts of repeated": lambda n, b: numbers(n).batch(b).repeat(2).skip(1),
    "generated": lambda n, b: generated(n).batch(b),
    "rows of rows": lambda n, b: Dataset.from_tensor_slices(np.ones((n, b))),
}


@settings(max_examples=30)
@given(n=st.integers(0, 23), b=st.integers(1, 6))
@pytest.mark.parametrize("name", [*BATCHED, *IN_ORDER])
def test_unbatch(name, n, b):
    dataset = (BATCHED | IN_ORDER)[name](n, b)
    rows = dataset.unbatch()
    expected = [plain(row) for batch in dataset for row in batch]
    assert plains(rows) == expected
    assert is_stream(rows) == (name in IN_ORDER)
    if not is_stream(rows):
        assert len(rows) == len(expected)
        assert plains(rows.skip(3)) == expected[3:]
        assert sorted(plains(rows.shuffle())) == sorted(expected)


@settings(max_examples=40)
@given(
    n=st.integers(0, 40),
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    drop=st.booleans(),
)
def test_rows_that_batches_of_batches_leave_out_do_not_come_back(n, sizes, drop):
    dataset, count = numbers(n), n
    for i, size in enumerate(sizes):
        is_last = i == len(sizes) - 1
        dataset = dataset.batch(size, drop_remainder=drop or not is_last)
    unit = int(np.prod(sizes if drop else sizes[:-1]))
    count = n - n % unit
    for _ in sizes:
        dataset = dataset.unbatch()
    assert plains(dataset) == list(range(count))
    assert len(dataset) == count
    assert plains(dataset.repeat(2).skip(1)) == [*range(count), *range(count)][1:]


def test_unbatch_of_nests():
    arrays = {"x": np.arange(5), "y": (np.ones((5, 2)),)}
    for batches in (
        Dataset.from_tensor_slices(arrays).batch(2),
        Dataset.from_generator(
            lambda: iter([{k: arrays[k] for k in arrays} for _ in range(1)])
        ),
    ):
        rows = batches.unbatch()
        assert plains(rows) == [{"x": i, "y": ([1.0, 1.0],)} for i in range(5)]
        assert rows.element_spec["x"] == TensorSpec((), np.int64)


@pytest.mark.parametrize("element", [3, (np.ones(2), np.ones(3)), ()])
def test_what_has_no_rows_cannot_be_unbatched(element):
    rows = Dataset.from_generator(lambda: iter([element])).unbatch()
    with pytest.raises(mpidist.DataError, match="unbatch"):
        list(rows)


# Filter


@pytest.mark.parametrize("make", [numbers, generated])
def test_filter(make):
    assert plains(make(9).filter(lambda x: x % 2 == 1)) == [1, 3, 5, 7]
    pairs = Dataset.zip(make(9), make(9)).filter(lambda x, y: x + y > 12)
    assert plains(pairs) == [(7, 7), (8, 8)]
    batches = make(9).batch(2).filter(lambda b: np.all(b < 4))
    assert plains(batches) == [[0, 1], [2, 3]]
    assert make(9).filter(lambda x: True).cardinality() == -2
    assert plains(make(9).filter(lambda x: False)) == []
    assert make(9).filter(lambda x: False).element_spec == TensorSpec((), np.int64)


@pytest.mark.parametrize("result", [1, None, "a", np.array([True, False]), np.int64(1)])
def test_a_predicate_returns_one_bool(result):
    with pytest.raises(TypeError, match="predicate must return one bool"):
        list(numbers(3).filter(lambda x: result))


def test_what_a_predicate_raises():
    def fail(x):
        raise KeyError(x)

    with pytest.raises(KeyError):
        list(numbers(3).filter(fail))

    def stop(x):
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(numbers(3).filter(stop))


# Interleave


def test_interleave_is_tensorflows():
    # The example of tf.data.Dataset.interleave's page
    rows = Dataset.range(1, 6).interleave(
        lambda x: Dataset.from_tensors(x).repeat(6), cycle_length=2, block_length=4
    )
    expected = "1111222211223333444433445555" + "55"
    assert "".join(map(str, plains(rows))) == expected


def interleaved(parts, cycle, block):
    """What TensorFlow's kernel does, written down apart from the library."""
    sources, slots, out = iter(parts), [None] * cycle, []
    at, left, ended = 0, block, False
    while not ended or any(slot is not None for slot in slots):
        if slots[at] is not None:
            item = next(slots[at], None)
            if item is not None:
                out.append(item)
                left -= 1
                if left == 0:
                    at, left = (at + 1) % cycle, block
            else:
                slots[at] = None
                at, left = (at + 1) % cycle, block
        elif not ended:
            part = next(sources, None)
            ended = part is None
            slots[at] = None if ended else iter(part)
        else:
            at, left = (at + 1) % cycle, block
    return out


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 5), max_size=6),
    cycle=st.integers(1, 4),
    block=st.integers(1, 4),
    calls=st.sampled_from([None, 1, -1]),
    is_generated=st.booleans(),
)
def test_interleave(sizes, cycle, block, calls, is_generated):
    make = generated if is_generated else numbers
    source = Dataset.from_tensor_slices(np.array(sizes, np.int64)).enumerate()
    rows = source.interleave(
        lambda i, n: make(int(n)).map(lambda x: 10 * i + x), cycle, block, calls
    )
    parts = [[10 * i + x for x in range(n)] for i, n in enumerate(sizes)]
    assert plains(rows) == plains(rows) == interleaved(parts, cycle, block)
    assert not [t for t in threading.enumerate() if "mpidist-prefetch" in t.name]


def test_interleave_of_files(tmp_path):
    for i in range(3):
        with h5py.File(tmp_path / f"{i}.h5", "w") as file:
            file["x"] = np.arange(10 * i, 10 * i + 4)
    paths = Dataset.from_tensor_slices([str(p) for p in sorted(tmp_path.iterdir())])
    read = lambda path: Dataset.from_hdf5(path, "x")  # noqa: E731
    expected = interleaved(np.arange(30).reshape(3, 10)[:, :4].tolist(), 2, 2)
    for calls in (None, mpidist.INFINITE_CARDINALITY):
        assert plains(paths.interleave(read, 2, 2, calls)) == expected
    assert sorted(plains(paths.interleave(read))) == sorted(expected)
    assert paths.interleave(read).element_spec == TensorSpec((), np.int64)
    batches = paths.interleave(lambda path: read(path).batch(2), 3)
    assert plains(batches)[:3] == [[0, 1], [10, 11], [20, 21]]
    assert batches.element_spec == TensorSpec((None,), np.int64)


def test_interleave_starts_files_only_when_it_is_their_turn():
    started = []

    def start(i):
        started.append(int(i))
        return numbers(4)

    rows = iter(Dataset.range(9).interleave(start, cycle_length=2))
    assert started == []
    next(rows)
    assert started == [0]
    next(rows)
    assert started == [0, 1]


def test_shuffles_inside_interleave_have_orders_of_their_own():
    rows = Dataset.range(2).interleave(lambda i: numbers(40).shuffle(), 2)
    found = plains(rows)
    assert sorted(found[::2]) == sorted(found[1::2]) == list(range(40))
    assert found[::2] != found[1::2]
    assert plains(rows) != found  # another epoch


def test_interleave_needs_datasets():
    with pytest.raises(TypeError, match=r"map_func .*must return a mpidist\.Dataset"):
        list(numbers(2).interleave(lambda x: [1, 2]))


# Reduce


@pytest.mark.parametrize("make", [numbers, generated])
def test_reduce(make):
    assert make(5).reduce(10, lambda state, x: state + x) == 20
    pairs = Dataset.zip(make(4), make(4))
    state = pairs.reduce((0, 0), lambda s, xy: (s[0] + 1, s[1] + xy[0] * xy[1]))
    assert state == (4, 14)
    assert make(0).reduce("none", lambda state, x: state) == "none"
    with pytest.raises(ValueError, match=r"take\("):
        numbers(3).repeat().reduce(0, lambda state, x: state)


# Distributed


def everything(strategy, comm, dataset):
    return in_order(
        on_all_ranks(strategy, comm, strategy.experimental_distribute_dataset(dataset))
    )


@pytest.mark.parametrize("policy", [AutoShardPolicy.AUTO, AutoShardPolicy.DATA])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_no_row_is_lost_or_doubled(strategy, comm, policy, size):
    options = Options(policy)
    zipped = Dataset.zip(numbers(23), generated(29) if size == 3 else numbers(29))
    cases = {
        "zip": zipped.map(lambda a, b: a + b),
        "enumerate": numbers(23).enumerate().map(lambda i, x: i + x),
        "unbatch": numbers(23).batch(4).unbatch().map(lambda x: 2 * x),
        "filter": numbers(46).filter(lambda x: x % 2 == 0),
        "interleave": numbers(3).interleave(lambda i: Dataset.range(2 * i, 46, 6)),
    }
    for name, rows in cases.items():
        dataset = rows.batch(size).with_options(options)
        found = everything(strategy, comm, dataset)
        assert sorted(found) == list(range(0, 46, 2)), name
        assert found == [x for batch in dataset for x in batch.tolist()], name
        if not is_stream(rows):
            shuffled = rows.shuffle().batch(size).with_options(options)
            found = everything(strategy, comm, shuffled)
            assert sorted(found) == list(range(0, 46, 2)), name


def parts_of(pipeline, epoch, replicas):
    """All replicas' rows of an epoch, step by step."""
    return [
        [
            plain(pipeline.local_batch(Epoch(epoch), i, BatchShare(replicas, replica)))
            for replica in range(replicas)
        ]
        for i in range(pipeline.length)
    ]


@pytest.mark.slow
@settings(max_examples=40)
@given(
    n=st.integers(0, 40),
    more=st.integers(0, 9),
    size=st.integers(1, 9),
    drop=st.booleans(),
)
def test_every_row_once_for_any_number_of_replicas(n, more, size, drop):
    zipped = Dataset.zip(numbers(n).shuffle(), numbers(n + more).shuffle())
    cases = [
        zipped.map(lambda a, b: a),
        numbers(n).enumerate().shuffle().map(lambda i, x: x),
        numbers(n).shuffle().batch(3).unbatch().shuffle(),
    ]
    for rows in cases:
        pipeline = rows.batch(size, drop).pipeline
        orders = [joined(joined(parts_of(pipeline, epoch, 1))) for epoch in range(2)]
        for order in orders:
            assert len(order) == (n - n % size if drop else n)
            assert sorted(set(order)) == sorted(order)
        for replicas in range(2, 5):
            for epoch in range(2):
                assert (
                    joined(joined(parts_of(pipeline, epoch, replicas))) == orders[epoch]
                )


@pytest.mark.parametrize("n", [5, 17, 30])
def test_chunks_are_mixed_behind_combined_files(tmp_path, n):
    for i, count in enumerate((10, 7)):
        with h5py.File(tmp_path / f"{i}.h5", "w") as file:
            rows = np.arange(10 * i, 10 * i + count)
            file.create_dataset("x", data=rows, chunks=(2,), compression="gzip")
    files = Dataset.from_hdf5([tmp_path / "0.h5", tmp_path / "1.h5"], "x")
    zipped = Dataset.zip(files, numbers(n))
    cases = {
        zipped.map(lambda x, i: i): (min(n, 17), lambda i: i),
        files.enumerate().map(lambda i, x: x): (17, lambda i: i),
        files.batch(5, drop_remainder=True).unbatch(): (15, lambda i: i),
        files.batch(5).skip(1).take(1).unbatch(): (5, lambda i: 5 + i),
    }
    for rows, (count, expected) in cases.items():
        shuffled = plains(rows.shuffle(seed=1, window_chunks=2))
        assert sorted(shuffled) == [expected(i) for i in range(count)]
        found = [x for b in rows.shuffle(window_chunks=2).batch(3) for x in plain(b)]
        assert sorted(found) == [expected(i) for i in range(count)]
    pairs = plains(zipped.shuffle(window_chunks=2))
    assert sorted(pairs) == list(zip(range(17), range(n)))


def test_filtered_files_can_be_divided(strategy, comm, mpi_tmp_path):
    if comm.rank == 0:
        for i in range(5):
            with h5py.File(mpi_tmp_path / f"{i}.h5", "w") as file:
                file["x"] = np.arange(10 * i, 10 * i + i)
    comm.Barrier()
    paths = [mpi_tmp_path / f"{i}.h5" for i in range(5)]
    rows = Dataset.from_hdf5(paths, "x").filter(lambda x: x % 2 == 0).batch(4)
    data = strategy.experimental_distribute_dataset(
        rows.with_options(Options(AutoShardPolicy.FILE))
    )
    steps = on_all_ranks(strategy, comm, data)
    assert sorted(in_order(steps)) == [10, 20, 30, 32, 40, 42]
    for rank, parts in enumerate(zip(*steps)):
        files = {x // 10 for part in parts for x in part.tolist()}
        assert files <= set(range(rank, 5, comm.size))
    data = numbers(4).filter(lambda x: True).batch(2)
    with pytest.raises(ValueError, match="FILE needs a dataset of files"):
        strategy.experimental_distribute_dataset(
            data.with_options(Options(AutoShardPolicy.FILE))
        )


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("make", [numbers, generated])
def test_caches_in_zipped_datasets(strategy, comm, make, seed):
    cached = numbers(9).shuffle(seed=seed).cache()
    zipped = Dataset.zip(make(9), cached, cached.shuffle(seed=2)).batch(3)
    data = strategy.experimental_distribute_dataset(zipped)
    epochs = [[plain(local(strategy, batch)) for batch in data] for epoch in range(2)]
    everyone = comm.allgather(epochs[1])
    for leaf in (1, 2):
        found = [x for mine in everyone for batch in mine for x in batch[leaf]]
        assert sorted(found) == list(range(9))


def test_every_rank_reads_all_with_off(strategy, comm):
    off = Options(AutoShardPolicy.OFF)
    rows = numbers(12).batch(2).unbatch().enumerate().map(lambda i, x: x)
    dataset = rows.batch(2 * comm.size).with_options(off)
    found = everything(strategy, comm, dataset)
    assert sorted(found) == sorted([*range(12)] * comm.size)


def test_what_a_predicate_raises_on_one_rank_is_raised_on_all(strategy, comm):
    def fail(x):
        if comm.rank == comm.size - 1 and x == 5:
            raise KeyError("mine")
        return True

    data = strategy.experimental_distribute_dataset(numbers(8).filter(fail).batch(2))
    with pytest.raises(KeyError, match="mine"):
        list(data)


def test_seeking_is_quick_in_what_can_be_numbered():
    n = 1 << 40
    rows = Dataset.zip(numbers(n).shuffle(seed=1).enumerate(), numbers(n + 1))
    rows = rows.batch(1 << 10).unbatch().shuffle(seed=2).skip(n - 3)
    assert len(plains(rows)) == 3
    iterator = iter(rows)
    state = iterator.get_state() | {"step": 2}
    iterator.set_state(state)
    assert len(list(itertools.islice(iterator, 5))) == 1
