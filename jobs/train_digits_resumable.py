"""Train as `train_digits.py` does, in a job that may be ended at any time.

    mpirun -n 2 python jobs/train_digits_resumable.py --checkpoint-dir run
    sbatch jobs/train.sbatch

It saves a checkpoint at regular intervals, and when it is about to be ended (SIGTERM,
SIGUSR1, Slurm's time limit): then it exits with 99, which requests a requeue. The next
job continues from the last checkpoint, in the middle of an epoch, on any number of
ranks, with the same final result. Under Open MPI's `mpirun --with-ft ulfm` the
surviving ranks continue in the same way when a rank dies.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import digits  # before NumPy: each rank computes on one core
import numpy as np
import train_digits
from tqdm import tqdm

import mpidist


class Results:
    """The results of the epochs until now, and sums over the batches of this one."""

    def __init__(self) -> None:
        self.epochs: list[list[float]] = []  # training loss, test loss, accuracy
        self.loss, self.rows = 0.0, 0.0

    def get_state(self) -> dict[str, Any]:
        """Return what a checkpoint saves."""
        epochs = np.array(self.epochs).reshape(-1, 3)
        return {"epochs": epochs, "loss": float(self.loss), "rows": self.rows}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint saved."""
        self.epochs = state["epochs"].tolist()
        self.loss, self.rows = state["loss"], state["rows"]


def train(options: argparse.Namespace, strategy: mpidist.Strategy) -> None:
    """Train on all ranks; if some die, again on the survivors."""
    training_rows, test_rows = train_digits.read(strategy, options)
    with strategy.scope():
        network = train_digits.Network(options)
    results = Results()
    checkpoint = mpidist.Checkpoint(
        strategy=strategy,
        weights=network.weights,
        velocity=network.velocity,
        batches=iter(training_rows),
        results=results,
    )
    manager = mpidist.CheckpointManager(
        checkpoint, options.checkpoint_dir, max_to_keep=2, is_background=True
    )
    handler = mpidist.PreemptionCheckpointHandler(None, manager)  # restores the last

    done = len(results.epochs)
    steps, rows, seconds = 0, 0.0, 0.0  # of this run of the job
    with (
        manager,
        contextlib.closing(handler),
        tqdm(initial=done, total=options.epochs, disable=not strategy.is_first) as bar,
    ):
        while len(results.epochs) < options.epochs:
            start = time.perf_counter()
            for batch in checkpoint.batches:
                batch_loss, batch_rows = network.step(strategy, batch)
                results.loss += batch_loss
                results.rows += batch_rows
                # Here `batches` has given what the weights have learned, and no more
                handler.save_checkpoint_if_preempted()
                steps, rows = steps + 1, rows + batch_rows
                if steps % options.save_every == 0:
                    manager.save()
            seconds += time.perf_counter() - start
            loss = float(results.loss / results.rows)
            scores = train_digits.evaluate(strategy, network, test_rows)
            results.epochs.append([loss, *scores])
            results.loss, results.rows = 0.0, 0.0
            checkpoint.batches = iter(training_rows)
            bar.update()
        if steps:
            manager.save()
    if strategy.is_first:
        rate = rows / max(seconds, 1e-9)
        digits.report(results.epochs, rate, strategy.size, options.plot)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the whole job."""
    parser = digits.make_parser(__doc__)
    add = parser.add_argument
    add("--checkpoint-dir", type=Path, default="run", help="where it saves and goes on")
    add("--save-every", type=digits.at_least_one, default=20, metavar="STEPS")
    options = parser.parse_args(arguments)
    mpidist.run_elastic(
        functools.partial(train, options),
        functools.partial(mpidist.MirroredStrategy, options.devices),
    )


if __name__ == "__main__":
    main()
