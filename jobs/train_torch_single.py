"""Train a convolutional network of PyTorch on handwritten digits, in one process.

    python jobs/train_torch_single.py --epochs 5

`train_torch.py` is the same on many ranks, in about as many lines: compare them. This
one saves after each epoch; after SIGTERM or SIGUSR1 it exits with 99 at the end of the
epoch, and the next run continues from there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core, as a rank of train_torch.py

import digits
import h5py
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


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


def read(files: Sequence[Path]) -> Any:
    """Return a dataset of the rows of files."""
    parts: dict[str, list[Any]] = {"x": [], "y": []}
    for path in files:
        with h5py.File(path) as file:
            for name, found in parts.items():
                found.append(np.asarray(file[name]))
    return TensorDataset(*(torch.from_numpy(np.concatenate(p)) for p in parts.values()))


def evaluate(model: Any, batches: Any) -> tuple[float, float]:
    """Return the mean loss and the accuracy over all test rows."""
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for batch in batches:
            x, y = to_inputs(*batch)
            logits = model(x)
            losses = cross_entropy(logits, y, reduction="none")
            correct = logits.argmax(1) == y
            sums += torch.tensor([losses.sum(), correct.sum(), len(y)])
    loss, correct_rows, rows = sums.tolist()
    return loss / rows, correct_rows / rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print how well it went."""
    parser = digits.make_parser(__doc__)
    parser.set_defaults(epochs=5, batch_size=128, learning_rate=0.1, hidden=64)
    parser.add_argument("--checkpoint-dir", type=Path, default="run-single")
    options = parser.parse_args(arguments)
    digits.write_missing(options.data_dir, options.shifts)
    train_files, test_file = digits.paths(options.data_dir, options.shifts)
    order = torch.Generator().manual_seed(options.seed)
    train = DataLoader(
        read(train_files), options.batch_size, shuffle=True, generator=order
    )
    test = DataLoader(read([test_file]), options.batch_size)

    torch.manual_seed(options.seed)
    model = make_network(options.hidden)
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate, momentum=0.9)
    first, path = 0, options.checkpoint_dir / "last.pt"
    if path.exists():
        state = torch.load(path)
        first = state["epoch"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        order.set_state(state["order"])
    path.parent.mkdir(parents=True, exist_ok=True)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: signals.append(number))

    for epoch in tqdm(range(first, options.epochs), unit="epoch"):
        for batch in train:
            x, y = to_inputs(*batch)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        state = {
            "epoch": epoch + 1,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "order": order.get_state(),
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        if signals:
            sys.exit(99)
    loss, accuracy = evaluate(model, test)
    print(f"loss={loss:.6f} accuracy={accuracy:.4f}")


if __name__ == "__main__":
    main()
