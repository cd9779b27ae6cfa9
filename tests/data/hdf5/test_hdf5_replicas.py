"""Rows of HDF5 files of every kind, divided over replicas and over many files."""

import dataclasses
import itertools

import h5py
import hdf5_files
import numpy as np
import pytest
from hdf5_files import Recipe, require_same, rows_of, whole
from hdf5_kinds import (
    CHUNKED,
    INTEGERS,
    ODD,
    PIPELINES,
    PLAIN,
    ROWS,
    WHOLE,
    write_pipelines,
    write_places,
    write_virtual,
)

from mpidist import Dataset
from mpidist.data.sharding import Permutation

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


def require_divided(strategy, dataset, expected, batch_size, seed=None):
    """Require that replicas get their slices of the batches of all rows, in order."""
    n = len(expected[0])
    shuffled = dataset if seed is None else dataset.shuffle(seed=seed)
    divided = strategy.experimental_distribute_dataset(shuffled.batch(batch_size))
    order = np.arange(n) if seed is None else Permutation(n, seed)(np.arange(n))
    replica, replicas = strategy.extended.replica_id, strategy.num_replicas_in_sync
    step = -1
    for step, batch in enumerate(divided):
        rows = order[step * batch_size : (step + 1) * batch_size]
        share = -(-len(rows) // replicas)
        mine = rows[replica * share : (replica + 1) * share]
        for value, values in zip(batch, expected, strict=True):
            (found,) = strategy.experimental_local_results(value)
            require_same(found, values[mine])
    assert step + 1 == len(divided) == -(-n // batch_size)


def written_by_root(comm, folder, write):
    """Call `write(path)` on one rank and return the path on all."""
    path = folder / "a.h5"
    if comm.rank == 0:
        write(path)
    comm.Barrier()
    return path


@pytest.mark.parametrize("kind", [*PLAIN, *ODD])
def test_replicas_get_their_rows_of_every_type(strategy, comm, mpi_tmp_path, kind):
    type_id, data = ODD[kind] if kind in ODD else (None, PLAIN[kind])
    path = written_by_root(
        comm, mpi_tmp_path, lambda path: write_pipelines(path, data, type_id)
    )
    names = ["plain", "shuffle+gzip+fletcher32", "contiguous"]
    expected = [whole(path, name) for name in names]
    dataset = Dataset.from_hdf5(path, names)
    require_divided(strategy, dataset, expected, 7)
    require_divided(strategy, dataset, expected, 8, seed=1)


def write_layouts(path):
    with h5py.File(path, "w", libver="latest", userblock_size=512) as file:
        for name, recipe in (CHUNKED | WHOLE).items():
            if not recipe.shapes:
                recipe.write(file, INTEGERS, name)
                if name in CHUNKED:
                    recipe = dataclasses.replace(recipe, filters=("shuffle", "gzip"))
                    recipe.write(file, INTEGERS, f"{name}, gzip")


def test_replicas_get_their_rows_of_every_layout(strategy, comm, mpi_tmp_path):
    path = written_by_root(comm, mpi_tmp_path, write_layouts)
    with h5py.File(path, "r") as file:
        expected = {name: file[name][...] for name in file}
    dataset = Dataset.from_hdf5(path, list(expected))
    for batch_size in [1, 6, ROWS + 1]:
        require_divided(strategy, dataset, list(expected.values()), batch_size)
        require_divided(strategy, dataset, list(expected.values()), batch_size, seed=3)


@pytest.mark.parametrize("make", [write_places, write_virtual])
def test_replicas_get_their_rows_of_other_files(strategy, comm, mpi_tmp_path, make):
    written_by_root(comm, mpi_tmp_path, lambda path: make(mpi_tmp_path))
    path, names = {
        write_places: ("here.h5", ["elsewhere", "soft", "contiguous elsewhere"]),
        write_virtual: ("virtual.h5", ["files", "columns"]),
    }[make]
    expected = [whole(mpi_tmp_path / path, name) for name in names]
    dataset = Dataset.from_hdf5(mpi_tmp_path / path, names)
    require_divided(strategy, dataset, expected, 6, seed=2)


def test_replicas_get_their_rows_of_many_files(strategy, comm, mpi_tmp_path):
    written_by_root(comm, mpi_tmp_path, lambda _: write_files(mpi_tmp_path, COUNTS))
    files = sorted(mpi_tmp_path.glob("*.h5"))
    expected = [np.concatenate([whole(path, n) for path in files]) for n in "xyz"]
    dataset = Dataset.from_hdf5(files, ["x", "y", "z"])
    for batch_size in [9, 64]:
        require_divided(strategy, dataset, expected, batch_size)
        require_divided(strategy, dataset, expected, batch_size, seed=5)
