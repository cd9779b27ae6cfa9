"""NodeBarrier: what ranks write before it, all ranks of the node read after it."""

import os
import re
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from node_barriers import make_node_barrier

import mpidist
from mpidist.comm.consensus.comparison import (
    FAILED,
    LARGE,
    GatherComparison,
    MaximumComparison,
    SharedMemoryComparison,
)
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.waiting import Departures, WaitTimeoutError
from mpidist.comm.shared_memory import node


@pytest.fixture
def barrier(comm):
    barrier = make_node_barrier(comm, 100)
    yield barrier
    barrier.close()


def write(barrier, value):
    barrier.page_pairs[(barrier.epoch + 1) & 1][barrier.rank].view(np.int64)[:] = value


def read(barrier, rank):
    return barrier.page_pairs[barrier.epoch & 1][rank].view(np.int64).tolist()


def test_pages_are_what_each_rank_wrote_before_it_came(comm, barrier):
    assert barrier.page_bytes == 256
    for meeting in range(200):
        write(barrier, 1000 * meeting + comm.rank)
        barrier.wait()
        found = [set(read(barrier, rank)) for rank in range(comm.size)]
        assert found == [{1000 * meeting + rank} for rank in range(comm.size)]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_memory_that_is_used_later_is_there_from_the_beginning(comm):
    """Else a full /dev/shm would end the job by SIGBUS at the first large array."""
    slot_bytes = 1 << 20
    barrier = make_node_barrier(comm, 100, slot_bytes)
    first = barrier.slots[0][comm.rank].__array_interface__["data"][0]
    last = barrier.slots[-1][comm.rank].__array_interface__["data"][0]
    resident, is_here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            start, stop = (int(text, 16) for text in found.groups())
            is_here = start < last + slot_bytes and first < stop
        elif is_here and line.startswith("Rss:"):
            resident += int(line.split()[1]) << 10
    assert resident >= len(barrier.slots) * slot_bytes
    barrier.close()


@pytest.mark.parametrize("yield_cpu", [False, True])
def test_a_slow_rank_is_waited_for(comm, barrier, yield_cpu):
    """Whoever waits lets other threads of its process run."""
    for slow in range(comm.size):
        write(barrier, -1)
        if comm.rank == slow:
            ran = threading.Event()
            threading.Timer(0.02, ran.set).start()
            assert ran.wait(600)
            write(barrier, slow)
        barrier.wait(yield_cpu=yield_cpu)
        assert read(barrier, slow)[0] == slow


def test_ranks_that_do_not_come_are_named(comm):
    barrier = make_node_barrier(comm, 8)
    if comm.rank == 0 and comm.size > 1:
        with pytest.raises(WaitTimeoutError) as info:
            barrier.wait(time.monotonic() + 0.05)
        assert info.value.args == (list(range(1, comm.size)),)
    comm.Barrier()
    barrier.close()


def test_a_deadline_that_is_kept_does_nothing(comm, barrier):
    barrier.wait(time.monotonic() + 60)
    barrier.wait()
    assert barrier.epoch == 2


@pytest.mark.parametrize("on_board", [True, False])
def test_payloads_come_with_the_comparison(comm, barrier, on_board):
    if on_board:
        comparison = SharedMemoryComparison(barrier, 84)
    else:
        comparison = GatherComparison(comm, Departures(comm), 84)
    kinds = [(np.dtype("i2"), (3,)), (np.dtype("c16"), (1, 2))]
    pages = comparison.pages(kinds)

    def fill(arrays):
        arrays[0][...] = np.arange(3) + comm.rank
        arrays[1][...] = comm.rank
        return comm.rank == 0

    for _ in range(3):
        is_large = fill(pages.own[comparison.turn(1)])
        assert comparison.agrees((7, LARGE * is_large, 0))
        assert comparison.is_any_large
        short, complex_ = pages.everyone[comparison.turn(0)]
        for rank in range(comm.size):
            assert short[rank].tolist() == [rank, rank + 1, rank + 2]
            assert complex_[rank].tolist() == [[rank, rank]]
        assert not comparison.agrees((7, FAILED * (comm.rank == comm.size - 1), 0))
        assert comparison.agrees((comm.rank, 0, 0)) == (comm.size == 1)
        fill(pages.own[comparison.turn(1)])
        assert comparison.agrees((8, 0, 0))
        assert not comparison.is_any_large
        assert pages.everyone[comparison.turn(0)][0][comm.size - 1][0] == comm.size - 1
    comparison.close()


