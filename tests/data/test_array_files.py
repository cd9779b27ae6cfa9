"""Rows of files that the user's function opens; tests read the files with NumPy."""

import os
import pickle

import h5py
import numpy as np
import pytest
from all_ranks import local, on_all_ranks, require_usable, rows_in_order

import mpidist
from mpidist import Dataset


def open_npy(path):
    return np.load(path, mmap_mode="r")


def open_h5(path):
    file = h5py.File(path)
    return {"x": file["x"], "y": file["y"]}


@pytest.fixture
def npy_files(mpi_tmp_path, comm):
    """Three files, one of them without rows, and one big-endian."""
    rows = np.arange(46.0).reshape(23, 2)
    if comm.rank == 0:
        for i, part in enumerate([rows[:7], rows[7:7], rows[7:]]):
            np.save(mpi_tmp_path / f"{i}.npy", part)
    comm.Barrier()
    return mpi_tmp_path / "*.npy", rows


@pytest.fixture
def h5_files(mpi_tmp_path, comm):
    """Two files with chunks of 4 rows, and contiguous rows of another dtype."""
    x, y = np.arange(60, dtype="i4").reshape(30, 2), np.arange(30) * 0.5
    if comm.rank == 0:
        for name, rows in ("a.h5", slice(0, 13)), ("b.h5", slice(13, 30)):
            with h5py.File(mpi_tmp_path / name, "w") as file:
                file.create_dataset("x", data=x[rows], chunks=(4, 1), compression=1)
                file["y"] = y[rows]
    comm.Barrier()
    return [mpi_tmp_path / "a.h5", mpi_tmp_path / "b.h5"], x, y


@pytest.mark.parametrize("policy", ["DATA", "FILE"])
def test_each_row_comes_once_and_again_in_the_next_epoch(
    strategy, comm, npy_files, policy
):
    files, rows = npy_files
    options = mpidist.Options()
    options.auto_shard_policy = mpidist.AutoShardPolicy[policy]
    data = Dataset.from_files(files, open_npy).shuffle(seed=1).batch(4)
    data = strategy.experimental_distribute_dataset(data.with_options(options))
    for _ in range(2):
        steps = on_all_ranks(strategy, comm, data)
        found = np.concatenate([part for parts in steps for part in parts])
        np.testing.assert_array_equal(np.sort(found, axis=0), rows)


def test_rows_of_a_state_that_goes_on(strategy, comm, h5_files):
    files, x, _ = h5_files
    data = Dataset.from_files(files, open_h5).shuffle(seed=2).batch(5)
    train = strategy.experimental_distribute_dataset(data)
    first = iter(train)
    begun = [next(first)["x"] for _ in range(2)]
    state = first.get_state()
    rest = [batch["x"] for batch in first]
    again = iter(train)
    again.set_state(state)
    other = [batch["x"] for batch in again]
    for pair in zip(rest, other, strict=True):
        np.testing.assert_array_equal(*(local(strategy, batch) for batch in pair))
    everything = on_all_ranks(strategy, comm, [*begun, *rest])
    found = np.concatenate([part for parts in everything for part in parts])
    np.testing.assert_array_equal(np.sort(found, axis=0), x)


def test_a_state_of_one_process_goes_on_divided(strategy, comm, h5_files):
    files, _, y = h5_files

    def make():
        return Dataset.from_files(files, open_h5).batch(5)

    before = iter(make())
    next(before)
    after = iter(strategy.experimental_distribute_dataset(make()))
    after.set_state(before.get_state())
    assert rows_in_order(strategy, comm, [b["y"] for b in after]) == y[5:].tolist()


@pytest.mark.parametrize("rows", [[0, 29, 13, 13, 12], [], list(range(30))[::-1]])
def test_rows_by_number(h5_files, rows):
    files, x, y = h5_files
    source = Dataset.from_files(files, open_h5)._pipeline.source
    for reader in source, pickle.loads(pickle.dumps(source)):
        found = reader.read(np.array(rows, np.int64))
        np.testing.assert_array_equal(found["x"], x[rows], strict=True)
        np.testing.assert_array_equal(found["y"], y[rows], strict=True)


def test_a_file_of_the_other_byte_order(mpi_tmp_path, strategy):
    np.save(mpi_tmp_path / f"{strategy.rank}.npy", np.arange(5, dtype=">i4"))
    (batch,) = Dataset.from_files(
        mpi_tmp_path / f"{strategy.rank}.npy", open_npy
    ).batch(9)
    np.testing.assert_array_equal(batch, np.arange(5, dtype="i4"), strict=True)


def damage(path):
    path.write_bytes(path.read_bytes()[:70])


def replace_by_others(path):
    with open(path, "wb") as file:  # np.save would append .npy to its name
        np.save(file, np.zeros(3, "i1"))


@pytest.mark.parametrize("change", [os.remove, damage, replace_by_others])
def test_a_bad_file_is_an_error_on_all_ranks(strategy, comm, npy_files, change):
    files, _ = npy_files
    bad = files.parent / "2.npy"  # described by the last rank, if there are three
    names = [files.parent / f"{i}.npy" for i in range(3)]
    if comm.rank == 0:
        change(bad)
    comm.Barrier()
    data = Dataset.from_files(names, open_npy).batch(4)
    with pytest.raises(mpidist.DataError, match=r"2\.npy"):
        strategy.experimental_distribute_dataset(data)
    require_usable(strategy)


@pytest.mark.parametrize("change", [os.remove, damage, replace_by_others])
def test_a_file_that_changes_is_an_error_on_all_ranks(
    strategy, comm, npy_files, change
):
    files, _ = npy_files
    data = strategy.experimental_distribute_dataset(
        Dataset.from_files(files, open_npy).batch(8)
    )
    list(data)
    comm.Barrier()
    if comm.rank == 0:
        change(files.parent / "2.npy")
    comm.Barrier()
    with pytest.raises(mpidist.DataError, match=r"2\.npy"):
        list(data)
    require_usable(strategy)


@pytest.mark.parametrize("change", [os.remove, damage, replace_by_others])
def test_rows_of_kept_chunks_are_checked(strategy, comm, h5_files, change):
    files, *_ = h5_files
    data = strategy.experimental_distribute_dataset(
        Dataset.from_files(files, open_h5).shuffle(seed=1).batch(6)
    )
    list(data)
    comm.Barrier()
    if comm.rank == 0:
        change(files[1])
    comm.Barrier()
    with pytest.raises(mpidist.DataError, match=r"b\.h5"):
        list(data)
    require_usable(strategy)


def test_a_function_that_fails_on_one_rank_is_an_error_on_all(strategy, npy_files):
    files, _ = npy_files
    last, is_bad = strategy.size - 1, True

    def open_file(path):
        if strategy.rank == last and is_bad:
            raise RuntimeError("no such module")
        return open_npy(path)

    data = Dataset.from_files(files, open_file).batch(4)
    with pytest.raises(mpidist.DataError, match="no such module"):
        list(strategy.experimental_distribute_dataset(data))
    is_bad = False
    assert len(list(strategy.experimental_distribute_dataset(data))) == 6


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.float64(3), "equal first dimension"),
        ((np.ones(2), np.ones(3)), "equal first dimension"),
        (np.array([{}, {}]), "object"),
        ("text", "AttributeError"),
        ((), "equal first dimension"),
    ],
)
def test_what_has_no_rows_is_named(mpi_tmp_path, strategy, value, message):
    with pytest.raises(mpidist.DataError, match=message):
        len(Dataset.from_files(__file__, lambda path: value))
