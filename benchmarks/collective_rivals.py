"""Other libraries that all-reduce, for `bench_collectives.py`."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpi4py import MPI

__all__ = ["gloo", "multi_worker"]

# Given arrays, a function that adds each up over all ranks
Reducer = Callable[[Sequence[Any]], Callable[[], None]]


@contextlib.contextmanager
def gloo(
    comm: MPI.Intracomm, shared: str | None = None
) -> Iterator[Callable[[Any], None] | None]:
    """Give a function that sums an array over all ranks, or None. Collective.

    Args:
      comm: the ranks.
      shared: a folder that all of them see; None for that of temporary files.
    """
    found = importlib.util.find_spec("torch") is not None
    if not comm.allreduce(found, MPI.LAND):
        yield None
        return
    import torch
    import torch.distributed as torch_distributed

    torch.set_num_threads(1)
    folder = comm.bcast(tempfile.mkdtemp(dir=shared) if comm.rank == 0 else None)
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


def multi_worker(comm: MPI.Intracomm, host: str = "127.0.0.1") -> Reducer | None:
    """Return a reducer by TensorFlow's strategy for several processes. Collective.

    None without TensorFlow. (In replica context its all_reduce of tensors is refused
    with one CPU per worker; what is timed is `Strategy.reduce`, in a tf.function.)

    Args:
      comm: the workers.
      host: under which the others find this one.
    """
    found = importlib.util.find_spec("tensorflow") is not None
    if not comm.allreduce(found, MPI.LAND):
        return None
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    with socket.socket() as free:
        free.bind((host, 0))
        workers = comm.allgather(f"{host}:{free.getsockname()[1]}")
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": workers},
            "task": {"type": "worker", "index": comm.rank},
        }
    )
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def reducer(arrays: Sequence[Any]) -> Callable[[], None]:
        values = [
            strategy.experimental_distribute_values_from_function(
                lambda _, a=array: tf.constant(a)
            )
            for array in arrays
        ]

        @tf.function
        def reduce() -> Any:
            op = tf.distribute.ReduceOp.SUM
            return [strategy.reduce(op, value, axis=None) for value in values]

        def call() -> None:
            for total in reduce():
                total.numpy()

        return call

    return reducer
