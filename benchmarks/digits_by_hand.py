"""What `jobs/train_digits.py` does, by hand: with NumPy, h5py and mpi4py alone.

It has the job's options, arithmetic and report. All rows are in memory, a step adds up
one array, and weights change in place.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "jobs"))

import digits  # before NumPy: each rank computes on one core
import h5py
import numpy as np
from mpi4py import MPI

Batch = tuple[Any, Any]


class Network:
    """A layer of rectified units, and a softmax over the ten digits."""

    def __init__(self, options: argparse.Namespace):
        normal, hidden = np.random.default_rng(options.seed).normal, options.hidden
        self.weights = {
            "w1": normal(scale=np.sqrt(2 / 64), size=(64, hidden)),
            "b1": np.zeros(hidden),
            "w2": normal(scale=np.sqrt(2 / hidden), size=(hidden, 10)),
            "b2": np.zeros(10),
        }
        self.velocity = {name: 0 * a for name, a in self.weights.items()}
        self.learning_rate = options.learning_rate
        # Sums of all ranks: the gradients, the loss, and the rows
        self.sums = np.empty(sum(a.size for a in self.weights.values()) + 2)
        ends = np.cumsum([a.size for a in self.weights.values()])
        parts = np.split(self.sums, ends)
        self.gradient = {
            name: part.reshape(a.shape)
            for (name, a), part in zip(self.weights.items(), parts)
        }

    def forward(self, x: Any) -> tuple[Any, Any]:
        """Return the hidden units, and the log-probabilities of the digits."""
        w1, b1, w2, b2 = self.weights.values()
        hidden = x @ w1 + b1
        hidden *= hidden > 0
        logits = hidden @ w2 + b2
        logits -= logits.max(axis=1, keepdims=True)
        return hidden, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def step(self, comm: MPI.Intracomm, batch: Batch) -> tuple[float, float]:
        """Train on a batch; return its loss, a sum over its rows, and their number."""
        x, y = digits.prepare(*batch)
        hidden, log_p = self.forward(x)
        d_logits = np.exp(log_p) - y
        d_hidden = d_logits @ self.weights["w2"].T
        d_hidden *= hidden > 0
        sums = [x.T @ d_hidden, d_hidden.sum(axis=0)]
        sums += [hidden.T @ d_logits, d_logits.sum(axis=0)]
        totals = [-(log_p * y).sum(), len(y)]
        np.concatenate([*(a.reshape(-1) for a in sums), totals], out=self.sums)
        comm.Allreduce(MPI.IN_PLACE, self.sums)
        loss, rows = self.sums[-2:]
        rate = self.learning_rate / rows
        for name, w in self.weights.items():
            velocity = self.velocity[name]
            velocity *= 0.9
            velocity -= rate * self.gradient[name]
            w += velocity
        return loss, rows


class Batches:
    """The rows of this rank in each batch."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        files: Sequence[Path],
        options: argparse.Namespace,
        shuffles: bool,
    ):
        self.rank, self.ranks, self.rows = comm.rank, comm.size, options.batch_size
        pairs = []
        for path in files:
            with h5py.File(path) as file:
                pairs.append((file["x"][:], file["y"][:]))
        self.x, self.y = map(np.concatenate, zip(*pairs))
        self.random = np.random.default_rng(options.seed)
        self.shuffles = shuffles

    def __iter__(self) -> Iterator[Batch]:
        order = np.arange(len(self.x))
        if self.shuffles:
            self.random.shuffle(order)
        for begin in range(0, len(order), self.rows):
            rows = order[begin : begin + self.rows]
            share = -(-len(rows) // self.ranks)
            mine = rows[self.rank * share : (self.rank + 1) * share]
            yield self.x[mine], self.y[mine]


def evaluate(comm: MPI.Intracomm, network: Network, test: Batches) -> list[float]:
    """Return the mean loss and the accuracy over all test rows."""
    sums = np.zeros(3)
    for pixels, labels in test:
        x, y = digits.prepare(pixels, labels)
        _, log_p = network.forward(x)
        right = log_p.argmax(axis=1) == labels
        sums += -(log_p * y).sum(), right.sum(), len(y)
    comm.Allreduce(MPI.IN_PLACE, sums)
    return [float(total / sums[2]) for total in sums[:2]]


def fit(comm: MPI.Intracomm, options: argparse.Namespace) -> tuple[Any, float]:
    """Return training loss, test loss and accuracy by epoch, and rows per second."""
    if comm.rank == 0:
        digits.write_missing(options.data_dir, options.shifts)
    comm.Barrier()
    train_files, test_file = digits.paths(options.data_dir, options.shifts)
    train = Batches(comm, train_files, options, shuffles=True)
    test = Batches(comm, [test_file], options, shuffles=False)
    network = Network(options)
    history, rates = [], []
    for _ in range(options.epochs):
        start, loss, rows = time.perf_counter(), 0.0, 0.0
        for batch in train:
            batch_loss, batch_rows = network.step(comm, batch)
            loss, rows = loss + batch_loss, rows + batch_rows
        rates.append(rows / (time.perf_counter() - start))
        history.append([loss / rows, *evaluate(comm, network, test)])
    return history, float(np.median(rates))


def main() -> None:
    options = digits.make_parser(__doc__).parse_args()
    comm = MPI.COMM_WORLD
    history, rate = fit(comm, options)
    if comm.rank == 0:
        digits.report(history, rate, comm.size, options.plot)


if __name__ == "__main__":
    main()
