"""Files that are written under a temporary name: no links, no rests, no half files."""

import errno
import json
import os
import re
import secrets
import stat

import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist.comm import device_info
from mpidist.comm.transports.tuning import Layout, find_table, write_table
from mpidist.util.files import (
    SHARD_PATTERN,
    AtomicFile,
    AtomicHdf5File,
    is_running,
    replace_file,
    shard_name,
    writer_of,
)

TABLE = {"allreduce": [(0, "mpi")], "allgatherv": [(0, "mpi")]}
TABLE |= {"broadcast": [(0, "mpi")]}


@pytest.fixture
def victim(tmp_path):
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "victim"
    path.write_text("precious")
    return path


def test_the_writer_does_not_follow_links_at_names_that_can_be_guessed(
    tmp_path, victim
):
    folder = tmp_path / "shared"
    folder.mkdir()
    host, process = os.uname().nodename, os.getpid()
    for name in ("x.h5", "x-00000-of-00001.h5"):
        for number in range(300):
            (folder / f"{name}.{host}.{process}.{number}.tmp").symlink_to(victim)
    alone = mpidist.MirroredStrategy(communicator=MPI.COMM_SELF)
    with mpidist.Hdf5Writer(alone, folder / "x.h5") as writer:
        writer.append(np.ones(3))
    alone.experimental_finalize()
    assert victim.read_text() == "precious"
    assert not (folder / "x.h5").is_symlink()


@pytest.mark.parametrize("kind", [AtomicFile, AtomicHdf5File])
@pytest.mark.parametrize("is_dangling", [False, True])
def test_what_lies_under_the_temporary_name_is_not_touched(
    tmp_path, victim, monkeypatch, kind, is_dangling
):
    monkeypatch.setattr(secrets, "randbits", lambda bits: 7)
    host, process = os.uname().nodename, os.getpid()
    planted = tmp_path / f"x.{host}.{process}.7.tmp"
    planted.symlink_to(victim.with_name("absent") if is_dangling else victim)
    with pytest.raises(FileExistsError):
        kind(tmp_path / "x")
    assert planted.is_symlink()
    assert victim.read_text() == "precious"
    assert os.listdir(victim.parent) == [victim.name]


def test_a_link_at_the_final_name_is_replaced(tmp_path, victim):
    (tmp_path / "x").symlink_to(victim)
    with replace_file(tmp_path / "x") as file:
        file.write(b"new")
    assert (tmp_path / "x").read_text() == "new"
    assert victim.read_text() == "precious"


def test_a_block_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(KeyError), replace_file(path) as file:
        file.write(b"new")
        raise KeyError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(fifo)  # as /dev/stdout may be
    for path, error in (fifo, "a FIFO"), (link, "a FIFO"), (tmp_path, "directory"):
        with pytest.raises(OSError, match=error), replace_file(path):
            pass
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [fifo, link]


def test_permissions_are_those_of_new_files(tmp_path, monkeypatch):
    layout = Layout("MPICH", (2,), "CPU")
    old = os.umask(0o027)
    try:
        with replace_file(tmp_path / "x"):
            pass
        write_table(tmp_path / "table", layout, TABLE, {})
        device_info._write(tmp_path / "outcomes", {"key": [True, "why"]})
    finally:
        os.umask(old)
    for name in ("x", "table", "outcomes"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640, name
    assert find_table(tmp_path / "table", layout) == TABLE
    assert json.loads((tmp_path / "outcomes").read_text()) == {"key": [True, "why"]}
    assert sorted(os.listdir(tmp_path)) == ["outcomes", "table", "x"]


def test_a_temporary_name_says_who_writes(tmp_path):
    published = r"x(-\d+)?\.h5"
    file = AtomicFile(tmp_path / "x-1.h5")
    writer = writer_of(file.temporary.name, published)
    assert writer == (os.uname().nodename, os.getpid())
    assert is_running(*writer)
    elsewhere = "x-1.h5.node.of.another.cluster.17.1.tmp"
    assert writer_of(elsewhere, published) == ("node.of.another.cluster", 17)
    assert is_running("node.of.another.cluster", 17) is None
    assert is_running(os.uname().nodename, 1 << 70) is False
    assert writer_of(elsewhere, r"y\.h5") is None
    assert writer_of("x-1.h5", published) is None
    file.discard()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("call", ["replace", "link", "no links"])
def test_a_name_that_is_taken_stays_unless_it_is_to_be_replaced(
    tmp_path, monkeypatch, call, is_late
):
    """Also where the call has done its work, and then says that it failed."""
    if call == "no links":
        monkeypatch.setattr(os, "link", fails(errno.EPERM))
    elif is_late:
        real = getattr(os, call)
        monkeypatch.setattr(os, call, lambda *a: real(*a) or fails(errno.EIO)())
    replaces = call == "replace"
    path = tmp_path / "x"
    for data in b"one", b"two":
        file = AtomicFile(path)
        file.write(data)
        file.complete()
        if replaces or data == b"one":
            file.publish(replaces=replaces)
        else:
            with pytest.raises(FileExistsError):
                file.publish(replaces=replaces)
        file.discard()
        assert path.read_bytes() == (data if replaces else b"one")
        assert os.listdir(tmp_path) == ["x"]


def fails(code):
    """Return a function that raises an OSError."""

    def fail(*arguments):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (3, 16), (99_999, 123_456)])
def test_names_of_shards_are_recognised(rank, ranks):
    name = shard_name("x.v1", rank, ranks, ".h5")
    assert re.fullmatch(rf"x\.v1{SHARD_PATTERN}\.h5", name)
    assert f"{rank:05}-of-{ranks:05}" in name
