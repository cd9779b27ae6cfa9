"""Files that are written under a temporary name: no links, no rests, no half files."""

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
    is_abandoned,
    replace_file,
    shard_name,
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


def test_only_files_that_no_process_writes_are_abandoned(tmp_path):
    published = r"x(-\d+)?\.h5"
    file = AtomicFile(tmp_path / "x-1.h5")
    name = file.temporary.name
    assert not is_abandoned(name, published)
    elsewhere = f"x-1.h5.node.of.another.cluster.{os.getpid()}.1.tmp"
    assert is_abandoned(elsewhere, published)
    assert not is_abandoned(elsewhere, r"y\.h5")
    assert not is_abandoned("x-1.h5", published)
    file.discard()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (3, 16), (99_999, 123_456)])
def test_names_of_shards_are_recognised(rank, ranks):
    name = shard_name("x.v1", rank, ranks, ".h5")
    assert re.fullmatch(rf"x\.v1{SHARD_PATTERN}\.h5", name)
    assert f"{rank:05}-of-{ranks:05}" in name
