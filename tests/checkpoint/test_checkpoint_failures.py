"""Saving beside the work, and all that can go wrong: full disks, dead ranks."""

import contextlib
import errno
import os
import resource
import threading

import numpy as np
import pytest

import mpidist
from mpidist import CheckpointError
from mpidist.checkpoint.save import Copies, Saving

LARGE = 600_000  # numbers, of which each rank writes a part


def make(strategy, folder, size=LARGE, is_background=True, **options):
    with strategy.scope():
        w = mpidist.Variable(np.zeros(3))
    checkpoint = mpidist.Checkpoint(
        strategy=strategy, shard_bytes=1, step=0, x=np.zeros(size), w=w
    )
    return mpidist.CheckpointManager(
        checkpoint, folder, 3, is_background=is_background, **options
    )


def save(manager, step):
    manager.checkpoint.step = step
    manager.checkpoint.x[...] = step
    manager.checkpoint.w.assign(np.full(3, float(step)))
    return manager.save()


def require(manager, step):
    checkpoint = manager.checkpoint
    assert checkpoint.step == step
    assert set(checkpoint.x.tolist()) == {float(step)}
    assert checkpoint.w.numpy().tolist() == [float(step)] * 3


@contextlib.contextmanager
def short_files(is_here, size_bytes=50_000):
    """Let this process write no more to any file; the signal is ignored by Python."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.fixture
def held(monkeypatch):
    """An event; until it is set, nothing is written."""
    go_on = threading.Event()
    write = Saving.write_shard

    def write_later(self):
        assert go_on.wait(600)
        write(self)

    monkeypatch.setattr(Saving, "write_shard", write_later)
    yield go_on
    go_on.set()


def test_what_is_saved_is_what_was_there_at_save(strategy, comm, mpi_tmp_path, held):
    manager = make(strategy, mpi_tmp_path)
    path = save(manager, 1)
    manager.checkpoint.x[...] = -1
    manager.checkpoint.w.assign(np.full(3, -1.0))
    manager.checkpoint.step = -1
    assert manager.latest_checkpoint is None
    assert not os.path.exists(path)
    held.set()
    manager.wait()
    assert manager.latest_checkpoint == path
    manager.checkpoint.restore(path)
    require(manager, 1)


def test_the_memory_of_copies_is_used_again(strategy, comm, mpi_tmp_path):
    manager = make(strategy, mpi_tmp_path)
    save(manager, 1)
    copies = manager.checkpoint.saver._copies
    manager.wait()
    before = {path: id(buffer) for path, buffer in copies._buffers.items()}
    assert before
    save(manager, 2)
    manager.wait()
    assert {path: id(buffer) for path, buffer in copies._buffers.items()} == before
    manager.restore_or_initialize()
    require(manager, 2)


def test_saves_restores_and_the_strategys_end_wait(strategy, comm, mpi_tmp_path):
    manager = make(strategy, mpi_tmp_path)
    paths = [save(manager, step) for step in range(3)]
    manager.checkpoint.restore(paths[2])  # the one that is being saved
    require(manager, 2)
    save(manager, 3)
    strategy.experimental_finalize()
    assert not list(mpi_tmp_path.glob("*.tmp"))
    assert mpidist.latest_checkpoint(mpi_tmp_path).endswith("ckpt-4.h5")


def test_the_with_block_waits(strategy, comm, mpi_tmp_path):
    with make(strategy, mpi_tmp_path) as manager:
        path = save(manager, 1)
    assert manager.checkpoints == [path]
    with pytest.raises(KeyError, match="reason"), make(strategy, mpi_tmp_path) as m:
        m.restore_or_initialize()
        path = save(m, 2)
        if strategy.extended.replica_id == strategy.num_replicas_in_sync - 1:
            raise KeyError("the reason")
        strategy.reduce("SUM", np.ones(1))
    assert mpidist.latest_checkpoint(mpi_tmp_path) == path


def test_the_next_save_tells_of_the_last_one(strategy, comm, mpi_tmp_path):
    n = strategy.num_replicas_in_sync
    is_last = strategy.extended.replica_id == n - 1
    manager = make(strategy, mpi_tmp_path)
    with short_files(is_last):
        save(manager, 1)
        with pytest.raises(CheckpointError, match="cannot be written"):
            save(manager, 2)
    save(manager, 3)
    manager.wait()
    assert manager.latest_checkpoint is not None
    comm.Barrier()
    assert len(list(mpi_tmp_path.glob("ckpt-?.h5"))) == 1


SCRIPT = """
import resource, sys
import numpy as np
import mpidist

