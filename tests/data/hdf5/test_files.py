"""The bytes of a file: any rows, few calls, changes, and errors of the disk."""

import contextlib
import dataclasses
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest
from all_ranks import local, on_root
from hdf5_damage import (
    RECIPES,
    divide,
    require_names,
    require_rank,
    slice_of,
    steps_until_error,
    wide,
    write_wide,
)
from hdf5_files import require_same

from mpidist import DataError, Dataset
from mpidist.hdf5 import files
from mpidist.hdf5.files import RawFile, WatchedFile
from mpidist.hdf5.index import state_of
from mpidist.hdf5.read import FileMap
from mpidist.util.buffers import Buffers

SIZE = 3_000_000


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


def open_file(path):
    with open(path, "rb") as file:
        return RawFile(path, state_of(path, file.fileno()))


@pytest.mark.parametrize(
    "size",
    [1, 3, 4096, 50_000, 100_000, pytest.param(1_499_000, marks=pytest.mark.slow)],
)
def test_rows_side_by_side(path, size, monkeypatch):
    monkeypatch.setattr(files, "_PIECE_BYTES", 60_000)  # as with larger files
    data = np.frombuffer(path.read_bytes(), np.uint8)[101:]
    table = data[: len(data) // size * size].reshape(-1, size)
    rows = np.random.default_rng(0).integers(0, len(table), 200)
    last, some = len(table) - 1, np.arange(len(table))[:40]
    wanted = [rows, np.sort(rows), rows[:0], np.array([last]), some, some[::-1]]
    wanted.append(np.concatenate([some, some[:3], some[::-1], some + last - some[-1]]))
    with ThreadPoolExecutor(3) as pool:
        for rows, parallel in itertools.product(wanted, [map, pool.map]):
            found = open_file(path).gather(101 + rows * size, size, Buffers(), parallel)
            assert found.tobytes() == table[rows].tobytes()


def test_a_kernel_that_reads_little_at_a_time(path, monkeypatch):
    data, preadv = np.frombuffer(path.read_bytes(), np.uint8), os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, to, at: preadv(fd, [to[0][: 1 + len(to[0]) // 2]], at)
    )
    for size in [10_000, 100_000]:
        for rows in [np.arange(30), np.arange(30)[::-1]]:
            found = open_file(path).gather(rows * size, size, Buffers())
            expected = data[: 30 * size].reshape(30, -1)[rows]
            assert found.tobytes() == expected.tobytes()
    assert open_file(path).read(7, 50_000) == data[7:50_007].tobytes()


def test_a_state_that_is_read_in_several_calls(path, monkeypatch):
    def state():
        with open(path, "rb") as file:
            return state_of(path, file.fileno())

    whole, pread, sizes = state(), os.pread, itertools.cycle([1, 7, 100])
    monkeypatch.setattr(
        os, "pread", lambda fd, n, at: pread(fd, min(n, next(sizes)), at)
    )
    assert state().head == whole.head


def test_far_rows_are_read_in_more_calls_than_near_ones(path, monkeypatch):
    calls, file, preadv = [], open_file(path), os.preadv

    def note(descriptor, to, at):
        calls.append(sum(map(len, to)))
        return preadv(descriptor, to, at)

    monkeypatch.setattr(os, "preadv", note)
    for offsets, size, expected in [
        (np.arange(0, 30_000, 100), 10, [29_910]),
        (np.arange(0, 2_000_000, 1000)[::-1], 1000, [2_000_000]),
        (np.arange(0, 2_000_000, 100_000), 100_000, [2_000_000]),
        (np.array([300_000, 100_000, 200_000]), 100_000, [200_000, 100_000]),
        (np.array([300, 100, 200, 400]), 100, [400]),
        (np.array([2_000_000, 0, 1_000_000]), 10, [10, 10, 10]),
    ]:
        file.gather(offsets, size, Buffers())
        assert calls == expected
        calls.clear()


def test_what_lies_beyond_the_end_is_an_error(path):
    file = open_file(path)
    with pytest.raises(DataError, match=f"bytes: has {SIZE} bytes, but its data"):
        file.gather(np.array([0, SIZE - 3]), 4, Buffers())
    with pytest.raises(DataError, match="bytes, but its data"):
        file.read(1 << 60, 4)


def test_another_file_of_the_same_name_is_not_read(path):
    os.utime(path, (1, 1))
    data = path.read_bytes()
    with open(path, "rb") as file:
        before = state_of(path, file.fileno())
    with path.open("r+b") as file:  # in place, behind what the checksum is of
        file.seek(SIZE // 2)
        file.write(bytes(9))
    changes = [
        (lambda: None, "modified at"),
        (lambda: path.write_bytes(b"x" * SIZE), "starts with other bytes"),
        (lambda: path.write_bytes(data + b"x"), f"{SIZE + 1} bytes instead of {SIZE}"),
        (lambda: replace(path, data), "inode"),
    ]
    for change, message in changes:
        change()
        with pytest.raises(
            DataError,
            match=f"differs from the indexed file.*{message}.*dataset",
        ):
            RawFile(path, before)


def replace(path, data):
    """Replace a file by another one with the same modification time."""
    other = path.with_name("other")
    other.write_bytes(data)
    os.utime(other, (1, 1))
    os.replace(other, path)


def test_copies_of_a_file_are_known_by_size_and_beginning(path):
    """Other nodes may have copies, and ranks may have paths of their own."""
    with open(path, "rb") as file:
        here = state_of(path, file.fileno())
    later = dataclasses.replace(here, inode=here.inode + 1, mtime_ns=here.mtime_ns + 1)
    elsewhere = dataclasses.replace(later, node="another node")
    assert here.changes_to(here, is_shared=True) == []
    for is_shared in (False, True):
        assert here.changes_to(elsewhere, is_shared) == []
        own = dataclasses.replace(later, path=path.with_name("copy"))
        assert here.changes_to(own, is_shared) == []
        cut = dataclasses.replace(elsewhere, size_bytes=3)
        (change,) = here.changes_to(cut, is_shared)
        assert "3 bytes" in change
    # On a file system of several nodes the same inode is the same file
    same = dataclasses.replace(elsewhere, inode=here.inode)
    assert here.changes_to(same, is_shared=False) == []
    assert "modified" in here.changes_to(same, is_shared=True)[0]


def test_a_network_file_system_is_asked_now_and_then(path, monkeypatch):
    stat, calls = os.stat, []
    file = WatchedFile(open_file(path).state, is_local=False, name=str(path))
    monkeypatch.setattr(os, "stat", lambda name: calls.append(name) or stat(name))
    for _ in range(100):
        file.check()
    assert calls == []
    os.truncate(path, 6)
    with pytest.raises(DataError, match=r"was changed: it has 6 bytes"):
        file.check(is_due=True)
    monkeypatch.setattr(files, "_CHECK_SECONDS", 0)
    with pytest.raises(DataError, match=r"was changed: it has 6 bytes"):
        file.check()


@pytest.mark.parametrize("layout", ["contiguous", "chunks", "gzip", "lzf"])
def test_an_error_of_the_disk(strategy, comm, mpi_tmp_path, layout):
    """The kernel's own: this process has no memory where the file has rows."""
    path, data = mpi_tmp_path / "a.h5", wide(64)
    on_root(comm, write_wide, path, RECIPES[layout], data)
    iterator = iter(divide(strategy, Dataset.from_hdf5(path, "x"), 8))
    require_same(local(strategy, next(iterator)), slice_of(data, strategy, 0, 8))
    if comm.rank == comm.size - 1:
        with open("/proc/self/mem", "rb") as memory:
            for descriptor in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
                        os.dup2(memory.fileno(), int(descriptor), inheritable=False)
    comm.Barrier()
    _, error = steps_until_error(strategy, comm, iterator, data, 8, first=1)
    require_rank(error, comm.size - 1)
    require_names(error, path, "x", range(8, 64))
    assert comm.allgather("nput/output error" in str(error)) == [True] * comm.size
    iterator.close()


@pytest.fixture(params=[True, False], ids=["kept", "not kept"])
def kept(request, monkeypatch):
    """Short rows stay in memory, or are too many for that."""
    if not request.param:
        monkeypatch.setattr(FileMap, "bytes_to_keep", lambda self, most_bytes: 0)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("chunks", [None, (7, 5), (7, 2)])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_rows_of_a_dataset(tmp_path, chunks, compression):
    if compression and not chunks:
        pytest.skip("compressed datasets have chunks")
    data = np.arange(500).reshape(100, 5).astype(">i4")
    options = {"chunks": chunks, "compression": compression}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=data, **options)
    dataset = Dataset.from_hdf5(tmp_path / "a.h5", "x").shuffle(seed=1)
    found = np.concatenate(list(dataset.batch(7)))
    require_same(found[np.argsort(found[:, 0])], data)
