"""Ranks of a notebook, by ipyparallel; skipped where that is not installed."""

import importlib.util
import os
import sys
from pathlib import Path

import launching
import pytest

import mpidist

SCRIPT = """
import ipyparallel

def total():
    import mpidist
    return mpidist.MirroredStrategy().reduce("SUM", 1.0)

def fail():
    import mpidist
    strategy = mpidist.MirroredStrategy()
    rank = strategy.extended.replica_id
    def step():
        if rank == 1:
            raise KeyError("the reason")
    strategy.run(step)

with ipyparallel.Cluster(engines="mpi", n=2) as client:
    print(client[:].apply_sync(total))
    try:
        client[:].apply_sync(fail)
    except ipyparallel.CompositeError as error:
        print(str(error).count("the reason"))
    print(client[:].apply_sync(total))
    client.cluster.restart_engines_sync()
    client.wait_for_engines(2, timeout=300)
    print(client[:].apply_sync(total))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("ipyparallel") is None, reason="there is no ipyparallel"
)
def test_engines_are_ranks_and_live_through_an_error(tmp_path):
    path = f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}"
    library = str(Path(mpidist.__file__).parents[1])
    done = launching.run(
        [sys.executable, "-c", SCRIPT],
        PATH=path,
        PYTHONPATH=library,
        IPYTHONDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")[:4]
    assert lines == ["[2.0, 2.0]", "2", "[2.0, 2.0]", "[2.0, 2.0]"]
