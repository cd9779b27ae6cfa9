"""Jobs that are about to be ended save the same step on all ranks, and exit."""

import math
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest

import mpidist
from mpidist.launch.launchers import time_limit
from mpidist.resilience import preemption
from mpidist.resilience.preemption import RESTART_EXIT_CODE

JOB = """
import os, signal, sys
import mpidist

strategy = mpidist.MirroredStrategy(["CPU:0"])
with strategy.scope():
    once = mpidist.VariableAggregation.ONLY_FIRST_REPLICA
    w = mpidist.Variable(0, aggregation=once)
manager = mpidist.CheckpointManager(mpidist.Checkpoint(w=w), sys.argv[1], 2)
handler = mpidist.PreemptionCheckpointHandler(None, manager)
begun = int(w.numpy())
while w.numpy() < 20:
    if w.numpy() == 7 and begun == 0 and strategy.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    handler.run(strategy.run, lambda: w.assign_add(1))
if strategy.rank == 0:
    print(begun, int(w.numpy()), handler.total_run_calls)
"""


@pytest.fixture
def make(comm, strategy, tmp_path):
    """A function that makes a manager of one variable, and a handler with a config.

    Or, if it `is_plain`, a handler of a Checkpoint and a folder.
    """
    folder = comm.bcast(tmp_path) / "run"
    made = []

    def make(is_plain=False, **config):
        with strategy.scope():
            once = mpidist.VariableAggregation.ONLY_FIRST_REPLICA
            w = mpidist.Variable(0, aggregation=once)
        checkpoint = mpidist.Checkpoint(w=w)
        manager = mpidist.CheckpointManager(checkpoint, folder, max_to_keep=2)
        saver = (checkpoint, str(folder)) if is_plain else (manager, None)
        termination = mpidist.TerminationConfig(**config)
        handler = mpidist.PreemptionCheckpointHandler(None, *saver, termination)
        made.append(handler)
        return w, manager, handler

    make.folder = folder
    yield make
    for handler in made:
        handler.close()


@pytest.mark.slow
def test_a_job_that_is_signalled_saves_and_goes_on_later(mpirun, tmp_path):
    ended = mpirun(2, JOB, str(tmp_path / "run"), fails=True)
    assert ended.returncode == RESTART_EXIT_CODE, ended.stderr
    ended = mpirun(2, JOB, str(tmp_path / "run"))
    begun, last, calls = map(int, ended.stdout.split())
    assert begun in (7, 8)
    assert (last, calls) == (20, 20)


