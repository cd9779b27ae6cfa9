"""CheckpointManager: which checkpoints are kept, which is the latest, what is left."""

import contextlib
import os
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from all_ranks import on_root

import mpidist
from mpidist import CheckpointError


@contextlib.contextmanager
def caught(comm):
    """Give a list that gets the warnings of rank 0, on all ranks."""
    texts = []
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        yield texts
    texts += comm.bcast([str(w.message) for w in record])


def make(strategy, folder, max_to_keep=3, **options):
    checkpoint = mpidist.Checkpoint(strategy=strategy, step=0, x=np.zeros(3))
    return mpidist.CheckpointManager(checkpoint, folder, max_to_keep, **options)


def save(manager, step, **options):
    manager.checkpoint.step = step
    manager.checkpoint.x[...] = step
    return manager.save(**options)


def names(folder):
    return sorted(os.listdir(folder))


def numbers(folder):
    return sorted(int(p.stem.rpartition("-")[2]) for p in Path(folder).iterdir())


def break_file(comm, path, change):
    comm.Barrier()
    if comm.rank == 0:
        Path(path).write_bytes(change(Path(path).read_bytes()))
    comm.Barrier()


@pytest.mark.parametrize("is_background", [False, True])
def test_the_last_ones_are_kept(strategy, comm, mpi_tmp_path, is_background):
    manager = make(strategy, mpi_tmp_path / "a" / "b", 3, is_background=is_background)
    assert manager.latest_checkpoint is None
    assert manager.restore_or_initialize() is None
    paths = [save(manager, step) for step in range(5)]
    manager.wait()
    assert manager.checkpoints == paths[-3:]
    assert manager.latest_checkpoint == paths[-1]
    assert names(manager.directory) == ["ckpt-3.h5", "ckpt-4.h5", "ckpt-5.h5"]
    assert mpidist.latest_checkpoint(manager.directory) == paths[-1]
    comm.Barrier()
    again = make(strategy, manager.directory)
    assert again.checkpoints == paths[-3:]
    assert again.restore_or_initialize() == paths[-1]
    found = again.checkpoint
    assert (found.step, found.save_counter, found.x.tolist()) == (4, 5, [4, 4, 4])
    assert save(again, 5).endswith("ckpt-6.h5")


def test_every_nth_is_kept_for_ever(strategy, comm, mpi_tmp_path):
    manager = make(strategy, mpi_tmp_path, 2, keep_every=3)
    for step in range(10):
        save(manager, step, checkpoint_number=step)
    assert numbers(mpi_tmp_path) == [0, 3, 6, 8, 9]
    comm.Barrier()
    make(strategy, mpi_tmp_path, 1, keep_every=3).save(checkpoint_number=10)
    assert numbers(mpi_tmp_path) == [0, 3, 6, 9, 10]


def test_the_interval_counts_steps(strategy, mpi_tmp_path):
    with strategy.scope():
        counter = mpidist.Variable(0)
    manager = make(strategy, mpi_tmp_path, step_counter=counter, checkpoint_interval=5)
    assert manager.checkpoint_interval == 5
    saved = []
    for step in range(12):
        counter.assign(step)
        if manager.save():
            saved.append(step)
    assert saved == [0, 5, 10]
    assert manager.save(check_interval=False).endswith("ckpt-4.h5")
    manager = make(
        strategy, mpi_tmp_path, step_counter=lambda: 12, checkpoint_interval=5
    )
    manager.restore_or_initialize()
    assert manager.save() is None


def test_what_init_fn_does_if_there_is_no_checkpoint(strategy, comm, mpi_tmp_path):
    calls = []
    manager = make(strategy, mpi_tmp_path, init_fn=lambda: calls.append(1))
    assert manager.restore_or_initialize() is None
    manager.save()
    assert manager.restore_or_initialize() is not None
    assert calls == [1]


def test_the_latest_is_the_one_that_was_saved_last(strategy, comm, mpi_tmp_path):
    """Not the one with the greatest number: one may go back, and on from there."""
    manager = make(strategy, mpi_tmp_path, 3)
    paths = [save(manager, step) for step in range(4)]
    manager.checkpoint.restore(paths[1])
    assert save(manager, 17) == paths[2]
    assert manager.latest_checkpoint == paths[2]
    comm.Barrier()
    again = make(strategy, mpi_tmp_path)
    assert again.restore_or_initialize() == paths[2]
    assert again.checkpoint.step == 17


