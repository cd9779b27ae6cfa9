"""Other libraries that all-reduce, for `bench_collectives.py`."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from mpi4py import MPI

__all__ = ["gloo"]


@contextlib.contextmanager
def gloo(comm: MPI.Intracomm) -> Iterator[Callable[[Any], None] | None]:
    """Give a function that sums an array over all ranks, or None. Collective."""
    found = importlib.util.find_spec("torch") is not None
    if not comm.allreduce(found, MPI.LAND):
        yield None
        return
    import torch
    import torch.distributed as torch_distributed

    torch.set_num_threads(1)
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    store = torch_distributed.FileStore(f"{folder}/store", comm.size)
    torch_distributed.init_process_group(
        "gloo",
        store=store,
        rank=comm.rank,
        world_size=comm.size,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        yield lambda array: torch_distributed.all_reduce(torch.from_numpy(array))
    finally:
        comm.Barrier()
        torch_distributed.destroy_process_group()
