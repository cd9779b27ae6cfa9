"""Symmetric arrays: made alike on all ranks, recognized, reduced in place, freed."""

import contextlib
import gc
import os
import re
import weakref
from pathlib import Path

import numpy as np
import pytest

import mpidist
from mpidist import CommunicationOptions
from mpidist.comm.shared_memory import node

LARGE = 300_000  # of elements: more than the ranks exchange with their calls


def regions(strategy):
    return len(strategy.extended.symmetric_memory.regions)


def everyones(comm, count, dtype="f8"):
    return [
        (np.arange(count) * (rank + 3) % 11 + rank).astype(dtype)
        for rank in range(comm.size)
    ]


@pytest.fixture
def spied(strategy, monkeypatch):
    """Count the arrays that are reduced where they lie."""
    in_node = strategy.extended.collectives.transports.intra_node
    counts = []
    if in_node is not None:
        reduce = in_node.allreduce_symmetric

        def allreduce_symmetric(everyone, receives, deadline):
            counts.append(len(receives))
            reduce(everyone, receives, deadline)

        monkeypatch.setattr(in_node, "allreduce_symmetric", allreduce_symmetric)
    return counts


def test_they_are_zeros_of_the_same_shapes_and_dtypes(strategy):
    given = {
        "w": np.ones((3, 5), "f4"),
        "more": [np.float64(2.5), np.arange(4), np.zeros((0, 3), "c8")],
        "n": 3,
    }
    made = strategy.symmetric_like(given)
    assert set(made) == set(given)
    pairs = [(made["w"], given["w"]), *zip(made["more"], given["more"])]
    pairs.append((made["n"], np.asarray(3)))
    for array, like in pairs:
        assert isinstance(array, np.ndarray)
        assert (array.shape, array.dtype) == (like.shape, like.dtype)
        assert not array.any()
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert array.flags.aligned


def test_each_rank_writes_to_its_own(comm, strategy):
    a, b = strategy.symmetric_like([np.zeros(1000), np.zeros(7, "i4")])
    a[...], b[...] = comm.rank + 1, comm.rank + 5
    comm.Barrier()
    assert (a == comm.rank + 1).all()
    assert (b == comm.rank + 5).all()
    comm.Barrier()


def test_of_variables_and_in_replica_context(strategy):
    with strategy.scope():
        w = mpidist.Variable(np.ones((2, 3), "f4"))
        a = strategy.symmetric_like(w)
    assert (a.shape, a.dtype) == ((2, 3), np.dtype("f4"))

    def step():
        return strategy.symmetric_like(w).sum()

    assert strategy.experimental_local_results(strategy.run(step)) == (0.0,)


@pytest.mark.mpi(min_size=2)
def test_they_are_reduced_where_they_lie(comm, strategy, spied):
    value = strategy.symmetric_like(np.zeros(LARGE))
    for _ in range(3):  # the first call is checked, the others are known
        strategy.reduce("SUM", value)
    assert spied == [1, 1, 1]
    options = CommunicationOptions(timeout_seconds=60, reproducible=True)
    ops = strategy.extended.cross_device_ops
    ops.reduce("SUM", value, "CPU:0", options)
    strategy.run(
        lambda: mpidist.get_replica_context().all_reduce("SUM", value, options)
    )
    assert spied == [1] * 5
    by_mpi = CommunicationOptions(implementation="MPI")
    strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", value, by_mpi))
    assert len(spied) == 5


@pytest.mark.mpi(min_size=2)
def test_views_are_recognized(comm, strategy, spied):
    parts = everyones(comm, 2 * LARGE)
    value = strategy.symmetric_like(parts[0])
    value[...] = parts[comm.rank]
    views = [value[1000:-5000], value.reshape(2, -1)[1], value.reshape(-1, 4)]
    expected = np.sum(parts, axis=0)
    for view, result in zip(
        views,
        [expected[1000:-5000], expected[LARGE:], expected.reshape(-1, 4)],
        strict=True,
    ):
        for _ in range(2):
            assert np.array_equal(strategy.reduce("SUM", view), result)
    assert spied == [1] * 6
    # These are not contiguous, so they are copied
    spied.clear()
    assert np.array_equal(strategy.reduce("SUM", value[::2]), expected[::2])
    grid, total = value.reshape(1000, -1), expected.reshape(1000, -1)
    assert np.array_equal(strategy.reduce("SUM", grid.T), total.T)
    assert spied == []


