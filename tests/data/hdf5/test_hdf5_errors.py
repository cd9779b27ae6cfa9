"""HDF5 files that are missing, unlike or damaged: an error on all ranks alike."""

import os
import re
import tracemalloc
import zlib

import h5py
import numpy as np
import pytest
from all_ranks import local, on_root
from h5py import h5d, h5p, h5s, h5t, h5z
from hdf5_damage import (
    CHUNK_ROWS,
    DAMAGES,
    RECIPES,
    WIDTH,
    bytes_of,
    damaged,
    divide,
    failure_of,
    info_of,
    numbered,
    overwrite,
    require_names,
    require_origin,
    require_rank,
    slice_of,
    steps_until_error,
    wide,
    write,
    write_chunks,
    write_wide,
)
from hdf5_files import Recipe, require_same, rows_of

from mpidist import AutoShardPolicy, DataError, Dataset, Options
from mpidist.errors import ArgumentTypeError, MismatchError


def overlapping_members(path):
    """Of a bfloat16, which h5py takes for 4 bytes, in the place of 2."""
    half = h5t.IEEE_F32LE.copy()
    half.set_fields(15, 7, 8, 0, 7)
    half.set_size(2)
    kind = h5t.create(h5t.COMPOUND, 6)
    kind.insert(b"weight", 0, half)
    kind.insert(b"number", 2, h5t.STD_I32LE)
    write(path, x=numbered(4))
    with h5py.File(path, "a") as file:
        h5d.create(file.id, b"y", kind, h5s.create_simple((4,)))
        inner = h5t.vlen_create(kind)
        h5d.create(file.id, b"z", inner, h5s.create_simple((4,)))


def two(y):
    """Return a function that writes a dataset x, and another one, y."""
    return lambda path: write(path, x=numbered(4), y=y)


