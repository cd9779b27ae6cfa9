"""Damaged and hostile files: always a CheckpointError that names the file."""

import io
import os
import socket
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpidist
from mpidist import CheckpointError
from mpidist.checkpoint import format as headers
from mpidist.checkpoint.format import Header, Shard, read_header
from mpidist.checkpoint.reading import read_tree

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def state():
    rng = np.random.default_rng(0)
    return {
        "large": rng.normal(size=9_000),
        "small": rng.integers(9, size=(2, 3)),
        "rng": np.random.default_rng(1),
        "nest": {"a": [1, 2.5, "text"], "b": (None, True)},
    }


@pytest.fixture
def saved(tmp_path):
    """A sound file of one process, its bytes, and a function that restores it."""
    alone = mpidist.MirroredStrategy(communicator=MPI.COMM_SELF)
    path = tmp_path / "ckpt-1.h5"
    mpidist.Checkpoint(strategy=alone, **state()).write(path)

    def restore(data):
        path.write_bytes(data)
        objects = state()
        for name in ("large", "small"):
            objects[name][...] = 0
        checkpoint = mpidist.Checkpoint(strategy=alone, **objects)
        checkpoint.nest["a"] = [0, 0.0, ""]
        before = repr(checkpoint.objects)
        error = None
        try:
            checkpoint.restore(path)
        except CheckpointError as raised:
            error = raised
        if error is not None:
            assert str(path) in str(error)
            assert repr(checkpoint.objects) == before
            return error
        np.testing.assert_array_equal(checkpoint.large, state()["large"])
        np.testing.assert_array_equal(checkpoint.small, state()["small"])
        assert checkpoint.nest == state()["nest"]
        assert checkpoint.rng.normal() == np.random.default_rng(1).normal()
        return None

    yield path, path.read_bytes(), restore
    alone.experimental_finalize()


def test_the_message_says_what_is_damaged(saved):
    _, data, restore = saved
    offset = data.index(state()["large"].tobytes())
    changed = bytearray(data)
    changed[offset + 100] ^= 1
    message = str(restore(bytes(changed)))
    assert f"bytes {offset} to" in message
    assert "have the checksum" in message
    assert "it ends in its header" in str(restore(data[:1000]))
    size = len(data) - 1
    assert f"it has {size} bytes instead of" in str(restore(data[:-1]))
    newer = data.replace(b"mpidist checkpoint 1,", b"mpidist checkpoint 2,", 1)
    assert "its format is 2; this mpidist reads 1" in str(restore(newer))


def test_other_files_are_no_checkpoints(saved, tmp_path):
    _, _, restore = saved
    other = tmp_path / "other.h5"
    with h5py.File(other, "w") as file:
        file["large"] = np.zeros(9_000)
    for data in (other.read_bytes(), b"", b"\x89HDF\r\n\x1a\n", b"mpidist checkpoint"):
        assert "does not begin like a checkpoint" in str(restore(data))
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(CheckpointError, match="folder"):
        read_tree(path)
    with pytest.raises(CheckpointError, match="there is no such file"):
        read_tree(tmp_path / "missing")


def forge(change, shards=(), size=None, patch=bytearray):
    """Return a file with right checksums whose HDF5 part `change` has made."""
    image = io.BytesIO()
    with h5py.File(image, "w", userblock_size=4096) as file:
        file.attrs["kind"] = "dict"
        change(file)
    body = patch(bytearray(image.getvalue()))
    header = Header(1, size or len(body), zlib.crc32(body[4096:]), (), tuple(shards))
    body[:4096] = headers.render(header, 4096)
    return bytes(body)


