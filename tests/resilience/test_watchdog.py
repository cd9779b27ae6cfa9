"""The watchdog: slow ranks are named, and jobs that would hang end."""

import math
import os
import re
import select
import signal
import subprocess
import sys

import pytest

from mpidist.comm.consensus import failures
from mpidist.resilience.watchdog import Watch
from mpidist.util.settings import hang_seconds

PROLOGUE = """
import os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI
import mpidist
from mpidist.resilience import watchdog

strategy = mpidist.MirroredStrategy(["CPU:0"])
rank = strategy.extended.replica_id
for step in range(50):
    strategy.reduce("SUM", np.ones(3))
"""
# The limit counts from now on, since ranks may take any time to start
LIMITED = """
watchdog.Watch(2.0).start()
MPI.COMM_WORLD.Barrier()
"""
CASES = {
    "stopped": "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)",
    "never comes": "if rank == 1: threading.Event().wait()",
    "an exception in a thread": """
result = []
def work():
    if rank == 1:
        raise KeyError("the reason")
    result.append(1)
thread = threading.Thread(target=work)
thread.start()
thread.join()
MPI.COMM_WORLD.Barrier()  # the traceback has been written
while not result:
    time.sleep(0.01)
""",
}
COLLECTIVES = {
    "small": 'strategy.reduce("SUM", 1)',
    "large": 'strategy.reduce("SUM", np.ones(1_000_000))',
    "direct": """
options = mpidist.CommunicationOptions(implementation="MPI")
strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", 1.0, options))
""",
}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, 1800), ("", 1800), ("2.5", 2.5), ("0", math.inf), ("inf", math.inf)],
)
def test_how_long_ranks_wait(text, seconds):
    environ = {} if text is None else {"MPIDIST_HANG_SECONDS": text}
    assert hang_seconds(environ) == seconds


@pytest.mark.parametrize(
    ("case", "collective", "nodes"),
    [
        pytest.param(*("stopped", "small", 1), marks=pytest.mark.slow),
        pytest.param(*("stopped", "large", 1), marks=pytest.mark.slow),
        ("stopped", "direct", 1),
        pytest.param(*("stopped", "small", 2), marks=pytest.mark.slow),
        pytest.param(*("never comes", "small", 1), marks=pytest.mark.slow),
        ("never comes", "large", 2),
        ("an exception in a thread", "small", 1),
    ],
)
def test_a_job_that_would_hang_ends_and_says_why(mpirun, case, collective, nodes):
    """It names the rank that did not come, the call, and its place."""
    script = PROLOGUE + LIMITED + CASES[case] + "\n" + COLLECTIVES[collective] + "\n"
    environment = {"MPIDIST_RANKS_PER_NODE": "1"} if nodes > 1 else {}
    ended = mpirun(2, script, **environment, fails=True)
    assert "rank 0 of 2 has waited" in ended.stderr
    assert "rank 1 did not arrive. The job ends" in ended.stderr
    assert "<string>:" in ended.stderr or "-c" in ended.stderr
    if case == "an exception in a thread":
        assert "KeyError: 'the reason'" in ended.stderr


def test_a_thread_that_never_arrives_is_named(mpirun):
    """Who knows when the main thread of rank 1 will go on?"""
    script = (
        PROLOGUE
        + LIMITED
        + """
def work():
    strategy.reduce("SUM", 1)

if rank == 1:
    threading.Thread(target=work, name="evaluation").start()
    threading.Event().wait()
strategy.reduce("SUM", 1)
"""
    )
    ended = mpirun(2, script, fails=True)
    assert "thread 'evaluation' did not arrive on rank 0" in ended.stderr
    assert "reduce at <string>:" in ended.stderr


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_stops_inside_a_call_is_named(mpirun, nodes):
    """All have arrived, and the others wait inside MPI."""
    script = f"""{PROLOGUE}{LIMITED}
from mpidist.comm.transports.mpi import MpiTransport

if rank == 1:
    MpiTransport._allreduce = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
options = mpidist.CommunicationOptions(implementation="MPI")
value = np.ones(1000)
strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", value, options))
"""
    environment = {"MPIDIST_RANKS_PER_NODE": "1"} if nodes > 1 else {}
    ended = mpirun(2, script, **environment, fails=True)
    assert "rank 0 of 2 has waited" in ended.stderr
    assert "rank 1 no longer answered: died, stopped or cut off" in ended.stderr


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux tells")
def test_a_process_that_has_ended_is_noticed(monkeypatch):
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        descriptor = os.pidfd_open(process.pid)
        monkeypatch.setitem(failures._descriptors, process.pid, descriptor)
        assert failures.ended_processes({3: process.pid}) == []
        process.kill()
        select.select([descriptor], [], [], 600)
        assert failures.ended_processes({3: process.pid}) == [3]
        monkeypatch.setattr(failures, "_is_stopped", True)
        assert failures.ended_processes({3: process.pid}) == []
    os.close(descriptor)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_process_that_is_stopped_is_known():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        pids = {2: os.getpid(), 3: process.pid}
        assert failures.stopped_processes(pids) == []
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert failures.stopped_processes(pids) == [3]
        process.kill()
    assert failures.stopped_processes(pids) == []  # there is no such process


