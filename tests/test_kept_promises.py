"""Promises of the manual that belong to no room's tests; promises.yaml lists all."""

import importlib.util
import os
import pickle
import re

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist import statistics as stats
from mpidist.data.distributed import datasets
from mpidist.hdf5 import read
from mpidist.tools.plan import Request, make_plan, to_text

Dataset = mpidist.Dataset
ROWS = np.arange(400.0).reshape(200, 2)


@pytest.mark.parametrize("ranks_per_node", ["", "1"])
def test_nothing_is_sent_on_the_users_communicator(comm, monkeypatch, ranks_per_node):
    """A receive that would take anything takes nothing, and it may be freed."""
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", ranks_per_node)
    theirs = comm.Dup()
    box = np.zeros(1 << 20, np.uint8)
    waiting = theirs.Irecv(box, MPI.ANY_SOURCE, MPI.ANY_TAG)
    strategy = mpidist.MirroredStrategy(["CPU:0"], communicator=theirs)
    for count in (1, 300_000):
        assert strategy.reduce("SUM", np.ones(count))[-1] == comm.size
        assert len(strategy.gather(np.ones(count), axis=0)) == count * comm.size
        strategy.broadcast(np.ones(count))
    strategy.gather_objects({"rank": comm.rank})
    assert not waiting.Test()
    waiting.Cancel()
    waiting.Wait()
    theirs.Free()
    assert strategy.reduce("SUM", 1) == comm.size
    strategy.experimental_finalize()


ON_FIRST = {
    "run": lambda s, w, it, _: s.run(lambda: 1),
    "next": lambda s, w, it, _: next(it),
    "set_state": lambda s, w, it, _: it.set_state(it.get_state()),
    "assign": lambda s, w, it, _: w.assign(np.ones(3)),
    "a variable": lambda s, w, it, _: w.__class__(np.ones(3)),
    "write": lambda s, w, it, path: mpidist.Checkpoint(w=w).write(path),
    "a writer": lambda s, w, it, path: mpidist.Hdf5Writer(s, path),
    "distribute": lambda s, w, it, _: s.experimental_distribute_dataset(
        Dataset.range(8).batch(2)
    ),
    "buckets": lambda s, w, it, _: s.gradient_buckets({"w": np.zeros(3)}).__enter__(),
    "symmetric": lambda s, w, it, _: s.symmetric_like(np.zeros(3)),
    "statistics": lambda s, w, it, _: s.statistics(all_ranks=True),
    "result": lambda s, w, it, _: stats.Histogram(2, (0, 1), s).result(),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ON_FIRST)
def test_what_rank_0_alone_calls_raises_on_all(make_strategy, mpi_tmp_path, name):
    strategy = make_strategy(["CPU:0"])
    rows = Dataset.range(64).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(rows))
    next(iterator)
    with strategy.scope():
        w = mpidist.Variable(np.zeros(3))
        error = mpidist.MismatchError if name == "next" else mpidist.DivergenceError
        with pytest.raises(error, match="rank 0"):
            if strategy.is_first:
                ON_FIRST[name](strategy, w, iterator, mpi_tmp_path / "a.h5")
            strategy.reduce("SUM", np.ones(3))


STEPS = """
import sys
import numpy as np
import mpidist

strategy = mpidist.MirroredStrategy(["CPU:0"])
with strategy.scope():
    mean = mpidist.VariableAggregation.MEAN
    w = mpidist.Variable(np.zeros(3), aggregation=mean)
rows = mpidist.Dataset.range(int(sys.argv[1]) * 4).shuffle(seed=0).batch(4)
for batch in strategy.experimental_distribute_dataset(rows):
    strategy.run(lambda x: w.assign_add(np.ones(3) * x.sum()), args=(batch,))
    strategy.reduce("SUM", np.ones(30_000))
"""


def test_a_step_writes_no_record(mpirun):
    few, many = (
        mpirun(2, STEPS, str(steps), MPIDIST_LOG="debug").stderr for steps in (3, 300)
    )
    lines = [re.findall(r"^\[\w+ rank \d", text, re.M) for text in (few, many)]
    assert len(lines[0]) >= 3
    # But for the line at the end of a job of some seconds, with its advice
    assert len(lines[1]) <= len(lines[0]) + 2


def test_rows_are_added_without_communication(comm, strategy):
    moments = stats.Moments(strategy=strategy)
    histogram = stats.Histogram(2, (0, 2), strategy=strategy)
    for _ in range(comm.rank):
        moments.update_state(np.ones(3))
        histogram.update_state(np.ones(3))
    added = 3 * sum(range(comm.size))
    assert histogram.result().counts.tolist() == [0, added]
    if comm.size > 1:  # else there are no rows
        assert moments.result().count == added


@pytest.mark.parametrize(
    ("exponents", "least", "most"), [(3, 0, 16 << 10), (300, 500 << 10, 1 << 20)]
)
def test_a_sketch_is_small(strategy, exponents, least, most):
    pytest.importorskip("ddsketch")
    sketch = stats.Quantiles(strategy=strategy)
    random = np.random.default_rng(0)
    sketch.update_state(10.0 ** random.uniform(-exponents, exponents, 200_000))
    assert least < len(pickle.dumps(sketch.get_state())) < most + (1 << 18)