@pytest.mark.parametrize("part", ["header", "structure", "array", "cut"])
def test_a_damaged_one_is_skipped_with_a_warning(strategy, comm, mpi_tmp_path, part):
    x = np.arange(100_000.0)
    checkpoint = mpidist.Checkpoint(strategy=strategy, x=x, step=0)
    manager = mpidist.CheckpointManager(checkpoint, mpi_tmp_path, 3)
    paths = []
    for checkpoint.step in range(2):
        x[...] = checkpoint.step
        paths.append(manager.save())
    place = {"header": 60, "structure": 4200, "array": -1000, "cut": 0}[part]

    def change(data):
        if part == "cut":
            return data[:-1]
        changed = bytearray(data)
        changed[place] ^= 16
        return bytes(changed)

    break_file(comm, paths[1], change)
    with caught(comm) as texts:
        manager = mpidist.CheckpointManager(checkpoint, mpi_tmp_path, 3)
        assert manager.restore_or_initialize() == paths[0]
    assert (x.tolist()[:2], checkpoint.step) == ([0, 0], 0)
    assert any(paths[1] in text and "damaged" in text for text in texts), texts
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.restore(paths[1])
    assert save_again(manager) == paths[1]
    assert manager.latest_checkpoint == paths[1]
    if part != "array":
        break_file(comm, paths[1], change)
        with caught(comm) as texts:
            assert mpidist.latest_checkpoint(mpi_tmp_path) == paths[0]
        assert any(paths[1] in text for text in texts), texts


def save_again(manager):
    manager.checkpoint.step = 1
    return manager.save()


def test_if_all_are_damaged_the_job_begins_anew(strategy, comm, mpi_tmp_path):
    manager = make(strategy, mpi_tmp_path)
    path = save(manager, 1)
    break_file(comm, path, lambda data: data[:5000])
    calls = []
    with caught(comm):
        manager = make(strategy, mpi_tmp_path, init_fn=lambda: calls.append(1))
        assert manager.restore_or_initialize() is None
    assert calls == [1]
    with caught(comm):
        assert mpidist.latest_checkpoint(mpi_tmp_path) is None
    assert mpidist.latest_checkpoint(mpi_tmp_path / "missing") is None


