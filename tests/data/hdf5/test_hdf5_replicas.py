"""Rows of HDF5 files of every kind, divided over replicas and over many files."""

import itertools

import h5py
import hdf5_files
import numpy as np
import pytest
from all_ranks import on_root
from hdf5_files import Recipe, require_same, rows_of
from hdf5_kinds import (
    PIPELINES,
)

from mpidist import AutoShardPolicy, Dataset, Options

# Structures of names, and how to make them of what a list of three names gives
STRUCTURES = {
    "a name": ("x", lambda x, y, z: x),
    "a list": (["x", "y", "z"], lambda x, y, z: (x, y, z)),
    "a list of one": (["y"], lambda x, y, z: (y,)),
    "a tuple": (("z", "x"), lambda x, y, z: (z, x)),
    "a name twice": (["y", "y"], lambda x, y, z: (y, y)),
    "a dict": ({"image": "x", "label": "y"}, lambda x, y, z: {"image": x, "label": y}),
    "a dict of one": ({"x": "z"}, lambda x, y, z: {"x": z}),
}
COUNTS = [3, 0, 17, 1, 1, 0, 40, 2, 5, 9] * 4


def write_files(folder, counts):
    """Write files of datasets of unlike layouts, also from file to file."""
    rows = np.arange(sum(counts))
    data = {
        "x": (rows[:, None] * 100 + np.arange(6)).astype("f4").reshape(-1, 3, 2),
        "y": rows.astype("i8"),
        "z": rows[:, None] % [7, 11, 13] == 0,
    }
    layouts = itertools.cycle([False, True, True, False, True])
    starts = np.cumsum([0, *counts])
    for i, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
        with h5py.File(
            folder / f"{i:03}.h5", "w", libver=["earliest", "latest"][i % 2]
        ) as file:
            for name, values in data.items():
                part = values[start:stop]
                order = "<>"[i % 2]  # the byte order may differ, the dtype is the same
                part = part.astype(part.dtype.newbyteorder(order))
                recipe = Recipe()
                if next(layouts):
                    chunks = (4, *values.shape[1:])
                    limits = (None, *values.shape[1:])
                    recipe = Recipe(chunks, PIPELINES[i % 6], limits)
                recipe.write(file, part, name)
    return data


@pytest.mark.parametrize("structure", STRUCTURES)
def test_many_files_of_few_rows(tmp_path, structure):
    data = write_files(tmp_path, COUNTS)
    names, select = STRUCTURES[structure]
    dataset = Dataset.from_hdf5(str(tmp_path / "*.h5"), names)
    assert len(dataset) == sum(COUNTS)
    for rows in hdf5_files.patterns(sum(COUNTS)):
        require_nest(rows_of(dataset, rows), select(*(v[rows] for v in data.values())))
    start = 0
    for batch in dataset.batch(50):
        part = slice(start, start + 50)
        require_nest(batch, select(*(values[part] for values in data.values())))
        start += 50
    assert start >= sum(COUNTS)


def require_nest(found, expected):
    """Require the same structure of the same arrays."""
    assert type(found) is type(expected)
    if isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            require_same(one, other)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            require_same(found[key], value)
    else:
        require_same(found, expected)


def test_shuffled_files_of_which_some_ranks_have_empty_ones(
    strategy, comm, mpi_tmp_path
):
    """How the rows are stored is not the same on all ranks."""
    paths = [mpi_tmp_path / f"{i}.h5" for i in range(comm.size)]

    def write():
        for path in paths:
            rows = np.arange(40 if path == paths[0] else 0)
            with h5py.File(path, "w") as file:
                storage = {"chunks": (8,), "maxshape": (None,), "compression": "gzip"}
                file.create_dataset("x", data=rows, **storage)

    on_root(comm, write)
    dataset = Dataset.from_hdf5(paths, "x").shuffle(seed=1, window_chunks=3).batch(8)
    dataset = dataset.with_options(Options(AutoShardPolicy.FILE))
    found = [
        strategy.gather(batch, axis=0)
        for batch in strategy.experimental_distribute_dataset(dataset)
    ]
    assert sorted(np.concatenate(found)) == list(range(40))
