"""Ranks that wait for each other in different communicators are told at once."""

import json

import pytest

PROLOGUE = """
import json, sys, threading
import numpy as np
from mpi4py import MPI
import mpidist
from mpidist.resilience import watchdog

world = MPI.COMM_WORLD
rank, x = world.rank, np.ones(3)
watchdog._LOOK_SECONDS = watchdog._FIRST_SECONDS = 0.05

def of(*ranks):
    group = world.group.Incl(ranks)
    return mpidist.MirroredStrategy(["CPU:0"], communicator=world.Create_group(group))

def beside(fn):
    thread = threading.Thread(target=fn, name="beside")
    thread.start()
    return thread

def attempt(fn):
    try:
        fn()
    except mpidist.CollectiveError as error:
        print(case, type(error).__name__, error, sep=": ", flush=True)
"""
TWO = """
first, second = of(0, 1), of(0, 1)
mine, other = (first, second) if rank == 0 else (second, first)
"""
BAD = {
    "reduce": """
def work():
    mine.reduce("SUM", x)
    other.reduce("SUM", x)
""",
    "run": """
def work():
    mine.run(lambda: mpidist.get_replica_context().all_reduce("SUM", x))
    other.run(lambda: mpidist.get_replica_context().all_reduce("SUM", x))
""",
    "a save": """
save = lambda s: mpidist.Checkpoint(strategy=s, x=x).save("never-saved")

def work():
    mine.reduce("SUM", x) if rank else save(mine)
    other.reduce("SUM", x) if rank == 0 else save(other)
""",
    "a thread that is joined": """
def reduce():
    first.reduce("SUM", x)

def work():
    if rank == 0:
        beside(lambda: attempt(reduce)).join()
    second.reduce("SUM", x)
    if rank == 1:
        beside(reduce).join()
""",
}
THREE = """
strategies = [of(*p) if rank in p else None for p in ((0, 1), (1, 2), (0, 2))]

def work():
    for number in {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]:
        strategies[number].reduce("SUM", x)
"""
CASES = {
    **{case: (2, TWO + script) for case, script in BAD.items()},
    "three": (3, THREE),
}
PLAY = """
for case, (ranks, script) in json.loads(sys.argv[1]).items():
    if rank < ranks:
        exec(script)
        attempt(work)
    world.Barrier()
MPI.Finalize()
"""
# The threads that are needed go on when the watchdogs have asked for them
SLOW = """
was_asked, answer = threading.Semaphore(0), watchdog._answer

def count(*args):
    answer(*args)
    was_asked.release()

watchdog._answer = count

def wait():
    for _ in range(3):
        was_asked.acquire()
"""
GOOD = {
    "a rank computes": """
if rank:
    wait()
total = first.reduce("SUM", 1) + second.reduce("SUM", 1)
""",
    "threads wait in one order and go on in another": """
def reduce():
    if rank:
        wait()
    first.reduce("SUM", x)

thread = beside(reduce)
if rank == 0:
    wait()
total = second.reduce("SUM", 2)
thread.join()
""",
}


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_all_ranks_are_told_of_a_deadlock(mpirun, nodes):
    environment = {"MPIDIST_RANKS_PER_NODE": "1"} if nodes > 1 else {}
    ended = mpirun(3, PROLOGUE + PLAY, json.dumps(CASES), **environment)
    for case, (ranks, _) in CASES.items():
        start = f"{case}: DivergenceError: the ranks wait for each other for ever"
        said = [line for line in ended.stdout.splitlines() if line.startswith(start)]
        assert len(said) >= ranks, ended.stdout
        for rank in range(ranks):
            assert f"rank {rank} waits in " in said[0]
        assert "at <string>:" in said[0]


def test_a_rank_that_makes_a_strategy_instead_is_named(mpirun):
    """It waits inside MPI, so only the others can raise."""
    script = "first.reduce('SUM', x) if rank else mpidist.MirroredStrategy()"
    ended = mpirun(2, PROLOGUE + TWO + script, fails=True)
    assert "rank 1 waits in reduce at <string>:" in ended.stderr
    assert "; rank 0 waits in making a strategy at <string>:" in ended.stderr


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", GOOD)
def test_ranks_that_will_go_on_are_waited_for(mpirun, case, nodes):
    environment = {"MPIDIST_RANKS_PER_NODE": "1"} if nodes > 1 else {}
    script = PROLOGUE + TWO + SLOW + GOOD[case] + "assert total == 4, total\n"
    mpirun(2, script, **environment)