@pytest.mark.parametrize("culprit", [0, -1])
def test_one_rank_is_enough(comm, make, culprit):
    exits = []
    w, manager, handler = make(exit_fn=lambda: exits.append(int(w.numpy())))
    for step in range(10):
        if step == 4 and comm.rank == culprit % comm.size:
            signal.raise_signal(signal.SIGTERM)
        if not exits:
            handler.run(w.assign_add, 1)
    assert exits == [4]
    assert [os.path.basename(path) for path in manager.checkpoints] == ["ckpt-1.h5"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_grace_period_is_used_as_long_as_a_save_fits_in(comm, make):
    exits = []
    w, _, handler = make(grace_period=1e6, exit_fn=lambda: exits.append(1))
    signal.raise_signal(signal.SIGUSR1)
    for _ in range(5):
        handler.run(w.assign_add, 1)
    assert not exits
    handler._asked_at -= 1e6
    handler.save_checkpoint_if_preempted()
    assert exits == [1]


def test_the_end_of_the_jobs_time_is_enough(comm, make, monkeypatch):
    """Rank 0's clock counts."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100_000))
    exits = []
    w, _, handler = make(exit_fn=lambda: exits.append(int(w.numpy())))
    for _ in range(3):
        handler.run(w.assign_add, 1)
    end = time.time() + (30 if comm.rank == 0 else 1e6)
    handler._limit = handler._limit._replace(end=end)
    handler.run(w.assign_add, 1)
    assert exits == [3]


def test_steps_in_a_scope_are_watched(comm, strategy, make):
    exits = []
    w, _, handler = make(exit_fn=lambda: exits.append(int(w.numpy())))

    def step():
        w.assign_add(1)

    with handler.watch_preemption_scope():
        strategy.run(step)
        strategy.run(step)
        if comm.rank == 0:
            signal.raise_signal(signal.SIGTERM)
        strategy.run(step)
    assert exits == [2]
    strategy.run(step)
    assert exits == [2]


def test_another_way_to_save(comm, make):
    saved = []
    _w, manager, handler = make(
        save_fn=lambda *a: saved.append(a), exit_fn=lambda: None
    )
    signal.raise_signal(signal.SIGTERM)
    handler.save_checkpoint_if_preempted("x", 1)
    assert saved == [("x", 1)]
    assert manager.checkpoints == []


@pytest.mark.parametrize("culprit", [0, -1])
def test_a_save_fn_that_raises_on_one_rank_raises_on_all(comm, make, culprit):
    def save():
        if comm.rank == culprit % comm.size:
            raise ZeroDivisionError("the reason")

    _w, _, handler = make(save_fn=save, exit_fn=lambda: None)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError, match="the reason"):
        handler.save_checkpoint_if_preempted()
    assert comm.allreduce(1) == comm.size


def test_the_latest_checkpoint_is_restored(comm, make):
    w, manager, handler = make()
    for _ in range(3):
        handler.run(w.assign_add, 2)
    manager.save()
    handler.run(w.assign_add, 2)
    handler.close()
    v, _, again = make()
    assert int(v.numpy()) == 6
    assert again.total_run_calls == 3


def test_a_checkpoint_of_before_there_was_a_handler_is_restored(comm, strategy, make):
    w, manager, handler = make()
    handler.close()
    handler.run(w.assign_add, 5)
    plain = mpidist.Checkpoint(strategy=strategy, w=w)
    mpidist.CheckpointManager(plain, manager.directory, max_to_keep=1).save()
    v, _, again = make()
    assert int(v.numpy()) == 5
    assert again.total_run_calls == 0


def test_what_is_not_a_manager_is_refused_on_all(comm, strategy):
    with pytest.raises(TypeError, match="CheckpointManager"):
        mpidist.PreemptionCheckpointHandler(None, object())
    checkpoint = mpidist.Checkpoint(strategy=strategy, step=1)
    with pytest.raises(TypeError, match="save_fn"):
        mpidist.PreemptionCheckpointHandler(None, checkpoint)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grace_period": -1}, "grace_period must be >= 0"),
        ({"grace_period": math.nan}, "grace_period must be >= 0"),
        ({"exit_fn": 3}, "exit_fn must be a function"),
    ],
)
def test_bad_configurations_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        mpidist.TerminationConfig(**arguments)


def test_a_job_with_little_time_makes_a_step(comm, make, monkeypatch, caplog):
    """And the next one knows how long the save took."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 90))
    exits = []
    w, manager, handler = make(exit_fn=lambda: exits.append(int(w.numpy())))
    with caplog.at_level("INFO", "mpidist"):
        while not exits:
            handler.run(w.assign_add, 1)
    assert exits == [1]
    assert len(manager.checkpoints) == 1
    said = [r.getMessage() for r in caplog.records if "time limit" in r.getMessage()]
    assert len(said) == (comm.rank == 0)
    assert all("SLURM_JOB_END_TIME" in text and "one step" in text for text in said)
    w, _, again = make(exit_fn=lambda: exits.append(int(w.numpy())))
    for _ in range(5):
        again.run(w.assign_add, 1)
    assert int(w.numpy()) == 6
    seconds = comm.allgather(again._durations.save)
    assert seconds == [seconds[0]] * comm.size
    assert 0 < seconds[0] < 60
    assert len(exits) == 1


def test_a_signal_of_another_rank_counts_what_saves_take_on_rank_0(comm, make):
    exits = []
    w, manager, handler = make(grace_period=60.0, exit_fn=lambda: exits.append(1))
    handler.run(w.assign_add, 1)
    manager.save()
    if comm.rank == comm.size - 1:
        signal.raise_signal(signal.SIGTERM)
    for _ in range(3):
        handler.run(w.assign_add, 1)
    assert (exits, int(w.numpy())) == ([], 4)


SQUEUE = """#!/bin/sh
printf '{text}'
exit {status}
"""
END = "2026-03-29T01:30:00", 1774747800.0


@pytest.mark.parametrize(
    ("environ", "text", "end", "warning"),
    [
        ({}, END[0], math.inf, ""),
        ({"SLURM_JOB_END_TIME": "1700000000"}, "", 1.7e9, ""),
        ({"SLURM_JOB_END_TIME": "0"}, "", math.inf, ""),
        ({"SLURM_JOB_END_TIME": "soon"}, "", math.inf, "'soon' is not a number"),
        ({"SLURM_JOB_END_TIME": "9" * 5000}, "", math.inf, "is not a number"),
        ({"SLURM_JOB_ID": "7"}, END[0], END[1], ""),
        ({"SLURM_JOB_ID": "7"}, f"{END[0]}\n2027-01-01T00:00:00\n", END[1], ""),
        ({"SLURM_JOB_ID": "7"}, f"old options\n{END[0]}\n", END[1], "'old options'"),
        ({"SLURM_JOB_ID": "7"}, "N/A\n", math.inf, ""),
        ({"SLURM_JOB_ID": "7"}, "", math.inf, "no such job"),
        ({"SLURM_JOB_ID": "7"}, "13:05", math.inf, "'13:05' is not a time"),
        ({"SLURM_JOB_ID": "7"}, "2026-02-30T00:00:00", math.inf, "day is out of range"),
        ({"SLURM_JOB_ID": "7"}, r"\377", math.inf, "is not a time"),
        ({"SLURM_JOB_ID": "7"}, None, math.inf, "squeue"),
    ],
)
def test_when_a_job_ends(environ, text, end, warning, tmp_path, caplog):
    if text is not None:
        program = tmp_path / "squeue"
        program.write_text(SQUEUE.format(text=text, status=0))
        program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", **environ}
    assert time_limit(environ).end == end
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == bool(warning)
    assert all(warning in text for text in texts)


def test_the_users_options_of_squeue_do_not_matter(tmp_path, monkeypatch):
    program = tmp_path / "squeue"
    program.write_text(
        '#!/bin/sh\n[ "$SLURM_TIME_FORMAT$SQUEUE_STATES" = standard ] || exit 3\n'
        '[ "$2" = --jobs=7_3 ] || exit 4\n'
        "date -d @1774747800 +%Y-%m-%dT%H:%M:%S\n"
    )
    program.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "TZ": "Europe/Berlin",
        "SLURM_TIME_FORMAT": "relative",
        "SQUEUE_STATES": "PENDING",
        "SLURM_JOB_ID": "9",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "3",
    }
    assert time_limit(environ).end == END[1]


