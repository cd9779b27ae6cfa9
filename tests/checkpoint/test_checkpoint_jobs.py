"""Two jobs and one folder of checkpoints: an error on all ranks, and nothing lost."""

import os
import sys

import launching
import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist import CheckpointError
from mpidist.checkpoint import directory as directories
from mpidist.checkpoint.format import lock

# What another job does: restore, then save in some way; each rank prints its error
JOB = """
import os, signal, sys
import numpy as np
import mpidist
from mpidist.checkpoint import directory as directories

folder, how, *rest = sys.argv[1:]
directories._PATIENCE_SECONDS = 0.0
strategy = mpidist.MirroredStrategy()
x = np.zeros(300_000)
checkpoint = mpidist.Checkpoint(strategy=strategy, shard_bytes=1, x=x)
manager = mpidist.CheckpointManager(checkpoint, folder, 1)
latest = manager.restore_or_initialize()
try:
    if how == "manager":
        manager.save()
    elif how == "background":
        manager = mpidist.CheckpointManager(checkpoint, folder, 1, is_background=True)
        manager.save()
        manager.wait()
    elif how == "save":
        checkpoint.save(folder + "/ckpt")
    elif how == "write":
        checkpoint.write(latest)
except mpidist.CheckpointError as error:
    print(f"[{strategy.extended.replica_id}: {error}]", flush=True)
else:
    print(f"[{strategy.extended.replica_id} saved]", flush=True)
if "fork" in rest and os.fork() == 0:
    for number in range(3):
        os.close(number)
    os.open(folder + "/fifo", os.O_RDONLY)  # until the test has ended
    os._exit(0)
if "kill" in rest:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def make(strategy, folder, **options):
    x = np.zeros(300_000)
    checkpoint = mpidist.Checkpoint(strategy=strategy, shard_bytes=1, x=x)
    options = {"max_to_keep": 3} | options
    return mpidist.CheckpointManager(checkpoint, folder, **options)


def save(manager, value):
    manager.checkpoint.x[:] = value
    return manager.save()


def require(manager, value):
    manager.checkpoint.x[:] = -1
    assert manager.restore_or_initialize() is not None
    assert set(manager.checkpoint.x.tolist()) == {value}


@pytest.fixture
def impatient(monkeypatch):
    """Nobody waits for a job that may be about to end."""
    monkeypatch.setattr(directories, "_PATIENCE_SECONDS", 0.0)


@pytest.mark.parametrize(
    "how",
    [
        "manager",
        pytest.param("background", marks=pytest.mark.slow),
        pytest.param("save", marks=pytest.mark.slow),
        pytest.param("write", marks=pytest.mark.slow),
    ],
)
def test_a_second_job_restores_but_does_not_save(
    strategy, comm, mpirun, mpi_tmp_path, how
):
    manager = make(strategy, mpi_tmp_path)
    save(manager, 1)
    path = save(manager, 2)
    comm.Barrier()
    before = {p.name: p.read_bytes() for p in mpi_tmp_path.iterdir()}
    comm.Barrier()
    ended = mpirun(2, JOB, str(mpi_tmp_path), how)
    first = comm.bcast(directories.JOB)
    for rank in range(2):
        assert f"[{rank}: " in ended.stdout
    assert (
        ended.stdout.count(f"in this directory: {first}. It has saved ckpt-2.h5") == 2
    )
    assert os.uname().nodename in first
    assert {p.name: p.read_bytes() for p in mpi_tmp_path.iterdir()} == before
    comm.Barrier()
    assert save(manager, 3) != path
    require(manager, 3)


@pytest.mark.slow
def test_another_folder_another_name_and_a_closed_strategy_are_free(
    strategy, comm, mpirun, mpi_tmp_path
):
    (mpi_tmp_path / "other").mkdir(exist_ok=True)
    save(make(strategy, mpi_tmp_path, checkpoint_name="mine"), 1)
    save(make(strategy, mpi_tmp_path / "third"), 1)
    for folder in ("other", ""):
        ended = mpirun(1, JOB, str(mpi_tmp_path / folder), "manager")
        assert "[0 saved]" in ended.stdout, ended.stderr
    manager = make(strategy, mpi_tmp_path / "other")
    save(manager, 1)
    strategy.experimental_finalize()
    ended = mpirun(1, JOB, str(mpi_tmp_path / "other"), "manager")
    assert "[0 saved]" in ended.stdout, ended.stderr


def test_several_managers_of_one_job(strategy, comm, mpi_tmp_path, impatient):
    managers = [make(strategy, mpi_tmp_path, is_background=b) for b in (False, True)]
    for value in range(4):
        manager = managers[value % 2]
        save(manager, value)
        manager.wait()
    require(make(strategy, mpi_tmp_path), 3)
    other = mpidist.Checkpoint(strategy=strategy, x=np.zeros(3))
    other.write(mpi_tmp_path / "ckpt")
    other.write(mpi_tmp_path / "ckpt")


def test_children_of_a_killed_job_keep_no_lock(tmp_path, impatient):
    if launching.is_open_mpi():
        pytest.skip("a fork is not for Open MPI's singletons")
    os.mkfifo(tmp_path / "fifo")
    command = [sys.executable, "-c", JOB, str(tmp_path), "manager", "fork", "kill"]
    ended = launching.run(command)
    assert "[0 saved]" in ended.stdout, ended.stderr
    alone = mpidist.MirroredStrategy(communicator=MPI.COMM_SELF)
    save(make(alone, tmp_path), 1)
    alone.experimental_finalize()
    os.close(os.open(tmp_path / "fifo", os.O_WRONLY))  # the child goes on, and ends


def test_a_job_that_was_started_again_waits_for_the_old_one(
    strategy, comm, mpi_tmp_path, monkeypatch
):
    """The old job ends while the new one looks whether it has."""
    manager = make(strategy, mpi_tmp_path)
    path = save(manager, 1)
    directories.release(id(manager.checkpoint.saver))
    comm.Barrier()
    looks = []
    if comm.rank == 0:
        old = lock(path)
        directories.locked.discard(old)  # as of another process

        is_locked = directories.is_locked

        def look(path):
            looks.append(path)
            if len(looks) == 3:
                os.close(old)
            return is_locked(path)

        monkeypatch.setattr(directories, "is_locked", look)
    save(manager, 2)
    assert len(looks) == (4 if comm.rank == 0 else 0)  # it lists again, and looks
    require(manager, 2)


@pytest.mark.parametrize("max_to_keep", [9, 2])
def test_restoring_takes_what_was_saved_since(strategy, mpi_tmp_path, max_to_keep):
    training = make(strategy, mpi_tmp_path, max_to_keep=max_to_keep)
    paths = [save(training, 1), save(training, 2)]
    started = []
    evaluation = make(strategy, mpi_tmp_path, init_fn=lambda: started.append(1))
    require(evaluation, 2)
    paths += [save(training, value) for value in (3, 4, 5)]
    assert evaluation.checkpoints == paths[-max_to_keep:]
    assert evaluation.latest_checkpoint == paths[-1]
    paths.append(save(training, 6))
    require(evaluation, 6)
    assert not started


@pytest.mark.parametrize(
    "place", ["directory.read_header", "directory.read_tree", "restore.read_tree"]
)
def test_checkpoints_removed_between_listing_and_opening(
    strategy, comm, mpi_tmp_path, monkeypatch, place
):
    training = make(strategy, mpi_tmp_path)
    for value in range(1, 4):
        save(training, value)
    comm.Barrier()
    stash = mpi_tmp_path / "stash"
    started = []
    evaluation = make(strategy, mpi_tmp_path, init_fn=lambda: started.append(1))
    if comm.rank == 0:
        stash.mkdir()
        for path in mpi_tmp_path.glob("ckpt-3*.h5"):
            path.rename(stash / path.name)
        directories._inspected.clear()  # as in a job that has not seen them
        module, _, name = f"mpidist.checkpoint.{place}".rpartition(".")
        read = getattr(sys.modules[module], name)

        def replace(path):
            if new := list(stash.iterdir()):
                for old in mpi_tmp_path.glob("ckpt-*.h5"):
                    old.unlink()
            for file in new:
                file.rename(mpi_tmp_path / file.name)
            return read(path)

        monkeypatch.setattr(sys.modules[module], name, replace)
    require(evaluation, 3)
    assert not started


@pytest.mark.parametrize("is_background", [False, True])
@pytest.mark.parametrize("job", ["the same", "another"])
@pytest.mark.parametrize("restores", [True, False])
def test_the_first_save_does_not_hide_a_newer_state(
    strategy, comm, mpi_tmp_path, impatient, monkeypatch, restores, job, is_background
):
    first = make(strategy, mpi_tmp_path)
    save(first, 1)
    second = make(strategy, mpi_tmp_path, is_background=is_background)
    if restores:
        require(second, 1)
    save(first, 2)
    if job == "another":
        directories.release(id(first.checkpoint.saver))
        monkeypatch.setattr(directories, "JOB", "Slurm job 17")
    comm.Barrier()
    before = sorted(os.listdir(mpi_tmp_path))
    if job == "another" or restores:
        since = "restored ckpt-1.h5" if restores else "looked for checkpoints"
        with pytest.raises(CheckpointError, match=f"ckpt-2.h5 was saved .*{since}"):
            save(second, 3)
        assert sorted(os.listdir(mpi_tmp_path)) == before
        assert second.latest_checkpoint.endswith("ckpt-2.h5")
        if restores:
            require(second, 2)
        else:
            second.checkpoint.restore(second.latest_checkpoint)
    save(second, 3)
    second.wait()
    save(second, 4)
    second.wait()
    require(make(strategy, mpi_tmp_path), 4)


def test_locks_hinder_nobody_else(strategy, comm, mpi_tmp_path):
    path = save(make(strategy, mpi_tmp_path), 1)
    code = f"import h5py; print(h5py.File({path!r}, 'r+')['x'][0])"
    if comm.rank == 0:
        assert launching.run([sys.executable, "-c", code]).stdout == "1.0\n"
        os.rename(path, path + ".moved")
        os.unlink(path + ".moved")
