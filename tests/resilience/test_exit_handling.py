"""A program that calls MPI.Finalize itself ends as one that does not."""

import json

import pytest

PROLOGUE = """
import atexit, sys
from mpi4py import MPI
import numpy as np
import mpidist

strategy = mpidist.MirroredStrategy(["CPU:0"])
folder, rank = sys.argv[1], strategy.extended.replica_id
data = mpidist.Dataset.range(64).batch(4).cache()
next(iter(strategy.experimental_distribute_dataset(data)))
with strategy.scope():
    w = mpidist.Variable(np.ones(3))
checkpoint = mpidist.Checkpoint(w=w)
manager = mpidist.CheckpointManager(checkpoint, folder + "/run", 2, is_background=True)
timeline = strategy.timeline(folder + "/timeline")
timeline.__enter__()
"""
GOOD = {
    "at once": "manager.save(); MPI.Finalize()",
    "at exit": "atexit.register(MPI.Finalize); manager.save()",
    "handling": """
try:
    raise StopIteration
except StopIteration:
    manager.save()
    MPI.Finalize()
""",
}
BAD = {
    "the save fails": (
        "from mpidist.checkpoint import save\n"
        "def fail(*_, **__): raise OSError('the disk is broken')\n"
        "save.write_file = fail\n"
        "manager.save(); MPI.Finalize()",
        "OSError: the disk is broken",
    ),
    "one rank alone": (
        "MPI.Finalize() if rank else strategy.reduce('SUM', 1.0)",
        "the end of the program at <string>:",
    ),
    "one rank exits": (
        "import sys\nsys.exit(3) if rank else strategy.reduce('SUM', 1.0)",
        "by sys.exit(3) on rank 1",
    ),
    "one rank is through": (
        "if not rank: strategy.reduce('SUM', 1.0)",
        "the end of the program at the end of ",
    ),
    "another strategy": (
        "other = mpidist.MirroredStrategy(['CPU:0'])\n"
        "MPI.Finalize() if rank else other.reduce('SUM', 1.0)",
        "rank 1 waits in the end of the program",
    ),
    "an exception of one rank": (
        "try:\n"
        "    1 / rank\n"
        "    strategy.reduce('SUM', 1.0)\n"
        "finally:\n"
        "    MPI.Finalize()",
        "ZeroDivisionError: ",
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_all_is_complete_before_mpi_is_finalized(mpirun, tmp_path, case):
    dumps = tmp_path / "dumps"
    mpirun(2, PROLOGUE + GOOD[case], str(tmp_path), MPIDIST_DUMPS=str(dumps))
    assert (tmp_path / "run" / "ckpt-1.h5").exists()
    assert list(dumps.glob("**/channel-*")) == []
    statuses = [json.loads(p.read_text()) for p in tmp_path.glob("timeline/status-*")]
    assert [status["state"] for status in statuses] == ["ended", "ended"]


@pytest.mark.parametrize("case", BAD)
def test_an_error_at_the_end_is_not_ignored(mpirun, tmp_path, case):
    script, said = BAD[case]
    ended = mpirun(2, PROLOGUE + script, str(tmp_path), fails=True)
    assert said in ended.stderr


def test_nothing_calls_mpi_in_a_program_that_goes_on_after_its_end(mpirun):
    """Open MPI would abort."""
    script = """
import threading
from mpi4py import MPI
import mpidist

strategy = mpidist.MirroredStrategy(["CPU:0"])
strategy.reduce("SUM", 1.0)
MPI.Finalize()
(watch,) = [t for t in threading.enumerate() if t.name == "watch-mpidist"]
watch.join(60)
print("over:", not watch.is_alive())
"""
    ended = mpirun(2, script)
    assert ended.stdout.count("over: True") == 2