@pytest.mark.parametrize("options", [{}, {"chunks": (10, 2), "compression": "gzip"}])
def test_a_plan_reads_no_rows(tmp_path, options):
    path, plans = tmp_path / "a.h5", []
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=ROWS, **options)
    for _ in range(2):
        plans.append(to_text(make_plan(Request((str(path),), 8, 3, datasets=("x",)))))
        with h5py.File(path) as file:
            rows = file["x"].id
            place = rows.get_chunk_info(0) if options else None
            start = place.byte_offset if options else rows.get_offset()
            size = place.size if options else ROWS.nbytes
        with open(path, "r+b") as file:
            file.seek(start)
            file.write(b"\xff" * size)
    assert plans[0] == plans[1]


COUNTED = []


def count(x):
    COUNTED.append(1)
    return x


SEEKING = {
    "map": lambda rows: rows.map(count),
    "zip and enumerate": lambda rows: Dataset.zip(rows.map(count), rows.enumerate()),
    "cache": lambda rows: rows.map(count).cache(),
    "concatenate": lambda rows: rows.map(count).concatenate(rows).skip(3).repeat(2),
}


@pytest.mark.parametrize("name", SEEKING)
def test_a_position_is_found_without_reading(strategy, name):
    batches = SEEKING[name](Dataset.from_tensor_slices(ROWS).shuffle(seed=1)).batch(4)
    divided = strategy.experimental_distribute_dataset(batches)
    steps = list(divided)
    iterator = iter(strategy.experimental_distribute_dataset(batches))
    state = iterator.get_state() | {"step": len(steps) - 1}
    COUNTED.clear()
    iterator.set_state(state)
    assert not COUNTED
    next(iterator)
    assert len(COUNTED) < 100
    assert next(iterator, None) is None


def test_an_index_of_written_rows_has_none(comm, strategy, mpi_tmp_path):
    path = mpi_tmp_path / "rows.h5"
    with mpidist.Hdf5Writer(strategy, path) as writer:
        writer.append({"x": ROWS, "y": ROWS[:, 0]})
    with h5py.File(path) as file:
        assert all(file[name].is_virtual for name in ("x", "y"))
    assert path.stat().st_size < ROWS.nbytes * comm.size * 10
    shard = min(mpi_tmp_path.glob("rows-*"))
    comm.Barrier()
    if comm.rank == 0:
        shard.unlink()
    comm.Barrier()
    with h5py.File(path) as file:
        assert not file["x"][: len(ROWS)].any()


@pytest.mark.parametrize(
    ("row_bytes", "most_bytes", "is_kept"),
    [(2048, 1 << 26, True), (32 << 10, 1 << 26, False), (2048, 1 << 16, False)],
)
def test_small_rows_stay_in_memory(
    tmp_path, monkeypatch, row_bytes, most_bytes, is_kept
):
    path, calls, real = tmp_path / "a.h5", [], os.preadv
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(64 * row_bytes // 8).reshape(64, -1)
    monkeypatch.setattr(read, "KEPT_BYTES", most_bytes)
    batches = Dataset.from_hdf5(path, "x").shuffle(seed=0).batch(8)
    list(batches)
    monkeypatch.setattr(os, "preadv", lambda *a: calls.append(1) or real(*a))
    assert len(list(batches)) == 8
    assert bool(calls) != is_kept


@pytest.mark.parametrize("free", [1 << 20, 1 << 40])
def test_all_ranks_of_a_node_keep_a_sixteenth(strategy, monkeypatch, free):
    monkeypatch.setattr(datasets, "free_bytes", lambda is_shared: {"here": free})
    _, kept_bytes = datasets._limits(strategy.extended)
    ranks = strategy.extended.topology.node_sizes[-1]
    assert kept_bytes == min(256 << 20, free // (16 * ranks))


@pytest.mark.parametrize("is_first_alone", [False, True])
def test_statistics_are_restored_on_one_rank(
    comm, strategy, mpi_tmp_path, is_first_alone
):
    """And on all ranks, what one has saved."""
    alone = mpidist.MirroredStrategy(["CPU:0"], communicator=MPI.COMM_SELF)

    def make(strategy):
        made = {
            "moments": stats.Moments(strategy=strategy),
            "histogram": stats.Histogram(3, (0, 300), strategy),
        }
        name = f"{comm.rank}/one" if strategy is alone else "all"
        return made, mpidist.Checkpoint(strategy=strategy, **made), mpi_tmp_path / name

    strategies = [strategy, alone][:: -1 if is_first_alone else 1]
    (made, saved, folder), (again, restored, _) = map(make, strategies)
    for each in made.values():
        each.update_state(ROWS if is_first_alone else ROWS[comm.rank :: comm.size])
    folder.parent.mkdir(exist_ok=True)
    path = saved.write(folder)
    # Rank 0's, for all
    restored.restore(comm.bcast(path))
    found = again["moments"].result()
    np.testing.assert_array_equal(found.mean, ROWS.mean(axis=0))
    assert found.count == len(ROWS)
    counts = np.histogram(ROWS, 3, (0, 300))[0]
    assert again["histogram"].result().counts.tolist() == counts.tolist()
    alone.experimental_finalize()


@pytest.mark.mpi(min_size=2)
def test_jit_compiles_once_for_each_strategy(strategy):
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    import mpidist.jax

    traced = []

    @mpidist.jax.jit
    def total(x):
        traced.append(1)
        return mpidist.jax.all_reduce("SUM", x)

    alone = mpidist.MirroredStrategy(["CPU:0"], communicator=MPI.COMM_SELF)
    for current in [strategy, alone] * 3:
        with current.scope():
            assert float(total(1.0)) == current.size
    assert len(traced) == 2
    alone.experimental_finalize()
