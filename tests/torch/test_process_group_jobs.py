"""Jobs that start and end `torch.distributed` over MPI, in all ways."""

import textwrap

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.mpirun

START = """
import datetime, os, signal, sys, threading
import torch, torch.distributed as dist
from mpi4py import MPI
import mpidist, mpidist.torch
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

def total(group=None):
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    return int(ones)
"""


@pytest.fixture
def job(mpirun):
    """Runs a script; returns its sorted lines, or its errors if it is to fail."""

    def run(script, ranks=2, fails=False):
        ended = mpirun(ranks, START + textwrap.dedent(script), fails=fails)
        lines = sorted(ended.stdout.split("\n"))[1:]
        return (lines, ended.stderr) if fails else lines

    return run


def test_a_group_is_destroyed_and_made_again(job):
    """The second one by environment variables, the third one of some ranks."""
    lines = job(
        """
        for turn in range(3):
            dist.init_process_group("mpidist")
            print(turn, total())
            dist.destroy_process_group()
        here = MPI.COMM_WORLD.bcast(os.getpid())
        os.environ["MASTER_ADDR"] = "localhost"
        os.environ["MASTER_PORT"] = str(20000 + here % 9999)
        mpidist.torch.init_process_group(MPI.COMM_WORLD)
        print(3, total())
        dist.destroy_process_group()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        dist.init_process_group("mpidist")
        print(4, total())
        dist.destroy_process_group()
        half = MPI.COMM_WORLD.Split(rank // 2)
        mpidist.torch.init_process_group(half, datetime.timedelta(seconds=300))
        print(5, total(), dist.get_world_size())
        print(6, [total(dist.new_group([r])) for r in range(half.size)][half.rank])
        dist.destroy_process_group()
        """,
        ranks=3,
    )
    threes = [f"{turn} 3" for turn in range(5) for _ in range(3)]
    assert lines == [*threes, "5 1 1", "5 2 2", "5 2 2", *["6 1"] * 3]


def test_other_ranks_than_mpis_are_an_error_on_all_ranks(job):
    lines = job(
        """
        cases = [
            dict(store=dist.HashStore(), rank=rank, world_size=4),
            dict(store=dist.HashStore(), rank=(rank + rank // 2) % 2, world_size=3),
            dict(rank=rank, world_size=4),
            dict(rank=size - 1 - rank, world_size=size),
            dict(world_size=4 if rank == 1 else -1),
            dict(),
        ]
        for number, case in enumerate(cases):
            if not case:
                os.environ["RANK"] = "0"
            try:
                dist.init_process_group("mpidist", **case)
                print(number)
            except ValueError as error:
                assert "but MPI's are" in str(error), error
        del os.environ["RANK"]
        dist.init_process_group("mpidist", rank=rank, world_size=size)
        print(total() == size == dist.get_world_size(), dist.get_rank() == rank)
        """,
        ranks=3,
    )
    assert lines == ["True True"] * 3


def test_no_other_host_reaches_the_store_of_a_job_on_one_node(job):
    lines = job(
        """
        import contextlib, pathlib

        def everywhere():
            # The sockets of this process that listen on all interfaces
            own, found = set(), set()
            for number in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    own.add(os.readlink(f"/proc/self/fd/{number}"))
            for table in ("tcp", "tcp6"):
                text = pathlib.Path("/proc/net", table).read_text()
                for row in map(str.split, text.splitlines()[1:]):
                    is_any = not row[1].split(":")[0].strip("0")
                    if row[3] == "0A" and is_any and f"socket:[{row[9]}]" in own:
                        found.add(row[1])
            return found

        before = everywhere()
        dist.init_process_group("mpidist")
        assert dist.distributed_c10d._get_default_store().num_keys() >= 0
        print(everywhere() - before)
        """
    )
    assert lines == ["set()", "set()"]


def test_beside_a_backend_of_another_device(job):
    lines = job(
        """
        try:
            dist.init_process_group("cpu:mpidist,cuda:gloo")
        except mpidist.UnsupportedError as error:
            assert torch.__version__ < "2.14", error
            print("from 2.14 on" in str(error))
            sys.exit()
        assert torch.__version__ >= "2.14"
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        gathered = [None] * size
        dist.all_gather_object(gathered, rank)
        received = torch.zeros(1)
        works = [
            dist.all_reduce(torch.ones(100_000), async_op=True),
            dist.isend(torch.ones(1), 1 - rank),
            dist.irecv(received, 1 - rank),
        ]
        while not all(work.is_completed() for work in works):
            pass
        try:
            dist.all_reduce(torch.ones(2 + rank))
        except mpidist.MismatchError as error:
            print(total() == size and gathered == [0, 1] and "differ" in str(error))
        dist.destroy_process_group()
        """
    )
    assert lines == ["True", "True"]


def test_beside_a_default_group_of_another_backend(job):
    """Whose threads end with it: they crash if they outlive the interpreter."""
    lines = job(
        """
        import contextlib, gc, glob, pathlib

        def threads_of_gloo():
            count = 0
            for path in glob.glob("/proc/self/task/*/comm"):
                with contextlib.suppress(OSError):  # another thread has ended
                    count += "gloo_runloop" in pathlib.Path(path).read_text()
            return count

        gc.disable()
        dist.init_process_group("gloo")  # met by MPI
        group = dist.new_group(backend="mpidist")
        print(total(), total(group), threads_of_gloo() > 0)
        dist.destroy_process_group()
        print(threads_of_gloo())
        """
    )
    assert lines == ["0", "0", "2 2 True", "2 2 True"]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_loss_of_a_process_ends_the_job(job, is_async):
    lines, _ = job(
        f"""
        dist.init_process_group("mpidist")
        total()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(torch.ones(500_000), async_op={is_async})
        if work is not None:
            work.wait()
        print("went on")
        """,
        ranks=3,
        fails=True,
    )
    assert "went on" not in lines


def test_a_program_may_end_with_its_group(job):
    """Neither waited for, nor destroyed."""
    lines = job(
        """
        dist.init_process_group("mpidist")
        total()
        ones = torch.ones(3_000_000)
        work = dist.all_reduce(ones, async_op=True)
        print("end")
        """
    )
    assert lines == ["end", "end"]
