"""Train a multilayer perceptron on handwritten digits, data-parallel over MPI ranks.

    mpirun -n 2 python jobs/train_digits.py
    srun -n 8 python jobs/train_digits.py --epochs 60 --plot curves.png
    srun -n 8 python jobs/train_digits.py --checkpoint-dir run

The 1,797 images of 8x8 pixels that scikit-learn carries (UCI, "Optical recognition of
handwritten digits") are written once to several HDF5 files. Then every rank reads its
share of each global batch, and gradients are added up over all ranks.

The number of ranks does not change the result: the order of the global batches is a
function of the seed alone, and all sums are formed in double precision, so that the
order of summation shows in the 16th digit, of which six are printed.

With --checkpoint-dir it saves now and then, while it goes on, and when it is about to
be ended (SIGTERM, SIGUSR1, the end of its time in Slurm): then it exits with 99, which
asks for a requeue. The next job goes on where the last checkpoint was, in the middle of
an epoch, on as many ranks as there are, and ends with the same result. Below Open MPI's
`mpirun --with-ft ulfm` those that are left go on so when a rank dies.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
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
    mpidist.run_elastic(
        functools.partial(work, options),
        functools.partial(mpidist.MirroredStrategy, options.devices),
    )


def work(options: argparse.Namespace, strategy: mpidist.Strategy) -> None:
    """Train on all ranks; once more on those that are left, if some die."""
    is_first = strategy.extended.replica_id == 0
    train_files, test_files = prepare_data(strategy, options.data_dir)
    train = read(strategy, train_files, options, shuffle=True)
    test = read(strategy, test_files, options, shuffle=False)

    with strategy.scope():
        model = Perceptron(options.hidden, options.seed)
        optimizer = Momentum(model.weights, options.learning_rate)
    progress = Progress(train)
    keeper = keeper_of(strategy, options, model, optimizer, progress)
    seconds, rows = 0.0, 0.0
    with keeper, progress.bar(options.epochs, is_first) as bar:
        while len(progress.history) < options.epochs:
            before, start = progress.rows, time.perf_counter()
            train_epoch(strategy, model, optimizer, progress, keeper.between_steps)
            seconds += time.perf_counter() - start
            rows += progress.rows - before
            result = evaluate(strategy, model, test)
            progress.end_epoch(result)
            bar.set_postfix(loss=result.loss, accuracy=result.accuracy, refresh=False)
            bar.update()

    history = progress.history
    if options.plot is not None:
        strategy.run(lambda: plot(history, options.plot) if is_first else None)
    if is_first:
        _, loss, accuracy = history[-1]
        print(
            f"loss={loss:.6f} accuracy={accuracy:.4f} "
            f"samples_per_s={rows / max(seconds, 1e-9):.0f} "
            f"ranks={strategy.num_replicas_in_sync}"
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
    add("--checkpoint-dir", type=Path, help="save here, and go on from here")
    add("--save-every", type=at_least_one, default=20, metavar="STEPS")
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
        self.velocities = [mpidist.Variable(0.0 * w.value()) for w in weights]

    def apply(self, strategy: mpidist.Strategy, gradients: Sequence[Any]) -> None:
        """Change the weights by the mean gradients. In cross-replica context."""
        update = strategy.extended.update
        pairs = zip(self._weights, self.velocities, gradients, strict=True)
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


class Progress:
    """Where the training is: what a checkpoint needs beside weights and velocities."""

    def __init__(self, dataset: mpidist.DistributedDataset):
        self._dataset = dataset
        self.batches = iter(dataset)
        self.loss = self.rows = 0.0  # of the epoch, until now
        self.history: list[tuple[float, float, float]] = []  # of the epochs before

    def end_epoch(self, result: Score) -> None:
        """Take note of an epoch, and begin the next."""
        loss = self.loss / self.rows
        self.history.append((loss, result.loss, result.accuracy))
        self.batches = iter(self._dataset)
        self.loss = self.rows = 0.0

    def bar(self, epochs: int, is_shown: bool) -> Any:
        """Return a progress bar of the epochs."""
        done = len(self.history)
        return tqdm(total=epochs, initial=done, disable=not is_shown, unit="epoch")

    def get_state(self) -> dict[str, Any]:
        """Return what `set_state` takes."""
        return {
            "batches": self.batches.get_state(),
            "loss": self.loss,
            "rows": self.rows,
            "history": np.array(self.history).reshape(-1, 3),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state. Collective."""
        self.batches.set_state(state["batches"])
        self.loss, self.rows = state["loss"], state["rows"]
        self.history = [tuple(scores) for scores in state["history"].tolist()]


class NoKeeper(contextlib.nullcontext[None]):
    """Saves nothing."""

    def between_steps(self) -> None:
        """Do nothing."""


class Keeper:
    """Saves checkpoints: every so many steps, and when the job is about to be ended."""

    def __init__(self, checkpoint: mpidist.Checkpoint, folder: Path, every: int):
        self._manager = mpidist.CheckpointManager(
            checkpoint, folder, max_to_keep=2, is_background=True
        )
        self._handler = mpidist.PreemptionCheckpointHandler(None, self._manager)
        self._every = every
        self._steps = 0

    def __enter__(self) -> None:
        self._manager.__enter__()

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._handler.close()
        if kind is None and self._steps:
            self._manager.save()
        self._manager.__exit__(kind, *error)

    def between_steps(self) -> None:
        """Save, if it is time to. Collective."""
        self._steps += 1
        self._handler.save_checkpoint_if_preempted()
        if self._steps % self._every == 0:
            self._manager.save()


def keeper_of(
    strategy: mpidist.Strategy,
    options: argparse.Namespace,
    model: Perceptron,
    optimizer: Momentum,
    progress: Progress,
) -> Keeper | NoKeeper:
    """Return what saves between steps, once the last checkpoint is restored."""
    if options.checkpoint_dir is None:
        return NoKeeper()
    checkpoint = mpidist.Checkpoint(
        strategy=strategy,
        weights=model.weights,
        velocities=optimizer.velocities,
        progress=progress,
    )
    return Keeper(checkpoint, options.checkpoint_dir, options.save_every)


def train_epoch(
    strategy: mpidist.Strategy,
    model: Perceptron,
    optimizer: Momentum,
    progress: Progress,
    between_steps: Callable[[], None],
) -> None:
    """Take one step for each global batch that is left of the epoch."""

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

    for batch in progress.batches:
        totals = strategy.run(step, args=batch)
        ((loss, rows),) = strategy.experimental_local_results(totals)
        progress.loss += float(loss)
        progress.rows += rows
        between_steps()


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
