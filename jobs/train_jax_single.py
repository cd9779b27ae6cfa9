"""Train a small convolutional network on handwritten digits with JAX, in one process.

    python jobs/train_jax_single.py

`train_jax.py` is the same over MPI ranks; `diff` shows what it takes. Both have the
same rows in each batch, so the loss differs only in the last digits of float32.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import digits
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import mpidist
import mpidist.jax


def first_weights(seed: int) -> dict[str, Any]:
    """Return the weights of two convolutions and of one dense layer."""
    random = np.random.default_rng(seed)
    shapes = {"c1": (3, 3, 1, 16), "c2": (3, 3, 16, 32), "dense": (128, digits.CLASSES)}
    weights = {}
    for name, shape in shapes.items():
        scale = np.sqrt(2 / np.prod(shape[:-1]))
        weights[name] = jnp.asarray(random.normal(scale=scale, size=shape), "float32")
        weights[f"{name}_bias"] = jnp.zeros(shape[-1], "float32")
    return weights


def log_probabilities(weights: dict[str, Any], pixels: Any) -> Any:
    """Return those of the classes, `(rows, CLASSES)`."""
    x = pixels.reshape(-1, 8, 8, 1).astype("float32") / digits.BRIGHTEST
    for name in ("c1", "c2"):  # each halves the image
        x = jax.lax.conv_general_dilated(
            x, weights[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + weights[f"{name}_bias"])
    logits = x.reshape(-1, 128) @ weights["dense"] + weights["dense_bias"]
    return jax.nn.log_softmax(logits)


def loss_of(weights: dict[str, Any], pixels: Any, y: Any) -> Any:
    """Return the mean loss over the rows."""
    log_p = log_probabilities(weights, pixels)
    return -jnp.mean(jnp.take_along_axis(log_p, y[:, None].astype(int), axis=1))


def scores_of(weights: dict[str, Any], pixels: Any, y: Any) -> Any:
    """Return sums over the rows: losses, right answers, and rows."""
    log_p = log_probabilities(weights, pixels)
    losses = -jnp.take_along_axis(log_p, y[:, None].astype(int), axis=1)
    right = (log_p.argmax(axis=1) == y).sum()
    return jnp.stack([losses.sum(), right, len(y)])


def train_step(weights: Any, velocity: Any, pixels: Any, y: Any) -> Any:
    """Return weights and velocity after a batch; momentum is 0.9."""
    gradient = jax.grad(loss_of)(weights, pixels, y)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradient)
    weights = jax.tree.map(lambda w, v: w - 0.05 * v, weights, velocity)
    return weights, velocity


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, from the last checkpoint on, and print how well it went."""
    parser = argparse.ArgumentParser(description="Train a convolutional network.")
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"))
    add("--checkpoint-dir", type=Path, default=Path("run-jax"))
    add("--epochs", type=int, default=5)
    add("--batch-size", type=int, default=96)
    options = parser.parse_args(arguments)
    digits.write_missing(options.data_dir, shifts=0)
    files, test_file = digits.paths(options.data_dir, shifts=0)
    train = mpidist.Dataset.from_hdf5(files, ["x", "y"])
    train = train.shuffle(seed=0).batch(options.batch_size).repeat(options.epochs)
    test = mpidist.Dataset.from_hdf5(test_file, ["x", "y"]).batch(options.batch_size)
    batches, test_batches = mpidist.jax.as_jax(train), mpidist.jax.as_jax(test)

    weights = first_weights(seed=0)
    velocity = jax.tree.map(jnp.zeros_like, weights)
    rows = iter(batches)
    saved = mpidist.Checkpoint(weights=weights, velocity=velocity, batches=rows)
    manager = mpidist.CheckpointManager(saved, options.checkpoint_dir, max_to_keep=2)
    handler = mpidist.PreemptionCheckpointHandler(None, manager)  # restores the last
    step = jax.jit(train_step)
    with manager, contextlib.closing(handler):
        for pixels, y in tqdm(saved.batches):
            changed = step(saved.weights, saved.velocity, pixels, y)
            saved.weights, saved.velocity = changed
            handler.save_checkpoint_if_preempted()
        manager.save()

    scores = jax.jit(scores_of)
    sums = sum(scores(saved.weights, *b) for b in test_batches)
    loss, right, rows = np.asarray(sums).tolist()
    print(f"loss={loss / rows:.6f} accuracy={right / rows:.4f}")


if __name__ == "__main__":
    main()
