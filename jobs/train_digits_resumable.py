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
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Each rank computes on one core: its BLAS must not use the cores of other ranks
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import digits
import numpy as np
import train_digits
from tqdm import tqdm

import mpidist


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


def train(options: argparse.Namespace, strategy: mpidist.Strategy) -> None:
    """Train on all ranks; if some die, again on the survivors."""
    training_rows, test_rows = train_digits.read(strategy, options)
    with strategy.scope():
        trainer = train_digits.Trainer(options)
    history = History()
    checkpoint = mpidist.Checkpoint(
        strategy=strategy,
        weights=trainer.model.weights,
        velocity=trainer.optimizer.velocity,
        sums=trainer.sums,
        batches=iter(training_rows),
        history=history,
    )
    manager = mpidist.CheckpointManager(
        checkpoint, options.checkpoint_dir, max_to_keep=2, is_background=True
    )
    handler = mpidist.PreemptionCheckpointHandler(None, manager)  # restores the last

    is_first = strategy.extended.replica_id == 0
    done, epochs = len(history.epochs), options.epochs
    steps, rows, seconds = 0, 0.0, 0.0  # in this run of the job
    with (
        manager,
        contextlib.closing(handler),
        tqdm(initial=done, total=epochs, disable=not is_first, unit="epoch") as bar,
    ):
        while len(history.epochs) < epochs:
            start, before = time.perf_counter(), float(trainer.sums[1])
            for batch in checkpoint.batches:
                strategy.run(trainer.step, args=batch)
                # Here `batches` has given what the weights have learned, and no more
                handler.save_checkpoint_if_preempted()
                steps += 1
                if steps % options.save_every == 0:
                    manager.save()
            seconds += time.perf_counter() - start
            rows += float(trainer.sums[1]) - before
            scores = train_digits.evaluate(strategy, trainer.model, test_rows)
            history.epochs.append([trainer.end_epoch(), *scores])
            checkpoint.batches = iter(training_rows)
            bar.update()
        if steps:
            manager.save()
    if is_first:
        rate, ranks = rows / max(seconds, 1e-9), strategy.num_replicas_in_sync
        digits.report(history.epochs, rate, ranks, options.plot)


class History:
    """The results of the epochs until now; in checkpoints they are one array."""

    def __init__(self) -> None:
        self.epochs: list[list[float]] = []

    def get_state(self) -> dict[str, Any]:
        """Return what `set_state` takes."""
        return {"epochs": np.array(self.epochs).reshape(-1, 3)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.epochs = state["epochs"].tolist()


if __name__ == "__main__":
    main()