def test_a_step_costs_one_small_reduction(comm, strategy, make):
    w, _, handler = make()
    before = strategy.extended.consensus.calls
    handler.save_checkpoint_if_preempted()
    assert strategy.extended.consensus.calls - before == (1 if comm.size > 1 else 0)
    assert np.array_equal(w.numpy(), 0)


def test_a_checkpoint_and_a_folder_do(comm, make):
    exits = []
    w, _, handler = make(True, exit_fn=lambda: exits.append(int(w.numpy())))
    for step in range(10):
        if step == 4 and comm.rank == comm.size - 1:
            signal.raise_signal(signal.SIGTERM)
        if not exits:
            handler.run(w.assign_add, 1)
    assert exits == [4]
    assert len([n for n in os.listdir(make.folder) if n.endswith(".h5")]) == 1
    comm.Barrier()
    v, _, again = make(True)
    assert (int(v.numpy()), again.total_run_calls) == (4, 4)
    assert mpidist.latest_checkpoint(make.folder) is not None
    comm.Barrier()


def test_a_checkpoint_and_a_folder_with_a_save_fn(comm, make):
    """The function saves where it likes; what is in the folder is restored."""
    exits = []

    def save():
        checkpoint.save(make.folder / "mine")

    w, _, handler = make(True, save_fn=save, exit_fn=lambda: exits.append(1))
    checkpoint = mpidist.Checkpoint(w=w)
    handler.run(w.assign_add, 3)
    signal.raise_signal(signal.SIGTERM)
    handler.save_checkpoint_if_preempted()
    assert exits == [1]
    assert os.listdir(make.folder) == ["mine-1.h5"]
    comm.Barrier()
    v, _, _ = make(True, save_fn=save)
    assert int(v.numpy()) == 3
    comm.Barrier()


