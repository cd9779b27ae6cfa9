"""The same training by hand, by the job of this project, and by other libraries.

All train the network of `jobs/train_digits.py` on the same HDF5 files, in shuffled
global batches, with momentum, in float64, and know the losses of each step.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
from mpi4py import MPI

import mpidist
from mpidist.comm.consensus import consensus, flight_recorder
from mpidist.util.counters import Counters

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
import digits
import train_digits

__all__ = [
    "ByHand",
    "Contestant",
    "Ours",
    "tensorflow",
    "torch_ddp",
    "without_counters",
]

MOMENTUM = 0.9


# Trains for one epoch, and returns the mean loss of its rows
Contestant = Callable[[], float]


def read_all(files: Sequence[Path]) -> tuple[Any, Any]:
    """Return all rows: they are few, so one would keep them in memory."""
    pairs = []
    for path in files:
        with h5py.File(path) as file:
            pairs.append((file["x"][:], file["y"][:]))
    x, y = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return x, y


def first_weights(options: argparse.Namespace) -> list[Any]:
    """Return the weights with which all begin."""
    rng = np.random.default_rng(options.seed)
    sizes = [(digits.PIXELS, options.hidden), (options.hidden, 10)]
    weights = []
    for fan_in, fan_out in sizes:
        scale = np.sqrt(2 / fan_in)
        weights += [
            rng.normal(scale=scale, size=(fan_in, fan_out)),
            np.zeros(fan_out),
        ]
    return weights


class Shares:
    """The rows of this rank in each global batch, in an order that changes by epoch."""

    def __init__(
        self, comm: MPI.Intracomm, files: Sequence[Path], options: argparse.Namespace
    ):
        self._rank, self._size, self._batch = comm.rank, comm.size, options.batch_size
        self._x, self._y = read_all(files)
        self._random = np.random.default_rng(options.seed)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        order = self._random.permutation(len(self._x))
        for begin in range(0, len(order), self._batch):
            rows = order[begin : begin + self._batch]
            share = -(-len(rows) // self._size)
            mine = rows[self._rank * share : (self._rank + 1) * share]
            yield self._x[mine] / 16.0, self._y[mine]


class ByHand:
    """NumPy, h5py and mpi4py: loss, rows and gradients in one all-reduce a step."""

    def __init__(
        self, comm: MPI.Intracomm, files: Sequence[Path], options: argparse.Namespace
    ):
        self._comm, self._rate = comm, options.learning_rate
        self._shares = Shares(comm, files, options)
        first = first_weights(options)
        count = sum(weight.size for weight in first)
        self._packed = np.zeros(2 + count)
        self._flat, self._velocity = np.zeros(count), np.zeros(count)
        cuts = np.cumsum([weight.size for weight in first])[:-1]
        self._weights, self._gradients = (
            [part.reshape(w.shape) for part, w in zip(np.split(a, cuts), first)]
            for a in (self._flat, self._packed[2:])
        )
        for weight, value in zip(self._weights, first):
            weight[:] = value

    def epoch(self) -> float:
        """Train, see `Contestant`."""
        packed, totals = self._packed, np.zeros(2)
        for x, y in self._shares:
            self._differentiate(x, y)
            self._comm.Allreduce(MPI.IN_PLACE, packed)
            totals += packed[:2]
            self._velocity *= MOMENTUM
            self._velocity += packed[2:] / packed[1]
            self._flat -= self._rate * self._velocity
        return float(totals[0] / totals[1])

    def _differentiate(self, x: Any, y: Any) -> None:
        w1, b1, w2, b2 = self._weights
        d_w1, d_b1, d_w2, d_b2 = self._gradients
        hidden = np.maximum(x @ w1 + b1, 0)
        logits = hidden @ w2 + b2
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        rows = np.arange(len(y))
        self._packed[:2] = -logits[rows, y].sum(), len(y)
        d_logits = np.exp(logits)
        d_logits[rows, y] -= 1
        d_hidden = (d_logits @ w2.T) * (hidden > 0)
        np.matmul(x.T, d_hidden, out=d_w1)
        d_hidden.sum(axis=0, out=d_b1)
        np.matmul(hidden.T, d_logits, out=d_w2)
        d_logits.sum(axis=0, out=d_b2)


class Ours:
    """The functions of `jobs/train_digits.py`, as it calls them."""

    def __init__(self, strategy: mpidist.Strategy, options: argparse.Namespace):
        self._strategy = strategy
        self._train, _ = train_digits.read(strategy, options)
        with strategy.scope():
            self._trainer = train_digits.Trainer(options)

    def epoch(self) -> float:
        """Train, see `Contestant`."""
        for batch in self._train:
            self._strategy.run(self._trainer.step, args=batch)
        return self._trainer.end_epoch()


class _Uncounted(Counters):
    """Counts no steps."""

    begin = mark = end_input = end_epoch = lambda *_: None


class _UncountedRecorder(flight_recorder.Recorder):
    """Keeps the last collectives, as ever, and counts nothing."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.counters = _Uncounted()

    def note_arrivals(self, is_agreed: bool, _: object) -> bool:
        return is_agreed

    def count(self, *_: object) -> None:
        return None

    def end(self) -> None:
        if self._opened:
            self._opened = 0
            self._words[self._place + flight_recorder.ENDED] = time.monotonic_ns()


