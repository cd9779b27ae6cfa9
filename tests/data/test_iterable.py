"""Datasets that can only be read in order, in one process, against plain lists."""

import itertools
import threading

import numpy as np
import pytest
from datasets import generated, in_batches, lists

import mpidist
from mpidist import Dataset


@pytest.mark.parametrize("source", [[1, 2, 3], range(1, 4), lambda: iter([1, 2, 3])])
def test_what_can_be_iterated_over_again_is_a_source(source):
    dataset = Dataset.from_generator(source)
    for _ in range(3):
        assert lists(dataset) == [1, 2, 3]
    assert dataset.cardinality() == mpidist.UNKNOWN_CARDINALITY == -2
    with pytest.raises(TypeError, match="not known"):
        len(dataset)


@pytest.mark.parametrize("once", [(x for x in range(3)), iter([1]), map(abs, [1])])
def test_what_can_be_iterated_over_once_is_refused(once):
    with pytest.raises(ValueError, match="pass the function"):
        Dataset.from_generator(once)


def test_a_function_that_returns_the_same_iterator_again_is_refused():
    once = iter([1, 2])
    dataset = Dataset.from_generator(lambda: once)
    assert lists(dataset) == [1, 2]
    with pytest.raises(ValueError, match="same iterator"):
        list(dataset)


def test_elements_are_arrays_in_the_structure_of_what_was_yielded():
    dataset = Dataset.from_generator([{"x": [1, 2], "y": (3.0, True)}])
    (element,) = dataset
    np.testing.assert_equal(element, {"x": np.array([1, 2]), "y": (3.0, True)})
    assert element["x"].shape == (2,)
    assert element["y"][1].dtype == bool


def test_elements_that_are_no_arrays_are_an_error():
    with pytest.raises(mpidist.DataError, match=r"not builtins\.NoneType"):
        list(Dataset.from_generator([None]))


def test_batches_of_unlike_elements_are_an_error():
    with pytest.raises(mpidist.DataError, match="elements that differ"):
        list(Dataset.from_generator([[1], [1, 2]]).batch(2))


def test_take_reads_no_further():
    seen = []

    def generate():
        for i in itertools.count():
            seen.append(i)
            yield i

    dataset = Dataset.from_generator(generate)
    assert lists(dataset.skip(1).take(2).repeat(2)) == [1, 2, 1, 2]
    assert seen == [0, 1, 2] * 2


def test_endless_repeats_of_nothing_end():
    assert lists(generated(0).repeat()) == []
    assert lists(generated(2).repeat().take(5)) == [0, 1, 0, 1, 0]
    assert lists(generated(2).repeat(-1).skip(1).take(2)) == [1, 0]


@pytest.mark.parametrize("make", [generated, Dataset.range])
def test_repetitions_of_repetitions_never_repeat_an_order(make):
    dataset = make(40).shuffle(40, seed=1).repeat().take(60).repeat().take(130)
    iterators = [lists(dataset) for _ in range(3)]
    assert len({tuple(rows) for rows in iterators}) == 3
    laps = [tuple(rows[i : i + 40]) for rows in iterators for i in (0, 60)]
    assert len(set(laps)) == len(laps)
    assert all(sorted(lap) == list(range(40)) for lap in laps)


def test_seeds_of_256_bits_are_told_apart():
    seeds = [0, 1, -1, 2**64 - 1, 2**64, 2**64 + 1, -(2**64), 2**256, -(2**256)]
    for make in (generated, Dataset.range):
        orders = [tuple(lists(make(40).shuffle(40, seed=seed))) for seed in seeds]
        assert len(set(orders)) == len(seeds)


def test_a_shuffle_is_the_same_for_one_seed_and_epoch():
    one, two = (generated(20).shuffle(4, seed=3) for _ in range(2))
    epochs = [(lists(one), lists(two)) for _ in range(3)]
    for order, again in epochs:
        assert order == again
        assert sorted(order) == list(range(20))
        # An element leaves the buffer of four only after those before it came in
        assert all(x < i + 4 for i, x in enumerate(order))
    assert len({tuple(order) for order, _ in epochs}) == 3
    assert lists(generated(20).shuffle(4, seed=4)) != epochs[0][0]
    assert lists(generated(20).shuffle(1, seed=4)) == list(range(20))
    assert sorted(lists(generated(5).shuffle(100, seed=-1))) == list(range(5))


def test_a_shuffle_needs_a_buffer_size():
    with pytest.raises(ValueError, match="buffer_size"):
        generated(3).shuffle(seed=1)


@pytest.mark.parametrize("ahead", [0, 2])
def test_errors_of_generators_and_maps_propagate(ahead):
    def generate():
        yield 1
        raise KeyError("on purpose")

    elements = iter(Dataset.from_generator(generate).prefetch(ahead))
    assert next(elements) == 1
    with pytest.raises(KeyError, match="on purpose"):
        next(elements)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(generated(3).map(lambda x: next(iter(()))).prefetch(ahead))


def test_a_generator_is_closed_when_a_loop_is_broken_off():
    closed = []

    def generate():
        try:
            yield from range(10)
        finally:
            closed.append(True)

    for _ in Dataset.from_generator(generate).map(abs).repeat().batch(2).skip(1):
        break
    assert closed == [True]


