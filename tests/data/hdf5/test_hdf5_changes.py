"""HDF5 files that change while they are read: right rows, or an error on all ranks."""

import gc
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import h5py
import launching
import numpy as np
import pytest
from all_ranks import local, on_root
from hdf5_damage import (
    RECIPES,
    divide,
    failure_of,
    lost_rows,
    place_of_row,
    require_names,
    require_origin,
    require_rank,
    require_usable,
    slice_of,
    steps_until_error,
    wide,
    write,
    write_wide,
)
from hdf5_files import Recipe, require_same, rows_of, whole

from mpidist import DataError, Dataset
from mpidist.data.distributed import reader
from mpidist.hdf5 import files
from mpidist.hdf5.read import Hdf5Rows


@pytest.fixture(autouse=True)
def _no_groups(monkeypatch):
    """Read no more steps ahead than the tests say, though they are of few bytes."""
    monkeypatch.setattr(reader, "_GROUPS", ((8 << 20, 1),))


CUTS = {"everything": 0, "half a row": 9001, "a few pages": 3 * 4096, "one byte": 1}


def require_met(strategy, comm, path, recipe, keep, depth, before):
    """Cut a file that is being read, after `before` steps; all ranks must notice.

    `keep` is how many bytes behind the beginning of row 40 of 96 stay, or 0 for none.
    """
    data, batch_size = wide(96), 8
    on_root(comm, write_wide, path, recipe, data)
    cut = place_of_row(path, 40) + keep if keep else 0
    lost = lost_rows(path, cut, len(data))
    iterator = iter(divide(strategy, Dataset.from_hdf5(path, "x"), batch_size, depth))
    for step in range(before):
        found = local(strategy, next(iterator))
        require_same(found, slice_of(data, strategy, step, batch_size))
    on_root(comm, os.truncate, path, cut)
    step, error = steps_until_error(
        strategy, comm, iterator, data, batch_size, first=before
    )
    assert step is not None, "rows that are gone were given as if they were there"
    require_names(error, path, "x")
    assert step <= lost[-1] // batch_size
    with pytest.raises(DataError):  # and again, rather than a hang or other rows
        next(iterator)
    iterator.close()
    require_usable(strategy)


