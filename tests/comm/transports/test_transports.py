"""The contract of all transports, on the host and on GPUs, with NumPy as the oracle."""

import functools
import gc
import math
import os
import time
import weakref
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from node_barriers import make_node_barrier

import mpidist
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.transports import blocks
from mpidist.comm.transports.device import DeviceMpiTransport, DeviceTransport
from mpidist.comm.transports.hierarchical import HierarchicalTransport
from mpidist.comm.transports.ipc import SLOTS, IpcTransport, share_buffers
from mpidist.comm.transports.mpi import MpiTransport
from mpidist.comm.transports.nccl import connect
from mpidist.comm.transports.ordered import OrderedTransport
from mpidist.comm.transports.ring import RingTransport
from mpidist.comm.transports.shared import SharedTransport
from mpidist.comm.transports.staging import StagingTransport
from mpidist.comm.transports.tuning import BySizeTransport
from mpidist.device import arrays
from mpidist.device.binding import gpu_count, nccl_version, use_gpu

DTYPES = ["i1", "u2", "i4", "i8", "f4", "f8", "g", "c8", "c16"]
SIZES = [0, 1, 2, 7, 63, 64, 65, 1000, 4096, 10_007]
# One cache line, and what does not divide arrays
SLOT_BYTES = [64, 4096, 1000]


def make_shared(consensus, slot_bytes):
    barrier = make_node_barrier(consensus.comm, 64, slot_bytes)
    return SharedTransport(consensus, barrier), barrier.close


def make_mpi(consensus):
    return MpiTransport(consensus), lambda: None


def make(kind, **options):
    """Return a maker of transports of a kind, which leave nothing to close."""
    return lambda consensus: (kind(consensus, **options), lambda: None)


def make_mpi_of_a_node(consensus):
    """Calls of MPI block there."""
    transport = MpiTransport(consensus)
    transport._blocks = True
    return transport, lambda: None


def make_ordered_of_many(consensus):
    """As for more ranks than send each other messages."""
    patch = mock.patch.object(blocks, "MOST_RANKS", 1)
    patch.start()
    return OrderedTransport(consensus, block_bytes=1000), patch.stop


def make_ring_of_nodes(consensus):
    """Nodes are pretended: two, whose ranks take turns."""
    name = f"node{consensus.rank % 2}"
    with mock.patch.object(MPI, "Get_processor_name", return_value=name):
        return RingTransport(consensus), lambda: None


def make_by_size(consensus):
    shared, close = make_shared(consensus, 4096)
    transports = {"mpi": MpiTransport(consensus), "shared": shared}
    rows = [(0, "shared"), (100, "mpi"), (2000, "shared")]
    table = dict.fromkeys(("allreduce", "allgatherv", "broadcast"), rows)
    return BySizeTransport(transports, table), close


