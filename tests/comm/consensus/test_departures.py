"""Ranks that leave a collective by an exception of their own, and forked processes."""

import re
import time

import numpy as np
import pytest

import mpidist
from mpidist.comm.consensus import waiting
from mpidist.comm.consensus.signatures import Tag
from mpidist.comm.transports.mpi import MpiTransport

BEGIN = """
import os, signal, sys, time
import numpy as np
import mpidist

strategy = mpidist.MirroredStrategy(["CPU:0"])
rank, ranks = strategy.extended.replica_id, strategy.num_replicas_in_sync
implementation, n = sys.argv[1], int(sys.argv[2])

def say(text):
    os.write(1, f"rank {rank}: {text}\\n".encode())

def total(step):
    return sum(step * ranks + r for r in range(ranks))

def reduce(step, timeout=None):
    options = mpidist.CommunicationOptions(
        timeout_seconds=timeout, implementation=implementation
    )
    value = np.full(n, float(step * ranks + rank))
    reductions = strategy.extended.collectives
    return reductions.all_reduce("reduce", "SUM", value, options)

def steps(skipped):
    # A number of another step is a wrong one
    for step in range(1000):
        try:
            found = reduce(step)
        except skipped:
            say("goes on")
            continue
        if (found != total(step)).any():
            say(f"wrong: {found} in step {step}, where {total(step)} is right")

def end():
    try:
        steps(TimeExpired)
    except mpidist.CollectiveError as error:
        say(f"told: {error}")

class TimeExpired(Exception):
    pass
"""

# An alarm goes off on rank 1 inside one of some functions, in the middle of a step
INTERRUPTED = (
    BEGIN
    + """
def interrupt(signal_number, frame):
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    if names & set(sys.argv[3].split()):
        raise TimeExpired("after a while")
    signal.setitimer(signal.ITIMER_REAL, 0.001)

if rank == 1:
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
end()
"""
)


AGREEING = "require_same agree exchange"
MOVING = "allreduce"
IN_BLOCKS = "_exchange share _wait"


