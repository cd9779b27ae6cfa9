"""Arguments and methods of TensorFlow's datasets, which change nothing here."""

import numpy as np
import pytest

import mpidist
from mpidist import Dataset

ROWS = np.arange(10)


def rows_of(dataset):
    return [np.asarray(row).tolist() for row in dataset]


def test_names_and_threads_change_nothing():
    plain = Dataset.from_tensor_slices(ROWS).shuffle(10, seed=1).map(lambda x: x + 1)
    plain = plain.skip(1).take(8).repeat(2).batch(4).prefetch(1)
    named = Dataset.from_tensor_slices(ROWS, name="rows")
    named = named.shuffle(10, 1, True, "mixed").map(
        lambda x: x + 1, -1, False, True, False, "more"
    )
    named = named.skip(1, name="a").take(8, name="b").repeat(2, name="c")
    named = named.batch(4, False, -1, False, "d").prefetch(1, name="e")
    assert rows_of(named) == rows_of(plain)

    pairs = Dataset.zip(named, named, name="f").with_options(mpidist.Options(), "g")
    pairs = pairs.concatenate(pairs, "h").cache("", "i").enumerate(2, "j")
    assert len(list(pairs)) == 8
    rest = Dataset.from_tensors(ROWS, "k").unbatch("l").filter(lambda x: x > 3, "m")
    assert rows_of(rest) == [4, 5, 6, 7, 8, 9]
    assert rest.reduce(0, lambda a, b: a + b, "n") == 39
    parts = Dataset.range(4).shard(2, 1, "o")
    assert rows_of(parts.interleave(Dataset.from_tensors, name="p")) == [1, 3]


def test_a_cache_in_a_file_is_refused():
    with pytest.raises(mpidist.UnsupportedError, match=r"cache .*'rows\.tmp'"):
        Dataset.range(3).cache("rows.tmp")


@pytest.mark.parametrize("bad", [3, b"x", ["x"]])
def test_bad_names_are_refused(bad):
    with pytest.raises(mpidist.ArgumentTypeError, match="name must be"):
        Dataset.range(3).take(1, name=bad)


def test_iterators_have_tensorflows_methods():
    iterator = iter(Dataset.range(2))
    assert iterator.element_spec == Dataset.range(2).element_spec
    assert iterator.get_next() == 0
    found = iterator.get_next_as_optional()
    assert found.has_value()
    assert found.get_value() == 1
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(mpidist.OutOfRangeError, match="ended after 2"):
        iterator.get_next()
