"""The contract of all transports, with NumPy as the oracle."""

from __future__ import annotations

import functools
import math
import time

import numpy as np
import pytest

import mpidist
from mpidist.agreement.agree import Agreement
from mpidist.agreement.board import Board
from mpidist.transports.by_size import BySizeTransport
from mpidist.transports.hierarchical import HierarchicalTransport
from mpidist.transports.mpi import MpiTransport
from mpidist.transports.ordered import OrderedTransport
from mpidist.transports.shared import SharedTransport

DTYPES = ["i1", "u2", "i4", "i8", "f4", "f8", "g", "c8", "c16"]
SIZES = [0, 1, 2, 7, 63, 64, 65, 1000, 4096, 10_007]
# One cache line, and what does not divide arrays
SLOT_BYTES = [64, 4096, 1000]


def make_shared(agreement, slot_bytes):
    board = Board(agreement.comm, 64, slot_bytes)
    return SharedTransport(agreement, board), board.close


def make_mpi(agreement):
    return MpiTransport(agreement), lambda: None


def make_limited(agreement):
    """An MPI that cannot move more than 100 bytes at once."""
    return MpiTransport(agreement, most_bytes=100), lambda: None


def make_ordered(agreement):
    return OrderedTransport(agreement), lambda: None


def make_ordered_in_blocks(agreement):
    return OrderedTransport(agreement, block_bytes=1000), lambda: None


def make_by_size(agreement):
    shared, close = make_shared(agreement, 4096)
    transports = {"mpi": MpiTransport(agreement), "shared": shared}
    rows = [(0, "shared"), (100, "mpi"), (2000, "shared")]
    table = dict.fromkeys(("allreduce", "allgatherv", "broadcast"), rows)
    return BySizeTransport(transports, table), close


def make_hierarchical(agreement, ranks_per_node):
    """Nodes are pretended: consecutive ranks; the last one may have fewer."""
    node = agreement.comm.Split(agreement.rank // ranks_per_node, agreement.rank)
    names = node.group.Translate_ranks(None, agreement.comm.group)
    board = Board(node, 0, 4096, names)
    transport = HierarchicalTransport(agreement, board)

    def close():
        transport.close()
        board.close()
        node.Free()

    return transport, close


MAKERS = {
    "mpi": make_mpi,
    "mpi, limited": make_limited,
    "ordered": make_ordered,
    "ordered in blocks": make_ordered_in_blocks,
    "by size": make_by_size,
    **{
        f"{n} ranks per node": functools.partial(make_hierarchical, ranks_per_node=n)
        for n in (1, 2, 3, 4)
    },
    **{f"shared {n}": functools.partial(make_shared, slot_bytes=n) for n in SLOT_BYTES},
}


@pytest.fixture(params=MAKERS)
def transport(comm, request):
    if comm.size == 1:
        pytest.skip("one rank needs no transport")
    agreement = Agreement(comm.Dup())
    transport, close = MAKERS[request.param](agreement)
    yield transport
    close()
    agreement.close()
    agreement.comm.Free()


@pytest.fixture(params=[None, 60])
def deadline(request):
    return None if request.param is None else time.monotonic() + request.param


def numbers(rank, count, dtype):
    """Small whole numbers, so that sums are exact in each dtype."""
    return (np.arange(count) * (rank + 3) % 11 + rank).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(comm, transport, deadline, dtype):
    for count in SIZES:
        send = numbers(comm.rank, count, dtype)
        before, receive = send.copy(), np.full(count, 99, dtype)
        transport.allreduce_sum(send, receive, deadline)
        parts = [numbers(rank, count, dtype) for rank in range(comm.size)]
        assert np.array_equal(receive, np.sum(parts, axis=0, dtype=dtype))
        assert np.array_equal(send, before)


@pytest.mark.parametrize("dtype", ["i1", "f4", "c16"])
def test_sums_of_several_arrays(comm, transport, deadline, dtype):
    shapes = [(3,), (), (0, 2), (700, 3), (1,), (5, 100)]

    def arrays(rank):
        return [numbers(rank, math.prod(s), dtype).reshape(s) for s in shapes]

    everyone = [np.concatenate(arrays(rank), axis=None) for rank in range(comm.size)]
    receive = np.empty(everyone[0].size, dtype)
    for _ in range(3):
        transport.allreduce_packed(arrays(comm.rank), receive, deadline)
        assert np.array_equal(receive, np.sum(everyone, axis=0, dtype=dtype))


def test_sums_of_arrays_of_several_dimensions(comm, transport):
    send, receive = np.full((3, 0, 2), 1.0), np.empty((3, 0, 2))
    transport.allreduce_sum(send, receive, None)
    send, receive = np.full((3, 5, 2), 1.0), np.empty((3, 5, 2))
    transport.allreduce_sum(send, receive, None)
    assert (receive == comm.size).all()


def test_every_rank_gets_the_same_bits(comm, transport):
    random = np.random.default_rng(comm.rank)
    for dtype in ("f4", "c16"):
        send = (random.standard_normal(5001) * 1e3).astype(dtype)
        receive = np.empty_like(send)
        transport.allreduce_sum(send, receive, None)
        everyone = comm.allgather(receive.tobytes())
        assert set(everyone) == {everyone[0]}


def test_ordered_sums_have_the_same_bits(comm, transport):
    """Those of adding up in a loop, whatever the size and the pack."""
    if not transport.is_ordered:
        pytest.skip("it leaves the order to MPI")
    for count in (1, 9, 1000, 10_007):
        parts = [
            np.random.default_rng(rank).standard_normal(count).astype("f4")
            for rank in range(comm.size)
        ]
        expected = functools.reduce(np.add, parts)
        for cut in (0, 1, count // 3):
            sends = [parts[comm.rank][:cut], parts[comm.rank][cut:]]
            receive = np.empty(count, "f4")
            transport.allreduce_packed(sends, receive, None)
            assert receive.tobytes() == expected.tobytes()


def test_narrow_numbers_are_added_up_in_wide_ones(comm, transport):
    if not transport.is_ordered:
        pytest.skip("MPI adds in the dtype of what is sent")
    for count in (1, 1000, 5000):
        parts = [
            (np.arange(count) % 100 + rank + 0.5).astype("f2")
            for rank in range(comm.size)
        ]
        receive = np.empty(count, "f4")
        transport.allreduce_sum(parts[comm.rank], receive, None)
        total = sum(part.astype("f4") for part in parts)
        assert np.array_equal(receive.astype("f2"), total.astype("f2"))


@pytest.mark.parametrize("dtype", [*DTYPES, "?", "S3", "m8[s]"])
@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (5, 0, 700, 1), (1300, 1, 64, 3)])
def test_gathers_of_uneven_lengths(comm, transport, deadline, dtype, counts):
    counts = counts[: comm.size]
    parts = [numbers(rank, n, "i8").astype(dtype) for rank, n in enumerate(counts)]
    receive = np.zeros(sum(counts), dtype)
    transport.allgatherv(parts[comm.rank], receive, counts, deadline)
    assert np.array_equal(receive, np.concatenate(parts))


