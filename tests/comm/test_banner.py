"""The lines at the start of a job."""

import sys

import h5py
import launching
import numpy as np
import pytest

import mpidist
from mpidist.comm.replica_group import banner
from mpidist.data.distributed.datasets import summarize

SCRIPT = """
import mpidist

for _ in range(2):
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    strategy.experimental_distribute_dataset(mpidist.Dataset.range(8).batch(4))
    strategy.experimental_finalize()
"""


def test_it_says_what_the_job_runs_on(comm, strategy):
    line = banner(strategy.extended)
    assert line.startswith(f"mpidist {mpidist.__version__}: {comm.size} replicas on 1 ")
    assert "; CPU; all_reduce by " in line
    assert "\n" not in line
    for name in strategy.extended.collectives.transport.name.split(", "):
        assert strategy.reduce("SUM", np.ones(1)) == comm.size
        assert name in line or name not in ("shared", "hierarchical")


def test_it_counts_nodes(comm, monkeypatch, make_strategy):
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "1")
    strategy = make_strategy(["CPU:0"])
    nodes = f"on {comm.size} node{'s' if comm.size > 1 else ''};"
    assert nodes in banner(strategy.extended)


def test_it_says_what_happens_if_a_rank_dies(strategy, monkeypatch):
    monkeypatch.delenv("OMPI_MCA_mpi_ft_enable", raising=False)
    assert banner(strategy.extended).endswith("; the job ends if a rank dies")


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda folder: mpidist.Dataset.from_hdf5(f"{folder}/*.h5", ["x"]).batch(64),
            "2 files, 1,005 rows, 16 steps, 64 rows in each, 32 for a replica",
        ),
        (
            lambda _: mpidist.Dataset.range(1).batch(3),
            "1 row, 1 step, 3 rows in each, 2 for a replica",
        ),
        (
            lambda _: mpidist.Dataset.range(9).batch(3).repeat(),
            "9 rows, an unknown number of steps, 3 rows in each, 2 for a replica",
        ),
        (
            lambda _: mpidist.Dataset.from_generator(lambda: iter(range(9))).batch(2),
            "an unknown number of steps, 2 rows in each, 1 for a replica",
        ),
        (
            lambda folder: (
                mpidist.Dataset.from_hdf5(f"{folder}/*.h5", ["x"])
                .batch(64)
                .with_options(mpidist.Options(mpidist.AutoShardPolicy.FILE))
            ),
            "1 file, 500 rows, 16 steps, on replica 0; each replica reads its own data",
        ),
    ],
)
def test_the_first_dataset_has_a_line_of_its_own(comm, strategy, tmp_path, make, line):
    if comm.size != 2:
        pytest.skip("for two replicas")
    folder = comm.bcast(tmp_path)
    if comm.rank == 0:
        for name, rows in [("a", 500), ("b", 505)]:
            with h5py.File(folder / f"{name}.h5", "w") as file:
                file["x"] = np.zeros(rows)
    comm.Barrier()
    data = strategy.experimental_distribute_dataset(make(folder))
    if comm.rank == 0:
        assert summarize(data._plan) == line


@pytest.mark.parametrize(
    ("ranks", "lines"), [pytest.param(1, 0, marks=pytest.mark.slow), (2, 2)]
)
@pytest.mark.parametrize("is_silent", [False, True])
def test_they_are_printed_once_by_one_rank(mpirun, ranks, lines, is_silent):
    environment = {"MPIDIST_BANNER": "0"} if is_silent else {}
    ended = mpirun(ranks, SCRIPT, **environment)
    assert ended.stdout == ""
    shown = [line for line in ended.stderr.splitlines() if "mpidist" in line]
    assert len(shown) == (0 if is_silent else lines)


def test_the_default_strategy_says_nothing():
    code = "import mpidist; mpidist.get_strategy().reduce('SUM', 1)"
    assert launching.run([sys.executable, "-c", code]).stderr == ""