@pytest.mark.mpi(min_size=2)
def test_nests_of_symmetric_and_other_arrays(comm, strategy, spied):
    shapes = [(3,), (LARGE,), (), (700, 300), (0, 4), (5,)]
    everyone = [
        [
            everyones(comm, int(np.prod(s)), "f4")[r].reshape(s) + j
            for j, s in enumerate(shapes)
        ]
        for r in range(comm.size)
    ]
    made = strategy.symmetric_like(everyone[0])
    for array, part in zip(made, everyone[comm.rank], strict=True):
        array[...] = part
    made[3] = made[3].copy()
    made[5] = everyone[comm.rank][5]
    for _ in range(2):
        found = strategy.reduce("SUM", made)
        for j, total in enumerate(found):
            assert np.array_equal(total, np.sum([e[j] for e in everyone], axis=0))
            assert total.shape == shapes[j]
    assert spied == [3, 3]


@pytest.mark.mpi(min_size=2)
def test_other_places_on_other_ranks_are_plain(comm, strategy, spied):
    """What one rank thinks that it recognizes, the others need not have."""
    parts = everyones(comm, LARGE)
    one, other = strategy.symmetric_like([parts[0], parts[0]])
    one[...] = other[...] = parts[comm.rank]
    expected = np.sum(parts, axis=0)
    odd = comm.rank == comm.size - 1
    for mine in (
        parts[comm.rank] if odd else one,
        other if odd else one,
        one if odd else parts[comm.rank],
    ):
        for _ in range(2):
            assert np.array_equal(strategy.reduce("SUM", mine), expected)
    assert spied == []
    assert np.array_equal(strategy.reduce("SUM", other), expected)
    assert spied == [1]


@pytest.mark.mpi(min_size=2)
def test_they_are_freed_with_the_last_reference(comm, strategy):
    before = regions(strategy)
    made = strategy.symmetric_like({"a": np.zeros(100), "b": np.zeros(3)})
    assert regions(strategy) == before + 1
    root, b = weakref.ref(made["a"].base), made["b"]
    strategy.reduce("SUM", made)
    del made
    assert root() is not None
    assert regions(strategy) == before + 1
    view = b[1:]
    del b
    assert root() is not None
    del view
    assert root() is None
    assert regions(strategy) == before


@pytest.mark.mpi(min_size=2)
def test_one_rank_may_let_go_earlier(comm, strategy):
    parts = everyones(comm, LARGE)
    value = strategy.symmetric_like(parts[0])
    value[...] = parts[comm.rank]
    if comm.rank == 0:
        value = value.copy()
    assert np.array_equal(strategy.reduce("SUM", value), np.sum(parts, axis=0))
    again = strategy.symmetric_like(parts[0])
    again[...] = parts[comm.rank]
    assert np.array_equal(strategy.reduce("SUM", again), np.sum(parts, axis=0))


def test_they_outlive_the_strategy(comm):
    strategy = mpidist.MirroredStrategy(communicator=comm)
    value = strategy.symmetric_like(np.zeros(1000))
    value[...] = comm.rank
    strategy.experimental_finalize()
    del strategy
    gc.collect()
    assert (value == comm.rank).all()
    value += 1
    assert (value == comm.rank + 1).all()


def shared_files():
    """Return the files with names that this process has open or mapped.

    Other jobs may have some in the same folder at any time.
    """
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        return []
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [line.split(maxsplit=5)[-1] for line in lines]
    for descriptor in descriptors.iterdir():
        with contextlib.suppress(OSError):  # that of the listing
            found.append(os.readlink(descriptor))
    return [f for f in found if re.search(r"/mpidist-\w{8}$", f)]