@pytest.mark.parametrize("dtype", ["i1", "f4", "c16", "S3", "m8[s]"])
@pytest.mark.parametrize("slot_bytes", SLOT_BYTES)
@pytest.mark.parametrize("widths", [(0, 0, 0, 0), (5, 0, 70, 1), (3, 3, 3, 3)])
@pytest.mark.parametrize("rows", [0, 1, 9, 200])
def test_gathers_of_columns(comm, dtype, slot_bytes, widths, rows):
    """Wide rows do not fit into a slot, of short ones many do."""
    if comm.size == 1:
        pytest.skip("one rank gathers nothing")
    agreement = Agreement(comm.Dup())
    transport, close = make_shared(agreement, slot_bytes)
    widths = widths[: comm.size]
    parts = [
        numbers(rank, rows * w, "i8").astype(dtype).reshape(rows, w)
        for rank, w in enumerate(widths)
    ]
    for seconds in (None, 60):
        deadline = None if seconds is None else time.monotonic() + seconds
        receive = np.zeros((rows, sum(widths)), dtype)
        transport.allgather_columns(parts[comm.rank], receive, widths, deadline)
        assert np.array_equal(receive, np.concatenate(parts, axis=1))
    close()
    agreement.close()
    agreement.comm.Free()


@pytest.mark.parametrize("dtype", ["u1", "f8", "S3"])
def test_broadcasts(comm, transport, deadline, dtype):
    for count in SIZES:
        for root in {0, comm.size - 1}:
            buffer = numbers(comm.rank, count, "i8").astype(dtype)
            transport.broadcast(buffer, root, deadline)
            expected = numbers(root, count, "i8").astype(dtype)
            assert buffer.tobytes() == expected.tobytes()


def test_calls_of_all_kinds_follow_each_other(comm, transport):
    """A rank that is ahead must not write where others still read."""
    random = np.random.default_rng(0)
    counts = [50 * rank for rank in range(comm.size)]
    for _ in range(100):
        count = int(random.integers(1, 300))
        kind = random.integers(3)
        if kind == 0:
            receive = np.empty(count, "i8")
            transport.allreduce_sum(numbers(comm.rank, count, "i8"), receive, None)
            parts = [numbers(rank, count, "i8") for rank in range(comm.size)]
            assert np.array_equal(receive, np.sum(parts, axis=0))
        elif kind == 1:
            receive = np.empty(sum(counts), "i8")
            mine = numbers(comm.rank, counts[comm.rank], "i8") + count
            transport.allgatherv(mine, receive, counts, None)
            parts = [numbers(rank, n, "i8") + count for rank, n in enumerate(counts)]
            assert np.array_equal(receive, np.concatenate(parts))
        else:
            buffer = numbers(comm.rank, count, "i8")
            transport.broadcast(buffer, count % comm.size, None)
            assert np.array_equal(buffer, numbers(count % comm.size, count, "i8"))


@pytest.mark.parametrize("method", ["allreduce_sum", "allgatherv", "broadcast"])
@pytest.mark.parametrize("kind", ["mpi", "ordered", "shared 4096", "2 ranks per node"])
def test_a_rank_that_does_not_come_is_told_at_the_deadline(comm, method, kind):
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    agreement = Agreement(comm.Dup())  # not freed: that might wait for all ranks
    transport, _ = MAKERS[kind](agreement)
    comm.Barrier()
    if comm.rank == 0:
        send, end = np.ones(5000), time.monotonic() + 0.2
        receive, counts = np.empty(5000 * comm.size), [5000] * comm.size
        calls = {
            "allreduce_sum": lambda: transport.allreduce_sum(send, send.copy(), end),
            "allgatherv": lambda: transport.allgatherv(send, receive, counts, end),
            "broadcast": lambda: transport.broadcast(send, comm.size - 1, end),
        }
        with pytest.raises(mpidist.DeadlineError, match="did not arrive"):
            calls[method]()
        with pytest.raises(mpidist.CollectiveError, match="any more"):
            agreement.gather("next", 1)
    agreement.close()
    comm.Barrier()
