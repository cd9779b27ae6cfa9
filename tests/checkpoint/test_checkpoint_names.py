"""Large states under names that HDF5's virtual datasets would read in another way."""

import os

import h5py
import numpy as np
import pytest

import mpidist

NO_UTF8 = os.fsdecode(b"\xff\xfe")
NAMES = ["a/b", "a%b", "a%%b", "100%", "%", "%2F", "new\nline", "grün", " ", "x" * 900]


@pytest.mark.parametrize(
    "stem",
    [
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("plain", "a%b", "a%%b")),
        "100%-%25",
        "new\nline",
        pytest.param("ü", marks=pytest.mark.slow),
        NO_UTF8,
    ],
    ids=ascii,
)
def test_parts_of_arrays_are_found_by_h5py_and_by_restoring(
    strategy, comm, mpi_tmp_path, stem
):
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=300_000) for name in NAMES}
    expected = {name: array.copy() for name, array in arrays.items()}
    own = mpidist.PerReplica((np.full(300_000, comm.rank),))
    checkpoint = mpidist.Checkpoint(
        strategy=strategy, shard_bytes=1 << 20, arrays=arrays, own={"%b/": own}
    )
    path = checkpoint.save(mpi_tmp_path / stem)
    with h5py.File(path) as file:
        found = {name: file["arrays"][name][:] for name in file["arrays"]}
        ranks = [file["own/%25b%2F"][str(r)][0] for r in range(comm.size)]
    assert ranks == list(range(comm.size))
    assert len(found) == len(NAMES)
    for array in expected.values():  # whatever they are called there
        assert any(np.array_equal(array, other) for other in found.values())
    for array in arrays.values():
        array[:] = 0
    own.values[0][:] = -1
    checkpoint.restore(path)
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)
    assert set(own.values[0].tolist()) == {comm.rank}


@pytest.mark.parametrize(
    "stem", ["a%b", "a%%b", "a%%%b", "100%", "new\nline", NO_UTF8], ids=ascii
)
def test_the_writers_index_finds_its_shards(strategy, comm, mpi_tmp_path, stem):
    names = ["a%b", "a%%b", "g%/x%", "new\nline", "ü"]
    path = mpi_tmp_path / f"{stem}.h5"
    with mpidist.Hdf5Writer(strategy, path) as writer:
        writer.append({name: np.full(3, comm.rank + 1.0) for name in names})
    expected = np.repeat(np.arange(comm.size) + 1.0, 3)
    with h5py.File(path) as file:
        for name in names:
            np.testing.assert_array_equal(file[name][:], expected)
    data = mpidist.Dataset.from_hdf5(path, names)
    for column in zip(*data, strict=True):
        np.testing.assert_array_equal(column, expected)
