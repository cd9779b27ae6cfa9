"""Which ranks share a node, and what a strategy does over several."""

import gc
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import launching
import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist.comm import replica_group
from mpidist.comm.replica_group import _Resources
from mpidist.device import probe


@pytest.fixture(params=[1, 2, 3])
def strategy_of_nodes(comm, monkeypatch, request):
    """A strategy for which so many ranks make a node."""
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", str(request.param))
    strategy = mpidist.MirroredStrategy(communicator=comm)
    node = strategy.extended.topology.node
    assert node.size == min(request.param, comm.size - comm.rank + node.rank)
    yield strategy
    strategy.experimental_finalize()


@pytest.mark.parametrize("count", [1, 1000, 200_000])
def test_collectives_over_several_nodes(comm, strategy_of_nodes, count):
    strategy = strategy_of_nodes
    values = [np.arange(count) % 5 + rank for rank in range(comm.size)]
    total = strategy.reduce("SUM", values[comm.rank])
    assert np.array_equal(total, np.sum(values, axis=0))
    gathered = strategy.gather(values[comm.rank][comm.rank :], axis=0)
    parts = [value[rank:] for rank, value in enumerate(values)]
    assert np.array_equal(gathered, np.concatenate(parts))


def test_hierarchical_reductions_over_several_nodes(comm, monkeypatch, make_strategy):
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "2")
    ops = mpidist.HierarchicalCopyAllReduce()
    strategy = make_strategy(cross_device_ops=ops)
    for count in (0, 1, 300_000):
        values = [np.arange(count) % 7 + rank for rank in range(comm.size)]
        total = strategy.reduce("SUM", values[comm.rank])
        assert np.array_equal(total, np.sum(values, axis=0))


@pytest.mark.parametrize("text", ["0", "-1", "two", "9" * 5000])
def test_a_bad_number_of_ranks_per_node_is_refused_on_all(comm, monkeypatch, text):
    if comm.rank == comm.size - 1:
        monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", text)
    with pytest.raises(mpidist.LaunchError, match="RANKS_PER_NODE must be a positive"):
        mpidist.MirroredStrategy(communicator=comm)


def test_jobs_that_connect_are_nodes_of_their_own(comm, tmp_path):
    """Two real worlds, of unlike sizes, which cannot share memory with each other."""
    if comm.size > 1 or "MPICH" not in MPI.Get_library_version():
        pytest.skip("it starts jobs, which Open MPI connects by a server only")
    fifo = tmp_path / "port"
    os.mkfifo(fifo)
    script = str(Path(__file__).parents[1] / "jobs" / "connected_job.py")

    def start(ranks, role):
        command = [*launching.mpirun_command(ranks), sys.executable, script]
        return launching.run([*command, role, str(fifo)])

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(start, 1, "server"), pool.submit(start, 2, "client")]
    ended = [job.result() for job in jobs]
    for one in ended:
        assert one.returncode == 0, one.stderr
    lines = sorted("".join(one.stdout for one in ended).splitlines())
    assert lines == [
        "client 1 (1, 2) hierarchical, mpi, ring",
        "client 2 (1, 2) hierarchical, mpi, ring",
        "server 0 (1, 2) hierarchical, mpi, ring",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes such names")
def test_a_mapped_file_whose_name_is_no_text(comm, tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff\xfe.so"
    with open(name, "wb+") as file:
        file.write(b"x")
        file.flush()
        with mmap.mmap(file.fileno(), 1):
            strategy = mpidist.MirroredStrategy(communicator=comm)
            library = probe.library_path()
    strategy.experimental_finalize()
    assert library is not None
    assert library.name.startswith("libmpi")


@pytest.mark.skipif(sys.platform != "linux", reason="its files lie in /dev/shm")
def test_files_of_mpi_stay_its_own(mpirun):
    """Those that MPI has mapped have their names after there is a strategy."""
    script = """
import sys
from mpi4py import MPI
import mpidist

def names():
    maps = open("/proc/self/maps", errors="surrogateescape").read().splitlines()
    return {line.split(maxsplit=5)[-1] for line in maps if "/dev/shm/" in line}

before = names()
mpidist.MirroredStrategy(["CPU:0"])
sys.stdout.write(f"{bool(before)} {before <= names()}\\n")
"""
    ended = mpirun(2, script)
    assert ended.stdout == "True True\n" * 2


@pytest.mark.slow
def test_strategies_that_all_ranks_have_dropped_are_freed(comm, monkeypatch):
    monkeypatch.setattr(_Resources, "_collect_at", 8)
    monkeypatch.setattr(replica_group, "_COLLECT_AT", 8)
    kept = mpidist.MirroredStrategy(communicator=comm)
    before = len(_Resources.in_use)
    on_rank_0 = []
    for step in range(24):
        strategy = mpidist.MirroredStrategy(communicator=comm)
        assert strategy.reduce("SUM", step) == step * comm.size
        if comm.rank == 0 and step < 3:
            on_rank_0.append(strategy)
    assert len(_Resources.in_use) < before + 20
    assert kept.reduce("SUM", 1) == comm.size
    # None was freed that some rank has kept
    of_all = [key for key in _Resources.in_use if len(key[1]) == comm.size]
    assert comm.allgather(of_all) == [of_all] * comm.size
    assert not any(kept.extended.topology.closed for kept in on_rank_0)


@pytest.mark.slow
def test_strategies_of_some_ranks_are_freed_by_them(comm, monkeypatch):
    """Ranks that were not in a strategy know nothing of it."""
    monkeypatch.setattr(_Resources, "_collect_at", 1)
    monkeypatch.setattr(replica_group, "_COLLECT_AT", 1)
    part = comm.Split(comm.rank % 2, comm.rank)
    for _ in range(3 + comm.rank % 2):
        mpidist.MirroredStrategy(communicator=part).reduce("SUM", 1)
    gc.collect()
    for _ in range(2):
        strategy = mpidist.MirroredStrategy(communicator=comm)
        assert strategy.reduce("SUM", 1) == comm.size
    members = tuple(part.group.Translate_ranks(None, MPI.COMM_WORLD.group))
    assert members not in [found for (_, found), _ in _Resources.list_dropped()]
    strategy.experimental_finalize()
    part.Free()
