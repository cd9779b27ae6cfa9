"""Ranks that die: where MPI can, the others go on without them."""

from pathlib import Path

import h5py
import launching
import pytest

import mpidist
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.failures import FailureDetector, can_survive
from mpidist.device.binding import gpu_count

ULFM = ("--with-ft", "ulfm")
needs_ulfm = pytest.mark.skipif(
    not launching.is_open_mpi(), reason="this MPI ends a job in which a rank dies"
)
PROLOGUE = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
import mpidist

rank = MPI.COMM_WORLD.rank
def die():
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""
COLLECTIVES = {
    "small": 'strategy.reduce("SUM", 1.0)',
    "large": 'strategy.reduce("SUM", np.ones(1_000_000))',
    "direct": """strategy.run(
        lambda: mpidist.get_replica_context().all_reduce("SUM", 1.0, options)
    )""",
    "gathered": "strategy.gather(np.ones(100_000), axis=0)",
}


@pytest.mark.skipif(can_survive(), reason="these ranks go on")
def test_the_function_is_called_once_where_no_rank_dies(comm):
    made = []

    def train(strategy):
        made.append(strategy)
        return strategy.reduce("SUM", 1)

    def make(communicator):
        assert communicator.Get_size() >= comm.size
        return mpidist.MirroredStrategy(["CPU:0"], communicator=comm)

    assert mpidist.run_elastic(train, make) == comm.size
    made.pop().experimental_finalize()
    assert made == []


@pytest.mark.skipif(can_survive(), reason="these ranks go on")
def test_other_errors_are_raised_as_they_are(comm):
    def train(strategy):
        raise KeyError("the reason")

    def make(communicator):
        return mpidist.MirroredStrategy(["CPU:0"], communicator=comm)

    with pytest.raises(KeyError, match="the reason"):
        mpidist.run_elastic(train, make)
    with pytest.raises(mpidist.ArgumentError, match="min_replicas"):
        mpidist.run_elastic(train, make, min_replicas=0)


@pytest.mark.mpi(min_size=2)
def test_a_death_is_said_once_to_all_who_ask(comm):
    failures, said = FailureDetector(comm), []
    failures.is_needed = True
    failures._comms.clear()  # not every MPI can revoke one
    consensus = Consensus(comm, failures=failures)
    failures.on_failure(lambda: said.append("in time"))
    assert consensus.is_usable
    for _ in range(2):
        failures._note({min(failures._ranks)})
    failures.on_failure(lambda: said.append("late"))
    assert said == ["in time", "late"]
    assert not consensus.is_usable
    assert not consensus.can_free
    for ask in (
        consensus.departures.require_none,
        failures.require_none,
        lambda: consensus.require_same("a call"),
    ):
        with pytest.raises(mpidist.RankLostError, match=f"rank 0 of {comm.size} has"):
            ask()
    consensus.close()


@needs_ulfm
@pytest.mark.parametrize(
    ("collective", "nodes", "dead"),
    [
        ("small", 1, [0]),
        ("large", 1, [2]),
        ("direct", 1, [1]),
        ("small", 2, [0, 1]),
        ("large", 2, [3]),
        ("gathered", 2, [0]),
    ],
)
def test_survivors_go_on(mpirun, collective, nodes, dead):
    """All of them, whatever they were waiting in."""
    script = f"""{PROLOGUE}
sizes = []
options = mpidist.CommunicationOptions(implementation="MPI")
def train(strategy):
    sizes.append(strategy.num_replicas_in_sync)
    for step in range(10):
        if step == 5 and len(sizes) == 1 and rank in {dead}:
            die()
        {COLLECTIVES[collective]}
    return float(strategy.reduce("SUM", rank))
result = mpidist.run_elastic(train)
sys.stdout.write(f"{{sizes}} {{result}}\\n")
"""
    environment = {"MPIDIST_RANKS_PER_NODE": "2"} if nodes > 1 else {}
    ended = mpirun(4, script, options=ULFM, **environment)
    left = sorted({0, 1, 2, 3} - set(dead))
    line = f"[4, {len(left)}] {float(sum(left))}"
    assert ended.stdout.split("\n") == [*[line] * len(left), ""]
    assert f"of 4 died; {len(left)} continue" in ended.stderr


