"""Train a convolutional network of Keras on handwritten digits, in one process.

    python jobs/train_keras_single.py

`train_keras.py` is the same on all MPI ranks, with checkpoints. Both have the same rows
in each batch and the same initial weights, so the loss differs only in the last digits
of float32. KERAS_BACKEND is "torch" (the default here) or "jax".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import digits  # before the backend: it computes on one core, as a rank does

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras

import keras
import numpy as np
from keras import layers

import mpidist


def make_model(options: Any) -> Any:
    """Return a network that takes `(rows, 64)` pixels and gives 10 logits."""
    conv: dict[str, Any] = {"padding": "same", "activation": "silu"}
    model = keras.Sequential(
        [
            layers.Input((digits.PIXELS,)),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(8, 3, **conv),
            layers.AveragePooling2D(2),
            layers.Conv2D(16, 3, **conv),
            layers.Flatten(),
            layers.Dense(options.hidden, activation="silu"),
            layers.Dense(digits.CLASSES),
        ]
    )
    optimizer = keras.optimizers.SGD(options.learning_rate, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def batches(options: Any, x: Any, y: Any) -> Iterator[Any]:
    """Yield training rows; in place of shuffle=True, as train_keras.py has them."""
    order = mpidist.Dataset.range(len(y)).shuffle(seed=options.seed)
    for rows in order.batch(options.batch_size).repeat(options.epochs):
        yield x[rows], y[rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print how well it went."""
    parser = digits.make_parser(__doc__)
    parser.set_defaults(epochs=5, batch_size=128, learning_rate=0.05, hidden=64)
    options = parser.parse_args(arguments)
    digits.write_missing(options.data_dir, options.shifts)
    files, test_file = digits.paths(options.data_dir, options.shifts)
    train, test = digits.read(files), digits.read([test_file])
    keras.utils.set_random_seed(options.seed)
    model = make_model(options)
    model.fit(
        batches(options, *train),
        epochs=options.epochs,
        steps_per_epoch=int(np.ceil(len(train[1]) / options.batch_size)),
    )
    loss, accuracy = model.evaluate(*test, options.batch_size, verbose=0)
    print(f"loss={loss:.6f} accuracy={accuracy:.4f}")


if __name__ == "__main__":
    main()
