"""Train a neural network on handwritten digits, data-parallel over MPI ranks.

    mpirun -n 2 python jobs/train_digits.py
    srun -n 8 python jobs/train_digits.py --epochs 60 --plot curves.png

Every rank computes the gradients of its part of each global batch; their sums over all
ranks change the weights. The number of ranks does not change the result: the order of
the rows depends on the seed only, and sums are formed in double precision, so the order
of summation changes only the 16th digit, and six digits are printed.

`digits.py` makes the data. `train_digits_resumable.py` is the same training with
checkpoints, for jobs that may be ended early.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

# Each rank computes on one core: its BLAS must not use the cores of other ranks
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import digits
import numpy as np
from tqdm import tqdm

import mpidist


class Perceptron:
    """One hidden layer of rectified units, and a softmax over the classes.

    All weights are one vector, so that a step sums and changes one array.
    """

    def __init__(self, hidden: int, seed: int):
        random = np.random.default_rng(seed)
        first = []
        for rows, columns in ((digits.PIXELS, hidden), (hidden, digits.CLASSES)):
            first.append(random.normal(scale=np.sqrt(2 / rows), size=(rows, columns)))
            first.append(np.zeros(columns))
        self.weights = mpidist.Variable(np.concatenate([a.ravel() for a in first]))
        stops = np.cumsum([a.size for a in first]).tolist()
        self.places = [
            (slice(stop - a.size, stop), a.shape)
            for stop, a in zip(stops, first, strict=True)
        ]
        # Of each step, in the same memory: new memory costs time
        self.sums = np.empty(stops[-1] + 2, like=self.weights.value())
        self.gradients = self.layers(self.sums)

    def layers(self, vector: Any) -> list[Any]:
        """Return weights, biases, weights, biases: views of a vector of all."""
        return [vector[place].reshape(shape) for place, shape in self.places]

    def forward(self, layers: Sequence[Any], pixels: Any) -> tuple[Any, Any, Any]:
        """Return inputs, hidden units, and log-probabilities of the classes."""
        w1, b1, w2, b2 = layers
        x = pixels / digits.BRIGHTEST
        hidden = x @ w1
        hidden += b1  # in place
        np.maximum(hidden, 0, out=hidden)
        log_p = hidden @ w2
        log_p += b2
        log_p -= log_p.max(axis=1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
        return x, hidden, log_p

    def differentiate(self, pixels: Any, y: Any) -> Any:
        """Return sums over the rows as one vector: gradients, losses, and rows.

        The next call overwrites it.
        """
        layers = self.layers(self.weights.value())
        x, hidden, log_p = self.forward(layers, pixels)
        target = one_hot(y)
        d_logits = np.exp(log_p)
        d_logits -= target
        d_hidden = d_logits @ layers[2].T
        d_hidden *= hidden > 0
        d_w1, d_b1, d_w2, d_b2 = self.gradients
        np.matmul(x.T, d_hidden, out=d_w1)
        d_hidden.sum(axis=0, out=d_b1)
        np.matmul(hidden.T, d_logits, out=d_w2)
        d_logits.sum(axis=0, out=d_b2)
        self.sums[-2], self.sums[-1] = -(log_p * target).sum(), len(y)
        return self.sums

    def scores(self, pixels: Any, y: Any) -> tuple[Any, Any, Any]:
        """Return each row's loss, 1.0 where the likeliest class is `y`, and 1.0."""
        _, _, log_p = self.forward(self.layers(self.weights.value()), pixels)
        losses = -(log_p * one_hot(y)).sum(axis=1)
        return losses, 1.0 * (log_p.argmax(axis=1) == y), np.ones_like(losses)


def one_hot(y: Any) -> Any:
    """Return rows that are true in column `y`, an array where `y` lies."""
    return y[:, None] == np.arange(digits.CLASSES, like=y)


class Momentum:
    """Gradient descent with momentum 0.9."""

    def __init__(self, weights: mpidist.Variable, learning_rate: float):
        self.weights, self.learning_rate = weights, learning_rate
        self.velocity = mpidist.Variable(0.0 * weights)

    def apply(self, strategy: mpidist.Strategy, gradient: Any, rows: Any) -> None:
        """Change the weights, given a sum of gradients. In cross-replica context."""
        given = self.velocity, gradient, rows
        strategy.extended.update(self.weights, self.descend, given)

    def descend(
        self,
        weights: mpidist.Variable,
        velocity: mpidist.Variable,
        gradient: Any,
        rows: Any,
    ) -> None:
        """Change this replica's copies of the weights and of the velocity."""
        change = 0.9 * velocity
        gradient *= self.learning_rate / rows
        change -= gradient
        velocity.assign(change)
        weights.assign_add(change)


