"""What a training step costs, beside one by hand and by other libraries.

    mpirun -n 1 python benchmarks/bench_step.py --output .../step-mpich-1rank.json
    mpirun -n 2 python benchmarks/bench_step.py --output .../step-mpich-2ranks.json

The step is that of `jobs/train_digits.py`, of a small network whose weights are one
array (`packed_network.py`): read the batch, compute the gradients, reduce them and
change the weights. By hand is the same with NumPy, h5py and mpi4py, all rows in memory,
and one flat all-reduce. The contestants take turns of two epochs, in an order that
changes. Only the second epoch counts: in the first one, the caches still hold what the
contestant before has used, which no job would have beside it. Results are microseconds
per step of the slowest rank, medians over the epochs, and ratios of turns of the same
round. The mean losses show at the end that all have done the same work. The machine
should do nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness

# isort: split
import digits
import h5py
import numpy as np
import packed_network
import rivals
import train_digits
from mpi4py import MPI

import mpidist

# Where a step costs little, what the library costs shows
SMALL = ["--shifts=0", "--hidden=128", "--batch-size=64", "--learning-rate=0.05"]
MOMENTUM = 0.9
HAND, DDP, MWMS = "by hand", "torch DDP (gloo)", "TensorFlow MWMS"
# What ours may cost at most, by each of the others
TARGETS = {HAND: 1.5, DDP: 0.2, MWMS: 0.1}

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
    """The job's rows, and the network with its weights in one array."""

    def __init__(self, strategy: mpidist.Strategy, options: argparse.Namespace):
        self._strategy = strategy
        self._train, _ = train_digits.read(strategy, options)
        with strategy.scope():
            self._trainer = packed_network.Trainer(options)

    def epoch(self) -> float:
        """Train, see `Contestant`."""
        for batch in self._train:
            self._strategy.run(self._trainer.step, args=batch)
        return self._trainer.end_epoch()


def torch_ddp(
    comm: MPI.Intracomm, files: Sequence[Path], options: argparse.Namespace
) -> Contestant:
    """Return a contestant that is torch's DistributedDataParallel, in its group."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = torch.nn.Sequential(
        torch.nn.Linear(digits.PIXELS, options.hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(options.hidden, 10),
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
        totals = np.zeros(2)
        for x, y in shares:
            optimizer.zero_grad()
            logits = parallel(torch.from_numpy(x))
            loss = torch.nn.functional.cross_entropy(
                logits, torch.from_numpy(y.astype(np.int64))
            )
            loss.backward()
            optimizer.step()
            totals += float(loss.detach()) * len(y), len(y)
        loss_sum, rows = comm.allreduce(totals)
        return float(loss_sum / rows)

    return train


def tensorflow(
    comm: MPI.Intracomm, files: Sequence[Path], options: argparse.Namespace
) -> Contestant | None:
    """Return a contestant that is MultiWorkerMirroredStrategy; None without it."""
    strategy = rivals.tensorflow_strategy(comm)
    if strategy is None:
        return None
    import tensorflow as tf

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


def measure(
    comm: MPI.Intracomm,
    contestants: Mapping[str, Contestant],
    steps: int,
    epochs: int,
) -> tuple[harness.Times, dict[str, float]]:
    """Return seconds per step of each epoch, and the last mean losses. Collective.

    The first turn of each is not counted.
    """
    times: harness.Times = {name: [] for name in contestants}
    losses: dict[str, float] = {}
    order = np.random.default_rng(0)  # the same on all ranks
    for turn in range(1 + epochs):
        for name in order.permutation(list(contestants)).tolist():

            def train(name: str = name) -> None:
                losses[name] = contestants[name]()

            train()
            seconds = harness.slowest(comm, train)
            if turn:
                times[name].append(seconds / steps)
    return times, losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--epochs", type=int, default=30, help="of each contestant (default 30)"
    )
    options = parser.parse_args(arguments)
    comm = MPI.COMM_WORLD
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    with tempfile.TemporaryDirectory() as own, rivals.torch_group(comm) as has_torch:
        folder = Path(comm.bcast(own))
        job = digits.make_parser(None).parse_args([*SMALL, f"--data-dir={folder}"])
        ours = Ours(strategy, job)  # writes the data
        files, _ = digits.paths(folder, job.shifts)
        contestants: dict[str, Contestant | None] = {
            "mpidist": ours.epoch,
            HAND: ByHand(comm, files, job).epoch,
            DDP: torch_ddp(comm, files, job) if has_torch else None,
            MWMS: tensorflow(comm, files, job),
        }
        present = {name: train for name, train in contestants.items() if train}
        steps = -(-len(read_all(files)[0]) // job.batch_size)
        epochs = 1 if options.tiny else options.epochs
        times, losses = measure(comm, present, steps, epochs)
        comm.Barrier()
    case = f"training step, {comm.size} rank{'s' if comm.size > 1 else ''}"
    targets = TARGETS if comm.size > 1 else {HAND: TARGETS[HAND]}
    harness.report(
        harness.beside(case, times, targets, ours="mpidist"),
        options.output,
        comm,
        rows_per_batch=job.batch_size,
        hidden=job.hidden,
        losses=losses,
        skipped=[f"{n}: not installed" for n in contestants if n not in present],
    )
    found = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    harness.say(comm, f"mean losses: {found}")


if __name__ == "__main__":
    main()