def test_ranks_know_the_processes_of_their_node(comm, strategy):
    pids = comm.allgather(os.getpid())
    others = {rank: pid for rank, pid in enumerate(pids) if rank != comm.rank}
    assert strategy.extended.consensus.pids == others
    assert failures.ended_processes(others) == []


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_slow_rank_is_named_and_waited_for(mpirun, tmp_path, nodes):
    """It is slow until it has been named."""
    named = tmp_path / "named"
    script = f"""
{PROLOGUE}
def say(*words, say=watchdog._say):
    say(*words)
    open({str(named)!r}, "w").close()
watchdog._say = say
MPI.COMM_WORLD.Barrier()
watchdog._SLOW_SECONDS = 0.5
while rank == 1 and not os.path.exists({str(named)!r}):
    time.sleep(0.01)
assert strategy.reduce("SUM", 1) == 2
print("done")
"""
    environment = {"MPIDIST_RANKS_PER_NODE": "1"} if nodes > 1 else {}
    ended = mpirun(2, script, **environment)
    assert ended.stdout.count("done") == 2
    assert "mpidist: rank 1 slow: rank 0 has waited" in ended.stderr
    assert ended.stderr.count("slow") == 1


@pytest.mark.slow
def test_ranks_that_are_alike_slow_are_not_named(mpirun):
    """They wait for each other for a while, but not many times what they took."""
    script = f"""
{PROLOGUE}
watchdog._LOOK_SECONDS = 0.05
watchdog._SLOW_TIMES = 10_000  # rather than what a busy machine may make of 20
watchdog.Watch(1e9).start()
threading.Event().wait(0.1)
strategy.reduce("SUM", 1)
watchdog._SLOW_SECONDS = 0.2
for _ in range(3):
    threading.Event().wait(0.1 + 0.5 * rank)
    strategy.reduce("SUM", 1)
"""
    ended = mpirun(2, script)
    assert "slow" not in ended.stderr


def test_a_bad_variable_ends_the_job_at_once(mpirun):
    ended = mpirun(2, "import mpidist\n", MPIDIST_HANG_SECONDS="soon", fails=True)
    assert "MPIDIST_HANG_SECONDS must be a number" in ended.stderr


IMPORTS = "\nimport threading, mpidist\nfrom mpi4py import MPI\n"
# What rank 1 does not do, of which the others cannot know
UNCOVERED = {
    "making a strategy": """
if MPI.COMM_WORLD.rank == 1:
    threading.Event().wait()
mpidist.MirroredStrategy(["CPU:0"])
""",
    "making a barrier": """
from mpidist.comm.consensus import barrier
if MPI.COMM_WORLD.rank == 1:
    barrier.available_cores = lambda: threading.Event().wait()
mpidist.MirroredStrategy(["CPU:0"])
""",
    "making memory of a node": """
from mpidist.comm.shared_memory import node
strategy = mpidist.MirroredStrategy(["CPU:0"])
if MPI.COMM_WORLD.rank == 1:
    node._open_together = lambda *_: threading.Event().wait()
rows = mpidist.Dataset.range(40).batch(4).cache()
for batch in strategy.experimental_distribute_dataset(rows):
    pass
""",
}
RANK = """
import os, threading
names = "PMI_RANK", "OMPI_COMM_WORLD_RANK"
rank = next(int(os.environ[name]) for name in names if name in os.environ)
"""