def make_hierarchical(consensus, ranks_per_node):
    """Nodes are pretended: consecutive ranks; the last one may have fewer."""
    node = consensus.comm.Split(consensus.rank // ranks_per_node, consensus.rank)
    names = node.group.Translate_ranks(None, consensus.comm.group)
    barrier = make_node_barrier(node, 0, 4096, names)
    transport = HierarchicalTransport(consensus, barrier)

    def close():
        transport.close()
        barrier.close()
        node.Free()

    return transport, close


def make_of_many_nodes(consensus):
    transport, close = make_hierarchical(consensus, 1)
    transport.most_nodes = 1
    patch = mock.patch.object(blocks, "MOST_RANKS", 1)
    patch.start()

    def end():
        patch.stop()
        close()

    return transport, end


def make_ipc(consensus, slot_bytes):
    barrier = make_node_barrier(consensus.comm, 64)
    buffers, reason = share_buffers(consensus, SLOTS * slot_bytes)
    if buffers is None:
        barrier.close()
        pytest.skip(f"GPUs cannot share memory here: {reason}")
    transport = IpcTransport(consensus, barrier, buffers)

    def close():
        transport.close()
        barrier.close()

    return transport, close


def make_staging(consensus, block_bytes):
    host, close = make_shared(consensus, 4096)
    return StagingTransport(host, block_bytes), close


def require_cuda_aware():
    if os.environ.get("MPIDIST_CUDA_AWARE") != "1":
        pytest.skip("MPIDIST_CUDA_AWARE=1 tells that MPI takes addresses of GPUs")


def make_device(consensus, block_bytes=16 << 20):
    require_cuda_aware()
    return DeviceTransport(consensus, block_bytes), lambda: None


def make_device_mpi(consensus):
    adder, close = make_device(consensus)
    return DeviceMpiTransport(consensus, adder), close


def make_nccl(consensus):
    if gpu_count() < consensus.size:
        pytest.skip("NCCL needs a GPU for each rank")
    versions = consensus.gather_objects("versions of NCCL", nccl_version)
    if not all(versions):
        pytest.skip("there is no NCCL")
    transport, reason = connect(consensus)
    assert transport is not None, reason
    return transport, transport.close


GPU_MAKERS = {
    "staging": functools.partial(make_staging, block_bytes=4 << 20),
    "staging in blocks": functools.partial(make_staging, block_bytes=1000),
    "staging, mpi": lambda c: (StagingTransport(MpiTransport(c)), lambda: None),
    "device": make_device,
    "device in blocks": functools.partial(make_device, block_bytes=1000),
    "device mpi": make_device_mpi,
    "nccl": make_nccl,
    **{f"ipc {n}": functools.partial(make_ipc, slot_bytes=n) for n in (256, 4096)},
}
MAKERS = {
    "mpi": make_mpi,
    "mpi, limited": make(MpiTransport, most_bytes=100),  # at once
    "mpi, of a node": make_mpi_of_a_node,
    "ordered": make(OrderedTransport),
    "ordered in blocks": make(OrderedTransport, block_bytes=1000),
    "ordered, many ranks": make_ordered_of_many,
    "ring": make(RingTransport),
    "ring of 2 nodes": make_ring_of_nodes,
    "by size": make_by_size,
    "many nodes": make_of_many_nodes,
    **{
        f"{n} ranks per node": functools.partial(make_hierarchical, ranks_per_node=n)
        for n in (1, 2, 3, 4)
    },
    **{f"shared {n}": functools.partial(make_shared, slot_bytes=n) for n in SLOT_BYTES},
}


ON_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in GPU_MAKERS]


@pytest.fixture(params=[*MAKERS, *ON_GPU])
def transport(comm, request):
    if comm.size == 1:
        pytest.skip("one rank needs no transport")
    if request.param in GPU_MAKERS:
        if not gpu_count():
            pytest.skip("needs a GPU and CuPy")
        use_gpu(comm.rank % gpu_count())
    consensus = Consensus(comm.Dup())
    transport, close = {**MAKERS, **GPU_MAKERS}[request.param](consensus)
    yield transport
    close()
    consensus.close()
    consensus.comm.Free()


def put(transport, array):
    """Return an array where the transport works."""
    if not transport.device:
        return array
    if not arrays.fits_device(array) or array.dtype == np.longdouble:
        pytest.skip(f"no GPU has {array.dtype}")
    return arrays.to_device(array, f"GPU:{arrays.current_gpu()}")


got = arrays.to_host


@pytest.fixture(params=[None, 60])
def deadline(request):
    return None if request.param is None else time.monotonic() + request.param


def numbers(rank, count, dtype):
    """Small whole numbers, so that sums are exact in each dtype."""
    return (np.arange(count) * (rank + 3) % 11 + rank).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(comm, transport, deadline, dtype):
    for count in SIZES:
        before = numbers(comm.rank, count, dtype)
        send = put(transport, before.copy())
        receive = put(transport, np.full(count, 99, dtype))
        transport.allreduce([send], receive, deadline)
        parts = [numbers(rank, count, dtype) for rank in range(comm.size)]
        assert np.array_equal(got(receive), np.sum(parts, axis=0, dtype=dtype))
        assert np.array_equal(got(send), before)
        if count == SIZES[-1] and not transport.device:
            transport.allreduce([send], send, deadline)  # in place
            assert np.array_equal(send, receive)


@pytest.mark.parametrize("dtype", ["i1", "f4", "c16"])
def test_sums_of_several_arrays(comm, transport, deadline, dtype):
    shapes = [(3,), (), (0, 2), (700, 3), (1,), (5, 100)]

    def parts(rank):
        return [numbers(rank, math.prod(s), dtype).reshape(s) for s in shapes]

    everyone = [np.concatenate(parts(rank), axis=None) for rank in range(comm.size)]
    receive = put(transport, np.empty(everyone[0].size, dtype))
    for _ in range(3):
        sends = [put(transport, part) for part in parts(comm.rank)]
        transport.allreduce(sends, receive, deadline)
        assert np.array_equal(got(receive), np.sum(everyone, axis=0, dtype=dtype))


