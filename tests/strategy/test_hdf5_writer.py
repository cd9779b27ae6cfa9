"""Rows that all ranks write, against NumPy and plain h5py."""

import contextlib
import errno
import itertools
import json
import math
import os
import resource
import shutil
import sys
from pathlib import Path

import failing_calls
import h5py
import launching
import numpy as np
import pytest
from all_ranks import on_root
from mpi4py import MPI

import mpidist
from mpidist import Dataset, Hdf5Writer
from mpidist.device import binding
from mpidist.hdf5.shard_writer import BLOCK_BYTES
from mpidist.util import mounts
from mpidist.util.files import AtomicFile, AtomicHdf5File


@pytest.fixture
def path(mpi_tmp_path):
    """The index file, in one empty folder for all ranks."""
    return mpi_tmp_path / "features.h5"


def rows_of(rank, count, shape=(3,), dtype="f8"):
    """Return rows that tell from which rank they come, and which they are."""
    numbers = 1000.0 * rank + np.arange(count)
    return np.broadcast_to(
        numbers.reshape(-1, *[1] * len(shape)), (count, *shape)
    ).astype(dtype)


def written_by_all(comm, make):
    return np.concatenate([make(rank) for rank in range(comm.size)])


def read(path, name="data"):
    with h5py.File(path, "r") as file:
        return file[name][...]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def shard(rank, size):
    return f"features-{rank:05}-of-{size:05}.h5"


def uneven(rank):
    return [5, 0, 13, 1][rank]


def test_the_index_is_all_rows_by_rank(comm, strategy, path):
    def rows(rank):
        x = rows_of(rank, uneven(rank), (2, 3), "f4")
        return {"x": x, "deep/in/label": x[:, 0, 0].astype("i8")}

    mine = rows(comm.rank)
    with Hdf5Writer(strategy, path, chunk_rows=4) as writer:
        for first, last in itertools.pairwise([0, 0, 1, 3, 13]):
            writer.append({name: a[first:last] for name, a in mine.items()})
    for name in mine:
        expected = written_by_all(comm, lambda rank, name=name: rows(rank)[name])
        found = read(path, name)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    # A rank without rows has no file
    shards = [shard(r, comm.size) for r in range(comm.size) if uneven(r)]
    assert names_in(path.parent) == sorted(["features.h5", *shards])
    np.testing.assert_array_equal(
        read(path.with_name(shard(0, comm.size)), "x"), rows(0)["x"]
    )


CATS = h5py.enum_dtype({"CAT": 0, "DOG": 1}, basetype="i1")
DOGS = h5py.enum_dtype({"DOG": 0, "CAT": 1}, basetype="i1")


def bfloat16():
    return np.ones(2, pytest.importorskip("ml_dtypes").bfloat16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bfloat16, "no dtype bfloat16.*float32"),
        (lambda: np.array(["a", "b"]), "no dtype <U1.*encode"),
        (lambda: np.zeros(2, "M8[s]"), "no dtype datetime64.*view"),
        (lambda: np.array([b"a", None]), "dtype object"),
        (lambda: np.zeros(2, [("r", "f4"), ("i", "f4")]), "return complex64"),
        (lambda: [1, 2], "must be an array"),
        (lambda: np.ma.masked_array([1, 2], [0, 1]), "masked"),
        (lambda: {"x": np.ones(1)}, "must be an array"),
    ],
)
def test_what_hdf5_cannot_hold_is_refused_by_name(strategy, path, make, message):
    with Hdf5Writer(strategy, path) as writer:
        for _ in range(2):
            with pytest.raises(mpidist.ArgumentTypeError, match=f"'odd'.*{message}"):
                writer.append({"odd": make(), "x": np.ones(2)})
        # Nothing was taken
        writer.append({"x": np.ones(1)})
    assert read(path, "x").tolist() == [1] * strategy.num_replicas_in_sync