@pytest.mark.slow
@pytest.mark.parametrize("operation", UNCOVERED)
def test_making_and_ending_strategies_are_watched(mpirun, operation):
    script = IMPORTS + UNCOVERED[operation]
    ended = mpirun(2, script, MPIDIST_HANG_SECONDS="2", fails=True)
    found = rf"mpidist: rank \d of 2 has waited [\d.]+ s in {operation} \(at <string>:"
    assert re.search(found, ended.stderr)
    assert "more than MPIDIST_HANG_SECONDS allows: " in ended.stderr


@pytest.mark.slow
def test_the_end_of_mpi_is_limited(mpirun):
    """There Python has ended; the operating system must do it."""
    script = f"""{RANK}
import atexit
if rank == 1:
    atexit.register(threading.Event().wait)  # called after those of mpidist
import mpidist
mpidist.MirroredStrategy(["CPU:0"]).experimental_finalize()
print("done", flush=True)
"""
    ended = mpirun(2, script, MPIDIST_HANG_SECONDS="2", fails=True)
    assert ended.stdout.count("done") == 2


@pytest.mark.slow
def test_the_start_of_mpi_is_limited(mpirun):
    script = f"""{RANK}
if rank == 1:
    threading.Event().wait()
import mpidist
"""
    ended = mpirun(2, script, MPIDIST_HANG_SECONDS="4", fails=True)
    assert 'File "<string>", line 8 in <module>' in ended.stderr


@pytest.mark.parametrize("text", ["1", pytest.param("none", marks=pytest.mark.slow)])
def test_a_variable_of_one_rank_is_an_error_on_all(mpirun, text):
    script = f"""{RANK}
if rank == 1:
    os.environ["MPIDIST_RANKS_PER_NODE"] = "{text}"
import mpidist
try:
    mpidist.MirroredStrategy(["CPU:0"])
except mpidist.LaunchError as error:
    print(error)
"""
    ended = mpirun(2, script, MPIDIST_HANG_SECONDS="20")
    assert ended.stdout.count("MPIDIST_RANKS_PER_NODE must be") == 2
    assert ended.stdout.count(f"'{text}' on rank 1") == 2


def test_time_in_which_the_process_was_stopped_does_not_count():
    """Batch systems stop whole jobs, for hours, and let them go on."""
    watchdog = Watch(10.0)
    watchdog._looked = 100.0
    watchdog.note_stop(1.0, 101.5)
    assert watchdog.waited(begun=100.0, now=101.5) == 1.5
    watchdog.note_stop(1.0, 7102.5)  # 7,000 s later than it would be
    assert watchdog.waited(begun=100.0, now=7102.5) == pytest.approx(2.5)
    assert watchdog.waited(begun=7102.5, now=7110.0) == 7.5
    watchdog.note_stop(1.0, 8103.5)
    assert watchdog.waited(begun=100.0, now=8103.5) == pytest.approx(3.5)


# Two of them look all the time
RESTLESS = """
import mpidist
from mpidist.resilience import watchdog

watchdog._LOOK_SECONDS = 1e-5
for _ in range(2):
    watchdog.Watch(1000.0).start()
for _ in range(200):
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    strategy.reduce("SUM", 1.0)
    strategy.experimental_finalize()
print("well")
"""


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_strategies_may_end_while_they_are_looked_at(mpirun, nodes):
    environment = {"MPIDIST_RANKS_PER_NODE": "1"} if nodes > 1 else {}
    ended = mpirun(2, RESTLESS, **environment)
    assert ended.stdout.count("well") == 2


def test_the_watchdog_goes_on_after_an_error(monkeypatch):
    """What it looks at may be freed at the same time."""
    looks = []

    class Enough(BaseException):
        """Ends the loop."""

    def look(self, survives):
        looks.append(survives)
        if len(looks) == 3:
            raise Enough
        raise AttributeError("freed")

    monkeypatch.setattr(Watch, "look_at_all", look)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(Enough):
        Watch(10.0).run()
    assert len(looks) == 3
