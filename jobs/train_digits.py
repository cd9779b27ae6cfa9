"""Train a multilayer perceptron on handwritten digits, data-parallel over MPI ranks.

    mpirun -n 2 python jobs/train_digits.py
    srun -n 8 python jobs/train_digits.py --epochs 60 --plot curves.png

The 1,797 images of 8x8 pixels that scikit-learn carries (UCI, "Optical recognition of
handwritten digits") are written once to several HDF5 files. Then every rank reads its
share of each global batch, and gradients are added up over all ranks.

The number of ranks does not change the result: the order of the global batches is a
function of the seed alone, and all sums are formed in double precision, so that the
order of summation shows in the 16th digit, of which six are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# One replica is one share of the CPU: its BLAS must not take the others' cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import h5py
import numpy as np
from tqdm import tqdm

import mpidist

CLASSES = 10
PIXELS = 64
TRAIN_FILES = 4
TEST_ROWS = 360


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the whole job."""
    options = parse(arguments)
    strategy = mpidist.MirroredStrategy(devices=options.devices)
    is_first = strategy.extended.replica_id == 0
    train_files, test_files = prepare_data(strategy, options.data_dir)
    train = read(strategy, train_files, options, shuffle=True)
    test = read(strategy, test_files, options, shuffle=False)

    with strategy.scope():
        model = Perceptron(options.hidden, options.seed)
        optimizer = Momentum(model.weights, options.learning_rate)
    history = []
    seconds = 0.0
    rows = 0
    epochs = tqdm(range(options.epochs), disable=not is_first, unit="epoch")
    for _ in epochs:
        start = time.perf_counter()
        total = train_epoch(strategy, model, optimizer, train)
        seconds += time.perf_counter() - start
        rows += total.rows
        result = evaluate(strategy, model, test)
        epochs.set_postfix(loss=result.loss, accuracy=result.accuracy, refresh=False)
        history.append((total.loss, result.loss, result.accuracy))

    if options.plot is not None:
        strategy.run(lambda: plot(history, options.plot) if is_first else None)
    if is_first:
        print(
            f"loss={result.loss:.6f} accuracy={result.accuracy:.4f} "
            f"samples_per_s={rows / seconds:.0f} ranks={strategy.num_replicas_in_sync}"
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), help="where the HDF5 files are")
    add("--epochs", type=at_least_one, default=40)
    add("--batch-size", type=at_least_one, default=64, help="rows over all ranks")
    add("--learning-rate", type=float, default=0.05)
    add("--hidden", type=at_least_one, default=128, help="units of the hidden layer")
    add("--seed", type=int, default=0, help="of the order of rows and first weights")
    add("--plot", type=Path, help="write a picture of the curves to this file")
    add(
        "--devices", nargs="+", help="such as CPU:0; by default this rank's GPU, or CPU"
    )
    return parser.parse_args(arguments)


def at_least_one(text: str) -> int:
    """Return the whole number that `text` is, which must be 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return int(text)


def prepare_data(
    strategy: mpidist.Strategy, folder: Path
) -> tuple[list[Path], list[Path]]:
    """Return the training and test files; rank 0 writes those that are missing.

    Collective: `run` returns when all ranks have left it, and raises on all what it
    raises on one.
    """
    train = [
        folder / f"digits-train-{i}-of-{TRAIN_FILES}.h5" for i in range(TRAIN_FILES)
    ]
    test = [folder / "digits-test.h5"]

    def write_missing() -> None:
        context = mpidist.get_replica_context()
        assert context is not None
        if context.replica_id_in_sync_group == 0:
            write_digits(train, test)

    strategy.run(write_missing)
    return train, test


def write_digits(train: Sequence[Path], test: Sequence[Path]) -> None:
    """Write the files that do not exist yet, each of them whole or not at all."""
    if all(path.exists() for path in (*train, *test)):
        return
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1797).permutation(len(images))
    cuts = np.linspace(TEST_ROWS, len(order), len(train) + 1).astype(int)
    parts = [order[:TEST_ROWS], *np.split(order, cuts[:-1])[1:]]
    for path, rows in zip((*test, *train), parts, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, h5py.File(temporary, "w") as file:
            file["x"] = images[rows].astype(np.uint8)
            file["y"] = labels[rows].astype(np.uint8)


class replacing:  # noqa: N801 (reads as a verb in a with statement)
    """Give a temporary path, and rename it to `path` if nothing was raised."""

    def __init__(self, path: Path):
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> Path:
        return self._temporary

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            with open(self._temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(self._temporary, self._path)
        else:
            self._temporary.unlink(missing_ok=True)


def read(
    strategy: mpidist.Strategy,
    files: Sequence[Path],
    options: argparse.Namespace,
    shuffle: bool,
) -> mpidist.DistributedDataset:
    """Return the rows of `files` in global batches, divided over the ranks."""
    dataset = mpidist.Dataset.from_hdf5(files, ["x", "y"])
    if shuffle:
        dataset = dataset.shuffle(seed=options.seed)
    dataset = dataset.batch(options.batch_size).map(lambda x, y: (x / 16.0, y))
    return strategy.experimental_distribute_dataset(dataset)


class Perceptron:
    """One hidden layer of rectified units, and a softmax over the classes."""

    def __init__(self, hidden: int, seed: int):
        rng = np.random.default_rng(seed)
        sizes = [(PIXELS, hidden), (hidden, CLASSES)]
        self.weights = []
        for fan_in, fan_out in sizes:
            scale = np.sqrt(2 / fan_in)
            first = rng.normal(scale=scale, size=(fan_in, fan_out))
            self.weights += [
                mpidist.Variable(first),
                mpidist.Variable(np.zeros(fan_out)),
            ]

    def forward(self, x: Any) -> tuple[Any, Any]:
        """Return the hidden units and the log-probabilities of the classes."""
        w1, b1, w2, b2 = self.weights
        hidden = np.maximum(x @ w1 + b1, 0)
        logits = hidden @ w2 + b2
        logits = logits - logits.max(axis=1, keepdims=True)
        return hidden, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def losses(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Return each row's cross entropy, and 1.0 where the best class is `y`."""
        _, log_p = self.forward(x)
        return -(log_p * one_hot(y)).sum(axis=1), 1.0 * (log_p.argmax(axis=1) == y)

    def gradients(self, x: Any, y: Any) -> tuple[Any, list[Any]]:
        """Return the sum of the rows' losses, and its gradients, by backpropagation."""
        hidden, log_p = self.forward(x)
        target = one_hot(y)
        d_logits = np.exp(log_p) - target
        d_hidden = (d_logits @ self.weights[2].value().T) * (hidden > 0)
        return -(log_p * target).sum(), [
            x.T @ d_hidden,
            d_hidden.sum(axis=0),
            hidden.T @ d_logits,
            d_logits.sum(axis=0),
        ]


