"""What objects say of themselves: `repr`, and the tables of notebooks."""

import inspect

import h5py
import numpy as np
import pytest

import mpidist
from mpidist.util.representation import MOST_CHARACTERS, counted, html_table, one_line

CLASSES = [
    name
    for name in mpidist.__all__
    if inspect.isclass(getattr(mpidist, name))
    and not issubclass(getattr(mpidist, name), BaseException)
]


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_class_has_a_repr_of_its_own(name):
    assert getattr(mpidist, name).__repr__ is not object.__repr__


@pytest.mark.parametrize("name", CLASSES)
def test_no_repr_raises_of_an_object_that_is_not_made(name):
    kind = getattr(mpidist, name)
    if "one_line" in getattr(kind.__repr__, "__code__", one_line.__code__).co_names:
        assert repr(kind.__new__(kind)).startswith(f"<{name}")


@pytest.fixture
def rows():
    return mpidist.Dataset.range(50)


def test_datasets(rows):
    assert repr(rows.batch(16)) == "<Dataset: 50 rows, 4 batches of 16>"
    assert repr(rows.take(7)) == "<Dataset: 50 rows, 7 elements>"
    assert "without an end" in repr(rows.repeat())
    from_generator = mpidist.Dataset.from_generator([1, 2])
    assert repr(from_generator) == "<Dataset: rows not counted yet>"


def test_no_file_is_opened_for_a_repr(tmp_path):
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(6)
    data = mpidist.Dataset.from_hdf5(path, "x").batch(4)
    path.rename(tmp_path / "hidden.h5")
    assert repr(data) == "<Dataset: 1 file, rows not counted yet, batches of 4>"
    (tmp_path / "hidden.h5").rename(path)
    assert len(data) == 2
    assert repr(data) == "<Dataset: 1 file, 6 rows, 2 batches of 4>"


def test_iterators(strategy, rows):
    alone = iter(rows.shard(1, 0))
    next(alone)
    assert repr(alone) == "<DatasetIterator: element 1, epoch 0>"
    data = strategy.experimental_distribute_dataset(rows.batch(16))
    assert repr(data).startswith("<DistributedDataset: 50 rows, 4 steps, 16 rows in")
    iterator = iter(data)
    next(iterator)
    assert repr(iterator) == "<DistributedIterator: step 1 of 4, epoch 0>"


def test_inside_of_run_and_after_the_end(comm, rows):
    strategy = mpidist.MirroredStrategy(communicator=comm)
    data = strategy.experimental_distribute_dataset(rows.batch(16))
    objects = [strategy, strategy.extended, strategy.scope(), data, iter(data)]
    before = [repr(thing) for thing in objects]
    # Replica 0 alone: what communicates would hang, or be refused
    if strategy.extended.replica_id == 0:
        assert [repr(thing) for thing in objects] == before
    strategy.run(lambda: [repr(thing) for thing in objects])
    objects[-1].close()
    strategy.experimental_finalize()
    for thing in objects:
        text = repr(thing)
        assert text.startswith(f"<{type(thing).__name__}: ")
        assert len(text) <= MOST_CHARACTERS
        assert "\n" not in text


def test_one_line():
    assert one_line(3, lambda: "a\nb") == "<int: a b>"
    assert one_line(3, lambda: str(1 / 0)) == "<int>"
    assert len(one_line(3, lambda: "x" * 500)) == MOST_CHARACTERS
    assert counted(1, "row") == "1 row"
    assert counted(4000, "batch", "batches") == "4,000 batches"


def test_tables_of_notebooks(strategy, rows):
    assert "4 batches of 16" in rows.batch(16)._repr_html_()
    data = strategy.experimental_distribute_dataset(rows.batch(16))
    assert "50 rows, 4 steps" in data._repr_html_()
    page = strategy._repr_html_()
    assert strategy.extended.device in page
    assert ("one rank" in page) == (strategy.num_replicas_in_sync == 1)
    assert "<b>" not in html_table("<b>", [("<b>", "<b>")], "<b>")