folder, steps, *rest = sys.argv[1:]
strategy = mpidist.MirroredStrategy()
x = np.zeros(600_000)
checkpoint = mpidist.Checkpoint(strategy=strategy, shard_bytes=1, x=x)
manager = mpidist.CheckpointManager(checkpoint, folder, 2, is_background=True)
if "short" in rest:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, -1))
for step in range(int(steps)):
    x[...] = step
    manager.save()
"""


@pytest.mark.slow
def test_the_end_of_the_program_waits(comm, mpirun, mpi_tmp_path):
    mpirun(min(2, comm.size), SCRIPT, str(mpi_tmp_path), "3")
    assert mpidist.latest_checkpoint(mpi_tmp_path).endswith("ckpt-3.h5")
    assert not list(mpi_tmp_path.glob("*.tmp"))


def test_an_error_at_the_end_of_the_program_is_told(comm, mpirun, mpi_tmp_path):
    arguments = str(mpi_tmp_path), "1", "short"
    ended = mpirun(min(2, comm.size), SCRIPT, *arguments, fails=True)
    assert "cannot be written" in ended.stderr
    assert not list(mpi_tmp_path.glob("*.h5"))


@pytest.mark.mpi(min_size=2)
def test_nobody_waits_for_a_rank_that_does_not_save(strategy, comm, mpi_tmp_path):
    manager = make(strategy, mpi_tmp_path)
    save(manager, 1)
    with pytest.raises(mpidist.DivergenceError):
        if comm.rank == 0:
            manager.save()
        else:
            strategy.reduce("SUM", np.ones(1))
    manager.wait()
    assert manager.latest_checkpoint.endswith("ckpt-1.h5")
    comm.Barrier()


@pytest.mark.parametrize("is_background", [False, True])
@pytest.mark.parametrize("size", [3, LARGE])
def test_all_ranks_fail_and_there_is_no_checkpoint_or_none_does(
    strategy, comm, mpi_tmp_path, monkeypatch, size, is_background
):
    """The last rank runs out of memory between the agreement and the files."""
    manager = make(strategy, mpi_tmp_path, size, is_background)

    def fail(*arguments, **options):
        raise MemoryError("no memory for copies")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(Copies, "replace", fail)
    try:
        save(manager, 1)
        manager.wait()
        is_saved = True
    except MemoryError:
        is_saved = False
    comm.Barrier()
    assert comm.allgather(is_saved) == [is_saved] * comm.size
    assert bool(os.listdir(mpi_tmp_path)) == is_saved
    comm.Barrier()
    monkeypatch.undo()
    save(manager, 2)
    manager.restore_or_initialize()
    require(manager, 2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, None])
@pytest.mark.parametrize("call", ["stat", "open", "pread"])
@pytest.mark.parametrize("which", ["ckpt-2.h5", "-00000-of-0000"])
def test_what_cannot_be_read_now_is_not_damaged(
    strategy, comm, mpi_tmp_path, monkeypatch, number, call, which
):
    checkpoint = mpidist.Checkpoint(
        strategy=strategy, shard_bytes=1 << 20, x=np.zeros(1 << 18), y=np.ones(1 << 18)
    )
    mpidist.CheckpointManager(checkpoint, mpi_tmp_path, 3).save()
    checkpoint.x[:] = 1
    mpidist.CheckpointManager(checkpoint, mpi_tmp_path, 3).save()
    manager = mpidist.CheckpointManager(checkpoint, mpi_tmp_path, 3)
    checkpoint.x[:] = 2
    real = getattr(os, call)

    def fail(file, *arguments, **keywords):
        path = os.readlink(f"/proc/self/fd/{file}") if call == "pread" else str(file)
        if which in path and "ckpt-1" not in path:
            raise MemoryError if number is None else OSError(number, "passing")
        return real(file, *arguments, **keywords)

    if comm.rank == 0:
        monkeypatch.setattr(os, call, fail)
    with pytest.raises(mpidist.CheckpointError, match="cannot be read now"):
        manager.restore_or_initialize()
    assert (checkpoint.x == 2).all()
    monkeypatch.undo()
    assert manager.restore_or_initialize().endswith("ckpt-2.h5")
    assert (checkpoint.x == 1).all()