def one_hot(y: Any) -> Any:
    """Return rows of zeros with a one in column `y`, where `y` lies."""
    columns = np.cumsum(np.ones_like(y, shape=(1, CLASSES)), axis=1) - 1
    return 1.0 * (y[:, None] == columns)


class Momentum:
    """Gradient descent with momentum 0.9."""

    def __init__(self, weights: Sequence[mpidist.Variable], learning_rate: float):
        self._weights = weights
        self._learning_rate = learning_rate
        self._velocities = [mpidist.Variable(0.0 * w.value()) for w in weights]

    def apply(self, strategy: mpidist.Strategy, gradients: Sequence[Any]) -> None:
        """Change the weights by the mean gradients. In cross-replica context."""
        update = strategy.extended.update
        pairs = zip(self._weights, self._velocities, gradients, strict=True)
        for weight, velocity, gradient in pairs:
            update(velocity, lambda v, g: v.assign(0.9 * v + g), args=(gradient,))
            step = self._learning_rate * velocity.value()
            update(weight, lambda w, s: w.assign_sub(s), args=(step,))


@dataclasses.dataclass
class Score:
    """Means over `rows` rows."""

    loss: float
    accuracy: float
    rows: int


def train_epoch(
    strategy: mpidist.Strategy,
    model: Perceptron,
    optimizer: Momentum,
    batches: mpidist.DistributedDataset,
) -> Score:
    """Take one step per global batch; return the mean loss on the way."""

    def step(x: Any, y: Any) -> Any:
        context = mpidist.get_replica_context()
        assert context is not None
        loss, gradients = model.gradients(x, y)
        # Sums over all replicas, and the number of rows: a late replica may have fewer
        total = context.all_reduce("SUM", [loss, float(len(x)), *gradients])
        loss, rows, *gradients = total
        mean = [gradient / rows for gradient in gradients]
        context.merge_call(optimizer.apply, args=(mean,))
        return loss, rows

    loss, rows = 0.0, 0.0
    for batch in batches:
        totals = strategy.run(step, args=batch)
        ((batch_loss, batch_rows),) = strategy.experimental_local_results(totals)
        loss += float(batch_loss)
        rows += batch_rows
    return Score(loss / rows, float("nan"), int(rows))


def evaluate(
    strategy: mpidist.Strategy, model: Perceptron, batches: mpidist.DistributedDataset
) -> Score:
    """Return the exact means over all rows of `batches`."""

    def losses(x: Any, y: Any) -> Any:
        loss, correct = model.losses(x, y)
        return loss, correct, np.ones_like(loss)

    totals = np.zeros(3)
    for batch in batches:
        rows = strategy.run(losses, args=batch)
        totals += [float(t) for t in strategy.reduce("SUM", rows, axis=0)]
    return Score(totals[0] / totals[2], totals[1] / totals[2], int(totals[2]))


def plot(history: Sequence[tuple[float, float, float]], path: Path) -> None:
    """Draw losses and accuracy by epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    left = figure.subplots()
    right = left.twinx()
    train_loss, test_loss, accuracy = zip(*history, strict=True)
    epochs = range(1, len(history) + 1)
    left.plot(epochs, train_loss, label="loss, training")
    left.plot(epochs, test_loss, label="loss, test")
    right.plot(epochs, accuracy, "k--", label="accuracy, test")
    left.set(xlabel="epoch", ylabel="cross entropy", yscale="log")
    right.set(ylabel="accuracy")
    figure.legend(loc="outside upper center", ncols=3)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=120)


if __name__ == "__main__":
    main()
