"""The network of `jobs/train_digits.py` with all weights in one array.

A step sums and changes that array, and reuses the memory of the step before: so little
is left to compute that what the library costs shows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import digits
import numpy as np

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