def test_the_arguments_of_a_handler(comm, strategy, tmp_path):
    handler = mpidist.PreemptionCheckpointHandler
    folder = comm.bcast(tmp_path)
    checkpoint = mpidist.Checkpoint(strategy=strategy, step=1)
    with pytest.raises(TypeError, match="checkpoint_dir"):
        handler(None, checkpoint)
    is_last = comm.rank == comm.size - 1
    with pytest.raises(TypeError, match="termination_config"):
        handler(None, checkpoint, folder, 3 if is_last else None)
    with pytest.raises(TypeError, match="checkpoint_dir"):
        handler(None, checkpoint, 3 if is_last else folder)
    with pytest.raises(TypeError, match="termination_config"):
        handler(None, checkpoint, mpidist.TerminationConfig())
    manager = mpidist.CheckpointManager(checkpoint, folder / "run", max_to_keep=2)
    made = handler(None, manager, folder / "other", mpidist.TerminationConfig())
    made.close()
    assert not (folder / "other").exists()  # as in TensorFlow: the manager's counts
    assert strategy.reduce("SUM", 1) == comm.size


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_watcher_that_raises_is_asked_again(comm, make, monkeypatch, failures):
    """Or raises on all ranks, in the end: the job does not go on unwatched."""
    monkeypatch.setattr(preemption, "_WATCH_SECONDS", 0.01)
    exits, calls, has_ended = [], [], threading.Event()

    def watch():
        if comm.rank < comm.size - 1:
            return False
        calls.append(1)
        if len(calls) == min(failures + 1, 3):
            has_ended.set()
        if len(calls) <= failures:
            raise ConnectionResetError("no answer")
        return True

    w, _, handler = make(termination_watcher_fn=watch, exit_fn=lambda: exits.append(1))
    if comm.rank == comm.size - 1:
        assert has_ended.wait(600)
        while handler._asked_at is None and len(handler._watcher_errors) < 3:
            has_ended.wait(0.001)
    comm.Barrier()
    if failures == 3:
        with pytest.raises(ConnectionResetError, match="no answer"):
            handler.run(w.assign_add, 1)
    else:
        handler.run(w.assign_add, 1)
        assert exits == [1]


@pytest.mark.parametrize("how", ["run", "scope", "save"])
def test_there_is_one_checkpoint_if_exit_fn_returns(comm, strategy, make, how):
    exits = []
    w, manager, handler = make(exit_fn=lambda: exits.append(1))
    if comm.rank == comm.size - 1:
        signal.raise_signal(signal.SIGTERM)
    for _ in range(4):
        if how == "save":
            handler.save_checkpoint_if_preempted()
        elif how == "run":
            handler.run(w.assign_add, 1)
        else:
            with handler.watch_preemption_scope():
                strategy.run(lambda: w.assign_add(1))
    assert (len(exits), len(manager.checkpoints)) == (1, 1)
    assert int(w.numpy()) == (0 if how == "save" else 4)


@pytest.mark.parametrize("first", [0, 1])
def test_handlers_may_be_closed_in_any_order(make, first):
    handlers = [make()[2] for _ in range(2)]
    handlers[first].close()
    handlers[1 - first].close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_forked_worker(comm, make, number):
    """It is no rank, and asks for nothing."""
    handlers = [make()[2] for _ in range(2)]
    context = multiprocessing.get_context("fork")
    started, _ = context.Event(), handlers
    worker = context.Process(target=lambda: (started.set(), time.sleep(600)))
    worker.start()
    assert started.wait(600)
    os.kill(worker.pid, number)
    worker.join(600)
    assert worker.exitcode == -number
    assert all(handler._asked_at is None for handler in handlers)


def test_the_signals_of_lsf_are_noticed(comm, make, monkeypatch):
    monkeypatch.setenv("LSB_JOBID", "7")
    exits = []
    w, _, handler = make(exit_fn=lambda: exits.append(1))
    signal.raise_signal(signal.SIGUSR2)
    handler.run(w.assign_add, 1)
    assert exits == [1]


@pytest.mark.parametrize(
    ("text", "seconds"), [("3600", 3600), ("infinity", math.inf), ("soon", None)]
)
def test_when_a_job_of_flux_ends(tmp_path, caplog, text, seconds):
    program = tmp_path / "flux"
    program.write_text(f'#!/bin/sh\n[ "$*" = "job timeleft" ] && echo {text}\n')
    program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "FLUX_JOB_ID": "f7"}
    now, end = time.time(), time_limit(environ).end
    assert bool(caplog.records) == (seconds is None)
    if seconds == 3600:
        assert now + 3600 <= end <= time.time() + 3600
    else:
        assert end == math.inf
