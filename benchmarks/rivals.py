"""Other libraries that communicate, and what benchmarks give them to do."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import harness

if TYPE_CHECKING:
    from mpi4py import MPI

RAW, GLOO = "raw MPI", "torch gloo"
MWMS = "TF MultiWorkerMirrored"

# Given arrays, a function that adds up each over all ranks
Reducer = Callable[[Sequence[Any]], Callable[[], None]]
Shape = tuple[int, ...]


@contextlib.contextmanager
def torch_group(comm: MPI.Intracomm, shared: str | None = None) -> Iterator[bool]:
    """Start torch's default process group, over gloo. Collective.

    Gives whether torch is installed. One thread computes.

    Args:
      comm: the ranks.
      shared: a folder that all of them see; None for that of temporary files.
    """
    if not harness.is_everywhere(comm, "torch"):
        yield False
        return
    import torch
    import torch.distributed as torch_distributed

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=shared) as own:
        torch_distributed.init_process_group(
            "gloo",
            store=torch_distributed.FileStore(f"{comm.bcast(own)}/store", comm.size),
            rank=comm.rank,
            world_size=comm.size,
            timeout=datetime.timedelta(seconds=60),
        )
        try:
            yield True
        finally:
            comm.Barrier()
            torch_distributed.destroy_process_group()
            comm.Barrier()  # before the store is removed


@contextlib.contextmanager
def gloo(
    comm: MPI.Intracomm, shared: str | None = None
) -> Iterator[Callable[[Any], Any] | None]:
    """Give a function that sums an array over all ranks in place, or None. Collective.

    The arguments are those of `torch_group`.
    """
    with torch_group(comm, shared) as is_there:
        if not is_there:
            yield None
            return
        import torch
        import torch.distributed as torch_distributed

        yield lambda array: torch_distributed.all_reduce(torch.from_numpy(array))


def tensorflow_strategy(comm: MPI.Intracomm, host: str = "127.0.0.1") -> Any:
    """Return TensorFlow's strategy for several processes; None without. Collective.

    Args:
      comm: the workers.
      host: under which the others find this one.
    """
    if not harness.is_everywhere(comm, "tensorflow"):
        return None
    with socket.socket() as free:
        free.bind((host, 0))
        workers = comm.allgather(f"{host}:{free.getsockname()[1]}")
    task = {"type": "worker", "index": comm.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    return tf.distribute.MultiWorkerMirroredStrategy()


def multi_worker(comm: MPI.Intracomm, host: str = "127.0.0.1") -> Reducer | None:
    """Return a reducer by TensorFlow, see `tensorflow_strategy`. Collective.

    In replica context its all_reduce of tensors is refused with one CPU per worker, so
    this is `Strategy.reduce`, in a tf.function.
    """
    strategy = tensorflow_strategy(comm, host)
    if strategy is None:
        return None
    import tensorflow as tf

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


def resnet50() -> Iterator[Shape]:
    """Yield 161 shapes, of 25.6 million numbers (He et al., CVPR 2016, table 1)."""

    def convolution(outputs: int, inputs: int, width: int) -> Iterator[Shape]:
        yield outputs, inputs, width, width
        yield from [(outputs,), (outputs,)]  # batch normalisation: scale and shift

    yield from convolution(64, 3, 7)
    inputs = 64
    for blocks, width in [(3, 64), (4, 128), (6, 256), (3, 512)]:
        for block in range(blocks):
            yield from convolution(width, inputs, 1)
            yield from convolution(width, width, 3)
            yield from convolution(4 * width, width, 1)
            if block == 0:
                yield from convolution(4 * width, inputs, 1)
            inputs = 4 * width
    yield from [(1000, 2048), (1000,)]


def gpt2() -> Iterator[Shape]:
    """Yield 148 shapes, of 124 million numbers (Radford et al., 2019: GPT-2 small)."""
    width = 768
    yield from [(50257, width), (1024, width)]
    for _ in range(12):
        yield from [(width,), (width,)]
        yield from [(width, 3 * width), (3 * width,), (width, width), (width,)]
        yield from [(width,), (width,)]
        yield from [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    yield from [(width,), (width,)]


# The shapes of gradients, parameter by parameter
MODELS = {"ResNet-50": list(resnet50()), "GPT-2 small": list(gpt2())}
