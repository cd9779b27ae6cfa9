"""A program that calls MPI.Finalize itself ends as one that does not."""

import json
import sys

import launching
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


@pytest.mark.parametrize(
    "case", ["at once", "at exit", pytest.param("handling", marks=pytest.mark.slow)]
)
def test_all_is_complete_before_mpi_is_finalized(mpirun, tmp_path, case):
    dumps = tmp_path / "dumps"
    mpirun(2, PROLOGUE + GOOD[case], str(tmp_path), MPIDIST_DUMPS=str(dumps))
    assert (tmp_path / "run" / "ckpt-1.h5").exists()
    assert list(dumps.glob("**/channel-*")) == []
    statuses = [json.loads(p.read_text()) for p in tmp_path.glob("timeline/status-*")]
    assert [status["state"] for status in statuses] == ["ended", "ended"]


# How a rank may end while others wait; the rest shows what else is said
USUAL = {"the save fails", "one rank alone", "an exception of one rank"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in USUAL else pytest.mark.slow) for c in BAD],
)
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


# The limit counts from now on, since ranks may take any time to start
EARLY = """
import os, sys, threading
from mpi4py import MPI
import mpidist
MPI.COMM_WORLD.Barrier()
os.environ["MPIDIST_HANG_SECONDS"] = "0.5"
if MPI.COMM_WORLD.rank == 1:
    exec(sys.argv[1])
else:
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("script", "where"),
    [
        ("sys.exit()", "(<string>:1, by sys.exit())"),
        ("", ""),
        pytest.param("MPI.Finalize()", "", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends_early_says_so(mpirun, script, where):
    """The system alone would say "Alarm clock"."""
    ended = mpirun(2, EARLY, script, fails=True)
    assert "mpidist: rank 1 of 2 has ended its program" in ended.stderr
    assert where in ended.stderr
    assert "waited 0.5 s for other ranks to end theirs" in ended.stderr


def test_the_c_library_speaks_after_some_time():
    code = """
import os
from mpidist.util.native_timers import say_later
read, write = os.pipe()
os.dup2(write, 2)
say_later("never", 0.01).cancel()
say_later("100 % of it", 0.05)
print(os.fdopen(read).readline())
"""
    ended = launching.run([sys.executable, "-c", code])
    assert ended.stdout.endswith(": 100 % of it\n\n"), ended


def test_a_rank_does_not_end_well_in_the_middle(mpirun):
    """MPICH's mpirun ends the others without a word, and with the status of this."""
    script = """
import os
import mpidist
strategy = mpidist.MirroredStrategy(["CPU:0"])
if os.fork() == 0:
    os._exit(0)
assert os.wait()[1] == 0
strategy.reduce("SUM", 1.0)
if strategy.rank == 1:
    os._exit(0)
strategy.reduce("SUM", 1.0)
"""
    ended = mpirun(2, script, fails=True)
    assert "rank 1 of 2 ends by os._exit(0) at <string>:10" in ended.stderr


def test_a_rank_may_end_itself_after_mpi(mpirun):
    script = (
        "\nimport os, mpidist\nfrom mpi4py import MPI\nMPI.Finalize()\nos._exit(0)\n"
    )
    mpirun(2, script)


HANDLED = """
import sys
import numpy as np
import mpidist
from mpi4py import MPI

strategy = mpidist.MirroredStrategy(["CPU:0"])
is_last = strategy.rank == strategy.size - 1
options = mpidist.CommunicationOptions(timeout_seconds=0.2)

def step():
    mpidist.get_replica_context().all_reduce("SUM", np.ones(3), options)

def miss(strategy):
    if is_last:  # it comes when rank 0 has given up
        MPI.COMM_WORLD.recv(tag=77)
    try:
        strategy.run(step)
    except mpidist.DeadlineError:
        print("handled", flush=True)
    if strategy.rank == 0:
        MPI.COMM_WORLD.send(None, strategy.size - 1, 77)

miss(strategy)
"""


@pytest.mark.parametrize(
    "script",
    [
        "",
        "again = mpidist.MirroredStrategy(['CPU:0']); again.reduce('SUM', 1)",
        pytest.param("sys.exit()", marks=pytest.mark.slow),
        pytest.param("strategy.experimental_finalize()", marks=pytest.mark.slow),
        pytest.param("MPI.Finalize()", marks=pytest.mark.slow),
    ],
)
def test_an_error_that_all_ranks_have_handled_is_none(mpirun, script):
    ended = mpirun(3, HANDLED + script)
    assert ended.stdout.count("handled") == 3
    assert "failed" not in ended.stderr


STATUSES = {
    "sys.exit(3)": 3,
    "sys.exit(-1)": 255,
    "sys.exit('text')": 1,
    "sys.exit()": 0,
    "sys.exit(True)": 1,
    "exit(4)": 4,
    "quit()": 0,
    "caught()": 0,
    "caught(); sys.exit(2)": 2,
    "in_thread()": 0,
    "pass": 0,
    "1 / 0": 1,
    "raise KeyboardInterrupt": -2,
    "os._exit(6)": 6,
}
FORKING = """
import json, os, sys, threading
import mpidist

def caught():
    try:
        sys.exit(7)
    except SystemExit as error:
        assert error.code == 7

def in_thread():
    thread = threading.Thread(target=sys.exit, args=(5,))
    thread.start()
    thread.join()

strategy = mpidist.MirroredStrategy(["CPU:0"])
found = {}
for code in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        sys.stderr = open(os.devnull, "w")
        exec(code)
        break
    found[code] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
else:
    strategy.reduce("SUM", 1)
    print(json.dumps(found))
"""


def test_forked_children_end_as_without_mpidist(mpirun):
    ended = mpirun(1, FORKING, json.dumps(list(STATUSES)))
    assert json.loads(ended.stdout) == STATUSES
