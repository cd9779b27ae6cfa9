"""Rows of HDF5 files, against h5py reading each file whole."""

import pickle

import h5py
import numpy as np
import pytest

import mpidist
from mpidist import Dataset
from mpidist.data.map_dataset import Epoch


def write(path, /, **datasets):
    with h5py.File(path, "w") as file:
        for name, data in datasets.items():
            file[name] = data
    return path


def whole(path, name="x"):
    with h5py.File(path, "r") as file:
        return file[name][...]


def rows_of(dataset, rows):
    return dataset.pipeline.elements(Epoch(), np.asarray(rows, np.int64))


def test_names_give_their_structure(tmp_path):
    x, y = np.arange(8.0).reshape(4, 2), np.arange(4)
    path = write(tmp_path / "a.h5", **{"x": x, "group/deep/y": y})
    for name, rows in [("x", x[:3]), ("/x", x[:3]), ("group/deep/y", y[:3])]:
        batch = next(iter(Dataset.from_hdf5(path, name).batch(3)))
        np.testing.assert_array_equal(batch, rows)
    for names in [["x", "group/deep/y"], ("x", "group/deep/y")]:
        batch = next(iter(Dataset.from_hdf5(path, names).batch(3)))
        assert type(batch) is tuple
        np.testing.assert_equal(batch, (x[:3], y[:3]))
    names = {"label": "group/deep/y", "input": "x"}
    batch = next(iter(Dataset.from_hdf5(path, names).batch(3)))
    np.testing.assert_equal(batch, {"label": y[:3], "input": x[:3]})


@pytest.fixture
def five_files(tmp_path):
    paths, counts = [], [3, 0, 7, 1, 0]
    for i, count in enumerate(counts):
        data = 100 * i + np.arange(count * 2, dtype="i4").reshape(count, 2)
        paths.append(write(tmp_path / f"part{i}.h5", x=data))
    return paths, np.concatenate([whole(path) for path in paths])


def test_files_are_read_one_after_the_other(five_files, tmp_path):
    paths, expected = five_files
    for files in [paths, map(str, paths), str(tmp_path / "part*.h5")]:
        dataset = Dataset.from_hdf5(files, "x")
        assert len(dataset) == 11
        np.testing.assert_array_equal(list(dataset), expected)
        (batch,) = dataset.batch(20)
        np.testing.assert_array_equal(batch, expected)
    backwards = Dataset.from_hdf5(paths[::-1], "x").batch(20)
    later_first = np.concatenate([expected[10:], expected[3:10], expected[:3]])
    np.testing.assert_array_equal(next(iter(backwards)), later_first)


def test_a_file_may_be_named_twice_and_a_name_may_have_brackets(tmp_path):
    path = write(tmp_path / "part[1].h5", x=np.arange(3))
    assert rows_of(Dataset.from_hdf5(str(path), "x"), [2]) == [2]
    twice = Dataset.from_hdf5([path, path], "x")
    assert rows_of(twice, range(6)).tolist() == [0, 1, 2] * 2


def test_no_files_are_an_error(tmp_path):
    with pytest.raises(mpidist.DataError, match=r"no file matches.*\*\.h5"):
        Dataset.from_hdf5(str(tmp_path / "*.h5"), "x")
    with pytest.raises(ValueError, match="at least one file"):
        Dataset.from_hdf5([], "x")


@pytest.mark.parametrize("names", [[], {}])
def test_no_names_are_an_error(tmp_path, names):
    path = write(tmp_path / "a.h5", x=[1])
    with pytest.raises(ValueError, match="dataset"):
        len(Dataset.from_hdf5(path, names))


@pytest.mark.parametrize(
    "changed",
    [
        np.zeros((5, 2)),
        np.zeros((4, 1), int),
        np.full((4, 2), 0.5),
        7,
        None,
    ],
    ids=["rows", "row shape", "dtype", "scalar", "group"],
)
def test_a_file_that_changed_since_it_was_inspected_is_an_error(tmp_path, changed):
    path = write(tmp_path / "a.h5", x=np.zeros((4, 2), int))
    dataset = Dataset.from_hdf5(path, "x")
    assert len(dataset) == 4
    copy = pickle.dumps(dataset)
    path.unlink()
    write(path, **({"x/y": 1} if changed is None else {"x": changed}))
    with pytest.raises(mpidist.DataError, match="'x'"):
        rows_of(pickle.loads(copy), range(4))
