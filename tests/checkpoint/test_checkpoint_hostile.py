"""Checkpoints made to do harm: refused at once, whatever size they claim to have."""

import io
import os
import socket
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist import CheckpointError
from mpidist.checkpoint import format as headers
from mpidist.checkpoint.format import Header, read_header
from mpidist.checkpoint.reading import read_tree

GIANT = 12 << 30


def forge(path, change, shards=(), size=None, patch=bytearray):
    """Write a checkpoint with right checksums whose HDF5 part `change` has made."""
    image = io.BytesIO()
    with h5py.File(image, "w", userblock_size=4096) as file:
        file.attrs["kind"] = "dict"
        change(file)
    body = patch(bytearray(image.getvalue()))
    header = Header(1, size or len(body), zlib.crc32(body[4096:]), (), tuple(shards))
    body[:4096] = headers.render(header, 4096)
    path.write_bytes(body)
    if size is not None:
        os.truncate(path, size)


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        read_tree(path)
    assert str(path.parent / path.name[:1]) in str(caught.value)
    return str(caught.value)


def group(parent, name):
    made = parent.create_group(name)
    made.attrs["kind"] = "dict"
    return made


def test_hard_links_that_double_the_paths_of_each_level(tmp_path):
    def change(file):
        above = file
        for _ in range(40):  # the file has 2**40 paths
            below = group(above, "a")
            above["b"] = below
            above = below

    forge(tmp_path / "x.h5", change)
    assert "/a/b' is a second link" in refusal(tmp_path / "x.h5")


def test_a_group_that_holds_itself(tmp_path):
    def change(file):
        group(file, "a")["b"] = file["/"]

    forge(tmp_path / "x.h5", change)
    assert "'/a/b' is a second link" in refusal(tmp_path / "x.h5")


def test_more_levels_than_can_be_saved(tmp_path):
    def change(file):
        above = file
        for _ in range(500):
            above = group(above, "a")

    forge(tmp_path / "x.h5", change)
    assert "more than 61 levels" in refusal(tmp_path / "x.h5")


def test_a_sparse_file_that_is_all_structure(tmp_path):
    forge(tmp_path / "x.h5", lambda file: None, size=GIANT)
    assert f"structure of {GIANT - 4096} bytes" in refusal(tmp_path / "x.h5")


def test_a_sparse_file_that_is_all_header(tmp_path):
    path = tmp_path / "x.h5"
    path.write_bytes(headers._FIRST.format(headers.FORMAT, GIANT, 0).encode())
    os.truncate(path, GIANT)
    assert f"header of {GIANT} bytes" in refusal(path)


def test_datasets_that_share_their_bytes(tmp_path):
    """31 KB that would become a hundred times as many."""
    count, size = 100, 30_000

    def change(file):
        for i in range(count):
            shape = file.create_dataset(str(i), (size,), "u1")
            shape.attrs["kind"] = "array"
        file["0"][:] = 1

    def share(body):
        with h5py.File(io.BytesIO(body)) as file:
            offset = file["0"].id.get_offset() - 4096  # as HDF5 counts
        length = size.to_bytes(8, "little")
        nowhere, first = b"\xff" * 8 + length, offset.to_bytes(8, "little") + length
        assert body.count(nowhere) == count - 1
        return body.replace(nowhere, first)

    forge(tmp_path / "x.h5", change, patch=share)
    assert "more bytes than remain in the file" in refusal(tmp_path / "x.h5")


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_what_is_no_regular_file_is_not_opened(tmp_path, kind):
    """As the checkpoint, and as a shard; opening a FIFO would wait for ever."""
    strange = tmp_path / "strange"
    if kind == "FIFO":
        os.mkfifo(strange)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(strange))
    else:
        strange.symlink_to("/dev/zero")
    (tmp_path / "ckpt-1.h5").symlink_to(strange)
    assert "must be a regular file" in refusal(tmp_path / "ckpt-1.h5")
    with pytest.warns(RuntimeWarning, match="must be a regular file"):
        assert mpidist.latest_checkpoint(tmp_path) is None

    shard = headers.Shard("x-0123abcd-00000-of-00001.h5", 1, 1)
    (tmp_path / shard.name).symlink_to(strange)
    forge(tmp_path / "x.h5", lambda file: None, [shard])
    assert "must be a regular file" in refusal(tmp_path / "x.h5")


def test_removing_old_shards_does_not_wait_for_a_fifo(tmp_path):
    alone = mpidist.MirroredStrategy(communicator=MPI.COMM_SELF)
    os.mkfifo(tmp_path / "x-0123abcd-00000-of-00001.h5")
    for _ in range(2):
        mpidist.Checkpoint(strategy=alone, x=1).write(tmp_path / "x")
    assert (tmp_path / "x.h5").exists()
    alone.experimental_finalize()


def test_very_many_small_arrays_can_still_be_saved(tmp_path, monkeypatch):
    """Those of a few KiB are checked in blocks; tiny ones are refused at saving."""
    monkeypatch.setattr(headers, "LARGEST_STRUCTURE_BYTES", 1 << 20)
    alone = mpidist.MirroredStrategy(communicator=MPI.COMM_SELF)
    arrays = {str(i): np.full(5_000, i, "f4") for i in range(60)}
    path = mpidist.Checkpoint(strategy=alone, arrays=arrays).write(tmp_path / "x")
    assert len(read_header(Path(path)).data) == 60
    for array in arrays.values():
        array[:] = -1
    mpidist.Checkpoint(strategy=alone, arrays=arrays).restore(path)
    assert [set(array.tolist()) for array in arrays.values()] == [
        {i} for i in range(60)
    ]
    tiny = {str(i): np.zeros(200) for i in range(1_000)}
    with pytest.raises(CheckpointError, match="join small arrays"):
        mpidist.Checkpoint(strategy=alone, arrays=tiny).write(tmp_path / "y")
    assert os.listdir(tmp_path) == ["x.h5"]
    alone.experimental_finalize()
