"""Damaged files: always a CheckpointError that names the file, never garbage."""

import io
import zlib

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpidist
from mpidist import CheckpointError
from mpidist.checkpoint import format as headers
from mpidist.checkpoint.format import (
    Header,
    Shard,
    SparseFile,
)
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


def forged(change):
    """Return a file whose checksums are right, and whose HDF5 part was changed."""
    image = io.BytesIO()
    with h5py.File(image, "w", userblock_size=4096) as file:
        file.attrs["kind"] = "dict"
        change(file)
    body = bytearray(image.getvalue())
    header = Header(1, len(body), zlib.crc32(body[4096:]))
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
    assert restore(forged(FORGERIES[name])) is not None


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
    assert "'large': expected" in str(restore(forged(change)))


def test_a_hole_takes_no_memory():
    image = SparseFile()
    image.seek(1 << 50)
    image.write(b"end")
    image.seek((1 << 50) - 2)
    assert image.read(5) == b"\0\0end"
