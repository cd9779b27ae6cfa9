"""Train a convolutional network of PyTorch on handwritten digits, on all MPI ranks.

    mpirun -n 2 python jobs/train_torch.py --epochs 5

`train_torch_single.py` is the same in one process. This job may be ended at any time
(SIGTERM, SIGUSR1, Slurm's time limit): it exits with 99, and the next run continues in
the middle of the epoch, on any number of ranks. The order of the rows and the initial
weights do not depend on that number, and gradients are weighted by rows, so the loss
differs only in the last digits of float32.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank computes on one core

import digits
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import mpidist
from mpidist.torch import DistributedDataParallel, as_tensors


def make_network(hidden: int) -> Any:
    """Return a network that takes `(rows, 64)` pixels and gives 10 logits."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(256, hidden),
        nn.SiLU(),
        nn.Linear(hidden, digits.CLASSES),
    )


def to_inputs(x: Any, y: Any) -> tuple[Any, Any]:
    """Return pixels from 0 to 1, and labels as numbers of 64 bits."""
    return x.float() / digits.BRIGHTEST, y.long()


def read(strategy: mpidist.Strategy, options: Any) -> tuple[Any, Any]:
    """Return training and test rows in global batches, divided over the ranks."""

    def write_missing() -> None:
        if strategy.extended.replica_id == 0:
            digits.write_missing(options.data_dir, options.shifts)

    strategy.run(write_missing)  # all ranks wait, or raise what one of them raises
    train_files, test_file = digits.paths(options.data_dir, options.shifts)
    train = mpidist.Dataset.from_hdf5(train_files, ["x", "y"]).shuffle(
        seed=options.seed
    )
    test = mpidist.Dataset.from_hdf5(test_file, ["x", "y"])
    batches = [rows.batch(options.batch_size) for rows in (train, test)]
    distributed = map(strategy.experimental_distribute_dataset, batches)
    first, second = map(as_tensors, distributed)
    return first, second


def evaluate(
    strategy: mpidist.Strategy, model: Any, batches: Any
) -> tuple[float, float]:
    """Return the mean loss and the accuracy over all test rows."""
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for batch in batches:
            x, y = to_inputs(*batch)
            logits = model(x)
            losses = cross_entropy(logits, y, reduction="none")
            correct = logits.argmax(1) == y
            sums += torch.tensor([losses.sum(), correct.sum(), len(y)])
    loss, correct_rows, rows = strategy.reduce("SUM", sums).tolist()
    return loss / rows, correct_rows / rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print how well it went."""
    parser = digits.make_parser(__doc__)
    parser.set_defaults(epochs=5, batch_size=128, learning_rate=0.1, hidden=64)
    parser.add_argument("--checkpoint-dir", type=Path, default="run-torch")
    options = parser.parse_args(arguments)
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    train, test = read(strategy, options)

    torch.manual_seed(options.seed)
    model = DistributedDataParallel(make_network(options.hidden), strategy)
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate, momentum=0.9)
    saved = mpidist.Checkpoint(
        model=model, optimizer=optimizer, batches=iter(train), epoch=0
    )
    manager = mpidist.CheckpointManager(saved, options.checkpoint_dir, max_to_keep=2)
    handler = mpidist.PreemptionCheckpointHandler(None, manager)  # restores the last

    is_first = strategy.extended.replica_id == 0
    bar = tqdm(
        initial=saved.epoch, total=options.epochs, disable=not is_first, unit="epoch"
    )
    with contextlib.closing(handler), bar:
        while saved.epoch < options.epochs:
            for batch in saved.batches:
                x, y = to_inputs(*batch)
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                handler.save_checkpoint_if_preempted()
            saved.epoch += 1
            saved.batches = iter(train)
            manager.save()
            bar.update()
    loss, accuracy = evaluate(strategy, model, test)
    if is_first:
        print(f"loss={loss:.6f} accuracy={accuracy:.4f}")


if __name__ == "__main__":
    main()