def test_sums_of_arrays_of_several_dimensions(comm, transport):
    for shape in ((3, 0, 2), (3, 5, 2)):
        send, receive = (put(transport, np.full(shape, 1.0)) for _ in range(2))
        transport.allreduce([send], receive, None)
        assert (got(receive) == comm.size).all()


def test_every_rank_gets_the_same_bits(comm, transport):
    random = np.random.default_rng(comm.rank)
    for dtype in ("f4", "c16"):
        send = put(transport, (random.standard_normal(5001) * 1e3).astype(dtype))
        receive = put(transport, np.empty(5001, dtype))
        transport.allreduce([send], receive, None)
        everyone = comm.allgather(got(receive).tobytes())
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
            mine = put(transport, parts[comm.rank])
            receive = put(transport, np.empty(count, "f4"))
            transport.allreduce([mine[:cut], mine[cut:]], receive, None)
            assert got(receive).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_numbers_are_added_up_in_wide_ones(comm, transport, dtype):
    if not transport.is_ordered:
        pytest.skip("MPI adds in the dtype of what is sent")
    dtype = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    for count in (1, 1000, 5000):
        parts = [
            (np.arange(count) % 100 + rank + 0.5).astype(dtype)
            for rank in range(comm.size)
        ]
        receive = put(transport, np.empty(count, "f4"))
        transport.allreduce([put(transport, parts[comm.rank])], receive, None)
        total = sum(part.astype("f4") for part in parts)
        assert np.array_equal(got(receive).astype(dtype), total.astype(dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_subnormal_numbers_are_not_taken_for_zero(comm, transport, dtype):
    """Not by GPUs either, for which CuPy compiles so (-ftz=true)."""
    if not transport.is_ordered:
        pytest.skip("MPI adds in the dtype of what is sent")
    dtype = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    if dtype == np.float32:
        mine = np.arange(1, 1024, dtype="u4").view("f4")
        mine[0] = 1e-40
    else:
        bits = 10 if dtype == np.float16 else 7
        mine = np.arange(1, 1 << bits, dtype="u2").view(dtype)
    receive = put(transport, np.full(mine.size, 99, "f4"))
    transport.allreduce([put(transport, mine)], receive, None)
    total = functools.reduce(np.add, [mine.astype("f4")] * comm.size)
    assert total.all()
    assert got(receive).astype(dtype).tobytes() == total.astype(dtype).tobytes()


@pytest.mark.parametrize("dtype", [*DTYPES, "?", "S3", "m8[s]"])
@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (5, 0, 700, 1), (1300, 1, 64, 3)])
def test_gathers_of_uneven_lengths(comm, transport, deadline, dtype, counts):
    counts = counts[: comm.size]
    parts = [numbers(rank, n, "i8").astype(dtype) for rank, n in enumerate(counts)]
    receive = put(transport, np.zeros(sum(counts), dtype))
    transport.allgatherv(put(transport, parts[comm.rank]), receive, counts, deadline)
    assert np.array_equal(got(receive), np.concatenate(parts))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", ["i1", "f4", "c16", "S3", "m8[s]"])
@pytest.mark.parametrize("slot_bytes", SLOT_BYTES)
@pytest.mark.parametrize("widths", [(0, 0, 0, 0), (5, 0, 70, 1), (3, 3, 3, 3)])
@pytest.mark.parametrize("rows", [0, 1, 9, 200])
def test_gathers_of_columns(comm, dtype, slot_bytes, widths, rows):
    """Wide rows do not fit into a slot, of short ones many do."""
    consensus = Consensus(comm.Dup())
    transport, close = make_shared(consensus, slot_bytes)
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
    consensus.close()
    consensus.comm.Free()


@pytest.mark.parametrize("dtype", ["u1", "f8", "S3"])
def test_broadcasts(comm, transport, deadline, dtype):
    for count in SIZES:
        for root in {0, comm.size - 1}:
            buffer = put(transport, numbers(comm.rank, count, "i8").astype(dtype))
            transport.broadcast(buffer, root, deadline)
            expected = numbers(root, count, "i8").astype(dtype)
            assert got(buffer).tobytes() == expected.tobytes()