@pytest.mark.parametrize("chunk_rows", [1, 3, 64, None])
def test_rows_come_in_any_portions(comm, strategy, path, chunk_rows, monkeypatch):
    # Blocks of several chunks, of one, and of less
    monkeypatch.setattr("mpidist.hdf5.shard_writer.BLOCK_BYTES", 7 * 8)

    def rows(rank):
        return rows_of(rank, 200 + rank, (), "f8")

    cuts = np.random.default_rng(comm.rank).integers(0, 200, 30)
    edges = [0, *range(10), *sorted(cuts), 200 + comm.rank]
    edges.sort()
    with Hdf5Writer(strategy, path, chunk_rows=chunk_rows) as writer:
        for first, last in itertools.pairwise(edges):
            writer.append(rows(comm.rank)[first:last])
    np.testing.assert_array_equal(read(path), written_by_all(comm, rows))
    with h5py.File(path.with_name(shard(0, comm.size)), "r") as file:
        assert file["data"].chunks == (chunk_rows or 7,)


def test_chunks_are_about_a_mebibyte_and_few_rows_take_no_whole_one(strategy, path):
    wide = np.zeros((200, 100, 100), "f4")  # 8 MB
    with Hdf5Writer(strategy, path) as writer:
        writer.append({"wide": wide, "narrow": np.arange(200)})
        rank = strategy.extended.replica_id
        mine = path.with_name(shard(rank, strategy.num_replicas_in_sync))
        (temporary,) = path.parent.glob(f"{mine.name}.*.tmp")
        # No more than a chunk waits in memory
        assert temporary.stat().st_size >= wide.nbytes - BLOCK_BYTES
    with h5py.File(mine, "r") as file:
        assert file["wide"].chunks == (26, 100, 100)
        assert file["wide"].maxshape == (None, 100, 100)
        assert file["narrow"].chunks is None
    assert mine.stat().st_size < wide.nbytes + 2 * BLOCK_BYTES


def test_a_row_that_is_too_large_for_a_chunk_is_cut(strategy, path, monkeypatch):
    monkeypatch.setattr("mpidist.hdf5.shard_writer.LARGEST_CHUNK_BYTES", 1 << 21)
    row = np.random.default_rng(0).normal(size=(1, 400, 1000))
    with Hdf5Writer(strategy, path) as writer:
        writer.append(row)
    found = read(path)
    np.testing.assert_array_equal(found, np.repeat(row, len(found), axis=0))


def test_chunks_that_hdf5_does_not_allow_are_refused(strategy, path):
    with (
        pytest.raises(ValueError, match=r"chunk_rows=10000000 .*'data'.*4294967295"),
        Hdf5Writer(strategy, path, chunk_rows=10**7) as writer,
    ):
        writer.append(np.zeros((1, 1000)))


def test_compression(comm, strategy, path):
    rows = np.zeros((1000, 100))
    options = {"compression": "gzip", "compression_level": 9, "shuffle": True}
    with Hdf5Writer(strategy, path, **options) as writer:
        writer.append(rows)
    assert read(path).shape == (1000 * comm.size, 100)
    mine = path.with_name(shard(comm.rank, comm.size))
    assert mine.stat().st_size < rows.nbytes / 20
    with h5py.File(mine, "r") as file:
        stored = file["data"]
        assert (stored.compression, stored.compression_opts) == ("gzip", 9)
        assert stored.shuffle


def test_arrays_of_any_layout_and_library(comm, strategy, path):
    base = rows_of(comm.rank, 12, (4,), "i4")
    frozen = base.copy()
    frozen.flags.writeable = False
    given = [
        base,
        np.asfortranarray(base),
        np.repeat(base, 2, axis=0)[::2],
        base[::-1][::-1],
        frozen,
        memoryview(base),
        base.astype(">i4"),
        mpidist.PerReplica((base,), (comm.rank,)),
        mpidist.Mirrored((base,)),
    ]
    if "torch" in sys.modules:
        given.append(sys.modules["torch"].from_numpy(base))
    with Hdf5Writer(strategy, path, chunk_rows=7) as writer:
        for array in given:
            writer.append(array)
    expected = written_by_all(
        comm, lambda r: np.tile(rows_of(r, 12, (4,), "i4"), (len(given), 1))
    )
    np.testing.assert_array_equal(read(path), expected)


@pytest.mark.gpu
def test_arrays_on_a_gpu(comm, strategy, path):
    cupy = pytest.importorskip("cupy")
    if not binding.gpu_count():
        pytest.skip("there is no GPU")
    with Hdf5Writer(strategy, path, chunk_rows=5) as writer:
        writer.append(cupy.asarray(rows_of(comm.rank, 12)))
        writer.append(rows_of(comm.rank, 2))
    expected = written_by_all(
        comm, lambda r: np.concatenate([rows_of(r, 12), rows_of(r, 2)])
    )
    np.testing.assert_array_equal(read(path), expected)