@needs_ulfm
def test_nothing_is_lost_with_caches_buckets_and_checkpoints(mpirun, tmp_path):
    """Twice: in a step of four ranks, then in one of three, just after a save."""
    script = f"""{PROLOGUE}
rows = np.arange(96.0)
def train(strategy):
    size = strategy.num_replicas_in_sync
    with strategy.scope():
        total = mpidist.Variable(0.0)
        large = mpidist.Variable(np.zeros(100_000))
    data = mpidist.Dataset.from_tensor_slices(rows).cache().shuffle(seed=0).batch(6)
    seen = []
    checkpoint = mpidist.Checkpoint(
        total=total, large=large, seen=seen,
        batches=iter(strategy.experimental_distribute_dataset(data.repeat(3))),
    )
    manager = mpidist.CheckpointManager(
        checkpoint, {str(tmp_path)!r}, max_to_keep=1, is_background=True
    )
    manager.restore_or_initialize()
    buckets = strategy.gradient_buckets([np.zeros(()), np.zeros(100_000)])
    def step(x):
        with buckets:
            buckets.put(1, np.full(100_000, len(x)) / 6)
            if (len(seen), rank) in [(17, 1), (30, 2)]:
                die()
            buckets.put(0, x.sum())
        context = mpidist.get_replica_context()
        context.merge_call(add, args=(buckets.result,))
    def add(strategy, sums):
        for variable, value in zip((total, large), sums):
            update = strategy.extended.update
            update(variable, lambda v, x: v.assign_add(x), args=(value,))
    with manager:
        for batch in checkpoint.batches:
            strategy.run(step, args=(batch,))
            everyone = strategy.gather(batch, axis=0)
            checkpoint.seen.append(everyone.tolist())
            seen = checkpoint.seen
            manager.save()
    assert (large.numpy() == 48).all(), large.numpy()
    return size, float(total.numpy()), sum(seen, [])
size, total, seen = mpidist.run_elastic(train)
assert total == 3 * rows.sum(), total
assert sorted(seen) == sorted([*rows] * 3)
sys.stdout.write(f"{{size}} done\\n")
"""
    ended = mpirun(4, script, options=ULFM)
    assert ended.stdout == "2 done\n" * 2
    assert "rank 1 of 4 died; 3 continue" in ended.stderr
    assert "rank 1 of 3 died; 2 continue" in ended.stderr
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]


@needs_ulfm
@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="needs a GPU and CuPy")
@pytest.mark.parametrize("implementation", ["AUTO", "MPI", "NCCL"])
def test_survivors_go_on_with_their_gpus(mpirun, implementation):
    """A rank dies while others reduce on their GPUs."""
    ranks = 3
    if implementation == "NCCL" and gpu_count() < ranks:
        pytest.skip("NCCL needs a GPU for each rank")
    script = f"""{PROLOGUE}
import threading
import cupy

sizes = []
options = mpidist.CommunicationOptions(implementation={implementation!r})
def step():
    x = cupy.ones(300_000)
    return mpidist.get_replica_context().all_reduce("SUM", x, options)
def train(strategy):
    sizes.append(strategy.num_replicas_in_sync)
    if rank == 1:
        threading.Timer(0.2, die).start()
    while True:
        (total,) = strategy.experimental_local_results(strategy.run(step))
        assert (total == sizes[-1]).all()
        if len(sizes) == 2:
            return
mpidist.run_elastic(train)
sys.stdout.write(f"{{sizes}}\\n")
"""
    ended = mpirun(ranks, script, options=ULFM, MPIDIST_ALLOW_SHARED_GPU="1")
    assert ended.stdout == "[3, 2]\n" * 2