@pytest.mark.parametrize(
    ("implementation", "n", "where", "ranks_per_node"),
    [
        ("AUTO", 10, AGREEING, ""),
        ("AUTO", 300_000, MOVING, ""),
        pytest.param("MPI", 300_000, AGREEING, "", marks=pytest.mark.slow),
        pytest.param("MPI", 300_000, MOVING, "", marks=pytest.mark.slow),
        pytest.param("AUTO", 10, AGREEING, "1", marks=pytest.mark.slow),
        pytest.param("AUTO", 300_000, MOVING, "2", marks=pytest.mark.slow),
        pytest.param("AUTO", 300_000, IN_BLOCKS, "1", marks=pytest.mark.slow),
        pytest.param("AUTO", 300_000, IN_BLOCKS, "2", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_rank_never_gives_a_number_of_another_step(
    mpirun, implementation, n, where, ranks_per_node
):
    ended = mpirun(
        3,
        INTERRUPTED,
        implementation,
        str(n),
        where,
        MPIDIST_RANKS_PER_NODE=ranks_per_node,
        fails=None,
    )
    assert "wrong" not in ended.stdout
    assert "rank 1: goes on" in ended.stdout
    if ended.stdout.count("goes on") == 3:  # before it sent anything: all ranks raise
        return
    call = r"(?:reduce|a collective) \(called at <string>:\d+\)"
    reason = f"rank 1 left {call} by TimeExpired: after a while"
    assert re.search(rf"rank 1: told: .*{reason}", ended.stdout), ended.stdout
    # A rank that waits inside MPI cannot be told, but ends soon
    for rank in (0, 2):
        told = rf"rank {rank}: told: .*{reason}"
        assert re.search(told, ended.stdout) or re.search(reason, ended.stderr)


# An alarm goes off on rank 1 while the thread of its buckets reduces
INTERRUPTED_BUCKETS = (
    INTERRUPTED.removesuffix("end()\n")
    + """
buckets = strategy.gradient_buckets([np.zeros(n)])
try:
    for step in range(1000):
        try:
            with buckets:
                buckets.put(0, np.full(n, float(step * ranks + rank)))
        except TimeExpired:
            say("goes on")
            continue
        if (buckets.result[0] != total(step)).any():
            say(f"wrong: {buckets.result[0]} in step {step}")
except mpidist.CollectiveError as error:
    say(f"told: {error}")
"""
)


def test_a_rank_that_does_not_wait_for_its_buckets_is_an_error_on_all(mpirun):
    ended = mpirun(3, INTERRUPTED_BUCKETS, "AUTO", "1000000", "finish", fails=None)
    assert "wrong" not in ended.stdout
    assert "rank 1: goes on" in ended.stdout
    for rank in range(3):
        assert re.search(rf"rank {rank}: told: .*rank 1 left", ended.stdout)


# Rank 0 leaves by a deadline before rank 1, without one, comes
LATE = (
    BEGIN
    + """
import threading
arrived = mpidist.MirroredStrategy(["CPU:0"])  # tells rank 1 that rank 0 has left
for step in range(3):
    reduce(step)
try:
    if rank == 0:
        try:
            reduce(3, timeout=0.2)
        except mpidist.DeadlineError as error:
            say(f"left: {error}")
        arrived.reduce("SUM", 1)
        reduce(4)
    else:
        arrived.reduce("SUM", 1)
        for step in range(3, 5):
            reduce(step)
except mpidist.CollectiveError as error:
    say(f"{type(error).__name__}: {error}")
arrived.reduce("SUM", 1)  # the first one to end ends the job
"""
)


@pytest.mark.parametrize("n", [10, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("implementation", "ranks_per_node"),
    [
        pytest.param("AUTO", "", marks=pytest.mark.slow),
        ("MPI", ""),
        pytest.param("AUTO", "1", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_comes_after_others_left_by_a_deadline_is_told(
    mpirun, n, implementation, ranks_per_node
):
    ended = mpirun(
        2,
        LATE,
        implementation,
        str(n),
        MPIDIST_RANKS_PER_NODE=ranks_per_node,
        fails=None,
    )
    reason = (
        r"rank 0 waited 0\.2 s in reduce \(called at <string>:\d+\), but rank 1 did"
    )
    assert re.search(rf"rank 0: left: {reason}", ended.stdout)
    assert re.search(rf"rank 0: CollectiveError: .*any more: {reason}", ended.stdout)
    assert re.search(rf"rank 1: DeadlineError: .*any more: {reason}", ended.stdout)


FORKS = (
    BEGIN
    + """
import multiprocessing

def error_of(fn):
    try:
        return f"no error but {fn()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def child(results):
    results.put(
        [
            error_of(lambda: reduce(1000)),
            error_of(lambda: strategy.run(lambda: 1)),
            error_of(lambda: strategy.gather(np.ones(1), 0)),
            error_of(lambda: strategy.gradient_buckets([np.ones(3)])),
            error_of(mpidist.MirroredStrategy),
        ]
    )
    strategy.experimental_finalize()

def fork(fn):
    pid = os.fork()
    if pid == 0:
        fn()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fail():
    raise KeyError("of the child")

if rank == 1:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=child, args=(results,))
    process.start()
    for text in results.get():
        say(text)
    process.join()
    fork(lambda: reduce(1000))
    codes = fork(lambda: None), fork(fail), fork(lambda: sys.exit(7))
    say(f"codes {codes}")
for step in range(3):
    assert (reduce(step) == total(step)).all()
say("well")
"""
)


@pytest.mark.parametrize("n", [10, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_forked_process_has_no_part_in_collectives(mpirun, n):
    ended = mpirun(
        2, FORKS, "AUTO", str(n), PYTHONWARNINGS="ignore::DeprecationWarning"
    )
    lines = ended.stdout.splitlines()
    of_child = [line for line in lines if "was forked from a rank" in line]
    assert [line.split(": ")[1] for line in of_child] == ["CollectiveError"] * 4 + [
        "ContextError"
    ]
    assert "rank 1: codes (0, 1, 7)" in lines
    assert {"rank 0: well", "rank 1: well"} <= set(lines)
    assert "failed; the job ends" not in ended.stderr
    assert ended.stderr.count("KeyError: 'of the child'") == 1


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_is_interrupted_in_run_alone_is_an_error_on_all(comm):
    strategy = mpidist.MirroredStrategy(communicator=comm)
    last = comm.size - 1

    def step(is_interrupted):
        if is_interrupted and comm.rank == last:
            raise KeyboardInterrupt
        return comm.rank

    numbers = "the number of interrupted calls"
    if comm.rank == last:
        with pytest.raises(KeyboardInterrupt):
            strategy.run(step, (True,))
    with pytest.raises(mpidist.MismatchError, match=f"{numbers} is"):
        strategy.run(step, (False,))
    with pytest.raises(mpidist.MismatchError, match=f"{numbers} is"):
        strategy.reduce("SUM", 1.0)
    strategy.extended.consensus.close()  # else the end of the program is an error, too


def test_ranks_that_are_interrupted_in_run_together_go_on(strategy):
    def step():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        strategy.run(step)
    assert strategy.reduce("SUM", 1.0) == strategy.num_replicas_in_sync


@pytest.mark.parametrize("most_direct", [16, 1])  # 1: as between more than 16 ranks
def test_ranks_that_wait_elsewhere_are_not_missing(comm, monkeypatch, most_direct):
    """Only rank 1, which waits nowhere: the last is further on, the others behind."""
    if comm.size < 3:
        pytest.skip("needs three ranks")
    monkeypatch.setattr(waiting, "_ANNOUNCE_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "_MOST_DIRECT", most_direct)
    own = comm.Dup()
    departures = waiting.Departures(own)
    last = comm.size - 1
    roll_call = waiting.RollCall(own, departures, 4 + 2 * (comm.rank == last), 0.0, 0.0)
    while comm.rank != 1 and roll_call.missing() != [1]:
        roll_call.exchange(time.monotonic())
    everyone = comm.Ibarrier()
    while not everyone.Test():
        if comm.rank != 1:
            roll_call.exchange(time.monotonic())
    assert waiting.RequestWaiter(own, departures).drain()
    own.Free()


def test_a_look_for_deadlocks_takes_no_other_message(strategy, comm):
    consensus, ranks = strategy.extended.consensus, comm.size
    transport = MpiTransport(consensus, most_bytes=1)  # sends in pieces
    departures = consensus.departures
    mine, found = np.full(ranks, comm.rank, np.uint8), np.empty(ranks, np.uint8)
    comm.Barrier()
    if comm.rank > 0:
        while not consensus.comm.Iprobe():  # rank 0 has begun
            pass
        assert departures.receive_probe() is None
    ones, deadline = [1] * ranks, time.monotonic() + 60
    transport.alltoallv(mine, ones, found, ones, deadline, "all_to_all", True)
    assert found.tolist() == list(range(ranks))


def test_messages_of_one_communicator_have_tags_of_their_own():
    assert len({int(tag) for tag in Tag}) == len(Tag.__members__)


def test_ranks_that_share_a_core_do_not_keep_it_busy_by_looking_for_each_other():
    for alone in (0.1, 1, 5):
        least = waiting.least_pause(alone)
        pauses = [waiting.pause_seconds(waited, least) for waited in (0.0, 1e-3, 100.0)]
        assert pauses == [0.0, 0.25e-3, 1e-3]
    for many in (16, 128, 1024):
        least = waiting.least_pause(many)
        longest = waiting.pause_seconds(100.0, least)
        assert least <= waiting.pause_seconds(0.0, least) <= longest
        assert many * waiting._LOOK_SECONDS < 0.8 * longest