def test_what_was_appended_may_be_changed_afterwards(strategy, path):
    row = np.zeros((1, 2))
    with Hdf5Writer(strategy, path) as writer:
        for i in range(3):
            row[:] = i
            writer.append(row)
    n = strategy.num_replicas_in_sync
    assert read(path)[:, 0].tolist() == [0, 1, 2] * n


def test_in_a_replica_function(comm, strategy, path):
    with Hdf5Writer(strategy, path) as writer:
        writer.append(strategy.run(lambda: {"x": rows_of(comm.rank, 2)}))
        strategy.run(lambda: writer.append({"x": rows_of(comm.rank, 1)}))
    expected = written_by_all(
        comm, lambda r: np.concatenate([rows_of(r, 2), rows_of(r, 1)])
    )
    np.testing.assert_array_equal(read(path, "x"), expected)
    strategy.run(lambda: write(strategy, path, 1, overwrite=True))
    assert read(path).tolist() == [1] * 2 * comm.size


# Names


def test_names_with_slashes_and_percent_signs(comm, strategy, path):
    path = path.with_name("100%b 5%%.v1.h5")
    names = ["/x", "a//b/", "a/c%b%%d", "ä ö/..."]
    with Hdf5Writer(strategy, path) as writer:
        rows = rows_of(comm.rank, 2)
        writer.append(dict.fromkeys(names, rows))
        writer.append(dict.fromkeys(["x", "a/b", *names[2:]], rows))
    expected = written_by_all(comm, lambda r: np.tile(rows_of(r, 2), (2, 1)))
    for name in names:
        np.testing.assert_array_equal(read(path, name), expected)
    assert list(Dataset.from_hdf5(path, names[2])) != []
    assert path.with_name(f"100%b 5%%.v1-00000-of-{comm.size:05}.h5").exists()


def test_a_bare_array_goes_to_the_dataset_that_was_named(strategy, path):
    with Hdf5Writer(strategy, path, dataset="train/x") as writer:
        writer.append(np.arange(2))
        writer.append({"train/x": np.arange(1)})
    n = strategy.num_replicas_in_sync
    assert read(path, "train/x").tolist() == [0, 1, 0] * n


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["x", "/x"], ValueError, "each once"),
        ([], ValueError, "at least one"),
        (["x", "x/y"], ValueError, "'x' cannot be a dataset and, in 'x/y', a group"),
        (["a/b/c", "a"], ValueError, "'a' cannot be a dataset"),
        ([""], ValueError, "'' cannot be the name"),
        (["/"], ValueError, "'/' cannot be the name"),
        (["a/./b"], ValueError, "cannot be the name"),
        (["a\0b"], ValueError, "cannot be the name"),
        ([3], TypeError, "must be a str, not 3"),
    ],
)
def test_names_that_hdf5_cannot_have(strategy, path, names, error, message):
    with Hdf5Writer(strategy, path) as writer:
        with pytest.raises(error, match=message):
            writer.append(dict.fromkeys(names, np.ones(1)))
        writer.append({"a": np.ones(1)})


