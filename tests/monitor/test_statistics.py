"""Where the time goes, in numbers: counted once each, exact where they are counts."""

import json
import os

import numpy as np
import pytest

import mpidist
from mpidist.monitor import statistics as module
from mpidist.util.counters import (
    BACKWARD,
    NEXT,
    RUN,
    Counters,
    Durations,
    bucket_seconds,
)


@pytest.fixture
def strategy(new_strategy):
    """One that nothing has been counted for."""
    return new_strategy


def test_steps_of_run_are_counted_and_parts_make_the_whole(strategy):
    rows = mpidist.Dataset.range(24).batch(4)
    for batch in strategy.experimental_distribute_dataset(rows):
        strategy.run(lambda x: x + 1, args=(batch,))
        strategy.reduce("SUM", np.ones(3))
    found = strategy.statistics()
    assert found["steps"] == 6
    assert found["epochs"] == 1
    assert sum(count for *_, count in found["step_histogram"]) == 5
    assert sum(found["parts"].values()) == pytest.approx(found["measured_seconds"])
    assert set(found["parts"]) == set(module.PARTS)
    assert 0 <= found["waiting_seconds"] <= found["parts"]["communication"]
    assert found["rank"] == strategy.extended.replica_id
    assert json.loads(json.dumps(found)) == found


def test_without_run_steps_are_those_of_next(strategy):
    rows = mpidist.Dataset.range(24).batch(4)
    for _ in range(2):
        for _ in strategy.experimental_distribute_dataset(rows):
            strategy.reduce("SUM", 1.0)
    # The last one of an epoch ends when the end of the data is found
    assert strategy.statistics()["steps"] == 12


def test_calls_and_bytes_by_operation(comm, strategy):
    before = strategy.statistics()["operations"]
    assert "reduce" not in before
    for _ in range(7):
        strategy.reduce("SUM", np.ones(5))
    large = np.ones(1 << 16)
    strategy.gather(large, axis=0)
    found = strategy.statistics()["operations"]
    if comm.size == 1:  # nothing is communicated
        assert "reduce" not in found
        return
    assert found["reduce"]["calls"] == 7
    assert sum(found["reduce"]["bytes"].values()) == 7 * 40
    assert sum(found["gather"]["bytes"].values()) >= large.nbytes * comm.size
    assert found["reduce"]["waiting_seconds"] <= found["reduce"]["seconds"]


def test_large_arrays_count_by_their_transport(comm, strategy):
    large = np.ones(1 << 16)
    strategy.reduce("SUM", large)
    options = mpidist.CommunicationOptions(implementation="MPI")
    strategy.extended.reduce_to("SUM", large, "CPU:0", options)
    found = strategy.statistics()["operations"]
    if comm.size > 1:  # both are "reduce"
        assert found["reduce"]["bytes"]["mpi"] == large.nbytes
        assert sum(found["reduce"]["bytes"].values()) == 2 * large.nbytes


def test_symmetric_arrays_count_once(comm, strategy):
    array = strategy.symmetric_like(np.zeros(1 << 15))
    strategy.reduce("SUM", array)
    if comm.size > 1:
        found = strategy.statistics()["operations"]["reduce"]
        assert sum(found["bytes"].values()) == array.nbytes


def test_others_wait_for_the_rank_that_arrives_last(comm, strategy):
    if comm.size == 1:
        return
    late = comm.size - 1

    def step():
        if comm.rank == late:  # it works as long as the others have waited for it
            for _ in range(200):
                np.linalg.inv(np.eye(60))
        return mpidist.get_replica_context().all_reduce("SUM", 1.0)

    for _ in range(20):
        strategy.run(step)
    found = strategy.statistics()
    ranks = {int(rank) for rank in found["waiting_for"]}
    assert ranks <= set(range(comm.size)) - {comm.rank}
    if comm.rank != late:
        by_rank = found["waiting_for"]
        assert max(by_rank, key=by_rank.get) == str(late)
        assert module.slowest(found) in (late, None)


def test_statistics_of_all_ranks(comm, strategy):
    strategy.barrier()
    found = strategy.statistics(all_ranks=True)
    assert [one["rank"] for one in found] == list(range(comm.size))
    assert all(one["ranks"] == comm.size for one in found)


def test_checkpoints_count_with_their_collectives(comm, strategy, tmp_path):
    folder = comm.bcast(str(tmp_path))
    with strategy.scope():
        w = mpidist.Variable(np.zeros(3))
    strategy.run(lambda: None)
    checkpoint = mpidist.Checkpoint(w=w)
    communicated = strategy.extended.consensus.recorder.counters.communication
    checkpoint.restore(checkpoint.save(f"{folder}/c"))
    counters = strategy.extended.consensus.recorder.counters
    assert counters.communication == communicated
    assert counters.checkpoint > 0
    strategy.run(lambda: None)
    assert strategy.statistics()["parts"]["checkpoint"] > 0


