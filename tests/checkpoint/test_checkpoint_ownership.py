"""Files beside checkpoints: removed or replaced only if they say that they are ours."""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from all_ranks import on_root, require_usable

import mpidist
from mpidist import CheckpointError
from mpidist.checkpoint import directory as directories
from mpidist.checkpoint.format import (
    Header,
    lock,
    read_header,
    unlock,
    write_file,
)
from mpidist.checkpoint.save import Saving

HOST = os.uname().nodename
BEGIN = b"mpidist checkpoint that is not complete\n"
SHARD = "ckpt-2-ffffffff-00000-of-00002.h5"
NUMBERS = np.arange(1 << 18, dtype="f8")  # of which each rank has a shard


def manager_of(strategy, folder, **options):
    checkpoint = mpidist.Checkpoint(
        strategy=strategy, shard_bytes=1 << 20, x=NUMBERS.copy(), y=NUMBERS.copy()
    )
    return mpidist.CheckpointManager(
        checkpoint, folder, **{"max_to_keep": 3, **options}
    )


def require_whole(strategy, path):
    x = np.zeros_like(NUMBERS)
    mpidist.Checkpoint(strategy=strategy, x=x, y=np.zeros_like(x)).restore(path)
    np.testing.assert_array_equal(x, NUMBERS)


def write_shard(path, **options):
    options = {"id": "f" * 32, "writer": (HOST, dead())} | options
    locks = []
    write_file(path, {}, {}, Header(0, **options), locks=locks)
    return locks[0]