def without_counters() -> mpidist.Strategy:
    """Make a strategy that does not know where its time goes. Collective."""
    with mock.patch.object(consensus, "Recorder", _UncountedRecorder):
        return mpidist.MirroredStrategy(["CPU:0"])


@contextlib.contextmanager
def torch_ddp(
    comm: MPI.Intracomm, files: Sequence[Path], options: argparse.Namespace
) -> Iterator[Contestant | None]:
    """Give a contestant that is torch's DistributedDataParallel, over gloo; or None."""
    found = importlib.util.find_spec("torch") is not None
    if not comm.allreduce(found, MPI.LAND):
        yield None
        return
    import torch
    import torch.distributed as torch_distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    torch_distributed.init_process_group(
        "gloo",
        store=torch_distributed.FileStore(f"{folder}/store", comm.size),
        rank=comm.rank,
        world_size=comm.size,
        timeout=datetime.timedelta(seconds=60),
    )
    pixels, hidden = digits.PIXELS, options.hidden
    model = torch.nn.Sequential(
        torch.nn.Linear(pixels, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10)
    ).double()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), first_weights(options)):
            parameter.copy_(torch.from_numpy(value.T))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(
        parallel.parameters(), options.learning_rate, momentum=MOMENTUM
    )
    shares = Shares(comm, files, options)

    def train() -> float:
        total, rows = 0.0, 0
        for x, y in shares:
            optimizer.zero_grad()
            logits = parallel(torch.from_numpy(x))
            loss = torch.nn.functional.cross_entropy(
                logits, torch.from_numpy(y.astype(np.int64))
            )
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(y)
            rows += len(y)
        total, rows = comm.allreduce(total), comm.allreduce(rows)
        return total / rows

    try:
        yield train
    finally:
        comm.Barrier()
        torch_distributed.destroy_process_group()


def tensorflow(
    comm: MPI.Intracomm, files: Sequence[Path], options: argparse.Namespace
) -> Contestant | None:
    """Return a contestant that is MultiWorkerMirroredStrategy; None without it."""
    found = importlib.util.find_spec("tensorflow") is not None
    if not comm.allreduce(found, MPI.LAND):
        return None
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = comm.allgather(free.getsockname()[1])
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
            "task": {"type": "worker", "index": comm.rank},
        }
    )
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = [tf.Variable(value) for value in first_weights(options)]
        velocities = [tf.Variable(tf.zeros_like(weight)) for weight in weights]
    x, y = read_all(files)
    dataset = tf.data.Dataset.from_tensor_slices((x, y.astype(np.int64)))
    dataset = dataset.shuffle(len(x), seed=options.seed).batch(options.batch_size)
    dataset = dataset.map(lambda x, y: (tf.cast(x, tf.float64) / 16.0, y))
    distributed = strategy.experimental_distribute_dataset(dataset)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            w1, b1, w2, b2 = weights
            logits = tf.nn.relu(x @ w1 + b1) @ w2 + b2
            loss = tf.reduce_sum(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            )
        gradients = tape.gradient(loss, weights)
        rows = tf.cast(tf.shape(y)[0], tf.float64)
        context = tf.distribute.get_replica_context()
        loss, rows, *gradients = context.all_reduce("SUM", [loss, rows, *gradients])
        for weight, velocity, gradient in zip(weights, velocities, gradients):
            velocity.assign(MOMENTUM * velocity + gradient / rows)
            weight.assign_sub(options.learning_rate * velocity)
        return loss, rows

    @tf.function
    def step(x: Any, y: Any) -> Any:
        loss, rows = strategy.run(replica_step, args=(x, y))
        return strategy.reduce("MEAN", loss, axis=None), strategy.reduce(
            "MEAN", rows, axis=None
        )

    def train() -> float:
        totals = np.zeros(2)
        for x, y in distributed:
            totals += [float(number) for number in step(x, y)]
        return float(totals[0] / totals[1])

    return train
