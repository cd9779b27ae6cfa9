"""Train a convolutional network of Keras on handwritten digits, on all MPI ranks.

    mpirun -n 2 python jobs/train_keras.py

`train_keras_single.py` is the same in one process. Both have the same rows in each
batch and the same initial weights, so on any number of ranks the loss differs only in
the last digits of float32. KERAS_BACKEND is "torch" (the default here) or "jax".

This job may be ended at any time (SIGTERM, SIGUSR1, Slurm's time limit): it exits with
99, and the next run continues in the middle of the epoch, on any number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import digits  # before the backend: each rank computes on one core

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras

import keras
from keras import layers

import mpidist
import mpidist.keras


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


def read(strategy: mpidist.Strategy, options: Any) -> tuple[Any, Any]:
    """Return training and test rows in global batches."""
    files, test_file = digits.make_files(strategy, options.data_dir, options.shifts)
    train = mpidist.Dataset.from_hdf5(files, ["x", "y"]).shuffle(seed=options.seed)
    test = mpidist.Dataset.from_hdf5(test_file, ["x", "y"])
    first, second = (
        rows.batch(options.batch_size).map(digits.as_float32) for rows in (train, test)
    )
    return first, second


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, from the last checkpoint on, and print how well it went."""
    parser = digits.make_parser(__doc__)
    parser.set_defaults(epochs=5, batch_size=128, learning_rate=0.05, hidden=64)
    parser.add_argument("--checkpoint-dir", type=Path, default="run-keras")
    options = parser.parse_args(arguments)
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    train, test = read(strategy, options)
    keras.utils.set_random_seed(options.seed)
    model = mpidist.keras.distribute(make_model(options), strategy)
    resume = mpidist.keras.Resume(options.checkpoint_dir)
    model.fit(train, epochs=options.epochs, callbacks=[resume])
    loss, accuracy = model.evaluate(test, verbose=0)
    if strategy.is_first:
        print(f"loss={loss:.6f} accuracy={accuracy:.4f}")


if __name__ == "__main__":
    main()
