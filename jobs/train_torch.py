"""Train a convolutional network of PyTorch on handwritten digits, on all MPI ranks.

    mpirun -n 2 python jobs/train_torch.py

`train_torch_single.py` is the same in one process. Both have the same rows in each
batch and the same initial weights, so on any number of ranks the loss differs only in
the last digits of float32.

This job may be ended at any time (SIGTERM, SIGUSR1, Slurm's time limit): it exits with
99, and the next run continues in the middle of the epoch, on any number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import digits  # before PyTorch: each rank computes on one core
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import mpidist
from mpidist.torch import DistributedDataParallel, as_tensors


def make_network(hidden: int) -> Any:
    """Return a network that takes `(rows, 64)` pixels and gives 10 logits."""
    first = nn.Conv2d(1, 8, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2)
    second = nn.Conv2d(8, 16, 3, padding=1), nn.SiLU(), nn.Flatten()
    dense = nn.Linear(256, hidden), nn.SiLU(), nn.Linear(hidden, 10)
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *first, *second, *dense)


def read(strategy: mpidist.Strategy, options: Any) -> tuple[Any, Any]:
    """Return training and test rows in batches, which are divided over the ranks."""
    files, test_file = digits.make_files(strategy, options.data_dir, options.shifts)
    train = mpidist.Dataset.from_hdf5(files, ["x", "y"]).shuffle(seed=options.seed)
    test = mpidist.Dataset.from_hdf5(test_file, ["x", "y"])
    first, second = (
        strategy.experimental_distribute_dataset(
            rows.batch(options.batch_size).map(digits.as_float32)
        )
        for rows in (train, test)
    )
    return as_tensors(first), as_tensors(second)


def evaluate(strategy: mpidist.Strategy, model: Any, batches: Any) -> tuple[Any, Any]:
    """Return the mean loss and the accuracy over all test rows."""
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for x, y in batches:
            logits = model(x)
            loss = cross_entropy(logits, y, reduction="sum")
            right = (logits.argmax(1) == y).sum()
            sums += torch.stack([loss, right, torch.tensor(len(y))])
    loss_sum, right_rows, rows = strategy.reduce("SUM", sums).tolist()
    return loss_sum / rows, right_rows / rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, from the last checkpoint on, and print how well it went."""
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
    with contextlib.closing(handler):
        while saved.epoch < options.epochs:
            title, is_quiet = f"epoch {saved.epoch}", not strategy.is_first
            for x, y in tqdm(saved.batches, title, disable=is_quiet):
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                handler.save_checkpoint_if_preempted()
            saved.epoch, saved.batches = saved.epoch + 1, iter(train)
            manager.save()
    loss, accuracy = evaluate(strategy, model, test)
    if strategy.is_first:
        print(f"loss={loss:.6f} accuracy={accuracy:.4f}")


if __name__ == "__main__":
    main()