def test_objects_that_do_not_fit_are_an_error_not_damage(strategy, comm, mpi_tmp_path):
    save(make(strategy, mpi_tmp_path), 1)
    other = mpidist.Checkpoint(strategy=strategy, step=0, x=np.zeros(4))
    manager = mpidist.CheckpointManager(other, mpi_tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"'x': expected.*\(4,\)"):
        manager.restore_or_initialize()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_to_keep": 0}, "max_to_keep must be >= 1 or None, not 0"),
        ({"keep_every": -1}, "keep_every"),
        ({"checkpoint_interval": 3}, "needs a step_counter"),
        ({"keep_checkpoint_every_n_hours": 0}, "must be > 0"),
        ({"checkpoint_name": "a/b"}, "checkpoint_name"),
    ],
    ids=lambda value: "",
)
def test_bad_arguments_are_named(strategy, mpi_tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make(strategy, mpi_tmp_path, **options)
    with pytest.raises(TypeError, match="needs a Checkpoint"):
        mpidist.CheckpointManager({"x": 1}, mpi_tmp_path, 3)


def test_a_folder_that_cannot_be_used_raises_on_all(strategy, comm, mpi_tmp_path):
    on_root(comm, (mpi_tmp_path / "file").write_text, "")
    with pytest.raises(CheckpointError, match=r"file.*cannot be written"):
        make(strategy, mpi_tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        mpidist.Checkpoint(strategy=strategy, x=1).write(mpi_tmp_path / "file" / "x")


@pytest.mark.parametrize("culprit", [0, -1])
@pytest.mark.parametrize("which", ["init_fn", "step_counter"])
def test_a_function_that_raises_on_one_rank_raises_on_all(
    comm, strategy, tmp_path, which, culprit
):
    def fail():
        if comm.rank == culprit % comm.size:
            raise ZeroDivisionError("the reason")
        return 1

    checkpoint = mpidist.Checkpoint(strategy=strategy, step=1)
    folder = comm.bcast(tmp_path) / "run"
    interval = 1 if which == "step_counter" else None
    manager = mpidist.CheckpointManager(
        checkpoint, folder, 2, checkpoint_interval=interval, **{which: fail}
    )
    with pytest.raises(ZeroDivisionError, match="the reason"):
        if which == "init_fn":
            manager.restore_or_initialize()
        else:
            manager.save()
    assert strategy.reduce("SUM", 1) == comm.size


@pytest.fixture
def clock(monkeypatch):
    """A function that sets the hours since the start that `time.time` tells."""
    start = time.time()

    def set_clock(hours):
        monkeypatch.setattr(time, "time", lambda: start + 3600 * hours)
        return start + 3600 * hours

    set_clock(0)
    return set_clock


def save_at(manager, comm, clock, hours):
    """Save a checkpoint whose file is as old as it would be."""
    now = clock(hours)
    path = manager.save()
    manager.wait()
    comm.Barrier()
    if comm.rank == 0:
        os.utime(path, (now, now))
    comm.Barrier()
    return path


@pytest.mark.parametrize(
    "is_background", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_hours_are_counted_over_jobs(
    strategy, comm, mpi_tmp_path, clock, is_background
):
    """Jobs of 4 hours, each with a manager, that save every hour: 11 h, 22 h, ..."""
    saved = {}
    for job in range(7):
        clock(4 * job)
        manager = make(
            strategy,
            mpi_tmp_path,
            2,
            keep_checkpoint_every_n_hours=10.5,
            is_background=is_background,
        )
        manager.restore_or_initialize()
        for hour in range(1, 5):
            path = save_at(manager, comm, clock, 4 * job + hour)
            saved[path] = 4 * job + hour
    kept = sorted(saved[str(path)] for path in mpi_tmp_path.iterdir())
    assert kept == [11, 22, 27, 28]
    assert [saved[path] for path in manager.checkpoints] == [27, 28]
    comm.Barrier()
    again = make(strategy, mpi_tmp_path, 2)  # without hours: what was kept stays
    assert again.checkpoints == manager.checkpoints
    assert again.latest_checkpoint == manager.latest_checkpoint
    again.restore_or_initialize()
    saved[save_at(again, comm, clock, 29)] = 29
    kept = sorted(saved[str(path)] for path in mpi_tmp_path.iterdir())
    assert kept == [11, 22, 28, 29]


def test_times_do_not_matter_to_what_was_kept(strategy, comm, mpi_tmp_path, clock):
    """A copy of the folder has new times; one that was kept is never removed."""
    options = {"keep_checkpoint_every_n_hours": 2}
    manager = make(strategy, mpi_tmp_path, 1, **options)
    paths = [save_at(manager, comm, clock, hours) for hours in (1, 2, 3)]
    assert manager.checkpoints == paths[2:]
    now = clock(100)
    if comm.rank == 0:
        for path in paths[1:]:
            os.utime(path, (now, now))
    comm.Barrier()
    manager = make(strategy, mpi_tmp_path, 1, **options)
    manager.restore_or_initialize()
    assert manager.checkpoints == paths[2:]
    for _ in range(3):
        manager.save()
    assert numbers(mpi_tmp_path) == [2, 3, 6]  # 3 is 98 hours younger than 2 now


def test_a_damaged_record_of_what_was_kept_is_made_up_for(
    strategy, comm, mpi_tmp_path, clock
):
    options = {"keep_checkpoint_every_n_hours": 2}
    manager = make(strategy, mpi_tmp_path, 1, **options)
    paths = [save_at(manager, comm, clock, hours) for hours in (1, 2, 3)]
    break_file(comm, paths[-1], lambda data: data[:70])
    with caught(comm):
        manager = make(strategy, mpi_tmp_path, 1, **options)
        assert manager.restore_or_initialize() == paths[1]
    for hours in (3.5, 4.5, 5.5):
        save_at(manager, comm, clock, hours)
    # 2 of 2 h, 4 (saved as 4) of 4.5 h, and the last
    assert numbers(mpi_tmp_path) == [2, 4, 5]


def test_hours_of_a_folder_without_a_record(strategy, comm, mpi_tmp_path, clock):
    checkpoint = mpidist.Checkpoint(strategy=strategy, step=0, x=np.zeros(3))
    for hours in range(4):
        now = clock(hours)
        path = checkpoint.save(mpi_tmp_path / "ckpt")
        on_root(comm, os.utime, path, (now, now))
    manager = make(strategy, mpi_tmp_path, 3, keep_checkpoint_every_n_hours=2)
    manager.restore_or_initialize()
    assert numbers(mpi_tmp_path) == [1, 2, 3, 4]
    assert [Path(p).name for p in manager.checkpoints] == [
        "ckpt-2.h5",
        "ckpt-3.h5",
        "ckpt-4.h5",
    ]
    for hours in (4, 5):
        save_at(manager, comm, clock, hours)
    assert numbers(mpi_tmp_path) == [1, 3, 4, 5, 6]


def test_a_clock_that_went_back_does_not_stop_the_count(
    strategy, comm, mpi_tmp_path, clock
):
    clock(1000)
    manager = make(strategy, mpi_tmp_path, 1, keep_checkpoint_every_n_hours=2)
    save_at(manager, comm, clock, 0)
    manager = make(strategy, mpi_tmp_path, 1, keep_checkpoint_every_n_hours=2)
    manager.restore_or_initialize()
    for hours in (1, 2, 3, 4):
        save_at(manager, comm, clock, hours)
    assert numbers(mpi_tmp_path) == [3, 5]


def test_a_restore_says_from_where_and_where_it_goes_on(strategy, mpi_tmp_path, caplog):
    def start():
        rows = mpidist.Dataset.range(12).batch(2)
        batches = iter(strategy.experimental_distribute_dataset(rows))
        checkpoint = mpidist.Checkpoint(strategy=strategy, batches=batches)
        return batches, mpidist.CheckpointManager(checkpoint, mpi_tmp_path, 2)

    batches, manager = start()
    next(batches)
    next(batches)
    path = manager.save()
    _, manager = start()
    with caplog.at_level("INFO"):
        manager.restore_or_initialize()
    said = [r.getMessage() for r in caplog.records if r.levelname == "INFO"]
    is_first = strategy.extended.replica_id == 0
    assert said == [f"restored {path}: epoch 0, batch 2"] * is_first
