"""Timelines: whole, on one clock, and harmless."""

import gzip
import json
import os
import threading

import numpy as np
import pytest

import mpidist
from mpidist.errors import DataError
from mpidist.monitor import timeline as module
from mpidist.monitor.report import state
from mpidist.monitor.timeline import compare_clocks
from mpidist.monitor.traces import (
    ClockSample,
    TraceFile,
    _events,
    drift_ppm,
    merge,
    offset_at,
    read_statuses,
    read_traces,
    status_path,
    trace_path,
)
from mpidist.util import tracing


@pytest.fixture
def strategy(new_strategy):
    """One that nothing has been counted for."""
    return new_strategy


@pytest.fixture
def folder(comm, tmp_path):
    """A folder of all ranks, of which none leaves before the others have read."""
    yield comm.bcast(tmp_path / "timeline")
    comm.Barrier()


def train(strategy, steps=5):
    rows = mpidist.Dataset.range(4 * steps).batch(4)

    def step(x):
        with mpidist.span('a "span"'):
            return mpidist.get_replica_context().all_reduce("SUM", float(x.sum()))

    for batch in strategy.experimental_distribute_dataset(rows):
        strategy.run(step, args=(batch,))


def check(events):
    """Check events against the rules of the trace event format."""
    last = {}
    for event in events:
        assert event["ph"] in ("X", "M", "i")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert isinstance(event["args"], dict)
            continue
        assert isinstance(event["ts"], float)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
            last.setdefault((event["pid"], event["tid"]), []).append(event)
    for spans in last.values():  # those of a thread are one in the other, or apart
        open_until = []
        for event in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 3e-3, event
            open_until.append(end)


def test_what_a_timeline_has(comm, strategy, folder):
    with strategy.timeline(folder):
        train(strategy)
    assert tracing.active is None
    comm.Barrier()
    path = trace_path(folder, comm.rank)
    events = json.loads(gzip.decompress(path.read_bytes()))  # the file by itself, too
    check(events)
    traces = read_traces(folder)
    assert [trace.rank for trace in traces] == list(range(comm.size))
    for trace in traces:
        found = list(trace.events())
        check(found)
        kinds = [event.get("cat") for event in found]
        assert kinds.count("step") == kinds.count("run") == kinds.count("span") == 5
        assert kinds.count("input") == 6
        reduced = [e for e in found if e["name"] == "all_reduce"]
        if comm.size > 1:
            assert [e["args"]["bytes"] for e in reduced] == [8] * 5
            assert all(e["args"]["wait_us"] <= e["dur"] + 1e-3 for e in reduced)
            assert all(e["args"]["by"] in ("shared", "mpi") for e in reduced)
        assert trace.end["one_of_steps"] == 1
        assert [step.number for step in trace.steps()] == [1, 2, 3, 4, 5]
        assert trace.clock_error_us >= 0
    statuses = read_statuses(folder)
    assert [one["rank"] for one in statuses] == list(range(comm.size))
    assert {(one["state"], one["steps"]) for one in statuses} == {("ended", 5)}


def test_collectives_end_on_all_ranks_after_they_began_on_all(comm, strategy, folder):
    with strategy.timeline(folder):
        for _ in range(20):
            strategy.reduce("SUM", 1.0)
    comm.Barrier()
    times = []
    for trace in read_traces(folder):
        calls = [e for e in trace.events() if e["name"] == "reduce"]
        assert len(calls) == 20 * (comm.size > 1)
        error = 2 * trace.clock_error_us + 1
        times.append([(e["ts"] - error, e["ts"] + e["dur"] + error) for e in calls])
    for call in zip(*times):
        assert max(begun for begun, _ in call) <= min(ended for _, ended in call)


def test_merged(comm, strategy, folder, tmp_path):
    with strategy.timeline(folder):
        train(strategy)
    comm.Barrier()
    count = merge(folder, tmp_path / "trace.json.gz")
    with gzip.open(tmp_path / "trace.json.gz") as file:
        trace = json.load(file)
    assert len(trace["traceEvents"]) == count
    check(trace["traceEvents"])
    assert len(trace["otherData"]["clock_error_us"]) == comm.size


