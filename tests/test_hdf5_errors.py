"""Files that are missing, unlike, damaged or changed: an error on all ranks alike."""

from __future__ import annotations

import gc
import os
import pickle
import re
import struct
import sys
import zlib

import h5py
import launching
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t, h5z
from hdf5_files import Recipe, require_same, rows_of

from mpidist import AutoShardPolicy, DataError, Dataset, InputOptions, Options
from mpidist.data.hdf5 import Hdf5Rows

CHUNK_ROWS = 8
WIDTH = 40


def numbered(rows, width=WIDTH):
    """Rows that are all different and nowhere zero."""
    return np.arange(1, rows * width + 1, dtype="i4").reshape(rows, width)


def write(path, /, **datasets):
    with h5py.File(path, "w") as file:
        for name, data in datasets.items():
            file[name] = data


def require_usable(strategy):
    n = strategy.num_replicas_in_sync
    assert strategy.reduce("SUM", strategy.extended.replica_id + 1) == n * (n + 1) // 2


def on_root(comm, function, *arguments):
    """Call a function on one rank while the others wait."""
    comm.Barrier()
    if comm.rank == 0:
        function(*arguments)
    comm.Barrier()


def divide(strategy, dataset, batch_size, depth=0):
    options = InputOptions(experimental_per_replica_buffer_size=depth)
    return strategy.experimental_distribute_dataset(dataset.batch(batch_size), options)


def mine(strategy, value):
    (found,) = strategy.experimental_local_results(value)
    return found