@pytest.mark.parametrize("layout", RECIPES)
@pytest.mark.parametrize("keep", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_file_that_is_cut_while_it_is_read(
    strategy, comm, mpi_tmp_path, layout, keep, depth
):
    """HDF5 itself gives zeros for what lies behind the end."""
    for before in [0, 1, 3]:
        path = mpi_tmp_path / f"{before}.h5"
        require_met(strategy, comm, path, RECIPES[layout], keep, depth, before)


@pytest.mark.parametrize("layout", RECIPES)
def test_a_file_that_is_cut_at_any_moment(tmp_path, layout):
    """Also within a call that reads: right rows or an error."""
    data = wide(64)
    for attempt in range(8):
        path, is_cut, is_begun = tmp_path / f"{attempt}.h5", Event(), Event()
        write_wide(path, RECIPES[layout], data)
        source = Hdf5Rows([path], "x")

        def read(source=source, is_cut=is_cut, is_begun=is_begun):
            is_last = False
            while not is_last:
                is_last = is_cut.is_set()
                try:
                    found = source.read(np.arange(64))
                except DataError:
                    return
                finally:
                    is_begun.set()
                require_same(found, data)

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            is_begun.wait()
            os.truncate(path, path.stat().st_size // (attempt + 2))
            is_cut.set()
            reading.result()
        source.close()


@pytest.mark.parametrize("layout", ["contiguous", "compact"])
def test_one_of_many_files_that_is_rewritten_in_place_between_epochs(
    strategy, comm, mpi_tmp_path, layout
):
    """More files than stay open; by bytes, and by h5py."""
    paths = [mpi_tmp_path / f"{i:03}.h5" for i in range(130)]
    data = np.arange(1, 1 + 260 * 2048, dtype="i4").reshape(130, 2, 2048)

    def write():
        for path, rows in zip(paths, data, strict=True):
            with h5py.File(path, "w") as file:  # of a version without checksums
                Recipe(layout).write(file, rows)
            os.utime(path, (1, 1))

    def rewrite(path):
        before = path.read_bytes()
        after = before.replace(data[0, 1].tobytes(), bytes(data[0, 1].nbytes))
        assert len(after) == len(before)
        assert after != before
        path.write_bytes(after)

    on_root(comm, write)
    divided = divide(strategy, Dataset.from_hdf5(paths, "x"), 26)
    for step, batch in enumerate(divided):
        expected = slice_of(data.reshape(260, 2048), strategy, step, 26)
        require_same(local(strategy, batch), expected)
    on_root(comm, rewrite, paths[0])
    for _ in range(3):  # each time again
        error = failure_of(strategy, comm, lambda: list(divided))
        require_names(error, paths[0], "x")
    require_usable(strategy)


@pytest.mark.parametrize("few", [0, 16])
@pytest.mark.parametrize("change", ["rewritten", "replaced"])
def test_a_file_that_rows_are_in_by_a_link_or_as_a_source(
    strategy, comm, mpi_tmp_path, monkeypatch, change, few
):
    monkeypatch.setattr(files, "_FEW_FILES", few)
    data, path = wide(8), mpi_tmp_path / "a.h5"
    source = mpi_tmp_path / "source.h5"

    def write(data, target=source):
        with h5py.File(target, "w") as file:
            file["x"] = data

    def write_links():
        write(data)
        os.utime(source, (1, 1))
        with h5py.File(path, "w") as file:
            file["link"] = h5py.ExternalLink("source.h5", "x")
            layout = h5py.VirtualLayout(data.shape, data.dtype)
            layout[...] = h5py.VirtualSource("source.h5", "x", data.shape)
            file.create_virtual_dataset("virtual", layout)

    def change_source():
        if change == "rewritten":
            before = source.read_bytes()
            source.write_bytes(before.replace(data[3].tobytes(), data[4].tobytes()))
        else:
            write(-data, mpi_tmp_path / "new.h5")
            os.utime(mpi_tmp_path / "new.h5", (1, 1))
            os.replace(mpi_tmp_path / "new.h5", source)

    on_root(comm, write_links)
    names = ["link", "virtual"]
    both = [divide(strategy, Dataset.from_hdf5(path, name), 4) for name in names]
    for divided in both:
        for step, batch in enumerate(divided):
            require_same(local(strategy, batch), slice_of(data, strategy, step, 4))
    on_root(comm, change_source)
    for name, divided in zip(names, both, strict=True):
        for _ in range(2):
            error = failure_of(strategy, comm, lambda divided=divided: list(divided))
            require_names(error, path, name)
            assert str(source) in str(error)


def test_a_file_that_is_replaced_before_it_is_opened_again(tmp_path):
    data, path = wide(8), tmp_path / "a.h5"
    write_wide(path, Recipe(), data)
    (tmp_path / "link.h5").symlink_to(path)
    for change in ["by a rename", "by a link"]:
        source = Hdf5Rows([tmp_path / "link.h5"], "x")
        require_same(source.read(np.arange(8)), data)
        source.close()
        write_wide(tmp_path / "new.h5", Recipe(), -data)
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        os.utime(tmp_path / "new.h5", ns=times)
        if change == "by a rename":
            os.replace(tmp_path / "new.h5", path)
        else:
            (tmp_path / "link.h5").unlink()
            (tmp_path / "link.h5").symlink_to("new.h5")
        for _ in range(2):
            with pytest.raises(DataError, match=r"instead of .*create a new dataset"):
                source.read(np.arange(8))
            source.close()
        data = -data


@pytest.mark.mpi(min_size=2)
def test_a_file_that_is_gone_for_one_rank_only(strategy, comm, tmp_path):
    data, path = wide(32), tmp_path / "a.h5"
    write_wide(path, RECIPES["gzip"], data)
    iterator = iter(divide(strategy, Dataset.from_hdf5(path, "x"), 8))
    next(iterator)
    if comm.rank == 1:
        os.truncate(path, 3000)
    _, error = steps_until_error(strategy, comm, iterator, data, 8, first=1)
    assert error is not None
    require_origin(error, comm, 1)
    require_rank(error, 1)
    assert (str(path) in str(error)) == (comm.rank == 1)
    iterator.close()


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
    path = tmp_path / "a.h5"
    write(path, x=np.zeros((4, 2), int))
    dataset = Dataset.from_hdf5(path, "x")
    assert len(dataset) == 4
    copy = pickle.dumps(dataset)
    path.unlink()
    write(path, **({"x/y": 1} if changed is None else {"x": changed}))
    with pytest.raises(DataError, match="'x'"):
        rows_of(pickle.loads(copy), range(4))


def resize_elsewhere(path, rows):
    """Change the number of rows in another process, which fills the new ones."""
    script = (
        "import sys, h5py\n"
        "with h5py.File(sys.argv[1], 'r+', locking=False, libver='latest') as file:\n"
        "    old, new = len(file['x']), int(sys.argv[2])\n"
        "    file['x'].resize(new, axis=0)\n"
        "    file['x'][old:] = -1\n"
        "    file.flush()\n"
        "    file['more'] = range(1000)\n"
    )
    result = launching.run([sys.executable, "-c", script, str(path), str(rows)])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("chunks", marks=pytest.mark.slow),
        "gzip",
        pytest.param("fletcher32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("rows", [pytest.param(200, marks=pytest.mark.slow), 64 + 1])
def test_a_file_that_grows_while_it_is_read(strategy, comm, mpi_tmp_path, layout, rows):
    """All ranks get the rows that were there, or an error."""
    data, path = wide(64), mpi_tmp_path / "a.h5"
    recipe = RECIPES[layout]
    grows = Recipe(recipe.layout, recipe.filters, (None, None))
    on_root(comm, write_wide, path, grows, data)
    divided = divide(strategy, Dataset.from_hdf5(path, "x"), 8)
    iterator = iter(divided)
    require_same(local(strategy, next(iterator)), slice_of(data, strategy, 0, 8))
    on_root(comm, resize_elsewhere, path, rows)
    step, error = steps_until_error(strategy, comm, iterator, data, 8, first=1)
    if step is not None:
        require_names(error, path, "x")
    iterator.close()
    # Once nobody holds the old state a new dataset has all rows
    del divided, iterator, error
    gc.collect()
    everything = np.concatenate([data, np.full((rows - 64, 4096), -1, "i4")])
    iterator = iter(divide(strategy, Dataset.from_hdf5(path, "x"), 50))
    _, error = steps_until_error(strategy, comm, iterator, everything, 50)
    assert error is None, error


def write_rows(path, data, storage, folder):
    """Write rows, perhaps into other files, and perhaps as far as they are there."""
    chunks = {"chunks": (2,), "maxshape": (None,)}
    direct = {
        "contiguous": {},
        "gzip": {**chunks, "compression": "gzip", "shuffle": True},
        "lzf": {**chunks, "compression": "lzf"},
    }
    parts = list(data.reshape(-1, 2))
    with h5py.File(path, "w", libver="latest") as file:
        if storage in direct:
            file.create_dataset("x", data=data, **direct[storage])
        elif storage == "compact":
            Recipe("compact").write(file, data)
        elif storage == "sources":
            layout = h5py.VirtualLayout(data.shape, data.dtype)
            for i, part in enumerate(parts):
                write_rows(folder / f"{i}.h5", part, "contiguous", folder)
                source = h5py.VirtualSource(f"{i}.h5", "x", part.shape)
                layout[2 * i : 2 * i + 2] = source
            file.create_virtual_dataset("x", layout)
        else:  # numbered sources, of which one appears later
            for i, part in enumerate(parts):
                if i != 3 or data[0]:
                    write_rows(folder / f"{i}.h5", part, "contiguous", folder)
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            space = h5py.h5s.create_simple((40,), (h5py.h5s.UNLIMITED,))
            space.select_hyperslab((0,), (h5py.h5s.UNLIMITED,), (2,), (2,))
            block = h5py.h5s.create_simple((2,))
            properties.set_virtual(space, b"%b.h5", b"x", block)
            space = h5py.h5s.create_simple((40,), (h5py.h5s.UNLIMITED,))
            space.select_hyperslab((38,), (2,))
            properties.set_virtual(space, b"19.h5", b"x", block)
            space = h5py.h5s.create_simple((40,), (h5py.h5s.UNLIMITED,))
            kind = h5py.h5t.py_create(data.dtype)
            h5py.h5d.create(file.id, b"x", kind, space, properties)
    os.utime(path, (data[0], data[0]))  # some kernels' clocks are coarse


@pytest.mark.parametrize(
    ("storage", "source", "message"),
    [("sources", 19, "19.h5: .*"), ("numbered sources", 3, "were added or removed; ")],
)
def test_one_of_many_sources_that_changes_within_an_epoch(
    tmp_path, storage, source, message
):
    data, path = np.arange(40), tmp_path / "a.h5"
    write_rows(path, data, storage, tmp_path)
    expected = whole(path)
    iterator = iter(Dataset.from_hdf5(path, "x").batch(10))
    require_same(next(iterator), expected[:10])
    write_rows(tmp_path / f"{source}.h5", data[38:] + 100, "contiguous", tmp_path)
    write_rows(tmp_path / "5x.h5", data[38:] + 100, "contiguous", tmp_path)
    with pytest.raises(DataError, match=f"{message}create a new dataset"):
        list(iterator)


@pytest.mark.parametrize("change", ["rewritten", "removed"])
def test_sources_of_a_copy(strategy, comm, tmp_path, change):
    """Each rank has a copy of all files; the last one's changes, or lacks a source."""
    data, path = np.arange(40), tmp_path / "a.h5"
    if comm.rank == 0:
        write_rows(path, data, "sources", tmp_path)
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for name, content in comm.bcast(files).items():  # a file has the time of writing
        (tmp_path / name).write_bytes(content)
    paths, source = [path, tmp_path / "19.h5"], tmp_path / "18.h5"
    divided = divide(strategy, Dataset.from_hdf5(paths, "x"), 42)
    if change == "rewritten":
        for batch in divided:
            require_same(
                local(strategy, batch),
                slice_of(np.append(data, data[38:]), strategy, 0, 42),
            )
    if comm.rank == comm.size - 1:
        source.unlink()
        if change == "rewritten":
            write_rows(source, data[:2], "contiguous", tmp_path)
    error = failure_of(strategy, comm, lambda: list(divided))
    require_names(error, tmp_path if comm.rank == comm.size - 1 else "a.h5", "x")
    assert "18.h5" in str(error)


@pytest.mark.parametrize("kept", ["file", "dataset"])
@pytest.mark.parametrize("storage", ["lzf", "compact", "gzip", "sources"])
def test_a_file_that_this_process_has_open_otherwise(tmp_path, storage, kept):
    """HDF5 shows it what it knew before another process wrote."""
    path, data = tmp_path / "a.h5", np.arange(40)
    write_rows(path, data, storage, tmp_path)
    with h5py.File(path, "r") as file:
        user = file["x"] if kept == "dataset" else None
        require_same(file["x"][...], data)
        rewrite_elsewhere(tmp_path / ("3.h5" if storage == "sources" else "a.h5"))
        (found,) = Dataset.from_hdf5(path, "x").batch(40)
        del user
    with h5py.File(path, "r") as file:
        require_same(found, file["x"][...])
    assert (found != data).any()


def rewrite_elsewhere(path):
    """Replace all rows by -1 in another process."""
    script = (
        "import sys, h5py\n"
        "with h5py.File(sys.argv[1], 'r+', locking=False) as file:\n"
        "    file['x'][...] = -1\n"
    )
    result = launching.run([sys.executable, "-c", script, str(path)])
    assert result.returncode == 0, result.stderr


def test_a_file_that_this_process_has_stopped_to_write(tmp_path):
    """Our handle has shared what it wrote, and does not outlive it."""
    path, data = tmp_path / "a.h5", np.arange(40)
    write_rows(path, data, "lzf", tmp_path)
    dataset = Dataset.from_hdf5(path, "x").batch(40)
    with h5py.File(path, "r+") as file:
        file["x"][3] = -7
        (found,) = dataset
        require_same(found, file["x"][...])
    (after,) = dataset
    require_same(after, found)
    rewrite_elsewhere(path)
    with pytest.raises(DataError, match="was changed"):
        list(dataset)
    (found,) = Dataset.from_hdf5(path, "x").batch(40)
    assert (found == -1).all()
