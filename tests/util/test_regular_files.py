"""Files that must be regular ones. No rank needs another here."""

import fcntl
import os
import signal
import socket

import pytest

from mpidist.util.files import open_regular, require_regular

CHECKS = [require_regular, open_regular]


def others(folder):
    """Yield paths to what is no regular file, and what messages call it."""
    os.mkfifo(folder / "fifo")
    yield folder / "fifo", "is a FIFO, and must be a regular file"
    (folder / "link").symlink_to("fifo")
    yield folder / "link", "is a FIFO"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    yield folder / "socket", "is a socket"
    yield "/dev/zero", "is a character device"
    yield folder, "Is a directory"
    yield folder / "nothing", "No such file"


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_no_regular_file_is_refused_by_name(check, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for path, message in others(tmp_path):
        with pytest.raises(OSError, match=message) as info:
            check(path)
        assert info.value.filename == os.fspath(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_regular_file_is_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        descriptor = open_regular(tmp_path / name)
        assert os.read(descriptor, 10) == b"content"
        assert os.get_blocking(descriptor)
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)
    descriptor = open_regular(tmp_path / "file", os.O_RDWR)
    assert os.write(descriptor, b"C") == 1
    os.close(descriptor)


def test_a_path_that_becomes_a_fifo_is_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    before = len(os.listdir("/proc/self/fd"))
    regular, real = os.stat(tmp_path / "file"), os.stat
    monkeypatch.setattr(
        os, "stat", lambda p, **k: regular if p == tmp_path / "fifo" else real(p, **k)
    )
    with pytest.raises(OSError, match="is a FIFO"):
        open_regular(tmp_path / "fifo")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lease_of_another_process_is_waited_for(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    with open(tmp_path / "file", "r+b") as leased:

        def give_back(*_):
            fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_UNLCK)

        handler = signal.signal(signal.SIGIO, give_back)
        try:
            try:
                fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            except OSError:
                pytest.skip("this file system has no leases")
            os.close(open_regular(tmp_path / "file"))
        finally:
            signal.signal(signal.SIGIO, handler)