# Rows that do not fit


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"x": np.ones((2, 3)), "y": np.ones(3)}, "unequal rows: 'x' has 2, 'y' has 3"),
        ({"x": np.ones((2, 3))}, r"datasets were \['x', 'y'\] and are now \['x'\]"),
        ({"x": np.ones((1, 4)), "y": np.ones(1)}, r"'x' were .* \(3,\), and are.*\(4"),
        (
            {"x": np.ones((1, 3), "f4"), "y": np.ones(1)},
            r"'x' were float64 .*, and are now float32",
        ),
        ({"x": np.ones((1, 3)), "y": 1.0}, "'y'.* is a scalar"),
    ],
)
def test_rows_unlike_those_before_raise_at_once_and_add_nothing(
    strategy, path, rows, message
):
    fitting = {"x": np.zeros((1, 3)), "y": np.zeros(1)}
    with Hdf5Writer(strategy, path) as writer:
        writer.append(fitting)
        with pytest.raises(mpidist.ArgumentError, match=message):
            writer.append(rows)
        writer.append(fitting)
    assert read(path, "x").tolist() == [[0, 0, 0]] * 2 * strategy.num_replicas_in_sync


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("usual", "other", "message"),
    [
        ({"x": np.ones(1)}, {"x": np.ones(1, "f4")}, "'x' are {}float64.*float32"),
        ({"x": np.ones(1)}, {"x": np.ones((1, 2))}, r"'x' are {}.*\(\) on.*\(2,\)"),
        ({"x": np.ones(1)}, {"y": np.ones(1)}, r"datasets are {}\['x'\].*\['y'\]"),
        ({"x": np.ones(0)}, {"x": np.ones(0, "i4")}, "'x' are {}float64.*int32"),
        (
            {"x": np.ones(1, CATS)},
            {"x": np.ones(1, DOGS)},
            "{}int8.*'CAT': 0.*'DOG': 0",
        ),
    ],
)
def test_ranks_that_append_unlike_rows_all_raise(
    comm, strategy, path, usual, other, message
):
    last = comm.size - 1
    # With several others, the first has appended nothing
    nothing = "nothing on rank 0; " if comm.size > 2 else ""
    message = f"{message.format(nothing)}.* on rank {last}$"
    with (
        pytest.raises(mpidist.MismatchError, match=message),
        Hdf5Writer(strategy, path) as writer,
    ):
        if comm.rank or not nothing:
            writer.append(other if comm.rank == last else usual)
    comm.Barrier()
    assert names_in(path.parent) == []


def test_zero_rows_of_one_rank_make_datasets_without_rows(comm, strategy, path):
    with Hdf5Writer(strategy, path) as writer:
        if comm.rank == comm.size - 1:
            writer.append({"x": np.ones((0, 3), "f4")})
    assert names_in(path.parent) == ["features.h5"]
    assert read(path, "x").shape == (0, 3)
    assert read(path, "x").dtype == np.float32
    assert len(Dataset.from_hdf5(path, "x")) == 0


# Leaving the block


@pytest.mark.parametrize("culprit", [0, -1])
@pytest.mark.parametrize("where", ["block", "collective", "close"])
def test_an_exception_on_one_rank_leaves_nothing(comm, strategy, path, culprit, where):
    culprit %= comm.size
    with (
        pytest.raises(KeyError, match="lost") as info,
        Hdf5Writer(strategy, path, chunk_rows=1) as writer,
    ):
        writer.append(rows_of(comm.rank, 9))
        if comm.rank == culprit:
            raise KeyError("lost")
        # Where the others are meanwhile
        if where == "collective":
            strategy.reduce("SUM", 1.0)
        elif where == "close":
            writer.close()
    if comm.size > 1:
        assert info.value.origin_rank == culprit
    if comm.rank != culprit:
        assert type(info.value.__cause__) is mpidist.errors.RemoteError
    with pytest.raises(mpidist.ContextError, match="closed"):
        writer.append(np.ones(1))
    writer.close()
    comm.Barrier()
    assert names_in(path.parent) == []
    # The ranks are together again
    assert strategy.reduce("SUM", 1) == comm.size


def test_an_exception_that_all_ranks_raise_stays_each_ranks_own(comm, strategy, path):
    error = ValueError(f"rank {comm.rank}")
    with pytest.raises(ValueError) as info, Hdf5Writer(strategy, path):
        raise error
    assert info.value is error
    assert info.value.__context__ is None
    comm.Barrier()
    assert names_in(path.parent) == []


def test_an_interrupt_is_raised_alone_and_removes_this_ranks_file(comm, strategy, path):
    with pytest.raises(KeyboardInterrupt), Hdf5Writer(strategy, path) as writer:
        writer.append(np.ones(3))
        raise KeyboardInterrupt
    comm.Barrier()
    assert names_in(path.parent) == []
    assert strategy.reduce("SUM", 1) == comm.size


def test_close_without_a_block(comm, strategy, path):
    writer = Hdf5Writer(strategy, str(path))
    writer.append(np.arange(2))
    assert not path.exists()
    writer.close()
    assert read(path).tolist() == [0, 1] * comm.size
    writer.close()
    with pytest.raises(mpidist.ContextError, match=r"features.h5: .*closed"):
        writer.append(np.arange(2))
    with pytest.raises(mpidist.ContextError, match="closed"), writer:
        pass
    assert read(path).tolist() == [0, 1] * comm.size