@needs_ulfm
def test_rows_are_written_once(mpirun, tmp_path):
    path = tmp_path / "rows.h5"
    script = f"""{PROLOGUE}
calls = []
def train(strategy):
    calls.append(strategy)
    sums = strategy.symmetric_like(np.zeros(1000))
    data = mpidist.Dataset.range(60).batch(6)
    with mpidist.Hdf5Writer(strategy, {str(path)!r}) as writer:
        for batch in strategy.experimental_distribute_dataset(data):
            if len(calls) == 1 and rank == 2 and 34 in batch.values[0]:
                die()
            context = mpidist.get_replica_context
            strategy.run(lambda: context().all_reduce("SUM", sums))
            writer.append({{"x": batch}})
mpidist.run_elastic(train)
"""
    ended = mpirun(3, script, options=ULFM)
    assert "rank 2 of 3 died; 2 continue" in ended.stderr
    with h5py.File(path) as file:
        assert sorted(file["x"][...]) == list(range(60))


@needs_ulfm
def test_a_death_before_mpi_has_started_ends_the_job(mpirun):
    """Open MPI would wait for ever."""
    script = """
import os, signal
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
import mpidist
mpidist.run_elastic(lambda strategy: strategy.reduce("SUM", 1))
"""
    ended = mpirun(3, script, options=ULFM, MPIDIST_HANG_SECONDS="4", fails=True)
    assert "mpi_defaults.py" in ended.stderr


@needs_ulfm
def test_without_run_elastic_the_job_ends(mpirun):
    script = f"""{PROLOGUE}
strategy = mpidist.MirroredStrategy()
if rank == 1:
    die()
strategy.reduce("SUM", 1)
"""
    ended = mpirun(3, script, options=ULFM, fails=True)
    assert "RankLostError: rank 1 of 3 has died" in ended.stderr


@needs_ulfm
def test_too_few_survivors_end_the_job(mpirun):
    script = f"""{PROLOGUE}
def train(strategy):
    if rank == 1:
        die()
    strategy.reduce("SUM", 1)
mpidist.run_elastic(train, min_replicas=2)
"""
    ended = mpirun(2, script, options=ULFM, fails=True)
    assert "RankLostError" in ended.stderr
    assert "min_replicas is 2" in ended.stderr


def test_elsewhere_the_job_ends(mpirun):
    script = f"""{PROLOGUE}
calls = []
def train(strategy):
    calls.append(strategy)
    if rank == 1:
        die()
    strategy.reduce("SUM", 1)
mpidist.run_elastic(train)
print("went on")
"""
    ended = mpirun(3, script, fails=True)
    assert "went on" not in ended.stdout


@needs_ulfm
def test_digits_are_the_same_whoever_dies(mpirun, tmp_path):
    """The README's job; a rank is killed at no particular place after some saves."""
    jobs = Path(__file__).parents[2] / "jobs"
    folder = tmp_path / "run"
    options = ["--data-dir", str(tmp_path / "data"), "--epochs", "4"]
    undisturbed = mpirun(2, str(jobs / "train_digits.py"), *options)
    script = f"""{PROLOGUE}
import runpy, threading
def kill():
    while not os.path.exists({str(folder / "ckpt-4.h5")!r}):
        threading.Event().wait(0.001)
    die()
if rank == 0:
    threading.Thread(target=kill, daemon=True).start()
sys.path.insert(0, {str(jobs)!r})
runpy.run_module("train_digits_resumable", run_name="__main__")
"""
    options += ["--checkpoint-dir", str(folder), "--save-every", "5"]
    disturbed = mpirun(3, script, *options, options=ULFM, OMP_NUM_THREADS="1")
    assert "rank 0 of 3 died; 2 continue" in disturbed.stderr
    expected, found = (e.stdout.split()[:2] for e in (undisturbed, disturbed))
    assert found == expected
    assert found[0].startswith("loss=")
