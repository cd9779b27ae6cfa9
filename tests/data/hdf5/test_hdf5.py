"""Rows of HDF5 files, against h5py reading each file whole."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest

import mpidist
from mpidist import Dataset
from mpidist.data.map_dataset import Epoch

ROWS = 23
NUMBERS = np.random.default_rng(0).normal(size=(ROWS, 3, 2)) * 100

# What `create_dataset` is told for each kind of dataset
KINDS = {
    "contiguous": {"data": NUMBERS},
    "chunked": {"data": NUMBERS, "chunks": (4, 3, 1)},
    "compressed": {
        "data": NUMBERS.astype("f4"),
        "chunks": (5, 3, 2),
        "compression": "gzip",
        "shuffle": True,
        "fletcher32": True,
    },
    "never written": {"shape": (ROWS, 2), "dtype": "f4", "fillvalue": 7},
    "one number a row": {"data": np.arange(ROWS)},
    "rows of no bytes": {"shape": (ROWS, 0), "dtype": "f4"},
    "big-endian": {"data": NUMBERS.astype(">f8")},
    "big-endian integers": {"data": np.arange(ROWS, dtype=">i2"), "chunks": (4,)},
    "float16": {"data": NUMBERS.astype("f2")},
    "complex": {"data": NUMBERS + 1j},
    "bool": {"data": NUMBERS > 0},
    "enum": {
        "data": np.arange(ROWS) % 2,
        "dtype": h5py.enum_dtype({"CAT": 0, "DOG": 1}, basetype="i1"),
    },
    "fixed strings": {"data": np.array([b"row %d" % i for i in range(ROWS)])},
    "strings": {
        "data": [f"row {i}" * i for i in range(ROWS)],
        "dtype": h5py.string_dtype(),
    },
    "compound": {"data": np.zeros(ROWS, [("a", ">i4"), ("b", "f8", (2,))])},
    "array type": {"shape": (ROWS,), "dtype": np.dtype(("f4", (3,)))},
}


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


def damage_chunk(path, name):
    with h5py.File(path, "r") as file:
        chunk = file[name].id.get_chunk_info(0)
    with open(path, "r+b") as file:
        file.seek(chunk.byte_offset)
        file.write(b"\xff" * chunk.size)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_dataset_is_read_as_h5py_reads_it(tmp_path, kind):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", **KINDS[kind])
    expected = whole(path)
    dataset = Dataset.from_hdf5(path, "x")
    assert len(dataset) == ROWS
    for rows in [range(ROWS), range(5, 9), [0], [22, 3, 3, 0, 22, 7, 8], []]:
        found = rows_of(dataset, rows)
        np.testing.assert_array_equal(found, expected[list(rows)])
        assert found.dtype == expected.dtype.newbyteorder("=")
        assert found.dtype.isnative


def test_a_big_endian_array_type_becomes_native(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (4,), np.dtype((">f4", (3,))))
    assert rows_of(Dataset.from_hdf5(tmp_path / "a.h5", "x"), [1]).dtype.isnative


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


def test_rows_of_several_files_in_any_order_with_duplicates(five_files):
    paths, expected = five_files
    dataset = Dataset.from_hdf5(paths, "x")
    random = np.random.default_rng(1)
    for count in [1, 2, 11, 40]:
        rows = random.integers(0, 11, count)
        np.testing.assert_array_equal(rows_of(dataset, rows), expected[rows])


def test_a_file_may_be_named_twice_and_a_name_may_have_brackets(tmp_path):
    path = write(tmp_path / "part[1].h5", x=np.arange(3))
    assert rows_of(Dataset.from_hdf5(str(path), "x"), [2]) == [2]
    twice = Dataset.from_hdf5([path, path], "x")
    assert rows_of(twice, range(6)).tolist() == [0, 1, 2] * 2


def test_a_file_that_is_open_already_can_be_read(tmp_path):
    path = write(tmp_path / "a.h5", x=np.arange(3))
    with h5py.File(path, "r"):
        assert rows_of(Dataset.from_hdf5(path, "x"), [2]) == [2]


def test_files_without_rows_are_a_dataset_without_elements(tmp_path):
    path = write(tmp_path / "a.h5", x=np.zeros((0, 4), "f4"))
    dataset = Dataset.from_hdf5(path, "x")
    assert list(dataset.batch(3)) == []
    assert rows_of(dataset, []).shape == (0, 4)


def test_far_rows_of_a_wide_dataset(tmp_path):
    data = np.arange(300 * 1000).reshape(300, 1000)
    path = write(tmp_path / "a.h5", x=data)
    rows = [299, 0, 150, 151, 7, 0]
    found = rows_of(Dataset.from_hdf5(path, "x"), rows)
    np.testing.assert_array_equal(found, data[rows])


def not_hdf5(path):
    path.write_text("x,y\n1,2\n")


def truncated(path):
    write(path, x=np.arange(1000))
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("make", "names", "message"),
    [
        (lambda path: None, "x", "cannot be opened"),
        (not_hdf5, "x", "cannot be opened"),
        (truncated, "x", "cannot be opened.*truncated"),
        (lambda path: write(path, y=[1]), "x", "no dataset 'x'; there are: y"),
        (lambda path: write(path, **{"x/y": [1]}), "x", "no dataset 'x'"),
        (lambda path: write(path, x=[1]), ["x", "x/y"], "no dataset 'x/y'"),
        (lambda path: write(path, x=1.5), "x", "'x' is a scalar"),
        (lambda path: write(path, x=h5py.Empty("f4")), "x", "'x' is a scalar"),
        (
            lambda path: write(path, x=[1, 2], y=[1, 2, 3]),
            {"a": "x", "b": "y"},
            "unequal rows: 'x' has 2, 'y' has 3",
        ),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, make, names, message):
    path = tmp_path / "bad.h5"
    make(path)
    with pytest.raises(mpidist.DataError, match=f"bad.h5: .*{message}"):
        list(Dataset.from_hdf5(path, names))


@pytest.mark.parametrize("other", [np.zeros((2, 3), "f8"), np.zeros((2, 4), "f4")])
def test_files_with_unlike_rows_are_refused(tmp_path, other):
    one = write(tmp_path / "one.h5", x=np.zeros((2, 3), "f4"))
    two = write(tmp_path / "two.h5", x=other)
    message = f"two.h5: .*'x' are {other.dtype}.* but float32 .*one.h5"
    with pytest.raises(mpidist.DataError, match=message):
        len(Dataset.from_hdf5([one, two], "x"))


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


def test_damaged_chunks_are_an_error_with_file_dataset_and_rows(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=NUMBERS, chunks=(8, 3, 2), compression="gzip")
    damage_chunk(path, "x")
    dataset = Dataset.from_hdf5(path, "x")
    np.testing.assert_array_equal(rows_of(dataset, [9, 20]), NUMBERS[[9, 20]])
    with pytest.raises(mpidist.DataError, match=r"a.h5: rows 0\.\.7 of dataset 'x'"):
        rows_of(dataset, [20, 2])


def test_a_copy_by_pickle_reads_for_itself(tmp_path):
    path = write(tmp_path / "a.h5", x=NUMBERS)
    dataset = Dataset.from_hdf5(path, {"in": "x"}).batch(4)
    for used in [False, True]:
        copy = pickle.loads(pickle.dumps(dataset))
        np.testing.assert_equal(list(copy), list(dataset), err_msg=f"used: {used}")


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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_reads_for_itself(tmp_path):
    dataset = Dataset.from_hdf5(write(tmp_path / "a.h5", x=NUMBERS), "x").batch(23)
    np.testing.assert_array_equal(next(iter(dataset)), NUMBERS)
    child = os.fork()
    if child == 0:
        try:
            same = np.array_equal(next(iter(dataset)), NUMBERS)
            os._exit(0 if same else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(next(iter(dataset)), NUMBERS)


def test_threads_may_read_at_once(five_files):
    paths, expected = five_files
    dataset = Dataset.from_hdf5(paths, "x")
    orders = [np.random.default_rng(i).permutation(11) for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        for order, found in zip(
            orders, pool.map(lambda o: rows_of(dataset, o), orders)
        ):
            np.testing.assert_array_equal(found, expected[order])
