"""Train a convolutional network of PyTorch on handwritten digits, in one process.

    python jobs/train_torch_single.py

`train_torch.py` is the same on all MPI ranks, with checkpoints. Both have the same rows
in each batch and the same initial weights, so the loss differs only in the last digits
of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import digits  # before PyTorch: it computes on one core, as a rank does
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import mpidist


def make_network(hidden: int) -> Any:
    """Return a network that takes `(rows, 64)` pixels and gives 10 logits."""
    first = nn.Conv2d(1, 8, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2)
    second = nn.Conv2d(8, 16, 3, padding=1), nn.SiLU(), nn.Flatten()
    dense = nn.Linear(256, hidden), nn.SiLU(), nn.Linear(hidden, 10)
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *first, *second, *dense)


def read(options: Any) -> tuple[Any, Any]:
    """Return training and test rows in batches."""
    digits.write_missing(options.data_dir, options.shifts)
    files, test_file = digits.paths(options.data_dir, options.shifts)
    train, test = (
        TensorDataset(*map(torch.from_numpy, digits.read(paths)))
        for paths in (files, [test_file])
    )
    # In place of shuffle=True: the rows that train_torch.py has in each batch
    order = mpidist.Dataset.range(len(train)).shuffle(seed=options.seed)
    order = order.batch(options.batch_size).repeat(options.epochs)
    return DataLoader(train, batch_sampler=order), DataLoader(test, options.batch_size)


def evaluate(model: Any, batches: Any) -> tuple[Any, Any]:
    """Return the mean loss and the accuracy over all test rows."""
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for x, y in batches:
            logits = model(x)
            loss = cross_entropy(logits, y, reduction="sum")
            right = (logits.argmax(1) == y).sum()
            sums += torch.stack([loss, right, torch.tensor(len(y))])
    loss_sum, right_rows, rows = sums.tolist()
    return loss_sum / rows, right_rows / rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print how well it went."""
    parser = digits.make_parser(__doc__)
    parser.set_defaults(epochs=5, batch_size=128, learning_rate=0.1, hidden=64)
    options = parser.parse_args(arguments)
    train, test = read(options)

    torch.manual_seed(options.seed)
    model = make_network(options.hidden)
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate, momentum=0.9)
    for x, y in tqdm(train):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    loss, accuracy = evaluate(model, test)
    print(f"loss={loss:.6f} accuracy={accuracy:.4f}")


if __name__ == "__main__":
    main()