def test_of_two_writers_of_one_path_the_second_is_refused(comm, strategy, path):
    one, two = (Hdf5Writer(strategy, path) for _ in range(2))
    for i, writer in enumerate([one, two]):
        writer.append(np.full(2, i))
    one.close()
    with pytest.raises(mpidist.ArgumentError, match="these files exist already"):
        two.close()
    comm.Barrier()
    assert read(path).tolist() == [0] * 2 * comm.size
    assert len(names_in(path.parent)) == 1 + comm.size


@pytest.mark.parametrize("moment", ["shards", "index"])
@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_jobs_one_raises_and_the_rows_of_the_other_stay(
    comm, strategy, make_strategy, path, monkeypatch, moment, has_links, overwrite
):
    """The other job writes all while this one is about to name its files."""

    def refuse(source, target):
        raise OSError(errno.EPERM, "no hard links")

    other, real = make_strategy(), AtomicHdf5File.publish

    def write_other():
        monkeypatch.setattr(AtomicHdf5File, "publish", real)
        write(other, path, 1)

    def publish(self, **options):
        if moment == "index" and self.path == path:
            with h5py.File(path, "w") as file:
                file["data"] = [1] * 2 * comm.size
        elif moment == "shards":
            write_other()
        real(self, **options)

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(AtomicHdf5File, "publish", publish)
    with pytest.raises(mpidist.ArgumentError, match="exists already: another job"):
        write(strategy, path, 2, overwrite=overwrite)
    comm.Barrier()
    assert read(path).tolist() == [1] * 2 * comm.size
    assert len(names_in(path.parent)) == 1 + (comm.size if moment == "shards" else 0)


def test_a_finalized_strategy_cannot_write(comm, path):
    strategy = mpidist.MirroredStrategy(communicator=comm)
    writer = Hdf5Writer(strategy, path)
    writer.append(np.ones(1))
    strategy.experimental_finalize()
    with pytest.raises(mpidist.ContextError, match="finalized"):
        writer.close()
    comm.Barrier()
    assert names_in(path.parent) == []
    with pytest.raises(mpidist.ContextError, match="finalized"):
        Hdf5Writer(strategy, path)


# Files that are there already


def write(strategy, path, value, **options):
    with Hdf5Writer(strategy, path, **options) as writer:
        writer.append(np.full(2, value))


@pytest.mark.parametrize("name", ["features.h5", "features-00007-of-00123.h5"])
def test_files_that_exist_are_an_error(comm, strategy, path, name):
    on_root(comm, path.with_name(name).write_text, "precious")
    with pytest.raises(mpidist.ArgumentError, match=f"already: {name}; .*overwrite"):
        Hdf5Writer(strategy, path)
    comm.Barrier()
    assert names_in(path.parent) == [name]
    assert path.with_name(name).read_text() == "precious"


def test_files_of_other_names_are_no_hindrance_and_are_left(comm, strategy, path):
    others = ["features", "features-1-of-2.h5", "features-a.h5", "features.h5.bak"]
    if comm.rank == 0:
        for name in others:
            path.with_name(name).write_text("other")
    comm.Barrier()
    for overwrite in [False, True]:
        write(strategy, path, 1, overwrite=overwrite)
    shards = [shard(r, comm.size) for r in range(comm.size)]
    assert names_in(path.parent) == sorted(["features.h5", *others, *shards])


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("kind", ["text", "hdf5", "link", "other index"])
def test_overwrite_replaces_no_file_by_its_name(comm, strategy, path, kind, is_early):
    """Whether it was there before the writer, or not."""
    mine = path.with_name(shard(0, comm.size))
    other = path.with_name("other.h5")
    write(strategy, other, 1)

    def place():
        if kind == "text":
            mine.write_text("precious")
        elif kind == "hdf5":
            with h5py.File(mine, "w") as file:
                file["data"] = [7]
        elif kind == "link":
            mine.symlink_to("other.h5")
        else:
            shutil.copy(other.with_name(f"other-00000-of-{comm.size:05}.h5"), mine)

    if is_early:
        on_root(comm, place)
    with pytest.raises(mpidist.ArgumentError, match=f"{mine.name}; .*content"):  # noqa: SIM117
        with Hdf5Writer(strategy, path, overwrite=True) as writer:
            writer.append(np.ones(2))
            if not is_early:
                on_root(comm, place)
    comm.Barrier()
    assert mine.name in names_in(path.parent)
    assert len(names_in(path.parent)) == 2 + comm.size
    assert read(other).tolist() == [1] * 2 * comm.size


