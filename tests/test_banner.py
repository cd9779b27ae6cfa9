"""The line at the start of a job."""

from __future__ import annotations

import sys

import launching
import numpy as np
import pytest

import mpidist
from mpidist.banner import banner

SCRIPT = """
import mpidist

for _ in range(2):
    strategy = mpidist.MirroredStrategy(["CPU:0"])
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


def test_it_counts_nodes(comm, monkeypatch):
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "1")
    strategy = mpidist.MirroredStrategy(["CPU:0"], communicator=comm)
    nodes = f"on {comm.size} node{'s' if comm.size > 1 else ''};"
    assert nodes in banner(strategy.extended)
    strategy.experimental_finalize()


@pytest.mark.parametrize(("ranks", "lines"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("is_silent", [False, True])
def test_it_is_printed_once_by_one_rank(mpirun, ranks, lines, is_silent):
    environment = {"MPIDIST_BANNER": "0"} if is_silent else {}
    ended = mpirun(ranks, SCRIPT, **environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    shown = [line for line in ended.stderr.splitlines() if "mpidist" in line]
    assert len(shown) == (0 if is_silent else lines)


def test_the_default_strategy_says_nothing():
    code = "import mpidist; mpidist.get_strategy().reduce('SUM', 1)"
    assert launching.run([sys.executable, "-c", code]).stderr == ""
