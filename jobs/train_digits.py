"""Train a neural network on handwritten digits, data-parallel over MPI ranks.

    mpirun -n 2 python jobs/train_digits.py
    srun -n 8 python jobs/train_digits.py --epochs 60 --plot curves.png

Every rank computes the gradients of its share of each global batch; their sums over all
ranks change the weights. The number of ranks does not change the result: the order of
the rows is a function of the seed alone, and all sums are formed in double precision,
so that the order of summation shows in the 16th digit, of which six are printed.

The data are made by `digits.py`. `train_digits_resumable.py` is the same training with
checkpoints, for jobs that may be ended before they are done.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

# Each rank computes on one core: its BLAS must not take those of other ranks
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import digits
import numpy as np
from tqdm import tqdm

import mpidist


class Perceptron:
    """One hidden layer of rectified units, and a softmax over the classes."""

    def __init__(self, hidden: int, seed: int):
        random = np.random.default_rng(seed)
        self.weights = []
        for rows, columns in ((digits.PIXELS, hidden), (hidden, digits.CLASSES)):
            first = random.normal(scale=np.sqrt(2 / rows), size=(rows, columns))
            self.weights.append(mpidist.Variable(first))
            self.weights.append(mpidist.Variable(np.zeros(columns)))

    def forward(self, x: Any) -> tuple[Any, Any]:
        """Return the hidden units and the log-probabilities of the classes."""
        w1, b1, w2, b2 = self.weights
        hidden = x @ w1
        hidden += b1.value()  # in place: new memory in each step costs time
        np.maximum(hidden, 0, out=hidden)
        logits = hidden @ w2 + b2
        logits = logits - logits.max(axis=1, keepdims=True)
        return hidden, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def gradients(self, pixels: Any, y: Any) -> tuple[Any, list[Any]]:
        """Return the sum of the rows' losses, and its gradients, by backpropagation."""
        x = pixels / digits.BRIGHTEST
        hidden, log_p = self.forward(x)
        target = one_hot(y)
        d_logits = np.exp(log_p) - target
        d_hidden = d_logits @ self.weights[2].value().T
        d_hidden *= hidden > 0
        return -(log_p * target).sum(), [
            x.T @ d_hidden,
            d_hidden.sum(axis=0),
            hidden.T @ d_logits,
            d_logits.sum(axis=0),
        ]

    def scores(self, pixels: Any, y: Any) -> tuple[Any, Any, Any]:
        """Return each row's loss, 1.0 where the likeliest class is `y`, and 1.0."""
        _, log_p = self.forward(pixels / digits.BRIGHTEST)
        losses = -(log_p * one_hot(y)).sum(axis=1)
        return losses, 1.0 * (log_p.argmax(axis=1) == y), np.ones_like(losses)


def one_hot(y: Any) -> Any:
    """Return rows that are true in column `y`, an array where `y` lies."""
    return y[:, None] == np.arange(digits.CLASSES, like=y)


class Momentum:
    """Gradient descent with momentum 0.9."""

    def __init__(self, weights: Sequence[mpidist.Variable], learning_rate: float):
        self.weights, self.learning_rate = weights, learning_rate
        self.velocities = [mpidist.Variable(0.0 * w.value()) for w in weights]

    def apply(self, strategy: mpidist.Strategy, gradients: Sequence[Any]) -> None:
        """Change the weights by the mean gradients. In cross-replica context."""
        args = self.velocities, gradients
        strategy.extended.update(self.weights, self.descend, args)

    def descend(
        self,
        weights: Sequence[Any],
        velocities: Sequence[Any],
        gradients: Sequence[Any],
    ) -> None:
        """Change this replica's copies of the weights and velocities."""
        for w, v, gradient in zip(weights, velocities, gradients, strict=True):
            v.assign(0.9 * v + gradient)
            w.assign_sub(self.learning_rate * v)


class Trainer:
    """The model, its optimizer, and sums over the rows of the epoch until now."""

    def __init__(self, options: argparse.Namespace):
        self.model = Perceptron(options.hidden, options.seed)
        self.optimizer = Momentum(self.model.weights, options.learning_rate)
        self.sums = np.zeros(2)  # of losses, and of rows

    def step(self, pixels: Any, y: Any) -> None:
        """Train on a global batch, of which this replica has these rows."""
        context = mpidist.get_replica_context()
        loss, gradients = self.model.gradients(pixels, y)
        # One all-reduce; with the number of rows, as the last replicas may have fewer
        totals = context.all_reduce("SUM", [loss, float(len(y)), *gradients])
        loss, rows, *gradients = totals
        mean = [gradient / rows for gradient in gradients]
        context.merge_call(self.optimizer.apply, args=(mean,))
        self.sums += float(loss), float(rows)

    def end_epoch(self) -> float:
        """Return the mean loss of the epoch's rows; the next begins."""
        loss, rows = self.sums
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
        start = time.perf_counter()
        for batch in train:
            strategy.run(trainer.step, args=batch)
        seconds += time.perf_counter() - start
        rows += trainer.sums[1]
        scores = evaluate(strategy, trainer.model, test)
        history.append([trainer.end_epoch(), *scores])
    if is_first:
        ranks = strategy.num_replicas_in_sync
        digits.report(history, rows / seconds, ranks, options.plot)


def read(
    strategy: mpidist.Strategy, options: argparse.Namespace
) -> tuple[mpidist.DistributedDataset, mpidist.DistributedDataset]:
    """Return training and test rows in global batches, divided over the ranks."""

    def write_missing() -> None:
        if mpidist.get_replica_context().replica_id_in_sync_group == 0:
            digits.write_missing(options.data_dir, options.shifts)

    strategy.run(write_missing)  # all ranks wait, or raise what one of them raises
    train_files, test_file = digits.paths(options.data_dir, options.shifts)
    train = mpidist.Dataset.from_hdf5(train_files, ["x", "y"])
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


if __name__ == "__main__":
    main()