def test_prefetch_reads_in_another_thread():
    names = []
    dataset = generated(3).map(lambda x: names.append(threading.current_thread().name))
    dataset = dataset.map(lambda x: 0)
    list(dataset.prefetch(2))
    assert {name.partition("_")[0] for name in names} == {"mpidist-prefetch"}


@pytest.mark.parametrize("args", [(5,), (0,), (2, 9), (9, 2), (2, 9, 3), (9, 2, -2)])
def test_range(args):
    dataset = Dataset.range(*args)
    assert lists(dataset) == list(range(*args))
    assert len(dataset) == len(range(*args))
    assert {x.dtype for x in dataset} <= {np.dtype(np.int64)}
    floats = list(Dataset.range(*args, output_type=np.float32))
    assert {x.dtype for x in floats} <= {np.dtype(np.float32)}


def test_a_range_is_not_held_in_memory():
    dataset = Dataset.range(1 << 60).shuffle(seed=1).batch(3)
    assert next(iter(dataset)).shape == (3,)


def test_from_tensors_is_one_element():
    element = {"x": np.ones((2, 3)), "y": (7, [1, 2])}
    dataset = Dataset.from_tensors(element)
    assert len(dataset) == 1
    np.testing.assert_equal(
        list(dataset.repeat(2)),
        [{"x": np.ones((2, 3)), "y": (7, np.array([1, 2]))}] * 2,
    )
    assert next(iter(dataset.repeat().batch(4)))["x"].shape == (4, 2, 3)
    with pytest.raises(ValueError, match="from_tensors"):
        Dataset.from_tensors(())


MAKERS = [generated, Dataset.range]


@pytest.mark.parametrize("second", MAKERS)
@pytest.mark.parametrize("first", MAKERS)
def test_concatenate(first, second):
    dataset = first(3).concatenate(second(5).skip(1))
    expected = [0, 1, 2, 1, 2, 3, 4]
    assert lists(dataset) == expected
    assert lists(dataset.batch(2)) == in_batches(expected, 2)
    assert lists(dataset.shard(2, 1)) == expected[1::2]
    both = first(3).batch(2).concatenate(second(3).batch(2))
    assert lists(both) == [[0, 1], [2], [0, 1], [2]]
    assert lists(first(0).concatenate(second(2))) == [0, 1]
    assert lists(first(2).repeat().concatenate(second(2)).take(5)) == [0, 1, 0, 1, 0]
    is_known = first is second is Dataset.range
    assert dataset.cardinality() == (7 if is_known else -2)
    with pytest.raises(ValueError, match="two datasets of batches"):
        first(3).concatenate(second(3).batch(2))


UNLIKE = {
    "element has dtype int64 in the first and float64": (
        lambda: np.full(3, 2**53 + 1),
        lambda: np.ones(3),
    ),
    "structures": (lambda: np.ones(3), lambda: (np.ones(3), np.ones(3))),
    r"element\['x'\] has dtype int32": (
        lambda: {"x": np.ones(3, "i4"), "y": np.ones(3)},
        lambda: {"x": np.ones(3, "u4"), "y": np.ones(3)},
    ),
}


@pytest.mark.parametrize("message", UNLIKE)
@pytest.mark.parametrize("size", [None, 2])
def test_unlike_elements_are_not_concatenated(message, size):
    """At once where it is known, else before the first element of the second."""
    first, second = (
        Dataset.from_tensor_slices(make()).shuffle(seed=1) for make in UNLIKE[message]
    )

    def prepare(dataset):
        return dataset if size is None else dataset.batch(size)

    with pytest.raises(TypeError, match=message):
        prepare(first).concatenate(prepare(second).repeat())
    same = second.map(lambda *e: e if len(e) > 1 else e[0])
    for _ in range(2):
        late = prepare(first).concatenate(prepare(same))
        with pytest.raises(TypeError, match=message):
            next(iter(late.shuffle(5)))
        with pytest.raises(TypeError, match=message):
            _ = late.batch(3).element_spec
    generated = Dataset.from_generator(list(same))
    for one, other in [(generated, first), (first.take(1), same)]:
        both = prepare(one).concatenate(prepare(other))
        with pytest.raises(TypeError, match="concatenate needs datasets"):
            lists(both)


def test_strings_and_shapes_may_differ():
    texts = [Dataset.from_tensor_slices(np.array(t)) for t in (["a"], ["bcd", "e"])]
    both = texts[0].concatenate(texts[1])
    assert lists(both.batch(3)) == [["a", "bcd", "e"]]
    shapes = [Dataset.from_tensors(np.arange(n)) for n in (2, 3)]
    assert lists(shapes[0].concatenate(shapes[1])) == [[0, 1], [0, 1, 2]]


def test_concatenated_unlike_rows_cannot_be_batched():
    dataset = Dataset.from_tensors([1, 2]).concatenate(Dataset.from_tensors([1, 2, 3]))
    with pytest.raises(mpidist.DataError, match="elements that differ"):
        list(dataset.batch(2))