def test_clocks_are_compared_again_at_the_same_call(comm, strategy, folder):
    with strategy.timeline(folder):
        made = strategy.extended.timeline
        made._next_runs = 2
        train(strategy)
        assert len(made._samples) == 3
    comm.Barrier()
    for trace in read_traces(folder):
        assert len(trace.clock) == 4


def test_clocks_of_one_node_are_the_same(comm, strategy):
    sample = compare_clocks(strategy.extended.consensus)
    assert abs(sample.offset_ns) <= sample.error_ns or comm.size == 1


def test_offsets_between_samples():
    samples = [ClockSample(0, 0, 5), ClockSample(1_000_000_000, 10_000, 9)]
    assert offset_at(samples, 5e8) == 5000
    assert drift_ppm(samples) == pytest.approx(10)
    assert offset_at(samples, 2e9) == pytest.approx(20_000)
    assert offset_at(samples[:1], 2e9) == 0


def test_what_a_killed_rank_leaves_can_be_read(comm, strategy, folder):
    with strategy.timeline(folder):
        train(strategy)
        strategy.extended.timeline._flush()
        train(strategy)
    comm.Barrier()
    path = trace_path(folder, comm.rank)
    data = path.read_bytes()
    whole = len(list(read_traces(folder)[comm.rank].events()))
    comm.Barrier()
    counts = []
    for size in range(len(data), 400, -97):
        path.write_bytes(data[:size])
        counts.append(len(list(_events(path))))
    assert counts[0] == whole
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= 1


def test_a_folder_that_cannot_be_written_hurts_nobody(comm, strategy, tmp_path):
    (tmp_path / "file").write_text("")
    where = comm.bcast(tmp_path / "file")
    made = strategy.timeline(where / "below")
    with pytest.warns(RuntimeWarning, match="the job continues"):
        made.__enter__()
    assert tracing.active is None
    train(strategy)
    made.__exit__(None, None, None)
    assert strategy.reduce("SUM", 1.0) == comm.size


def test_files_stay_where_they_were_named(comm, strategy, tmp_path, monkeypatch):
    """Whatever folder the program changes to afterwards."""
    first, second = comm.bcast((tmp_path / "first", tmp_path / "second"))
    if comm.rank == 0:
        first.mkdir()
        second.mkdir()
    comm.Barrier()
    monkeypatch.chdir(first)
    manager = mpidist.CheckpointManager(
        mpidist.Checkpoint(strategy=strategy, step=1), "runs", 2
    )
    with (
        strategy.timeline("timeline"),
        mpidist.Hdf5Writer(strategy, "rows.h5") as rows,
    ):
        comm.Barrier()
        monkeypatch.chdir(second)
        rows.append(np.ones(2))
        manager.save()
    comm.Barrier()
    assert not [*second.iterdir()]
    assert (first / "rows.h5").exists()
    assert len([*(first / "timeline").iterdir()]) == 2 * comm.size
    assert mpidist.latest_checkpoint(first / "runs")
    comm.Barrier()


def test_links_in_the_folder_are_not_followed(comm, strategy, folder, tmp_path):
    victim = tmp_path / "precious"
    victim.write_text("precious")
    folder.mkdir(exist_ok=True)
    rank = comm.rank
    for name in (f"status-{rank:05}.json", f"status-{rank:05}.new"):
        (folder / name).symlink_to(victim)
    with strategy.timeline(folder):
        strategy.reduce("SUM", 1.0)
    comm.Barrier()
    assert victim.read_text() == "precious"
    assert not (folder / f"status-{rank:05}.json").is_symlink()
    assert [*folder.glob("*.tmp")] == []


