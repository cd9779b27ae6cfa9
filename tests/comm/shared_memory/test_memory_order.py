"""Under QEMU on x86 these cannot show that a fence is missing.

x86 keeps stores in order, and loads; only a load may overtake an earlier store. Between
the two, Python takes longer than a store needs: without any fence, 30,000 rounds passed
on x86. On a real Arm, whose stores overtake stores and whose loads overtake loads, each
test can fail. What they show everywhere: waits and flags are at the right place.
"""

import os

import numpy as np
import pytest
from node_barriers import make_node_barrier

from mpidist import TensorSpec
from mpidist.comm.consensus.barrier import memory_fence, words_of
from mpidist.data.caching import RowTable, fields_of

# `pytest --all` tries a hundred times as often
ROUNDS = pytest.mark.parametrize(
    "rounds", [300, pytest.param(30_000, marks=pytest.mark.slow)]
)
COUNT = 512  # integers: on more lines than a processor holds back


@pytest.fixture
def barrier(comm):
    barrier = make_node_barrier(comm, 8 * COUNT, 8 * COUNT)
    yield barrier
    barrier.close()


@ROUNDS
def test_a_barrier_passes_what_was_written_before(comm, barrier, rounds):
    """Message passing: pages and slots, then the barrier's count."""
    slots = [[slot.view("i8") for slot in slots] for slots in barrier.slots]
    for n in range(rounds):
        pages = barrier.word_pairs[(barrier.epoch + 1) & 1]
        turn = slots[n % len(slots)]
        pages[comm.rank][COUNT - 1] = n
        turn[comm.rank][:] = n
        barrier.wait()
        assert [page[COUNT - 1] for page in pages] == [n] * comm.size
        assert all((slot == n).all() for slot in turn)


@ROUNDS
def test_a_flag_of_a_cache_passes_its_row(strategy, comm, rounds):
    """Message passing: a row, then its flag; the ranks store rows by turns."""
    spec = TensorSpec((COUNT,), np.int64)
    fields = fields_of(spec, rounds)
    storage = strategy.extended.node_memory.allocate(strategy, fields, None)
    table = RowTable(storage, spec)
    for n in range(rounds):
        number = np.array([n])
        if n % comm.size == comm.rank:
            assert table.store_rows(number, np.full((1, COUNT), n + 1)) is None
        while not table.contains(number).all():
            os.sched_yield()
        assert (table.rows(number) == n + 1).all()


@ROUNDS
def test_symmetric_arrays_are_added_up_whole(strategy, comm, rounds):
    """Message passing: an array, then the barriers around its reduction, and back."""
    mine, plain = strategy.symmetric_like(np.zeros(100 * COUNT, "i8")), np.zeros(COUNT)
    for n in range(rounds // 10):
        mine[:], plain[:] = n + comm.rank, n + comm.rank
        expected = n * comm.size + sum(range(comm.size))
        assert (strategy.reduce("SUM", mine) == expected).all()
        assert (strategy.reduce("SUM", plain) == expected).all()


@ROUNDS
def test_a_fence_keeps_loads_behind_stores(comm, barrier, rounds):
    """Store buffering: of two ranks that write, then read, one sees the other's."""
    fence = memory_fence()
    words = [words_of(slot[:8]) for slot in barrier.slots[0]]
    mine, seen = words[comm.rank], []
    for n in range(1, rounds + 1):
        barrier.wait()
        mine[0] = n
        fence()
        seen.append([word[0] for word in words])
    # What each rank saw of each other in a round: whether that round's number
    is_new = np.array(comm.allgather(seen)) == np.arange(1, rounds + 1)[:, None]
    for rank in range(comm.size):
        for other in range(rank):
            assert (is_new[rank, :, other] | is_new[other, :, rank]).all()