@pytest.mark.parametrize(("call", "overwrite"), [("listdir", False), ("rename", True)])
def test_an_output_that_appears_after_the_look_is_not_removed(
    comm, strategy, path, monkeypatch, call, overwrite
):
    """Another job publishes its files while this one clears the way."""
    if overwrite:
        write(strategy, path, 1)
    other = path.parent / "other"
    on_root(comm, other.mkdir)
    write(strategy, other / path.name, 2)
    writer = Hdf5Writer(strategy, path, overwrite=overwrite)
    writer.append(np.full(2, 3))
    comm.Barrier()
    real = getattr(os, call)

    def appear(*arguments):
        monkeypatch.undo()
        found = real(*arguments) if call == "listdir" else None
        for each in names_in(other):
            os.replace(other / each, path.with_name(each))
        return real(*arguments) if found is None else found

    if comm.rank == 0:
        monkeypatch.setattr(os, call, appear)
    with pytest.raises(mpidist.ArgumentError, match="job has written it since"):
        writer.close()
    comm.Barrier()
    assert read(path).tolist() == [2] * 2 * comm.size
    assert len(names_in(path.parent)) == 2 + comm.size


def test_overwrite_leaves_a_file_that_appears_after_the_look(
    comm, strategy, path, monkeypatch
):
    write(strategy, path, 1)
    real, late = os.listdir, path.with_name(shard(5, 9))

    def look(folder):
        found = real(folder)
        late.write_text("precious")
        return found

    writer = Hdf5Writer(strategy, path, overwrite=True)
    writer.append(np.full(2, 2))
    with monkeypatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(os, "listdir", look)
        with contextlib.suppress(mpidist.ArgumentError):
            writer.close()
    comm.Barrier()
    assert late.read_text() == "precious"


@pytest.mark.parametrize("place", [os.rename, shutil.copy, os.link])
@pytest.mark.parametrize("is_early", [False, True])
def test_overwrite_keeps_the_shards_of_an_index_of_another_name(
    comm, strategy, path, place, is_early
):
    write(strategy, path, 1)
    best = path.with_name("best.h5")
    if is_early:
        on_root(comm, place, path, best)
    with pytest.raises(mpidist.ArgumentError, match=r"best\.h5 is a renamed or copied"):  # noqa: SIM117
        with Hdf5Writer(strategy, path, overwrite=True) as writer:
            writer.append(np.full(2, 2))
            if not is_early:
                on_root(comm, place, path, best)
    comm.Barrier()
    assert read(best).tolist() == [1] * 2 * comm.size
    on_root(comm, best.unlink)
    on_root(comm, best.symlink_to, path.name)  # no index of its own
    write(strategy, path, 2, overwrite=True)
    assert read(best).tolist() == [2] * 2 * comm.size


def test_rows_of_the_old_files_may_be_rewritten(comm, strategy, path):
    write(strategy, path, 1)
    with Hdf5Writer(strategy, path, overwrite=True) as writer:
        for row in Dataset.from_hdf5(path, "data").batch(1):
            writer.append(row + comm.rank)
    expected = np.repeat(1 + np.arange(comm.size), 2 * comm.size)
    np.testing.assert_array_equal(read(path), expected)


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_rows": 0}, "chunk_rows must be >= 1, not 0"),
        ({"compression": "lzma"}, "None or 'gzip', not 'lzma'"),
        ({"compression": "gzip", "compression_level": 10}, r"0\.\.9.*not 10"),
        ({"compression_level": 4}, "with compression=None"),
        ({"dataset": "/"}, "'/' cannot be the name"),
    ],
)
def test_options_that_cannot_be(comm, strategy, path, options, message):
    with pytest.raises(mpidist.ArgumentError, match=message):
        Hdf5Writer(strategy, path, **options)
    assert names_in(path.parent) == []