def test_a_full_disk_ends_the_timeline_alone(comm, strategy, folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with strategy.timeline(folder):
        made = strategy.extended.timeline
        train(strategy)
        with monkeypatch.context() as patched:
            patched.setattr("mpidist.monitor.traces.os.write", full)
            patched.setattr(module, "warn", lambda text: None)
            with made._lock:
                try:
                    made._flush()
                except OSError as error:
                    made._give_up(error)
        assert tracing.active is None
        train(strategy)
    comm.Barrier()
    assert len(read_traces(folder)) == comm.size


def test_long_jobs_record_fewer_steps(comm, strategy, folder, monkeypatch):
    monkeypatch.setattr(module, "_MOST_RANK_BYTES", 8000)
    monkeypatch.setattr(module, "_LEAST_RANK_BYTES", 8000)
    before = strategy.statistics()["steps"]
    with strategy.timeline(folder):
        for _ in range(12):
            train(strategy, 20)
            made = strategy.extended.timeline
            with made._lock:
                made._flush()
    assert strategy.statistics()["steps"] - before in (239, 240)  # not a first one
    comm.Barrier()
    for trace in read_traces(folder):
        steps = trace.steps()
        assert trace.end["one_of_steps"] > 1
        assert steps[0].one_of == 1
        assert steps[-1].one_of > 1
        assert trace.path.stat().st_size < 16_000


def test_a_full_file_takes_no_more_events_and_progress_is_still_shown(
    comm, strategy, folder, monkeypatch
):
    monkeypatch.setattr(module, "_MOST_RANK_BYTES", 1000)
    monkeypatch.setattr(module, "_LEAST_RANK_BYTES", 1000)
    with strategy.timeline(folder):
        made = strategy.extended.timeline
        with made._lock:
            train(strategy, 100)
            with pytest.warns(RuntimeWarning, match="limit"):
                made._flush()
        size = trace_path(folder, comm.rank).stat().st_size
        train(strategy, 100)
        with made._lock:
            made._flush()
    comm.Barrier()
    assert trace_path(folder, comm.rank).stat().st_size < size + 500
    for status in read_statuses(folder):
        assert status["state"] == "ended"
        assert status["steps"] > 100


def test_ten_hours_of_short_steps_fill_no_file():
    """Of a millisecond, with seven events, in 175 bytes."""
    most, size, steps = module._MOST_RANK_BYTES, 0, 0
    while steps < 36_000_000:
        stride = module.stride_at(size, most)
        size += 100 * 175
        steps += stride * 100
    assert size < most


def test_a_later_job_takes_the_folder_over(comm, strategy, folder):
    with strategy.timeline(folder):
        made = strategy.extended.timeline
        path = trace_path(folder, comm.rank)
        with made._lock:
            train(strategy)
            made._flush()
            later = TraceFile(
                path, comm.rank, "host", 0, {"job": "later", "began": 4e9}
            )
            later.close()
            data = path.read_bytes()
            train(strategy)
            with pytest.warns(RuntimeWarning, match="another job"):
                made._flush_or_give_up()
    comm.Barrier()
    assert path.read_bytes() == data
    assert [trace.about["job"] for trace in read_traces(folder)] == [
        "later"
    ] * comm.size


def test_a_timeline_that_begins_within_a_step(comm, strategy, folder):
    train(strategy)
    with strategy.timeline(folder):
        train(strategy)
    comm.Barrier()
    for trace in read_traces(folder):
        events = list(trace.events())
        assert min(event["ts"] for event in events if "ts" in event) >= 0
        assert trace.steps()[0].number == 7


def test_there_is_one_timeline_at_a_time(comm, strategy, folder):
    with strategy.timeline(folder):
        made = strategy.extended.timeline
        other = folder / "other"
        with strategy.timeline(other):
            assert strategy.extended.timeline is made
        assert strategy.extended.timeline is made
        assert not other.exists()


def test_an_error_in_the_block_on_all_ranks(comm, strategy, folder):
    with pytest.raises(ZeroDivisionError), strategy.timeline(folder):
        strategy.run(lambda: 1 // 0)
    assert tracing.active is None
    with strategy.timeline(folder):
        train(strategy)


ALONE = """
import os
import mpidist
strategy = mpidist.MirroredStrategy(["CPU:0"])
try:
    with strategy.timeline(os.environ["FOLDER"]):
        if strategy.extended.replica_id == 1:
            raise ZeroDivisionError
except ZeroDivisionError:
    try:
        strategy.barrier()
    except mpidist.DivergenceError:
        print("rank 1: they differ")
except mpidist.DivergenceError:
    print("rank 0: they differ")
"""


def test_an_error_in_the_block_on_one_rank_hangs_nobody(mpirun, tmp_path):
    job = mpirun(2, ALONE, FOLDER=str(tmp_path))
    assert job.stdout.count("they differ") == 2


def test_wrong_folders(strategy):
    with pytest.raises(mpidist.ArgumentTypeError), strategy.timeline(3):
        pytest.fail("it was entered")


def test_spans_without_a_timeline():
    calls = []

    @mpidist.span("counted")
    def count(x):
        calls.append(x)
        return x

    with mpidist.span("outer"):
        assert count(2) == 2
    assert calls == [2]
    assert count.__name__ == "count"


def test_spans_of_several_threads(comm, strategy, folder):
    with strategy.timeline(folder):

        def work():
            with mpidist.span("in a thread"):
                np.ones(10).sum()

        threads = [threading.Thread(target=work, name=f"worker-{i}") for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    comm.Barrier()
    for trace in read_traces(folder):
        spans = [e for e in trace.events() if e["name"] == "in a thread"]
        assert len(spans) == 3


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_records_nothing(comm, strategy, folder):
    with strategy.timeline(folder):
        pid = os.fork()
        if not pid:
            os._exit(0 if tracing.active is None and tracing.always is None else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert tracing.active is not None


JOB = """
import numpy as np, os, signal
import mpidist
strategy = mpidist.MirroredStrategy(["CPU:0"])
for i in range(30):
    strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", np.ones(3)))
"""


def test_by_the_environment(mpirun, tmp_path):
    mpirun(2, JOB, MPIDIST_TIMELINE=str(tmp_path))
    traces = read_traces(tmp_path)
    assert [len(trace.steps()) for trace in traces] == [30, 30]
    assert all(trace.end for trace in traces)
    assert all(len(trace.clock) == 2 for trace in traces)


def test_an_error_that_ends_the_job_is_in_the_timeline(mpirun, tmp_path):
    fail = """
if strategy.extended.replica_id == 1:
    with mpidist.span("the last"):
        1 // 0
strategy.barrier()
"""
    mpirun(2, JOB + fail, MPIDIST_TIMELINE=str(tmp_path), fails=True)
    trace = next(trace for trace in read_traces(tmp_path) if trace.rank == 1)
    assert trace.end
    names = [event["name"] for event in trace.events()]
    assert names.count("the last") == 1
    statuses = read_statuses(tmp_path)
    assert statuses[-1]["state"] == "failed"
    assert state(statuses, 0.0) == "ended by an error of rank 1"


def test_after_a_kill(mpirun, tmp_path):
    wait = """
from mpidist.monitor.traces import status_path
from pathlib import Path
folder = Path(os.environ["MPIDIST_TIMELINE"])
path = status_path(folder, strategy.extended.replica_id)
is_written = False
while not all(strategy.gather_objects(is_written)):
    is_written = path.exists() and b'"steps": 0,' not in path.read_bytes()
if strategy.extended.replica_id == 1:
    os.kill(os.getpid(), signal.SIGKILL)
strategy.barrier()
"""
    mpirun(2, JOB + wait, MPIDIST_TIMELINE=str(tmp_path), fails=True)
    traces = read_traces(tmp_path)
    assert len(traces) == 2
    assert not traces[1].end
    for trace in traces:
        check(trace.events())
    assert read_statuses(tmp_path)[1]["state"] == "running"


def test_a_folder_without_a_timeline(tmp_path):
    with pytest.raises(DataError, match="MPIDIST_TIMELINE"):
        read_traces(tmp_path)
    assert read_statuses(tmp_path) == []
    assert status_path(tmp_path, 3).name == "status-00003.json"