FORGERIES = {
    "no kind": lambda f: f.create_group("nest"),
    "an unknown kind": lambda f: f.create_group("nest").attrs.update(kind="code"),
    "kind is a number": lambda f: f.create_group("nest").attrs.update(kind=7),
    "a soft link": lambda f: f.update_soft(),
    "compressed": lambda f: f.create_dataset(
        "large", data=np.zeros(10), compression="gzip"
    ).attrs.update(kind="array"),
    "objects": lambda f: f.create_dataset(
        "large", data=["a", "b"], dtype=h5py.string_dtype()
    ).attrs.update(kind="array"),
    "references": lambda f: f.create_dataset(
        "large", (2,), h5py.ref_dtype
    ).attrs.update(kind="array"),
    "a giant": lambda f: f.create_dataset("large", (1 << 40,), "f8").attrs.update(
        kind="array"
    ),
    "external raw data": lambda f: f.create_dataset(
        "large", (10,), "f8", external=[("/etc/passwd", 0, 80)]
    ).attrs.update(kind="array"),
    "a dtype of another": lambda f: f.create_dataset(
        "large", data=np.zeros(10, "u2")
    ).attrs.update(kind="array", dtype="os.system"),
    "an unfit dtype": lambda f: f.create_dataset(
        "large", data=np.zeros(10, "u4")
    ).attrs.update(kind="array", dtype="bfloat16"),
    "a list with gaps": lambda f: f.create_group("nest/5").parent.attrs.update(
        kind="list"
    ),
    "a named type": lambda f: f.update_type(),
    "a text as a number": lambda f: f.create_dataset(
        "nest", data=np.bytes_(b"zz")
    ).attrs.update(kind="int"),
}


@pytest.mark.parametrize("name", sorted(FORGERIES))
def test_a_forged_file_runs_nothing_and_raises(saved, name, monkeypatch):
    def soft(file):
        file["large"] = h5py.SoftLink("/large")

    def named(file):
        file["large"] = np.dtype("f8")

    monkeypatch.setattr(h5py.File, "update_soft", soft, raising=False)
    monkeypatch.setattr(h5py.File, "update_type", named, raising=False)
    _, _, restore = saved
    assert restore(forge(FORGERIES[name])) is not None


HEADERS = {
    "overlapping": Header(1, 10_000, 0, ((5000, 100, 0), (5050, 10, 0))),
    "beyond the end": Header(1, 10_000, 0, ((9990, 100, 0),)),
    "in the header": Header(1, 10_000, 0, ((100, 100, 0),)),
    "another folder": Header(1, 9, 0, (), (Shard("../x.h5", 1, 1),)),
    "negative": Header(-1, 9, 0),
    "no numbers": Header("1", 9, 0),
}


@pytest.mark.parametrize("name", sorted(HEADERS))
def test_a_forged_header_raises(saved, name):
    _, data, restore = saved
    forged_header = headers.render(HEADERS[name], 4096)
    assert "its header has" in str(restore(forged_header + data[4096:]))


@SETTINGS
@given(st.binary(max_size=300))
def test_any_text_as_a_header(text):
    body = text.ljust(4096 - headers._LINE_BYTES - 1) + b"\n"
    first = headers._FIRST.format(1, 4096, zlib.crc32(body)).encode()
    with pytest.raises((ValueError, KeyError, TypeError)):
        headers.parse(first + body)


def test_a_lost_dataset_is_named(saved):
    def change(file):
        file.create_dataset("small", data=np.zeros((2, 3))).attrs["kind"] = "array"

    _, _, restore = saved
    assert "'large': expected" in str(restore(forge(change)))


# Made to do harm: refused at once, whatever size they claim to have

GIANT = 12 << 30


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

    (tmp_path / "x.h5").write_bytes(forge(change))
    assert "/a/b' is a second link" in refusal(tmp_path / "x.h5")


def test_a_group_that_holds_itself(tmp_path):
    def change(file):
        group(file, "a")["b"] = file["/"]

    (tmp_path / "x.h5").write_bytes(forge(change))
    assert "'/a/b' is a second link" in refusal(tmp_path / "x.h5")


def test_more_levels_than_can_be_saved(tmp_path):
    def change(file):
        above = file
        for _ in range(500):
            above = group(above, "a")

    (tmp_path / "x.h5").write_bytes(forge(change))
    assert "more than 61 levels" in refusal(tmp_path / "x.h5")


def test_a_sparse_file_that_is_all_structure(tmp_path):
    path = tmp_path / "x.h5"
    path.write_bytes(forge(lambda file: None, size=GIANT))
    os.truncate(path, GIANT)
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

    (tmp_path / "x.h5").write_bytes(forge(change, patch=share))
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
    (tmp_path / "x.h5").write_bytes(forge(lambda file: None, [shard]))
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