# Files that cannot be used: the rows x, y of each of two, and what the message says
UNUSABLE = {
    "nothing": (lambda path: None, "cannot be opened"),
    "text": (lambda path: path.write_text("x,y\n1,2\n" * 1000), "cannot be opened"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be opened"),
    "folder": (lambda path: path.mkdir(), "cannot be opened"),
    "dangling": (lambda path: path.symlink_to("nowhere.h5"), "cannot be opened"),
    "signature only": (
        lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n"),
        "cannot be opened",
    ),
    "group": (
        lambda path: write(path, **{"x": numbered(4), "y/z": 1}),
        "no dataset 'y'",
    ),
    "other datasets": (
        lambda path: write(path, x=numbered(4), z=numbered(4)),
        "no dataset 'y'; there are: x, z",
    ),
    "broken soft link": (two(h5py.SoftLink("/nowhere")), "no dataset 'y'"),
    "broken external link": (
        two(h5py.ExternalLink("nowhere.h5", "y")),
        "no dataset 'y'",
    ),
    "named type": (two(np.dtype("f4")), "no dataset 'y'"),
    "scalar": (two(3.5), "'y' is a scalar"),
    "no dataspace": (two(h5py.Empty("f4")), "'y' is a scalar"),
    "unequal rows": (two(np.arange(5)), "unequal rows: 'x' has 4, 'y' has 5"),
    "overlapping members": (
        overlapping_members,
        "'y' has a type .* member 'number' overlaps",
    ),
    # Known from two files
    "other dtype": (two(np.arange(4.0)), "'y' are float64"),
    "other row shape": (two(np.zeros((4, 1), int)), r"'y' are int64 \(1,\)"),
    "other fields": (two(np.zeros(4, "i4,f4")), r"'y' are .*f0"),
    "other members": (
        two(np.zeros(4, h5py.enum_dtype({"cat": 0, "dog": 1}, "i8"))),
        r"'y' are int64{'cat': 0, 'dog': 1}",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_file_that_cannot_be_used(strategy, comm, tmp_path, kind):
    """Each rank has files of its own; a second rank looks into the second file."""
    write(tmp_path / "a.h5", x=numbered(4), y=np.arange(4))
    make, message = UNUSABLE[kind]
    make(tmp_path / "b.h5")
    dataset = Dataset.from_hdf5([tmp_path / "a.h5", tmp_path / "b.h5"], ["x", "y"])
    for _ in range(2):
        error = failure_of(strategy, comm, lambda: divide(strategy, dataset, 4))
        assert re.search(f"b.h5: .*{message}", str(error))
        assert len(set(comm.allgather(str(error)))) == 1
        if not kind.startswith("other") or kind == "other datasets":
            require_origin(error, comm, 1)
            assert f"on rank {1 % comm.size}" in str(error)


LABELS = [{"cat": 0, "dog": 1}, {"dog": 0, "cat": 1}]


@pytest.mark.parametrize(
    "kind", ["files", "fields", "concatenated", "filtered", "interleaved", "ranks"]
)
@pytest.mark.parametrize("members", [LABELS, LABELS[::-1], LABELS[:1] * 2])
def test_enums_with_other_members(strategy, comm, mpi_tmp_path, kind, members):
    """NumPy's `==` of dtypes ignores them."""
    paths = [mpi_tmp_path / "a.h5", mpi_tmp_path / "b.h5"]

    def make():
        for path, names in zip(paths, members, strict=True):
            dtype = h5py.enum_dtype(names, ">i2")
            dtype = np.dtype([("l", dtype, 2)]) if kind == "fields" else dtype
            write(path, x=np.zeros(4, dtype))

    def read():
        if kind == "ranks":

            def own(context):
                path = paths[context.input_pipeline_id % 2]
                return Dataset.from_hdf5(path, "x").shuffle(seed=1).batch(2)

            return list(strategy.distribute_datasets_from_function(own))
        if kind == "interleaved":
            several = Dataset.range(2).interleave(
                lambda i: Dataset.from_hdf5(paths[i], "x")
            )
            return list(strategy.experimental_distribute_dataset(several.batch(2)))
        if kind in ("concatenated", "filtered"):
            both = [Dataset.from_hdf5(path, "x").shuffle(seed=1) for path in paths]
            if kind == "filtered":
                both = [dataset.filter(lambda x: True) for dataset in both]
            first, second = (dataset.batch(2) for dataset in both)
            return list(
                strategy.experimental_distribute_dataset(first.concatenate(second))
            )
        return list(divide(strategy, Dataset.from_hdf5(paths, "x"), 4))

    on_root(comm, make)
    if members[0] == members[1] or (kind == "ranks" and comm.size == 1):
        assert read()
        return
    with pytest.raises(
        (DataError, ArgumentTypeError, MismatchError), match="dog"
    ) as error:
        read()
    assert len(set(comm.allgather(type(error.value)))) == 1


def test_a_chunk_that_is_far_longer_than_it_says(tmp_path):
    """1,000 times: HDF5 needs memory for all of it."""
    rows = np.arange(400, dtype="u1").reshape(4, 100)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x = file.create_dataset(
            "x", (4, 100), "u1", chunks=(4, 100), compression="gzip"
        )
        x.id.write_direct_chunk((0, 0), zlib.compress(rows.tobytes() + bytes(1 << 26)))
    source = Dataset.from_hdf5(tmp_path / "a.h5", "x")
    tracemalloc.start()
    try:
        require_same(rows_of(source, range(4)), rows)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_a_shuffle_of_values_of_0_bytes(strategy, comm, mpi_tmp_path):
    path, data = mpi_tmp_path / "a.h5", numbered(16)

    def make():
        write_chunks(path, data, ("shuffle", "gzip"))
        content = path.read_bytes()
        at = content.index(b"shuffle\0") + 8
        overwrite(path, at, bytes(4))

    on_root(comm, make)
    error = failure_of(
        strategy, comm, lambda: list(divide(strategy, Dataset.from_hdf5(path, "x"), 8))
    )
    require_names(error, path, "x")


def test_a_pattern_that_no_file_matches(strategy, comm, mpi_tmp_path):
    def make():
        return Dataset.from_hdf5(str(mpi_tmp_path / "*.h5"), "x")

    error = failure_of(strategy, comm, make)
    require_names(error, mpi_tmp_path / "*.h5")
    with pytest.raises(ValueError, match="at least one file"):
        Dataset.from_hdf5([], "x")
    for names in ([], {}):
        with pytest.raises(ValueError, match="dataset"):
            len(Dataset.from_hdf5(mpi_tmp_path / "a.h5", names))

    def divide_own(context):
        if context.input_pipeline_id == comm.size - 1:
            return make()
        return Dataset.range(4)

    def distribute():
        strategy.distribute_datasets_from_function(divide_own)

    error = failure_of(strategy, comm, distribute)
    require_names(error, mpi_tmp_path / "*.h5")
    require_origin(error, comm, comm.size - 1)


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
        found = local(strategy, next(iterator))
        require_same(found, slice_of(data, strategy, 0, batch_size))
        for _ in range(2):  # the step is tried again
            error = failure_of(strategy, comm, lambda i=iterator: next(i))
            require_names(error, path, "x", lost)
            require_origin(error, comm, comm.size - 1)
        iterator.close()
    for intact in [range(lost.start), range(lost.stop, len(data))]:
        require_same(rows_of(dataset, intact), data[list(intact)])


def test_a_damaged_chunk_does_not_end_the_dataset(strategy, comm, mpi_tmp_path):
    """After the file was repaired, with its times, the same iterator goes on."""
    batch_size = comm.size * CHUNK_ROWS
    data, path = numbered(4 * batch_size), mpi_tmp_path / "a.h5"
    on_root(comm, write_chunks, path, data, ("gzip",))
    info = info_of(path, comm.size)
    before = path.read_bytes()[info.byte_offset :][: info.size]
    on_root(comm, bytes_of(0.5), path, comm.size)
    iterator = iter(divide(strategy, Dataset.from_hdf5(path, "x"), batch_size))
    next(iterator)
    failure_of(strategy, comm, lambda: next(iterator))
    status = path.stat()
    on_root(comm, overwrite, path, info.byte_offset, before)
    times = status.st_atime_ns, status.st_mtime_ns
    on_root(comm, lambda: os.utime(path, ns=times))
    for step in range(1, 4):
        found = local(strategy, next(iterator))
        require_same(found, slice_of(data, strategy, step, batch_size))
    assert not iterator.get_next_as_optional().has_value()


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


UNREADABLE = [
    undefined_fill,
    unknown_filter,
    opaque_of_unknown_tag,
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


@pytest.mark.parametrize("name", ["x", "virtual", "link"])
def test_external_storage_that_is_cut(strategy, comm, mpi_tmp_path, name):
    """HDF5 itself gives zeros."""
    data, path = numbered(24), mpi_tmp_path / "a.h5"
    raw = [mpi_tmp_path / f"{i}.bin" for i in range(2)]

    def write_one():
        parts = [(str(raw[0]), 100, 1000), (str(raw[1]), 0, h5py.h5f.UNLIMITED)]
        with h5py.File(mpi_tmp_path / "source.h5", "w") as file:
            file.create_dataset("x", data.shape, "i4", external=parts)[...] = data
        layout = h5py.VirtualLayout(data.shape, data.dtype)
        layout[...] = h5py.VirtualSource("source.h5", "x", data.shape)
        with h5py.File(path, "w") as file:
            file["x"] = file["link"] = h5py.ExternalLink("source.h5", "x")
            file.create_virtual_dataset("virtual", layout)

    def divided(allow):
        dataset = Dataset.from_hdf5(path, name, allow_short_external=allow)
        return divide(strategy, dataset, 24)

    def require_rows(allow):
        (batch,) = divided(allow)
        require_same(local(strategy, batch), slice_of(data, strategy, 0, 24))

    def require_error(message):
        error = failure_of(strategy, comm, lambda: divided(False))
        require_names(error, path, "/x")
        assert message in str(error)

    on_root(comm, write_one)
    require_rows(False)
    require_rows(True)
    for number, size, last in [(1, data.nbytes - 1000, -1), (0, 1100, 999)]:
        on_root(comm, os.truncate, raw[number], size - 1)
        require_error(
            f"{raw[number]} has {size - 1} bytes, and rows of '/x' need {size}"
        )
        data.reshape(-1).view(np.uint8)[last] = 0
        require_rows(True)
    on_root(comm, raw[0].unlink)
    require_error(f"{raw[0]} cannot be read: No such file")


SHORT_CHUNKS = {
    "a stream of too few bytes": (0, lambda raw: zlib.compress(raw[:-8])),
    "a stream of no bytes": (0, lambda raw: zlib.compress(b"")),
    "too few bytes, unfiltered": (1, lambda raw: raw[:-8]),
}


@pytest.mark.parametrize("kind", SHORT_CHUNKS)
def test_chunks_of_too_few_bytes(strategy, comm, mpi_tmp_path, kind):
    """HDF5 itself gives whatever lies in memory for the rest."""
    mask, change = SHORT_CHUNKS[kind]
    data, path = numbered(4 * CHUNK_ROWS), mpi_tmp_path / "a.h5"

    def make():
        write_chunks(path, data, ("gzip",))
        with h5py.File(path, "r+") as file:
            short = change(data[16:24].tobytes())
            file["x"].id.write_direct_chunk((16, 0), short, filter_mask=mask)

    on_root(comm, make)
    divided = divide(strategy, Dataset.from_hdf5(path, "x"), 8)
    _, error = steps_until_error(strategy, comm, iter(divided), data, 8)
    assert error is not None
    require_names(error, path, "x", range(16, 24))


@pytest.mark.parametrize("kind", ["time", "24 bits"])
def test_types_that_numpy_does_not_have(strategy, comm, mpi_tmp_path, kind):
    path, type_id = mpi_tmp_path / "a.h5", h5t.UNIX_D32LE
    if kind == "24 bits":
        type_id = h5t.STD_I32LE.copy()
        type_id.set_precision(24)
        type_id.set_size(3)

    def make():
        with h5py.File(path, "w") as file:
            h5d.create(file.id, b"x", type_id, h5s.create_simple((24,)))

    on_root(comm, make)
    dataset = Dataset.from_hdf5(path, "x")
    error = failure_of(strategy, comm, lambda: list(divide(strategy, dataset, 8)))
    require_names(error, path, "x")


def test_more_files_than_may_be_open_at_once(tmp_path):
    resource = pytest.importorskip("resource")
    data = numbered(3 * 80)
    paths = [tmp_path / f"{i:02}.h5" for i in range(80)]
    for i, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            recipe = Recipe((2, WIDTH), ("gzip",)) if i % 2 else Recipe()
            recipe.write(file, data[3 * i : 3 * i + 3])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_open = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (is_open + 40, limits[1]))
        dataset = Dataset.from_hdf5(paths, "x")
        rows = np.random.default_rng(0).permutation(len(data))
        for _ in range(2):
            require_same(rows_of(dataset, rows), data[rows])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("locking", [True, "best-effort"])
def test_a_file_that_this_process_holds_with_locks(tmp_path, locking):
    write_chunks(tmp_path / "a.h5", numbered(20), ("gzip",))
    with h5py.File(tmp_path / "a.h5", "r", locking=locking):
        found = rows_of(Dataset.from_hdf5(tmp_path / "a.h5", "x"), range(20))
    require_same(found, numbered(20))


@pytest.mark.parametrize("layout", ["contiguous", "gzip"])
def test_users_may_open_the_file_while_it_is_read(tmp_path, layout):
    path, data = tmp_path / "a.h5", wide(8)
    write_wide(path, RECIPES[layout], data)
    dataset = Dataset.from_hdf5(path, "x")
    require_same(rows_of(dataset, [3]), data[[3]])
    with h5py.File(path) as file:
        require_same(file["x"][...], data)
        require_same(rows_of(dataset, [7, 1]), data[[7, 1]])
    require_same(rows_of(dataset, [2, 0]), data[[2, 0]])


# The message says which rank met it


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("policy", ["AUTO", "DATA", "FILE", "OFF"])
@pytest.mark.parametrize("depth", [0, 1])
def test_damaged_chunks_are_told_with_the_rank(
    strategy, comm, mpi_tmp_path, policy, depth
):
    """Once, and with the path of the file, however the rows are divided."""
    paths = [mpi_tmp_path / f"{i}.h5" for i in range(comm.size)]
    data = numbered(CHUNK_ROWS)

    def make():
        for path in paths:
            write_chunks(path, data, ("gzip",))
        bytes_of(0.5)(paths[-1], 0)

    on_root(comm, make)
    options = Options(auto_shard_policy=AutoShardPolicy[policy])
    dataset = Dataset.from_hdf5(paths, "x").with_options(options)
    batch_size = CHUNK_ROWS * comm.size
    error = failure_of(
        strategy, comm, lambda: list(divide(strategy, dataset, batch_size, depth))
    )
    require_names(error, paths[-1], "x", range(CHUNK_ROWS))
    require_rank(error, comm.rank if policy == "OFF" else comm.size - 1)
    assert str(error).count("on rank") == 1