@pytest.mark.parametrize("kind", [GatherComparison, MaximumComparison])
def test_by_mpi_the_rank_that_was_away_longest_arrives_last(comm, kind):
    comparison = kind(comm, Departures(comm))
    for last in range(comm.size):
        if comm.rank == last:
            comparison._left_ns -= 10**12  # as if it had worked that long
        assert comparison.agrees((7, 0, 0))
        assert comparison.last_rank() == (-1 if comm.rank == last else last)


def test_the_rank_that_arrives_last_at_the_barrier(comm, barrier):
    last = comm.size - 1
    for _ in range(20):
        if comm.rank == last:  # when all others have arrived
            while any(count[0] <= barrier.epoch for _, count in barrier._others):
                os.sched_yield()
        barrier.wait()
        if comm.rank == last:
            assert barrier.last_rank == -1
        elif comm.size == 2:  # of more others that arrive at one time any may be named
            assert barrier.last_rank in (-1, last)
        else:
            assert barrier.last_rank != comm.rank


@pytest.mark.mpi(min_size=2)
def test_a_broken_strategy_writes_no_payload(comm, barrier):
    """Others may still read what this rank has told them before it broke off."""
    consensus = Consensus(comm, SharedMemoryComparison(barrier, 64))
    pages = consensus.comparison.pages([(np.dtype("f8"), (3,))])
    own = [page[0] for page in pages.own]

    def fill(arrays):
        arrays[0][...] = 7.0
        return False

    for array in own:
        array[...] = comm.rank
    consensus.broken = "it was interrupted"
    for timeout in (None, 10.0):
        error = pytest.raises(mpidist.CollectiveError, match="was interrupted")
        with error, consensus.call("step", timeout) as call:
            call.exchange(pages, fill)
    assert [array.tolist() for array in own] == [[comm.rank] * 3] * 2
    consensus.close()


@pytest.mark.mpi(min_size=2)
def test_what_filling_a_payload_raises_is_raised_on_all_ranks(comm, barrier):
    consensus = Consensus(comm, SharedMemoryComparison(barrier, 64))
    pages = consensus.comparison.pages([(np.dtype("f8"), ())])

    def fill(arrays):
        arrays[0][...] = float("no number" if comm.rank == 0 else comm.rank)
        return False

    for timeout in (None, 1000.0):
        error = pytest.raises(ValueError, match="no number")
        with error, consensus.call("step", timeout) as call:
            call.exchange(pages, fill)
    consensus.require_same("a call")
    consensus.close()


@pytest.mark.mpi(min_size=2)
def test_too_little_shared_memory_is_said_and_done_without(comm, monkeypatch):
    """Each rank sees for itself; one that has none is enough."""
    free = {"/dev/shm": 1 << 30 if comm.rank else 1000}
    monkeypatch.setattr(node, "free_bytes", lambda is_shared: free)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        strategy = mpidist.MirroredStrategy(communicator=comm)
    texts = [str(w.message) for w in said]
    assert len(texts) == (comm.rank == 0)
    assert all(
        "MiB of shared memory" in t and "1000 bytes are free" in t for t in texts
    )
    assert strategy.extended.collectives.transport.name == "mpi, ordered, ring"
    found = strategy.reduce("SUM", np.arange(3) + comm.rank)
    assert found.tolist() == [comm.size * i + sum(range(comm.size)) for i in range(3)]
    strategy.experimental_finalize()


def test_cores_are_those_that_ranks_may_use(comm):
    """Bound to one core each, they have as many as they are."""
    mine = os.sched_getaffinity(0)
    cores = sorted(set.union(*comm.allgather(mine)))
    if len(cores) < 2:
        pytest.skip("there is one core")
    try:
        os.sched_setaffinity(0, {cores[comm.rank % 2]})
        barrier = make_node_barrier(comm, 64)
        assert barrier._has_cores == (comm.size <= 2)
        barrier.wait()
        barrier.close()
    finally:
        os.sched_setaffinity(0, mine)