def test_paths_that_cannot_be(comm, strategy, path):
    with pytest.raises(mpidist.ArgumentError, match="must name a file"):
        Hdf5Writer(strategy, path.parent)
    with pytest.raises(mpidist.ArgumentTypeError, match="must be a path, not 3"):
        Hdf5Writer(strategy, 3)
    with pytest.raises(mpidist.ArgumentTypeError, match="needs a strategy"):
        Hdf5Writer(path, path)
    for missing in [path.with_name("missing") / "a.h5", path / "a.h5"]:
        with pytest.raises(mpidist.DataError, match=r"a\.h5: cannot be written: .*No"):
            Hdf5Writer(strategy, missing)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "other.h5"}, "path is .*features.h5 on"),
        ({"chunk_rows": 5}, "storage is .*chunk_rows=5"),
        ({"overwrite": True}, "overwrite is False on"),
        ({"dataset": "x"}, "dataset is data on .*; x on rank"),
    ],
)
def test_arguments_that_differ_between_ranks(comm, strategy, path, options, message):
    mine = {"path": path, **(options if comm.rank == comm.size - 1 else {})}
    with pytest.raises(mpidist.MismatchError, match=message):
        Hdf5Writer(strategy, mine.pop("path"), **mine)
    comm.Barrier()
    assert names_in(path.parent) == []


# Disks


def test_after_an_append_that_could_not_be_written_there_is_no_close(
    comm, strategy, path
):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = Hdf5Writer(strategy, path, chunk_rows=1)
    rows = {"x": np.ones((10, 1000)), "y": np.ones(10)}
    writer.append(rows)
    if comm.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
        try:
            with pytest.raises(mpidist.DataError, match=r"00000-of.*'x'.*too large"):
                for _ in range(100):
                    writer.append(rows)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(mpidist.DataError, match="an earlier append failed"):
            writer.append(rows)
    with pytest.raises(mpidist.DataError, match=r"00000-of.*an earlier append failed"):
        writer.close()
    comm.Barrier()
    assert names_in(path.parent) == []


@pytest.mark.parametrize("step", ["__init__", "write", "complete", "publish"])
def test_a_rank_without_memory_leaves_nothing(comm, strategy, path, monkeypatch, step):
    def fail(*_, **__):
        raise MemoryError("it is short")

    def write_all():
        with monkeypatch.context() as patch:
            if comm.rank == comm.size - 1:
                patch.setattr(AtomicFile, step, fail)
            write(strategy, path, 1)

    with pytest.raises(MemoryError, match="it is short"):
        write_all()
    comm.Barrier()
    assert names_in(path.parent) == []
    write(strategy, path, 1)
    assert read(path).tolist() == [1] * 2 * comm.size


@pytest.mark.mpi(min_size=2)
def test_a_folder_that_the_ranks_do_not_share_is_an_error(
    comm, strategy, tmp_path, monkeypatch
):
    # A folder that no network shows is not waited for
    local = {mount.kind for mount in mounts.read_mounts()}
    monkeypatch.setattr(mounts, "LOCAL_FILE_SYSTEMS", local)
    monkeypatch.setattr("mpidist.strategy.hdf5_writer._VISIBLE_SECONDS", math.inf)
    monkeypatch.chdir(tmp_path)  # another one on each rank
    message = r"rank 0 does not see features-00001.*\.tmp, which rank 1 wrote"
    with pytest.raises(mpidist.DataError, match=message):
        Hdf5Writer(strategy, "features.h5")
    assert names_in(tmp_path) == []


def test_a_relative_path_is_of_the_folder_at_the_time(
    comm, strategy, path, monkeypatch
):
    monkeypatch.chdir(path.parent)
    with Hdf5Writer(strategy, "features.h5") as writer:
        monkeypatch.chdir("/")
        writer.append(np.arange(2))
    assert read(path).tolist() == [0, 1] * comm.size


def test_the_index_is_named_after_all_else_is_on_the_disk(
    comm, strategy, path, monkeypatch
):
    done, names = [], {}
    real_fsync, real_publish = os.fsync, AtomicHdf5File.publish

    def fsync(descriptor):
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        done.append(("sync", "folder" if target == str(path.parent) else target))
        real_fsync(descriptor)

    def publish(self, **options):
        names[str(self.temporary)] = self.path.name
        assert not path.exists()
        done.append(("name", self.path.name))
        real_publish(self, **options)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr(AtomicHdf5File, "publish", publish)
    write(strategy, path, 1)
    mine = shard(comm.rank, comm.size)
    expected = [("sync", mine), ("name", mine)]
    if comm.rank == 0:
        expected[1:1] = [("sync", "features.h5")]
        expected += [("sync", "folder"), ("name", "features.h5"), ("sync", "folder")]
    assert [(what, names.get(name, name)) for what, name in done] == expected


# Afterwards


