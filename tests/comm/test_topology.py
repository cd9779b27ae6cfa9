"""Which ranks share a node, and what a strategy does over several."""

import gc
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import launching
import pytest
from mpi4py import MPI

import mpidist
from mpidist.comm import replica_group
from mpidist.comm.replica_group import _Resources
from mpidist.device import probe


@pytest.mark.parametrize("count", [1, 2, 3])
def test_so_many_ranks_make_a_node(comm, monkeypatch, make_strategy, count):
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", str(count))
    node = make_strategy().extended.topology.node
    assert node.size == min(count, comm.size - comm.rank + node.rank)


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


UNLIKE = """
import os, sys
names = "PMI_RANK", "OMPI_COMM_WORLD_RANK"
if next(os.environ[name] for name in names if name in os.environ) == "1":
    if sys.argv[1] in ("MPI4PY_RC_THREAD_LEVEL", "OMPI_MCA_mpi_ft_enable"):
        os.environ[sys.argv[1]] = sys.argv[2]
    else:
        from mpidist import _version
        _version.__version__ = "0.0.9"
import mpidist
try:
    mpidist.MirroredStrategy(["CPU:0"])
except mpidist.LaunchError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("version", ""), "the version of mpidist differs between ranks: "),
        (("MPI4PY_RC_THREAD_LEVEL", "serialized"), "MPI_THREAD_SERIALIZED on rank 1"),
        pytest.param(
            *(("OMPI_MCA_mpi_ft_enable", "1"), "True on rank 1"), marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_that_are_started_unlike_are_refused_on_all(mpirun, change, message):
    if launching.is_open_mpi() and change[0].startswith("OMPI"):
        pytest.skip("mpirun itself reads it")
    ended = mpirun(2, UNLIKE, *change, MPIDIST_HANG_SECONDS="60")
    assert ended.stdout.count(message) == 2, ended.stderr