def test_gradient_buckets_are_counted_beside(comm, strategy):
    buckets = strategy.gradient_buckets({"w": np.zeros(1000)}, "SUM")
    with buckets:
        buckets.put("w", np.ones(1000))
    found = strategy.statistics()
    assert found["overlapped_seconds"] > 0 or comm.size == 1
    buckets.close()


def test_what_ends_steps():
    counters = Counters()
    counters.mark(NEXT)
    counters.mark(BACKWARD)  # `next` ends the steps from the first mark on
    counters.mark(NEXT)
    assert counters.steps == 1
    counters.mark(BACKWARD)
    assert counters.steps == 1
    counters.end_epoch(False)
    counters.mark(NEXT)
    assert counters.steps == 1
    counters.mark(RUN)
    counters.mark(NEXT)
    counters.mark(RUN)
    assert counters.steps == 2
    assert [count for *_, count in counters.snapshot()["histogram"]] == [1]


def test_durations_are_counted_whenever_one_looks():
    durations, expected = Durations(), np.random.default_rng(0).integers(1, 2**40, 2000)
    assert durations.describe()[:2] == (0, 0)
    for number, duration in enumerate(expected.tolist()):
        durations.add(duration)
        if number in (0, 511, 512, 1999):
            known = expected[: number + 1]
            least, most, counts = durations.describe()
            assert (least, most) == (known.min(), known.max())
            assert counts.sum() == len(known)
            for bucket in np.flatnonzero(counts):
                begin, end = bucket_seconds(bucket)
                is_in = (begin <= known / 1e9) & (known / 1e9 < end)
                assert is_in.sum() == counts[bucket]


def make(parts, waiting=0.0, waiting_for=(), **more):
    took = sum(parts)
    return {
        "steps": 101,
        "ranks": 4,
        "measured_seconds": took,
        "step_seconds": {"mean": took / 100},
        "parts": dict(zip(module.PARTS, parts)),
        "waiting_seconds": waiting,
        "waiting_for": dict(waiting_for),
        "epochs": 0,
        "has_cache": False,
        **more,
    }


def test_the_line_at_the_end():
    found = make([0.71, 0.18, 0.11, 0.0], 0.12, {"3": 0.1, "1": 0.02})
    assert module.as_text(found) == (
        "step 10 ms: 71 % compute, 18 % communication (12 % waiting, mostly for rank "
        "3), 11 % input"
    )
    found = make([0.9, 0.1, 0.0, 0.0], 0.06, {"1": 0.02, "2": 0.02, "3": 0.02})
    assert module.as_text(found).endswith("10 % communication (6 % waiting)")


def test_advice():
    balanced = make([0.9, 0.1, 0.0, 0.0])
    assert module.advice(balanced, 2, 2, 4) == []
    [small] = module.advice(make([0.1, 0.9, 0.0, 0.0]), 2, 2, 4)
    assert small.startswith("on one rank a step would take about 4 ms: it is too small")
    waiting = make([0.1, 0.9, 0.0, 0.0], 0.5, {"1": 0.5}) | {"ranks": 2}
    assert module.advice(waiting) == []
    assert "for rank 1" in module.as_text(waiting)
    [small] = module.advice(waiting, works=[0.1, 0.1])
    assert "about 2 ms: it is too small" in small
    assert "for rank" not in module.as_text(waiting, [0.1, 0.1])
    assert module.advice(waiting, works=[0.1, 0.95]) == []
    assert "for rank 1" in module.as_text(waiting, [0.1, 0.95])
    [cache] = module.advice(make([0.6, 0.1, 0.3, 0.0], epochs=2), 2, 2, 4)
    assert "cache()" in cache
    [more] = module.advice(
        make([0.6, 0.1, 0.3, 0.0], epochs=2, has_cache=True), 2, 2, 4
    )
    assert "num_parallel_calls" in more
    [threads] = module.advice(balanced, 2, 8, 4)
    assert "2 ranks share 4 cores, with 8 threads each" in threads
    assert "OMP_NUM_THREADS=2" in threads
    assert module.advice(balanced, 4, 1, 2) == ["4 ranks share 2 cores"]


END = """
import numpy as np
import mpidist
from mpidist.monitor import statistics
statistics._LEAST_SECONDS = 0.0
strategy = mpidist.MirroredStrategy(["CPU:0"])
for _ in range(20):
    strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", np.ones(3)))
"""


@pytest.mark.parametrize("banner", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_job_says_at_its_end_where_its_time_went(mpirun, banner):
    job = mpirun(2, END, MPIDIST_BANNER=banner)
    lines = [line for line in job.stderr.splitlines() if "mpidist: step " in line]
    assert len(lines) == int(banner)
    assert not lines or "% communication" in lines[0]


def test_a_short_job_says_nothing(mpirun):
    job = mpirun(2, END.replace("statistics._LEAST_SECONDS = 0.0\n", ""))
    assert "mpidist: step" not in job.stderr
    assert os.environ.get("MPIDIST_BANNER") != "0"