def test_calls_of_all_kinds_follow_each_other(comm, transport):
    """A rank that is ahead must not write where others still read."""
    random = np.random.default_rng(0)
    counts = [50 * rank for rank in range(comm.size)]
    for _ in range(100):
        count = int(random.integers(1, 300))
        kind = random.integers(3)
        if kind == 0:
            receive = put(transport, np.empty(count, "i8"))
            mine = put(transport, numbers(comm.rank, count, "i8"))
            transport.allreduce([mine], receive, None)
            parts = [numbers(rank, count, "i8") for rank in range(comm.size)]
            assert np.array_equal(got(receive), np.sum(parts, axis=0))
        elif kind == 1:
            receive = put(transport, np.empty(sum(counts), "i8"))
            mine = put(transport, numbers(comm.rank, counts[comm.rank], "i8") + count)
            transport.allgatherv(mine, receive, counts, None)
            parts = [numbers(rank, n, "i8") + count for rank, n in enumerate(counts)]
            assert np.array_equal(got(receive), np.concatenate(parts))
        else:
            buffer = put(transport, numbers(comm.rank, count, "i8"))
            transport.broadcast(buffer, count % comm.size, None)
            expected = numbers(count % comm.size, count, "i8")
            assert np.array_equal(got(buffer), expected)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("method", ["allreduce", "allgatherv", "broadcast"])
@pytest.mark.parametrize(
    "kind", ["mpi", "ordered", "ring", "shared 4096", "2 ranks per node"]
)
def test_a_rank_that_does_not_come_is_told_at_the_deadline(comm, method, kind):
    consensus = Consensus(comm.Dup())  # not freed: that might wait for all ranks
    transport, _ = MAKERS[kind](consensus)
    comm.Barrier()
    if comm.rank == 0:
        send, end = np.ones(5000), time.monotonic() + 0.2
        receive, counts = np.empty(5000 * comm.size), [5000] * comm.size
        calls = {
            "allreduce": lambda: transport.allreduce([send], send.copy(), end),
            "allgatherv": lambda: transport.allgatherv(send, receive, counts, end),
            "broadcast": lambda: transport.broadcast(send, comm.size - 1, end),
        }
        with pytest.raises(mpidist.DeadlineError, match="did not arrive"):
            calls[method]()
        with pytest.raises(mpidist.CollectiveError, match="any more"):
            consensus.gather_objects("next", lambda: 1)
    consensus.close()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_memory_of_all_blocks_that_are_given_up_is_kept(comm, monkeypatch):
    """A rank that comes late sends parts of them, wherever this one has given up."""
    begin, given_up = blocks.BlockSum.__init__, []

    def begin_and_note(block, *arguments):
        begin(block, *arguments)
        given_up.extend(weakref.ref(part.base) for part in block._parts)

    monkeypatch.setattr(blocks.BlockSum, "__init__", begin_and_note)
    consensus = Consensus(comm.Dup())  # not freed: that might wait for all ranks
    transport = OrderedTransport(consensus, block_bytes=1000)
    comm.Barrier()
    if comm.rank == 0:
        send, end = np.ones(5000), time.monotonic() + 0.01
        with pytest.raises(mpidist.DeadlineError):
            transport.allreduce([send], send.copy(), end)
    consensus.close()
    comm.Barrier()
    del transport, consensus
    gc.collect()
    kept = sum(part() is not None for part in given_up)
    # Two blocks were on their way, and of each the parts that others send
    assert kept >= (2 * (comm.size - 1) if comm.rank == 0 else 0)


@pytest.mark.parametrize("parts", [1, 3, 32, 50])
def test_blocks_of_every_size_are_added(comm, parts):
    """Few small blocks, and many larger ones; the last one has one element."""
    count = parts * comm.size * (64 << 10) // 8 + 1
    everyone = [np.random.default_rng(rank).random(count) for rank in range(comm.size)]
    expected = functools.reduce(np.add, everyone)
    consensus = Consensus(comm.Dup())
    total = np.empty(count)
    OrderedTransport(consensus).allreduce([everyone[comm.rank]], total, None)
    consensus.close()
    np.testing.assert_array_equal(total, expected)