def dead():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def no_locks(monkeypatch):
    real = fcntl.fcntl

    def call(descriptor, command, *arguments):
        if command in (fcntl.F_OFD_SETLK, fcntl.F_OFD_GETLK):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return real(descriptor, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", call)


def plant(folder, name, content, writer=None):
    """Write a leftover: a shard of a dead or other job, or a file of that content."""
    path = folder / name.format(host=HOST, dead=dead(), alive=os.getpid())
    if content is not None:
        path.write_bytes(content)
    else:
        unlock(write_shard(path, **({} if writer is None else {"writer": writer})))
    return path


# Name, content (None: a shard), writer of a shard
LEFT = [
    (SHARD, None, None),
    (SHARD, None, ("another.host", 1)),
    ("ckpt-2.h5.{host}.{dead}.0.tmp", BEGIN, None),
    ("ckpt-2.h5.{host}.{dead}.0.tmp", b"", None),  # killed before its first byte
    ("ckpt-2.h5.another.host.{alive}.3.tmp", BEGIN, None),
    ("ckpt-2-0123abcd-00001-of-00002.h5.{host}.{dead}.1.tmp", BEGIN, None),
]
NOT_LEFT = [
    (SHARD, b"", None),
    (SHARD, b"rows of somebody else", None),
    (SHARD, None, (HOST, os.getpid())),
    ("ckpt-2.h5.{host}.{alive}.0.tmp", BEGIN, None),
    ("ckpt-2.h5.{host}.{dead}.0.tmp", b"notes", None),
    ("ckpt-2-0123abcd-00000-of-00002.txt", None, None),
    ("other-2-0123abcd-00000-of-00002.h5", None, None),
    ("other-2.h5.{host}.{dead}.0.tmp", BEGIN, None),
    ("ckpt-x.h5", b"", None),
]


@pytest.mark.parametrize("has_locks", [True, False], ids=["locks", "no locks"])
@pytest.mark.parametrize(
    ("case", "is_left"), [(c, True) for c in LEFT] + [(c, False) for c in NOT_LEFT]
)
def test_the_first_save_removes_what_dead_jobs_left_and_nothing_else(
    strategy, comm, mpi_tmp_path, monkeypatch, case, is_left, has_locks
):
    if not has_locks:
        no_locks(monkeypatch)
    path = comm.bcast(plant(mpi_tmp_path, *case) if comm.rank == 0 else None)
    manager = manager_of(strategy, mpi_tmp_path)
    comm.Barrier()
    assert path.exists()  # an evaluation, which does not save, leaves it alone
    comm.Barrier()
    manager.save()
    comm.Barrier()
    # Nobody knows of the processes of other hosts; locks may be those of this host
    is_unknown = "another.host" in str((path.name, case[2]))
    assert path.exists() == (not is_left or is_unknown)


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_save_of_another_host_of_yesterday_has_ended(
    strategy, comm, mpi_tmp_path, monkeypatch, has_locks
):
    if not has_locks:
        no_locks(monkeypatch)
    path = mpi_tmp_path / SHARD
    if comm.rank == 0:
        plant(mpi_tmp_path, SHARD, None, ("another.host", 1))
        os.utime(path, (1e9, 1e9))
    comm.Barrier()
    manager_of(strategy, mpi_tmp_path).save()
    comm.Barrier()
    assert not path.exists()


@pytest.mark.parametrize("name", [SHARD, "ckpt-2.h5.another.host.1.3.tmp"])
def test_what_another_job_has_locked_stays(strategy, comm, mpi_tmp_path, name):
    path, descriptor = mpi_tmp_path / name, None
    if comm.rank == 0 and name == SHARD:
        descriptor = write_shard(path)
    elif comm.rank == 0:
        path.write_bytes(BEGIN)
        descriptor = lock(path)
    comm.Barrier()
    manager_of(strategy, mpi_tmp_path).save()
    comm.Barrier()
    assert path.exists()
    comm.Barrier()
    if descriptor is not None:
        unlock(descriptor)
        os.utime(path, (1e9, 1e9))
    manager_of(strategy, mpi_tmp_path).save(7)
    comm.Barrier()
    assert not path.exists()


@pytest.mark.parametrize("how", ["rename", "link", "copy"])
@pytest.mark.parametrize("then", ["manager", "same name", "removed"])
def test_an_index_needs_its_shards_under_any_name(
    strategy, comm, mpi_tmp_path, how, then
):
    manager = manager_of(strategy, mpi_tmp_path, max_to_keep=1)
    path, best = Path(manager.save()), mpi_tmp_path / "best.h5"
    if comm.rank == 0:
        {"rename": os.rename, "link": os.link, "copy": copy}[how](path, best)
    comm.Barrier()
    if then == "manager":
        manager_of(strategy, mpi_tmp_path, checkpoint_name="ckpt").save(9)
    elif then == "same name":
        manager.checkpoint.write(path)
    else:
        manager.save()
    comm.Barrier()
    require_whole(strategy, best)
    on_root(comm, best.unlink)
    manager.save()
    manager.save()
    comm.Barrier()
    assert len(list(mpi_tmp_path.iterdir())) <= 2 * (1 + comm.size)


def copy(source, target):
    target.write_bytes(source.read_bytes())


@pytest.fixture
def dead_jobs(monkeypatch):
    """Nobody who wrote a shard is alive."""
    monkeypatch.setattr(directories, "_is_dead", lambda path, writer: True)


@pytest.mark.usefixtures("dead_jobs")
@pytest.mark.parametrize(
    "name", ["ckpt-1.h5.bak", "best.H5", "best-0123abcd-00000-of-00001.h5", "a link"]
)
def test_any_name_counts(strategy, comm, mpi_tmp_path, tmp_path, name):
    manager = manager_of(strategy, mpi_tmp_path)
    path = Path(manager.save())
    directories.release(id(manager.checkpoint.saver))
    away, best = comm.bcast(tmp_path / "away.h5"), mpi_tmp_path / name
    if comm.rank == 0:
        os.rename(path, away if name == "a link" else best)
        if name == "a link":  # whose target is not there now
            best.symlink_to(away.with_name("mounted") / away.name)
    comm.Barrier()
    manager_of(strategy, mpi_tmp_path).save(5)
    back = mpi_tmp_path / "back.h5"
    on_root(comm, os.rename, away if name == "a link" else best, back)
    require_whole(strategy, back)


@pytest.mark.usefixtures("dead_jobs")
@pytest.mark.parametrize("how", ["named", "renamed", "unreadable"])
def test_an_index_that_shows_late_keeps_its_shards(
    strategy, comm, mpi_tmp_path, monkeypatch, how
):
    """After the next job has listed the directory, or cannot be read at once."""
    manager = manager_of(strategy, mpi_tmp_path)
    path, aside = Path(manager.save()), mpi_tmp_path.parent / "aside"
    directories.release(id(manager.checkpoint.saver))
    best = path if how == "named" else mpi_tmp_path / "best.h5"
    if how == "named":
        on_root(comm, os.rename, path, aside)
    if comm.rank == 0 and how == "unreadable":
        os.rename(path, best)
        real = directories.read_header
        monkeypatch.setattr(directories, "read_header", unreadable(real, best))
    elif comm.rank == 0:
        names = directories._names

        def then_rename(directory):
            found = names(directory)
            for source in {aside, path} - {best}:
                if source.exists():
                    os.rename(source, best)
            return found

        monkeypatch.setattr(directories, "_names", then_rename)
    with contextlib.suppress(CheckpointError):
        manager_of(strategy, mpi_tmp_path).save(7)
    monkeypatch.undo()
    comm.Barrier()
    require_whole(strategy, best)


def unreadable(read, which):
    def fail(path):
        if path == which:
            raise CheckpointError("passing") from OSError(errno.EIO, "passing")
        return read(path)

    return fail


@pytest.mark.parametrize("damage", [b"", b"no header"], ids=["cut", "other bytes"])
def test_shards_stay_while_their_index_cannot_be_read(
    strategy, comm, mpi_tmp_path, damage
):
    manager = manager_of(strategy, mpi_tmp_path)
    path = Path(manager.save())
    data = path.read_bytes()
    if comm.rank == 0:
        path.write_bytes(data[:100] + damage)
    comm.Barrier()
    with contextlib.suppress(CheckpointError):
        manager_of(strategy, mpi_tmp_path).save(5)
    on_root(comm, path.write_bytes, data)
    require_whole(strategy, path)


FOREIGN = {
    "data": lambda path: h5py.File(path, "w").create_dataset("x", data=NUMBERS[:5]),
    "text": lambda path: path.write_text("mpidist is"),
    "nothing": lambda path: path.write_bytes(b""),
    "a shard": lambda path: unlock(write_shard(path)),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a folder": lambda path: path.mkdir(),
    "a FIFO": os.mkfifo,
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("how", ["write", "save", "manager", "background"])
def test_a_file_in_the_way_is_an_error_and_stays(
    strategy, comm, mpi_tmp_path, kind, how
):
    path = mpi_tmp_path / "ckpt-1.h5"
    on_root(comm, FOREIGN[kind], path)
    before = os.lstat(path)
    manager = manager_of(strategy, mpi_tmp_path, is_background=how == "background")
    saves = {
        "write": lambda: manager.checkpoint.write(path),
        "save": lambda: manager.checkpoint.save(mpi_tmp_path / "ckpt"),
    }
    with pytest.raises(CheckpointError, match=r"ckpt-1\.h5.*(no checkpoint|cannot be)"):
        saves.get(how, manager.save)()
    require_usable(strategy)
    assert (os.lstat(path).st_ino, os.lstat(path).st_size) == (
        before.st_ino,
        before.st_size,
    )
    assert len(list(mpi_tmp_path.iterdir())) == 1
    comm.Barrier()
    if kind != "a folder":
        on_root(comm, path.unlink)
        manager.checkpoint.restore(manager.checkpoint.write(path))


def test_rows_whose_name_looks_like_shards_stay(strategy, comm, mpi_tmp_path):
    path = mpi_tmp_path / "run-20261126.h5"
    with mpidist.Hdf5Writer(strategy, path) as writer:
        writer.append(NUMBERS)
    for _ in range(2):
        manager_of(strategy, mpi_tmp_path).checkpoint.write(mpi_tmp_path / "run")
    rows = mpidist.Dataset.from_hdf5(path, "data")
    assert len(rows) == len(NUMBERS) * comm.size


@pytest.mark.parametrize("number", [1, 5], ids=["same number", "another"])
@pytest.mark.parametrize("is_background", [False, True])
def test_of_two_first_saves_one_is_refused(
    strategy, comm, mpi_tmp_path, monkeypatch, is_background, number
):
    """Another job saves between this one's look at the directory and its index."""
    no_locks(monkeypatch)
    manager = manager_of(strategy, mpi_tmp_path, is_background=is_background)
    theirs = mpi_tmp_path / f"ckpt-{number}.h5"
    publish = directories.publish

    def publish_after_the_other(file, before):
        write_file(theirs, {}, {}, Header(1, job="another job"))
        publish(file, before)

    monkeypatch.setattr(directories, "publish", publish_after_the_other)
    with pytest.raises(CheckpointError, match="another job has saved"):
        manager.save()
        manager.wait()
    require_usable(strategy)
    comm.Barrier()
    assert list(mpi_tmp_path.iterdir()) == [theirs]
    assert read_header(theirs).job == "another job"


def test_a_file_that_appears_in_place_of_the_old_one_stays(
    strategy, comm, mpi_tmp_path, monkeypatch
):
    """It may get the inode of the old one."""
    checkpoint = manager_of(strategy, mpi_tmp_path).checkpoint
    path = Path(checkpoint.write(mpi_tmp_path / "model"))
    publish = directories.publish

    def publish_after_the_other(file, before):
        path.unlink()
        with h5py.File(path, "w") as other:
            other["x"] = np.arange(5)
        publish(file, before)

    monkeypatch.setattr(directories, "publish", publish_after_the_other)
    with pytest.raises(CheckpointError, match="another job has saved"):
        checkpoint.write(path)
    comm.Barrier()
    with h5py.File(path, locking=False) as file:
        assert file["x"][4] == 4


@pytest.mark.mpi(min_size=2)
def test_a_shard_that_is_removed_by_others_is_an_error(
    strategy, comm, mpi_tmp_path, monkeypatch
):
    """As by a job that cannot see this one's locks."""
    wait = Saving._wait_for_shard

    def then_remove(saving, name):
        found = wait(saving, name)
        (mpi_tmp_path / name).unlink()
        return found

    monkeypatch.setattr(Saving, "_wait_for_shard", then_remove)
    with pytest.raises(CheckpointError, match="cannot be written"):
        manager_of(strategy, mpi_tmp_path).save()
    comm.Barrier()
    assert not (mpi_tmp_path / "ckpt-1.h5").exists()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("call", ["write_shard", "write_index"])
def test_what_is_raised_in_a_thread_is_raised_on_all(
    strategy, comm, mpi_tmp_path, monkeypatch, error, call
):
    manager = manager_of(strategy, mpi_tmp_path, is_background=True)

    def fail(saving):
        raise error

    if comm.rank == (0 if call == "write_index" else comm.size - 1):
        monkeypatch.setattr(Saving, call, fail)
    with pytest.raises((CheckpointError, MemoryError)):
        manager.save()
        manager.wait()
    monkeypatch.undo()
    manager.save()
    manager.wait()
    require_whole(strategy, manager.latest_checkpoint)


def test_only_what_was_planned_is_removed(strategy, comm, mpi_tmp_path, monkeypatch):
    """The user gives another checkpoint the name of the outdated one."""
    manager = manager_of(strategy, mpi_tmp_path, max_to_keep=1)
    path, best = Path(manager.save()), mpi_tmp_path / "best.h5"
    manager.checkpoint.write(best)
    publish = directories.publish

    def then_rename(file, before):
        publish(file, before)
        os.rename(best, path)

    monkeypatch.setattr(directories, "publish", then_rename)
    manager.save()
    comm.Barrier()
    require_whole(strategy, path)


def test_a_text_that_begins_alike_is_no_checkpoint(strategy, comm, mpi_tmp_path):
    path = mpi_tmp_path / "notes.h5"
    on_root(comm, path.write_text, "mpidist checkpoint 3 is the best one\n" * 3)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        manager_of(strategy, mpi_tmp_path).checkpoint.write(path)
