"""Board: ranks of a node meet, and read what the others wrote before they came."""

from __future__ import annotations

import os
import threading
import time
import warnings

import numpy as np
import pytest

import mpidist
from mpidist.comm.consensus.agreement import Agreement
from mpidist.comm.consensus.barrier import Board
from mpidist.comm.consensus.calls import Call
from mpidist.comm.consensus.comparison import BoardComparison, GatherComparison, Payload
from mpidist.comm.consensus.waiting import Departures, LateError
from mpidist.comm.shared_memory import node


@pytest.fixture
def board(comm):
    board = Board(comm, 100)
    yield board
    board.close()


def write(board, value):
    board.both_pages[(board.meetings + 1) & 1][board.rank].view(np.int64)[:] = value


def read(board, rank):
    return board.both_pages[board.meetings & 1][rank].view(np.int64).tolist()


def test_pages_are_what_each_rank_wrote_before_it_came(comm, board):
    assert board.page_bytes == 128
    for meeting in range(200):
        write(board, 1000 * meeting + comm.rank)
        board.meet()
        found = [set(read(board, rank)) for rank in range(comm.size)]
        assert found == [{1000 * meeting + rank} for rank in range(comm.size)]


@pytest.mark.parametrize("is_patient", [False, True])
def test_a_slow_rank_is_waited_for(comm, board, is_patient):
    """Whoever waits lets other threads of its process run."""
    for slow in range(comm.size):
        write(board, -1)
        if comm.rank == slow:
            ran = threading.Event()
            threading.Timer(0.02, ran.set).start()
            assert ran.wait(600)
            write(board, slow)
        board.meet(is_patient=is_patient)
        assert read(board, slow)[0] == slow


def test_ranks_that_do_not_come_are_named(comm):
    board = Board(comm, 8)
    if comm.rank == 0 and comm.size > 1:
        with pytest.raises(LateError) as info:
            board.meet(time.monotonic() + 0.05)
        assert info.value.args == (list(range(1, comm.size)),)
    comm.Barrier()
    board.close()


def test_a_deadline_that_is_kept_does_nothing(comm, board):
    board.meet(time.monotonic() + 60)
    board.meet()
    assert board.meetings == 2


@pytest.mark.parametrize("on_board", [True, False])
def test_payloads_come_with_the_comparison(comm, board, on_board):
    if on_board:
        comparison = BoardComparison(board, 84)
    else:
        comparison = GatherComparison(comm, Departures(comm), 84)
    kinds = [(np.dtype("i2"), (3,)), (np.dtype("c16"), (1, 2))]
    pages = comparison.pages(kinds)

    def fill(arrays):
        arrays[0][...] = np.arange(3) + comm.rank
        arrays[1][...] = comm.rank
        return comm.rank == 0

    for _ in range(3):
        is_large = fill(comparison.next_page(pages))
        assert comparison.agrees(7, is_large)
        assert comparison.is_any_large
        short, complex_ = comparison.payload(pages)
        for rank in range(comm.size):
            assert short[rank].tolist() == [rank, rank + 1, rank + 2]
            assert complex_[rank].tolist() == [[rank, rank]]
        assert not comparison.agrees(7, has_failed=comm.rank == comm.size - 1)
        assert comparison.agrees(comm.rank) == (comm.size == 1)
        fill(comparison.next_page(pages))
        assert comparison.agrees(8)
        assert not comparison.is_any_large
        assert comparison.payload(pages)[0][comm.size - 1][0] == comm.size - 1


def test_a_broken_strategy_writes_no_payload(comm, board):
    """Others may still read what this rank has told them before it broke off."""
    if comm.size == 1:
        pytest.skip("one rank tells nobody")
    agreement = Agreement(comm, BoardComparison(board, 64))
    pages = agreement.comparison.pages([(np.dtype("f8"), (3,))])
    own = [page[0] for page in pages.own]

    def fill(arrays):
        arrays[0][...] = 7.0
        return False

    for array in own:
        array[...] = comm.rank
    agreement.broken = "it was interrupted"
    for timeout in (None, 10.0):
        with pytest.raises(mpidist.CollectiveError, match="was interrupted"):
            agreement.exchange(Call("step"), 1, Payload(pages, fill), timeout)
    assert [array.tolist() for array in own] == [[comm.rank] * 3] * 2
    agreement.close()


def test_what_filling_a_payload_raises_is_raised_on_all_ranks(comm, board):
    if comm.size == 1:
        pytest.skip("one rank tells nobody")
    agreement = Agreement(comm, BoardComparison(board, 64))
    pages = agreement.comparison.pages([(np.dtype("f8"), ())])

    def fill(arrays):
        arrays[0][...] = float("no number" if comm.rank == 0 else comm.rank)
        return False

    for timeout in (None, 1000.0):
        with pytest.raises(ValueError, match="no number"):
            agreement.exchange(Call("step"), 1, Payload(pages, fill), timeout)
    agreement.raise_together("a call", None)
    agreement.close()


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "i1", "u2", "i8", "f2"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("sizes", [(1,), (0, 3), (250, 250, 1), (1000,), (3000, 5)])
def test_small_and_large_reductions_are_the_same(comm, strategy, dtype, op, sizes):
    """Integers that are exact in each dtype; from one number to more than a page."""

    def values(rank):
        return [(np.arange(n) % 7 + rank).astype(dtype) for n in sizes]

    everyone = [values(rank) for rank in range(comm.size)]
    for _ in range(3):
        found = strategy.run(
            lambda: mpidist.get_replica_context().all_reduce(op, values(comm.rank))
        )
        found = found if comm.size == 1 else [part.values[0] for part in found]
        for j, result in enumerate(found):
            total = sum(value[j].astype("c16") for value in everyone)
            expected = total / comm.size if op == "MEAN" else total
            assert result.dtype == (
                np.dtype("f8") if op == "MEAN" and dtype[0] in "iu" else np.dtype(dtype)
            )
            tolerance = {"f2": 1e-3, "f4": 1e-7, "c8": 1e-7}.get(dtype, 1e-15)
            np.testing.assert_allclose(result, expected, rtol=tolerance)


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
    assert strategy.extended.collectives.transport.name == "mpi"
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
        board = Board(comm, 64)
        assert board._has_cores == (comm.size <= 2)
        board.meet()
        board.close()
    finally:
        os.sched_setaffinity(0, mine)
