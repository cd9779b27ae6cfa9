"""Zip, enumerate, unbatch, filter, interleave and reduce, against plain lists."""

import itertools

import h5py
import numpy as np
import pytest
from datasets import generated

import mpidist
from mpidist import AutoShardPolicy, Dataset, Options, TensorSpec
from mpidist.data.iter_dataset import IterDataset

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


# Unbatch


BY_NUMBER = [
    *(lambda b: b, lambda b: b.repeat(2), lambda b: b.skip(1).take(2)),
    *(lambda b: b.cache(), lambda b: b.concatenate(numbers(4).batch(3))),
]
IN_ORDER = [
    lambda b: b.map(lambda x: x[x % 3 > 0]),
    *(lambda b: b.shuffle(seed=1), lambda b: b.shard(2, 1)),
]


@pytest.mark.parametrize("step", [*BY_NUMBER, *IN_ORDER])
def test_which_rows_of_batches_have_random_access(step):
    batches = step(numbers(13).batch(4))
    rows = batches.unbatch()
    assert plains(rows) == [plain(row) for batch in batches for row in batch]
    assert is_stream(rows) == (step in IN_ORDER)


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


def test_interleave_of_files(tmp_path):
    for i in range(3):
        with h5py.File(tmp_path / f"{i}.h5", "w") as file:
            file["x"] = np.arange(10 * i, 10 * i + 4)
    paths = Dataset.from_tensor_slices([str(p) for p in sorted(tmp_path.iterdir())])
    read = lambda path: Dataset.from_hdf5(path, "x")  # noqa: E731
    expected = [0, 1, 10, 11, 2, 3, 12, 13, 20, 21, 22, 23]
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