def test_the_folder_may_be_moved(comm, strategy, mpi_tmp_path, monkeypatch):
    (mpi_tmp_path / "decoy").mkdir(exist_ok=True)
    (mpi_tmp_path / "made").mkdir(exist_ok=True)
    comm.Barrier()
    write(strategy, mpi_tmp_path / "decoy" / "features.h5", 7)
    write(strategy, mpi_tmp_path / "made" / "features.h5", 1)
    if comm.rank == 0:
        (mpi_tmp_path / "made").rename(mpi_tmp_path / "moved")
        (mpi_tmp_path / "link.h5").symlink_to("moved/features.h5")
    comm.Barrier()
    places = [("moved/features.h5", "decoy"), ("link.h5", ".")]
    # All of h5py's first: it locks files, as datasets do not, and HDF5 wants one way
    for reader in [read, lambda path: np.array(list(Dataset.from_hdf5(path, "data")))]:
        for path, folder in places:
            monkeypatch.chdir(mpi_tmp_path / folder)
            assert reader(mpi_tmp_path / path).tolist() == [1] * 2 * comm.size


def test_a_shard_that_is_gone_is_an_error_for_datasets(comm, strategy, path):
    write(strategy, path, 1)
    lost = path.with_name(shard(comm.size - 1, comm.size))
    dataset = Dataset.from_hdf5(path, "data")
    on_root(comm, lost.unlink)
    with pytest.raises(mpidist.DataError, match=f"missing: {lost.name}"):
        list(dataset)


FORKING = """
import os
import sys
import numpy as np
import mpidist

strategy = mpidist.MirroredStrategy()
with mpidist.Hdf5Writer(strategy, sys.argv[1], chunk_rows=1) as writer:
    writer.append(np.arange(3))
    if os.fork() == 0:
        writer.append(np.arange(1000))
        writer._shard.discard()  # as the end of a process does
        os._exit(0)  # without MPI's part of it
    os.wait()
    writer.append(np.arange(3))
"""


def test_a_forked_process_does_no_harm(tmp_path):
    path = tmp_path / "features.h5"
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(path)]
    done = launching.run(command)
    assert done.returncode == 0, done.stderr
    assert read(path).tolist() == [0, 1, 2, 0, 1, 2]
    assert len(names_in(tmp_path)) == 2


FORGOTTEN = """
import sys
import numpy as np
import mpidist

writer = mpidist.Hdf5Writer(mpidist.MirroredStrategy(), sys.argv[1], chunk_rows=1)
writer.append(np.arange(3))
"""


@pytest.mark.slow
def test_a_writer_that_is_never_closed_leaves_nothing(tmp_path):
    path = tmp_path / "features.h5"
    done = launching.run([sys.executable, "-c", FORGOTTEN, str(path)])
    assert done.returncode == 0
    assert "the writer was not closed, and its rows are lost" in done.stderr
    assert names_in(tmp_path) == []


# Calls of the operating system

SUPPORT = Path(failing_calls.__file__).parent
JOB = str(SUPPORT.with_name("fuzz") / "job.py")
WRITERS = ["writer", "writer overwrites", "writer by dataset"]
WRITERS += ["writer without links", "overwriter without links"]
RARER = ["disk full", "late", "interrupted"]


@pytest.mark.parametrize(
    "where", [[0.35, 0.85], pytest.param([0.1, 0.6], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "how",
    ["fails", "copies", *(pytest.param(h, marks=pytest.mark.slow) for h in RARER)],
)
def test_any_call_of_a_writer(mpirun, tmp_path, how, where):
    """Some of the calls: tests/fuzz/run draws others."""
    program = tmp_path / "program.json"
    places = itertools.product(WRITERS, [0, 1], [how], where)
    program.write_text(json.dumps(list(places)))
    mpirun(2, JOB, "files", "--program", str(program), PYTHONPATH=str(SUPPORT))


@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupt_while_the_earlier_files_go_keeps_the_new(
    tmp_path, monkeypatch, number
):
    alone = mpidist.MirroredStrategy(communicator=MPI.COMM_SELF)
    path, real, removed = tmp_path / "rows.h5", os.unlink, []

    def unlink(target):
        real(target)
        removed.extend([target] * str(target).endswith(".earlier.tmp"))
        if len(removed) == number:
            raise KeyboardInterrupt

    write(alone, path, 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "unlink", unlink)
        write(alone, path, 2, overwrite=True)
    assert read(path).tolist() == [2, 2]