def slice_of(data, strategy, step, batch_size):
    """Return this replica's rows of a batch of the rows in their order."""
    batch = data[step * batch_size : (step + 1) * batch_size]
    share = -(-len(batch) // strategy.num_replicas_in_sync)
    replica = strategy.extended.replica_id
    return batch[replica * share : (replica + 1) * share]


def failure_of(strategy, comm, call):
    """Return the DataError that `call()` raises on every rank; the job goes on."""
    with pytest.raises(DataError) as caught:
        call()
    assert all(comm.allgather(isinstance(caught.value, DataError)))
    require_usable(strategy)
    return caught.value


def require_names(error, path, dataset=None, rows=None):
    """Require that a message names the file, and the dataset and some of the rows."""
    message = str(error)
    assert str(path) in message
    if dataset is not None:
        assert repr(dataset) in message
    if rows is not None:
        named = re.search(r"\brows? (\d+)(?:\.\.(\d+))?", message)
        assert named, message
        first, last = int(named[1]), int(named[2] or named[1])
        assert any(first <= row <= last for row in rows), message


def require_origin(error, comm, rank):
    """Require that all ranks blame the same rank, if there is a choice."""
    if comm.size > 1:
        assert error.origin_rank == rank


# Files that cannot be used: the rows x, y of each of two, and what the message says


def nothing(path):
    pass


def text(path):
    path.write_text("x,y\n1,2\n" * 1000)


def empty(path):
    path.write_bytes(b"")


def folder(path):
    path.mkdir()


def dangling(path):
    path.symlink_to("nowhere.h5")


def signature_only(path):
    path.write_bytes(b"\x89HDF\r\n\x1a\n")


def group(path):
    write(path, **{"x": numbered(4), "y/z": 1})


def other_datasets(path):
    write(path, x=numbered(4), z=numbered(4))


def broken_soft_link(path):
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = numbered(4), h5py.SoftLink("/nowhere")


def broken_external_link(path):
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = numbered(4), h5py.ExternalLink("nowhere.h5", "y")


def named_type(path):
    write(path, x=numbered(4), y=np.dtype("f4"))


def scalar(path):
    write(path, x=numbered(4), y=3.5)


def no_dataspace(path):
    write(path, x=numbered(4), y=h5py.Empty("f4"))


def unequal_rows(path):
    write(path, x=numbered(4), y=np.arange(5))


def other_dtype(path):
    write(path, x=numbered(4), y=np.arange(4.0))


def other_row_shape(path):
    write(path, x=numbered(4), y=np.zeros((4, 1), int))


def other_fields(path):
    write(path, x=numbered(4), y=np.zeros(4, "i4,f4"))


UNUSABLE = {
    nothing: "cannot be opened",
    text: "cannot be opened",
    empty: "cannot be opened",
    folder: "cannot be opened",
    dangling: "cannot be opened",
    signature_only: "cannot be opened",
    group: "no dataset 'y'",
    other_datasets: "no dataset 'y'; there are: x, z",
    broken_soft_link: "no dataset 'y'",
    broken_external_link: "no dataset 'y'",
    named_type: "no dataset 'y'",
    scalar: "'y' is a scalar",
    no_dataspace: "'y' is a scalar",
    unequal_rows: "unequal rows: 'x' has 4, 'y' has 5",
    other_dtype: "'y' are float64",
    other_row_shape: r"'y' are int64 \(1,\)",
    other_fields: r"'y' are .*f0",
}


@pytest.mark.parametrize("damage", UNUSABLE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_file_that_cannot_be_used(strategy, comm, tmp_path, damage, everywhere):
    """Each rank has files of its own; those of the last one, or of all, are bad."""
    write(tmp_path / "a.h5", x=numbered(4), y=np.arange(4))
    is_bad = everywhere or comm.rank == comm.size - 1
    if is_bad:
        damage(tmp_path / "b.h5")
    else:
        write(tmp_path / "b.h5", x=numbered(4), y=np.arange(4))
    files = [tmp_path / "a.h5", tmp_path / "b.h5"]
    dataset = Dataset.from_hdf5(files, ["x", "y"])
    for _ in range(2):
        error = failure_of(strategy, comm, lambda: divide(strategy, dataset, 4))
        assert re.search(f"b.h5: .*{UNUSABLE[damage]}", str(error))
        assert (str(tmp_path / "b.h5") in str(error)) == is_bad
        require_origin(error, comm, comm.rank if everywhere else comm.size - 1)


def test_a_pattern_that_no_file_matches(strategy, comm, mpi_tmp_path):
    def make():
        return Dataset.from_hdf5(str(mpi_tmp_path / "*.h5"), "x")

    error = failure_of(strategy, comm, make)
    require_names(error, mpi_tmp_path / "*.h5")

    def divide_own(context):
        if context.input_pipeline_id == comm.size - 1:
            return make()
        return Dataset.range(4)

    def distribute():
        strategy.distribute_datasets_from_function(divide_own)

    error = failure_of(strategy, comm, distribute)
    require_names(error, mpi_tmp_path / "*.h5")
    require_origin(error, comm, comm.size - 1)


def refuses_everything():
    return os.name != "posix" or os.geteuid() == 0


@pytest.mark.skipif(refuses_everything(), reason="root may read every file")
def test_a_file_without_permission(strategy, comm, tmp_path):
    write(tmp_path / "a.h5", x=numbered(4))
    if comm.rank == comm.size - 1:
        (tmp_path / "a.h5").chmod(0)
    dataset = Dataset.from_hdf5(tmp_path / "a.h5", "x")
    error = failure_of(strategy, comm, lambda: divide(strategy, dataset, 4))
    assert re.search("a.h5: cannot be opened.*[Pp]ermission", str(error))
    require_origin(error, comm, comm.size - 1)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("recipe", [Recipe(), Recipe((8, WIDTH), ("gzip",))])
def test_a_file_that_was_cut_before_it_is_opened(
    strategy, comm, mpi_tmp_path, libver, recipe
):
    path = mpi_tmp_path / "a.h5"

    def make():
        with h5py.File(path, "w", libver=libver) as file:
            recipe.write(file, numbered(64))

    on_root(comm, make)
    size = path.stat().st_size
    for cut in sorted({0, 1, 7, 8, 9, 44, 95, 96, 97, 512, 800, size // 2, size - 1}):
        on_root(comm, lambda cut=cut: (make(), os.truncate(path, cut)))
        dataset = Dataset.from_hdf5(path, "x")
        error = failure_of(strategy, comm, lambda dataset=dataset: list(dataset))
        require_names(error, path)
        error = failure_of(
            strategy, comm, lambda dataset=dataset: divide(strategy, dataset, 4)
        )
        require_names(error, path)


# Damage to one chunk, which belongs to one rank: functions of the path of a file, that
# write `data` into its dataset x by chunks of CHUNK_ROWS rows and spoil one chunk


def write_chunks(path, data, filters, libver="earliest"):
    with h5py.File(path, "w", libver=libver) as file:
        Recipe((CHUNK_ROWS, WIDTH), filters).write(file, data)


def info_of(path, chunk):
    with h5py.File(path, "r") as file:
        return file["x"].id.get_chunk_info_by_coord((chunk * CHUNK_ROWS, 0))


def overwrite(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def patch_index(path, chunk, address=None, size=None):
    """Let the entry of a B-tree, which has no checksum, point elsewhere."""
    info, content = info_of(path, chunk), path.read_bytes()
    key = struct.pack("<IIQQQ", info.size, 0, chunk * CHUNK_ROWS, 0, 0)
    entry = key + struct.pack("<Q", info.byte_offset)
    assert content.count(entry) == 1
    key = struct.pack("<I", info.size if size is None else size) + key[4:]
    address = info.byte_offset if address is None else address
    path.write_bytes(content.replace(entry, key + struct.pack("<Q", address)))


def bytes_of(where, value=None, count=1):
    """Damage some bytes from `where` on (a share of the chunk, or counted back)."""

    def spoil(path, chunk):
        info = info_of(path, chunk)
        at = int(where * info.size) if where >= 0 else info.size + where
        with open(path, "rb") as file:
            file.seek(info.byte_offset + at)
            old = file.read(min(count, info.size - at))
        new = bytes([b ^ 1 if value is None else value for b in old])
        overwrite(path, info.byte_offset + at, new)

    return spoil


def other_stream(change):
    """Put other bytes in the place of a gzip chunk."""

    def spoil(path, chunk):
        with h5py.File(path, "r+") as file:
            at = (chunk * CHUNK_ROWS, 0)
            raw = file["x"][chunk * CHUNK_ROWS :][:CHUNK_ROWS].tobytes()
            file["x"].id.write_direct_chunk(at, change(raw))

    return spoil


def address(change):
    def spoil(path, chunk):
        info, end = info_of(path, chunk), path.stat().st_size
        patch_index(path, chunk, address=change(info.size, end))

    return spoil


def size(new):
    return lambda path, chunk: patch_index(path, chunk, size=new)


DAMAGES = {
    "gzip: overwritten": (("gzip",), bytes_of(0, 0xFF, 1 << 20)),
    "gzip: zeros": (("gzip",), bytes_of(0, 0, 1 << 20)),
    "gzip: first byte": (("gzip",), bytes_of(0)),
    "gzip: a byte within": (("gzip",), bytes_of(0.5)),
    "gzip: second half": (("gzip",), bytes_of(0.5, 0, 1 << 20)),
    "gzip: its checksum": (("gzip",), bytes_of(-1)),
    "gzip: cut": (("gzip",), other_stream(lambda raw: zlib.compress(raw)[:-5])),
    "gzip: no stream": (("gzip",), other_stream(lambda raw: raw)),
    "gzip: one byte": (("gzip",), other_stream(lambda raw: raw[:1])),
    "shuffle and gzip": (("shuffle", "gzip"), bytes_of(0.5, 0, 9)),
    "fletcher32: first byte": (("fletcher32",), bytes_of(0)),
    "fletcher32: a byte within": (("fletcher32",), bytes_of(0.5)),
    "fletcher32: last byte": (("fletcher32",), bytes_of(-5)),
    "fletcher32: the checksum": (("fletcher32",), bytes_of(-1)),
    "fletcher32: both halves": (("fletcher32",), bytes_of(-4, 0, 4)),
    "all filters: a byte": (("shuffle", "gzip", "fletcher32"), bytes_of(0.3)),
    "all filters: the checksum": (("shuffle", "gzip", "fletcher32"), bytes_of(-2)),
    "checksum first": (("fletcher32", "gzip"), bytes_of(0.3)),
    "lzf with a checksum": (("lzf", "fletcher32"), bytes_of(0.3)),
    "address: far away": ((), address(lambda size, end: 1 << 40)),
    "address: the end": ((), address(lambda size, end: end)),
    "address: over the end": ((), address(lambda size, end: end - size // 2)),
    "address: negative": ((), address(lambda size, end: (1 << 64) - 512)),
    "address of gzip: far away": (("gzip",), address(lambda size, end: 1 << 40)),
    "address of gzip: over the end": (("gzip",), address(lambda size, end: end - 9)),
    "size of gzip: too small": (("gzip",), size(9)),
    "size of gzip: zero": (("gzip",), size(0)),
    "size of gzip: too large": (("gzip",), size((1 << 32) - 1)),
    "size: too large": ((), size((1 << 31) + 5)),
}


def damaged(comm, path, kind, data, chunk):
    """Write a file of which one chunk is damaged."""
    filters, spoil = DAMAGES[kind] if isinstance(kind, str) else kind
    on_root(comm, lambda: (write_chunks(path, data, filters), spoil(path, chunk)))
    return Dataset.from_hdf5(path, "x")


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_chunk_is_an_error_on_all_ranks(strategy, comm, mpi_tmp_path, kind):
    """One rank meets it in its rows of the second batch."""
    batch_size = comm.size * CHUNK_ROWS
    data, chunk = numbered(3 * batch_size), 2 * comm.size - 1
    lost = range(chunk * CHUNK_ROWS, (chunk + 1) * CHUNK_ROWS)
    path = mpi_tmp_path / "a.h5"
    dataset = damaged(comm, path, kind, data, chunk)
    for depth in [0, 1]:
        iterator = iter(divide(strategy, dataset, batch_size, depth))
        found = mine(strategy, next(iterator))
        require_same(found, slice_of(data, strategy, 0, batch_size))
        for _ in range(2):  # the step is tried again
            error = failure_of(strategy, comm, lambda i=iterator: next(i))
            require_names(error, path, "x", lost)
            require_origin(error, comm, comm.size - 1)
        iterator.close()
    for intact in [range(lost.start), range(lost.stop, len(data))]:
        require_same(rows_of(dataset, intact), data[list(intact)])


def test_a_damaged_chunk_does_not_end_the_dataset(strategy, comm, mpi_tmp_path):
    """After the file was repaired the same iterator goes on."""
    batch_size = comm.size * CHUNK_ROWS
    data, path = numbered(4 * batch_size), mpi_tmp_path / "a.h5"
    on_root(comm, write_chunks, path, data, ("gzip",))
    info = info_of(path, comm.size)
    before = path.read_bytes()[info.byte_offset :][: info.size]
    on_root(comm, bytes_of(0.5), path, comm.size)
    iterator = iter(divide(strategy, Dataset.from_hdf5(path, "x"), batch_size))
    next(iterator)
    failure_of(strategy, comm, lambda: next(iterator))
    on_root(comm, overwrite, path, info.byte_offset, before)
    for step in range(1, 4):
        found = mine(strategy, next(iterator))
        require_same(found, slice_of(data, strategy, step, batch_size))
    assert not iterator.get_next_as_optional().has_value()


def test_damage_is_met_by_whoever_reads_those_rows(strategy, comm, mpi_tmp_path):
    data, path = numbered(6 * CHUNK_ROWS), mpi_tmp_path / "a.h5"
    dataset = damaged(comm, path, "gzip: overwritten", data, 3)
    divided = divide(strategy, dataset.shuffle(seed=1), 6)
    error = failure_of(strategy, comm, lambda: list(divided))
    require_names(error, path, "x", range(3 * CHUNK_ROWS, 4 * CHUNK_ROWS))
    # What reads everything meets it everywhere, and each rank tells of its own
    off = dataset.with_options(Options(auto_shard_policy=AutoShardPolicy.OFF))
    error = failure_of(strategy, comm, lambda: list(divide(strategy, off, 9)))
    require_names(error, path, "x", range(3 * CHUNK_ROWS, 4 * CHUNK_ROWS))
    require_origin(error, comm, comm.rank)


def test_damage_in_one_of_several_files_and_datasets(strategy, comm, mpi_tmp_path):
    """The rows are counted from the beginning of the file that is named."""
    data, paths = numbered(3 * CHUNK_ROWS), [mpi_tmp_path / f"{i}.h5" for i in range(3)]

    def make():
        for path in paths:
            with h5py.File(path, "w") as file:
                file["whole"] = data
                Recipe((CHUNK_ROWS, WIDTH), ("gzip",)).write(file, data)
        bytes_of(0.5)(paths[1], 2)

    on_root(comm, make)
    dataset = Dataset.from_hdf5(paths, {"a": "whole", "b": "x"})
    error = failure_of(strategy, comm, lambda: list(divide(strategy, dataset, 5)))
    require_names(error, paths[1], "x", range(2 * CHUNK_ROWS, 3 * CHUNK_ROWS))
    assert "0.h5" not in str(error)
    assert "2.h5" not in str(error)


@pytest.mark.parametrize("limits", [None, (None, WIDTH), (None, None)])
def test_a_damaged_chunk_index(strategy, comm, mpi_tmp_path, limits):
    """Of the newer kinds, which have checksums: rows that are given are right."""
    path, data = mpi_tmp_path / "a.h5", numbered(40 * CHUNK_ROWS)

    def make():
        with h5py.File(path, "w", libver="latest") as file:
            Recipe((CHUNK_ROWS, WIDTH), (), limits).write(file, data)
        info = info_of(path, 30)
        old, new = (struct.pack("<Q", info.byte_offset + i) for i in (0, 8))
        content = path.read_bytes()
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))

    on_root(comm, make)

    def iterate():
        divided = divide(strategy, Dataset.from_hdf5(path, "x"), 20)
        for step, batch in enumerate(divided):
            require_same(mine(strategy, batch), slice_of(data, strategy, step, 20))

    error = failure_of(strategy, comm, iterate)
    require_names(error, path)


def undefined_fill(file):
    """Rows that were never written and have no fill value."""
    try:
        Recipe((8, WIDTH), fill=..., written=()).write(file, numbered(24))
    except LookupError as error:
        pytest.skip(str(error))


def unknown_filter(file):
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_chunk((8, WIDTH))
    properties.set_filter(32015, h5z.FLAG_OPTIONAL, (3,))  # Zstandard, a plug-in
    space = h5s.create_simple((24, WIDTH))
    dataset = h5d.create(file.id, b"x", h5t.STD_I32LE, space, properties)
    for start in [0, 8, 16]:
        dataset.write_direct_chunk((start, 0), b"compressed")


def opaque_of_unknown_tag(file):
    kind = h5t.create(h5t.OPAQUE, 3)
    kind.set_tag(b"fingerprint")
    made = h5d.create(file.id, b"x", kind, h5s.create_simple((24,)))
    made.write(h5s.ALL, h5s.ALL, np.zeros(24, "V3"), mtype=kind)


def external_storage_that_is_gone(file):
    file.create_dataset("x", (24,), "i4", external=[("gone.bin", 0, 96)])


def virtual_source_that_is_no_file(file):
    folder = os.path.dirname(file.filename)
    with open(os.path.join(folder, "source.h5"), "w") as source:
        source.write("text")
    layout = h5py.VirtualLayout((24,), "i4")
    layout[:] = h5py.VirtualSource("source.h5", "d", (24,))
    file.create_virtual_dataset("x", layout)


UNREADABLE = [
    undefined_fill,
    unknown_filter,
    opaque_of_unknown_tag,
    external_storage_that_is_gone,
    virtual_source_that_is_no_file,
]


@pytest.mark.parametrize("make", UNREADABLE, ids=lambda f: f.__name__)
def test_datasets_that_h5py_cannot_read(strategy, comm, mpi_tmp_path, make):
    path = mpi_tmp_path / "a.h5"

    def write_one():
        with h5py.File(path, "w") as file:
            make(file)

    on_root(comm, write_one)
    divided = divide(strategy, Dataset.from_hdf5(path, "x"), 8)
    for _ in range(2):
        error = failure_of(strategy, comm, lambda: next(iter(divided)))
        require_names(error, path, "x", range(24))
        require_origin(error, comm, comm.rank)


# Files that change while they are read


RECIPES = {
    "contiguous": Recipe(),
    "chunks": Recipe((CHUNK_ROWS, 4096)),
    "gzip": Recipe((CHUNK_ROWS, 4096), ("gzip",)),
    "fletcher32": Recipe((CHUNK_ROWS, 4096), ("fletcher32",)),
    "lzf": Recipe((CHUNK_ROWS, 4096), ("lzf",)),
}


def write_wide(path, recipe, data):
    """Write rows that need far more memory than HDF5 keeps of any file."""
    with h5py.File(path, "w", libver="latest") as file:
        recipe.write(file, data)


def wide(rows):
    """Rows of 16 KiB that do not compress to nothing."""
    random = np.random.default_rng(0)
    return random.integers(1, 1 << 30, (rows, 4096), np.int32)


def place_of_row(path, row):
    """Return the address of a row's data, or of its chunk's."""
    with h5py.File(path, "r") as file:
        dataset = file["x"]
        if dataset.chunks is None:
            row_bytes = dataset.dtype.itemsize * dataset[0].size
            return dataset.id.get_offset() + row * row_bytes
        at = (row // dataset.chunks[0] * dataset.chunks[0], 0)
        return dataset.id.get_chunk_info_by_coord(at).byte_offset


def lost_rows(path, cut, rows):
    """Return which rows have data behind the first `cut` bytes."""
    return [row for row in range(rows) if place_of_row(path, row) >= cut]


def steps_until_error(strategy, comm, iterator, data, batch_size, first=0):
    """Go on until an error, the same on all ranks; what comes before is right."""
    for step in range(first, -(-len(data) // batch_size)):
        error = None
        try:
            found = mine(strategy, next(iterator))
        except DataError as caught:
            error = caught
        everyone = comm.allgather(error is None)
        assert len(set(everyone)) == 1, everyone
        if error is not None:
            require_usable(strategy)
            return step, error
        require_same(found, slice_of(data, strategy, step, batch_size))
    assert not iterator.get_next_as_optional().has_value()
    return None, None


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
        found = mine(strategy, next(iterator))
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


@pytest.mark.parametrize("keep", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_compressed_file_that_is_cut_while_it_is_read(
    strategy, comm, mpi_tmp_path, keep, depth
):
    for before in [0, 1, 3]:
        path = mpi_tmp_path / f"{before}.h5"
        require_met(strategy, comm, path, RECIPES["gzip"], keep, depth, before)


@pytest.mark.parametrize("layout", RECIPES)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_file_that_is_replaced_or_removed_while_it_is_read(
    strategy, comm, mpi_tmp_path, layout, depth
):
    """The old rows, which the open file still has, or an error; never the new ones."""
    data, path = wide(64), mpi_tmp_path / "a.h5"
    for change in ["replaced alike", "replaced otherwise", "removed"]:
        on_root(comm, write_wide, path, RECIPES[layout], data)
        dataset = Dataset.from_hdf5(path, "x")
        iterator = iter(divide(strategy, dataset, 8, depth))
        require_same(mine(strategy, next(iterator)), slice_of(data, strategy, 0, 8))
        if change == "removed":
            on_root(comm, path.unlink)
        else:
            other = (
                Recipe((3, 100)) if change.endswith("otherwise") else RECIPES[layout]
            )
            on_root(comm, write_wide, mpi_tmp_path / "new.h5", other, -data)
            on_root(comm, os.replace, mpi_tmp_path / "new.h5", path)
        step, error = steps_until_error(strategy, comm, iterator, data, 8, first=1)
        if step is not None:
            require_names(error, path)
        iterator.close()


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
    assert (str(path) in str(error)) == (comm.rank == 1)
    iterator.close()


@pytest.mark.parametrize("layout", RECIPES)
def test_a_file_that_changed_before_it_is_opened_again(tmp_path, layout):
    """Rows of now, or an error; never bytes that lie where rows were before."""
    data, path = wide(32), tmp_path / "a.h5"
    for other in RECIPES.values():
        write_wide(path, RECIPES[layout], data)
        source = Hdf5Rows([path], "x")
        require_same(source.read(np.arange(5)), data[:5])
        copy = pickle.loads(pickle.dumps(source))
        source.close()
        path.unlink()
        write_wide(path, other, -data)
        for one in [source, copy]:
            try:
                found = one.read(np.arange(32))
            except DataError as error:
                require_names(error, path, "x")
            else:
                require_same(found, -data)
            one.close()


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


@pytest.mark.parametrize("layout", ["chunks", "gzip", "fletcher32"])
@pytest.mark.parametrize("rows", [200, 64 + 1])
def test_a_file_that_grows_while_it_is_read(strategy, comm, mpi_tmp_path, layout, rows):
    """All ranks get the rows that were there, or an error."""
    data, path = wide(64), mpi_tmp_path / "a.h5"
    recipe = RECIPES[layout]
    grows = Recipe(recipe.layout, recipe.filters, (None, None))
    on_root(comm, write_wide, path, grows, data)
    divided = divide(strategy, Dataset.from_hdf5(path, "x"), 8)
    iterator = iter(divided)
    require_same(mine(strategy, next(iterator)), slice_of(data, strategy, 0, 8))
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
