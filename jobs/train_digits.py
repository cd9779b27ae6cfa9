"""Train a neural network on handwritten digits, on all MPI ranks.

    mpirun -n 2 python jobs/train_digits.py
    srun -n 8 python jobs/train_digits.py --epochs 60 --plot curves.png

Each rank computes the gradients of its rows of a batch; `reduce` adds up those of all
ranks, and every rank changes its weights by these sums. The number of ranks changes the
16th digit of a sum, and none of those that are printed. `digits.py` has the data, the
options and the plot; `train_digits_resumable.py` is the same with checkpoints.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import digits  # before NumPy: each rank computes on one core
import numpy as np
from tqdm import tqdm

import mpidist


class Network:
    """A layer of rectified units, and a softmax over the ten digits."""

    def __init__(self, options: argparse.Namespace):
        normal, hidden = np.random.default_rng(options.seed).normal, options.hidden
        first = {
            "w1": normal(scale=np.sqrt(2 / 64), size=(64, hidden)),
            "b1": np.zeros(hidden),
            "w2": normal(scale=np.sqrt(2 / hidden), size=(hidden, 10)),
            "b2": np.zeros(10),
        }
        self.weights = {name: mpidist.Variable(a) for name, a in first.items()}
        self.velocity = {name: mpidist.Variable(0 * a) for name, a in first.items()}
        self.learning_rate = options.learning_rate

    def forward(self, x: Any) -> tuple[Any, Any]:
        """Return the hidden units, and the log-probabilities of the digits."""
        w1, b1, w2, b2 = (w.value() for w in self.weights.values())
        hidden = x @ w1 + b1
        hidden *= hidden > 0
        logits = hidden @ w2 + b2
        logits -= logits.max(axis=1, keepdims=True)
        return hidden, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def gradients(self, pixels: Any, labels: Any) -> dict[str, Any]:
        """Return sums over this rank's rows: gradients, the loss, and the rows."""
        x, y = digits.prepare(pixels, labels)
        hidden, log_p = self.forward(x)
        d_logits = np.exp(log_p) - y
        d_hidden = d_logits @ self.weights["w2"].value().T
        d_hidden *= hidden > 0
        layer1 = {"w1": x.T @ d_hidden, "b1": d_hidden.sum(axis=0)}
        layer2 = {"w2": hidden.T @ d_logits, "b2": d_logits.sum(axis=0)}
        return {**layer1, **layer2, "loss": -(log_p * y).sum(), "rows": float(len(y))}

    def scores(self, pixels: Any, labels: Any) -> tuple[Any, Any, Any]:
        """Return sums over this rank's rows: the loss, right answers, and the rows."""
        x, y = digits.prepare(pixels, labels)
        _, log_p = self.forward(x)
        right = log_p.argmax(axis=1) == labels
        return -(log_p * y).sum(), right.sum(), len(y)

    def step(self, strategy: mpidist.Strategy, batch: Any) -> tuple[Any, float]:
        """Train on a batch; return its loss, a sum over its rows, and their number."""
        sums = strategy.reduce("SUM", strategy.run(self.gradients, args=batch))
        strategy.extended.update([*self.weights.values()], self.descend, (sums,))
        return sums["loss"], sums["rows"]

    def descend(self, weights: list[mpidist.Variable], sums: dict[str, Any]) -> None:
        """Change this rank's copies, with momentum; they are equal on all ranks."""
        rate = self.learning_rate / sums["rows"]
        for w, (name, velocity) in zip(weights, self.velocity.items()):
            velocity.assign(0.9 * velocity - rate * sums[name])
            w.assign_add(velocity)


def read(strategy: mpidist.Strategy, options: argparse.Namespace) -> tuple[Any, Any]:
    """Return training and test rows in batches, which are divided over the ranks."""
    files, test_file = digits.make_files(strategy, options.data_dir, options.shifts)
    train = mpidist.Dataset.from_hdf5(files, ["x", "y"]).cache()
    train = train.shuffle(seed=options.seed).batch(options.batch_size)
    test = mpidist.Dataset.from_hdf5(test_file, ["x", "y"]).batch(options.batch_size)
    distribute = strategy.experimental_distribute_dataset
    return distribute(train), distribute(test)


def evaluate(strategy: mpidist.Strategy, network: Network, test: Any) -> list[float]:
    """Return the mean loss and the accuracy over all test rows."""
    sums = np.zeros(3)
    for batch in test:
        scores = strategy.reduce("SUM", strategy.run(network.scores, args=batch))
        sums += [float(score) for score in scores]
    return [float(total / sums[2]) for total in sums[:2]]


def fit(strategy: mpidist.Strategy, options: argparse.Namespace) -> tuple[Any, float]:
    """Return training loss, test loss and accuracy by epoch, and rows per second."""
    train, test = read(strategy, options)
    with strategy.scope():
        network = Network(options)
    history, rates, name = [], [], f"ranks={strategy.size}"
    for _ in tqdm(range(options.epochs), name, disable=not strategy.is_first):
        start, loss, rows = time.perf_counter(), 0.0, 0.0
        for batch in train:
            batch_loss, batch_rows = network.step(strategy, batch)
            loss, rows = loss + batch_loss, rows + batch_rows
        mean_loss = float(loss / rows)  # waits for the GPU
        rates.append(rows / (time.perf_counter() - start))
        history.append([mean_loss, *evaluate(strategy, network, test)])
    return history, float(np.median(rates))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print how well it went, and how much faster than one rank alone."""
    options = digits.make_parser(__doc__).parse_args(arguments)
    strategy = mpidist.MirroredStrategy(options.devices)
    history, rate = fit(strategy, options)
    if strategy.is_first:
        rate_alone = digits.rate_alone(fit, options) if strategy.size > 1 else None
        digits.report(history, rate, strategy.size, options.plot, rate_alone)
    strategy.barrier()  # the other ranks wait until the first has printed


if __name__ == "__main__":
    main()