@pytest.mark.mpi(min_size=2)
def test_no_file_stays(comm, strategy):
    comm.Barrier()
    assert shared_files() == []
    made = strategy.symmetric_like(np.zeros(1000))
    comm.Barrier()
    assert shared_files() == []
    comm.Barrier()
    del made


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("culprit", [0, -1])
def test_too_little_memory_is_an_error_on_all(comm, strategy, monkeypatch, culprit):
    if comm.rank == 0:
        free = {"/dev/shm": 1000}
        monkeypatch.setattr(node, "free_bytes", lambda is_shared: free)
    with pytest.raises(mpidist.ArgumentError, match="symmetric arrays need"):
        strategy.symmetric_like(np.zeros(10_000))
    monkeypatch.undo()
    comm.Barrier()
    assert shared_files() == []
    comm.Barrier()
    if comm.rank == culprit % comm.size:
        monkeypatch.setattr(node.mmap, "mmap", fail)
    with pytest.raises((OSError, mpidist.errors.RemoteError), match="no mapping"):
        strategy.symmetric_like(np.zeros(10_000))
    comm.Barrier()
    assert shared_files() == []


def fail(*_, **__):
    raise OSError("no mapping")


@pytest.mark.mpi(min_size=2)
def test_unlike_shapes_are_refused_on_all(comm, strategy):
    with pytest.raises(mpidist.MismatchError, match="value"):
        strategy.symmetric_like(np.zeros(3 + (comm.rank == 0)))
    with pytest.raises(TypeError):
        strategy.symmetric_like("w" if comm.rank == 0 else np.zeros(3))


def test_under_another_strategy_they_are_refused(strategy, make_strategy):
    other = make_strategy()
    with other.scope(), pytest.raises(mpidist.ContextError, match="symmetric_like"):
        strategy.symmetric_like(np.zeros(3))


# Where ranks cannot pass files: in containers with networks of their own
HIDDEN = """
from mpidist.comm.shared_memory import node
node._pass_file = lambda node: -1
"""


def mapped():
    """Return the inodes of the memory that this process shares with others."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:mpidist" in line}


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has such files")
@pytest.mark.parametrize("is_warm", [False, True])
def test_no_memory_of_a_closed_strategy_stays(comm, is_warm):
    """That of its barrier, its caches, and its buckets' barrier."""
    before = mapped()
    strategy = mpidist.MirroredStrategy(communicator=comm)
    dataset = mpidist.Dataset.range(8).cache().batch(4)
    divided = strategy.experimental_distribute_dataset(dataset)
    assert len(list(divided)) == 2
    strategy.gradient_buckets([np.zeros(3)])
    made = len(mapped() - before)
    strategy.experimental_finalize()
    del strategy
    with pytest.raises(mpidist.ContextError):
        list(divided)
    del divided
    stays = len(mapped() - before)
    # The default strategy is made the first time, by any test, and stays
    if is_warm:
        assert (made, stays) == (3, 0)
    assert len(list(dataset)) == 2


@pytest.mark.mpi(min_size=2)
def test_no_descriptor_stays(comm, strategy):
    """What is mapped has one, and no other process that this one starts inherits it."""
    strategy.symmetric_like(np.zeros(10))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        strategy.symmetric_like(np.zeros(10))
    assert len(os.listdir("/proc/self/fd")) == before
    kept = strategy.symmetric_like(np.zeros(10))
    mine = [fd for fd in os.listdir("/proc/self/fd") if is_memory(int(fd))]
    assert not any(os.get_inheritable(int(fd)) for fd in mine)
    del kept


def is_memory(descriptor):
    try:
        return "memfd:mpidist" in os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # that of the listing
        return False


@pytest.mark.parametrize("way", ["", HIDDEN], ids=["passed", "by name"])
def test_memory_of_killed_ranks_is_given_back(mpirun, way):
    """All are killed while the pages are reserved, which takes longest."""
    script = f"""
import os, signal
import numpy as np, mpidist
{way}
strategy = mpidist.MirroredStrategy(["CPU:0"])
pids = strategy.extended.topology.pids
if strategy.extended.replica_id == 0:
    reserve = os.posix_fallocate
    def kill(*arguments):
        reserve(*arguments)
        for pid in [*pids.values(), os.getpid()]:
            os.kill(pid, signal.SIGKILL)
    os.posix_fallocate = kill
print("begun", flush=True)
strategy.symmetric_like(np.zeros(1000))
"""
    folder = Path("/dev/shm")
    before = set(folder.glob("mpidist-*"))
    ended = mpirun(2, script, fails=True)
    assert ended.stdout.count("begun") == 2
    assert set(folder.glob("mpidist-*")) <= before