class Trainer:
    """The model, its optimizer, and sums over the rows of the epoch until now."""

    def __init__(self, options: argparse.Namespace):
        self.model = Perceptron(options.hidden, options.seed)
        self.optimizer = Momentum(self.model.weights, options.learning_rate)
        # Of losses, and of rows; where the weights are, so that no step waits for them
        self.sums = np.zeros(2, like=self.model.weights.value())

    def step(self, pixels: Any, y: Any) -> None:
        """Train on a global batch, of which this replica has these rows."""
        context = mpidist.get_replica_context()
        # The rows are summed, too, as the last replicas may have fewer
        sums = context.all_reduce("SUM", self.model.differentiate(pixels, y))
        context.merge_call(self.optimizer.apply, args=(sums[:-2], sums[-1]))
        self.sums += sums[-2:]

    def end_epoch(self) -> float:
        """Return the mean loss of the epoch's rows; the next begins."""
        loss, rows = self.sums.tolist()
        self.sums[:] = 0
        return float(loss / rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print how well it went."""
    options = digits.make_parser(__doc__).parse_args(arguments)
    strategy = mpidist.MirroredStrategy(options.devices)
    train, test = read(strategy, options)
    with strategy.scope():
        trainer = Trainer(options)

    is_first = strategy.extended.replica_id == 0
    history, rows, seconds = [], 0.0, 0.0
    for _ in tqdm(range(options.epochs), disable=not is_first, unit="epoch"):
        seconds += train_epoch(strategy, trainer, train)
        rows += float(trainer.sums[1])
        scores = evaluate(strategy, trainer.model, test)
        history.append([trainer.end_epoch(), *scores])
    ranks = strategy.num_replicas_in_sync
    if is_first:
        alone = rate_alone(options) if ranks > 1 else None
        digits.report(history, rows / seconds, ranks, options.plot, alone)
    strategy.barrier()


def train_epoch(
    strategy: mpidist.Strategy, trainer: Trainer, train: mpidist.DistributedDataset
) -> float:
    """Train on all batches once, and return how many seconds that took."""
    start = time.perf_counter()
    for batch in train:
        strategy.run(trainer.step, args=batch)
    return time.perf_counter() - start


def read(
    strategy: mpidist.Strategy, options: argparse.Namespace
) -> tuple[mpidist.DistributedDataset, mpidist.DistributedDataset]:
    """Return training and test rows in global batches, divided over the ranks."""

    def write_missing() -> None:
        if mpidist.get_replica_context().replica_id_in_sync_group == 0:
            digits.write_missing(options.data_dir, options.shifts)

    strategy.run(write_missing)  # all ranks wait, or raise what one of them raises
    train_files, test_file = digits.paths(options.data_dir, options.shifts)
    train = mpidist.Dataset.from_hdf5(train_files, ["x", "y"]).cache()
    train = train.shuffle(seed=options.seed).batch(options.batch_size)
    test = mpidist.Dataset.from_hdf5(test_file, ["x", "y"]).batch(options.batch_size)
    distribute = strategy.experimental_distribute_dataset
    return distribute(train), distribute(test)


def evaluate(
    strategy: mpidist.Strategy, model: Perceptron, test: mpidist.DistributedDataset
) -> tuple[float, float]:
    """Return the mean loss and the accuracy over all test rows."""
    sums = np.zeros(3)
    for batch in test:
        scores = strategy.run(model.scores, args=batch)
        sums += [float(total) for total in strategy.reduce("SUM", scores, axis=0)]
    loss, correct, rows = sums.tolist()
    return loss / rows, correct / rows


def rate_alone(options: argparse.Namespace) -> float:
    """Return how many rows per second this rank trains on alone.

    It trains from the start for about a second, at least two steps. The others wait.
    """
    from mpi4py import MPI  # not before mpidist, which sees that it starts well

    strategy = mpidist.MirroredStrategy(options.devices, communicator=MPI.COMM_SELF)
    train, _ = read(strategy, options)
    with strategy.scope():
        trainer = Trainer(options)
    batches = itertools.chain.from_iterable(itertools.repeat(train))  # of all epochs
    strategy.run(trainer.step, args=next(batches))  # warms up
    trainer.end_epoch()
    start, seconds = time.perf_counter(), 0.0
    while seconds < 1:
        strategy.run(trainer.step, args=next(batches))
        seconds = time.perf_counter() - start
    return float(trainer.sums[1] / seconds)


if __name__ == "__main__":
    main()
