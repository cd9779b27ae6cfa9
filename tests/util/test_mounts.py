"""The mounted file systems: any table, names of any bytes, which are local."""

import os
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.util import mounts
from mpidist.util.mounts import find_mount, parse_mounts, read_mounts

TABLE = rb"""21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:40 / /scratch rw,noatime - lustre 10.0.0.1@o2ib:/fs rw,flock,lazystatfs
31 21 0:41 / /home\040of/all rw - nfs4 server:/home rw,vers=4.2,local_lock=none
32 30 0:42 / /scratch/tmp rw - tmpfs tmpfs rw
33 30 0:43 / /scratch/tmp ro - xfs /dev/sdb ro
34 21 0:44 /a /caf%s rw - nfs s:/%s rw
garbage
""" % (b"\xe9\x85", b"\xff\\134b")


@pytest.mark.parametrize(
    ("path", "kind", "option"),
    [
        ("/", "ext4", "relatime"),
        ("/scratchy/x", "ext4", "rw"),
        ("/scratch/a/b", "lustre", "flock"),
        ("/home of/all/x", "nfs4", "vers=4.2"),
        ("/scratch/tmp/x", "xfs", "ro"),
        (os.fsdecode(b"/caf\xe9\x85/x"), "nfs", "rw"),
    ],
)
def test_the_mount_of_a_path(path, kind, option):
    mount = find_mount(parse_mounts(TABLE), path)
    assert mount.kind == kind
    assert option in mount.options
    if kind == "nfs":
        assert os.fsencode(mount.source) == b"s:/\xff\\b"


@given(st.binary(max_size=200))
def test_any_table_of_mounts(table):
    find_mount(parse_mounts(table), "/x")


def test_only_network_file_systems_show_files_late(tmp_path, monkeypatch):
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    table = b"9 1 0:0 / /\xe9 rw - nfs s rw\n30 1 %s / / rw - %s x rw\n"
    assert number in {mount.device for mount in read_mounts()}
    for kind, seconds in [(b"ext4", 0.0), (b"nfs4", 10.0), (b"\xe9", 10.0)]:
        lines = table % (number.encode(), kind)
        monkeypatch.setattr(pathlib.Path, "read_bytes", lambda _, lines=lines: lines)
        assert mounts.lateness(tmp_path, 10.0) == seconds
    assert mounts.lateness(tmp_path / "missing", 10.0) == 0.0

    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(pathlib.Path, "read_bytes", refuse)
    assert mounts.lateness(tmp_path, 10.0) == 10.0


def test_a_file_is_waited_for_where_it_may_appear_late(tmp_path, monkeypatch):
    path = tmp_path / "file"
    assert not mounts.wait_for_file(path, 0.0)
    monkeypatch.setattr(mounts, "lateness", lambda directory, most_seconds: 10.0)
    monkeypatch.setattr(mounts.time, "sleep", lambda seconds: path.touch())
    assert mounts.wait_for_file(path, 10.0)
    assert mounts.wait_for_file(path, 0.0)
