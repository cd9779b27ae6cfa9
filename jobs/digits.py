"""Shared by the digits jobs: data, options, and a report; and one core for each rank.

The data are scikit-learn's 1,797 images of 8x8 pixels (UCI, "Optical recognition of
handwritten digits"), divided into training and test images, in HDF5 files. Shifting
each training image by a pixel makes more of them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Each rank computes on one core: its BLAS must not use the cores of other ranks. That
# works only before NumPy or PyTorch is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import h5py
import numpy as np

if TYPE_CHECKING:
    from mpidist import Strategy

PIXELS = 64
CLASSES = 10
BRIGHTEST = 16.0
DIRECTIONS = [(0, 1), (0, -1), (1, 0), (-1, 0)]  # right, left, down, up
TRAIN_FILES = 4
TEST_ROWS = 360


def paths(folder: Path, shifts: int) -> tuple[list[Path], Path]:
    """Return the training files and the test file; `shifts` as in `write`."""
    shifted = f"-{shifts}-shifts" if shifts else ""
    name = f"digits-train{shifted}-{{}}-of-{TRAIN_FILES}.h5"
    train = [folder / name.format(i) for i in range(TRAIN_FILES)]
    return train, folder / "digits-test.h5"


def make_files(
    strategy: Strategy, folder: Path, shifts: int
) -> tuple[list[Path], Path]:
    """Return `paths`, after one rank has written what is missing. Collective.

    Raises, on all ranks: what that rank raises.
    """

    def write_on_first() -> None:
        if strategy.is_first:
            write_missing(folder, shifts)

    strategy.run(write_on_first)  # all wait until it has written
    return paths(folder, shifts)


def write_missing(folder: Path, shifts: int) -> None:
    """Write the files unless all exist. Call it on one rank."""
    train, test = paths(folder, shifts)
    if not all(path.exists() for path in (*train, test)):
        from sklearn.datasets import load_digits

        write(folder, shifts, *load_digits(return_X_y=True))


def write(folder: Path, shifts: int, images: Any, labels: Any) -> None:
    """Write images and labels to files, each of them whole or not at all.

    Args:
      folder: is made if it is missing.
      shifts: in how many of the four directions each training image is shifted.
      images: `(rows, PIXELS)`, from 0 to BRIGHTEST.
      labels: `(rows,)`.
    """
    train_paths, test_path = paths(folder, shifts)
    order = np.random.default_rng(1797).permutation(len(images))
    test, train = order[:TEST_ROWS], order[TEST_ROWS:]
    moves = [(0, 0), *DIRECTIONS[:shifts]]
    x = np.concatenate([shift(images[train], *move) for move in moves])
    y = np.tile(labels[train], len(moves))
    folder.mkdir(parents=True, exist_ok=True)
    write_file(test_path, images[test], labels[test])
    cuts = np.linspace(0, len(x), len(train_paths) + 1).astype(int)
    for path, begin, end in zip(train_paths, cuts, cuts[1:]):
        write_file(path, x[begin:end], y[begin:end])


def shift(images: Any, down: int, right: int) -> Any:
    """Return the images moved by a pixel at most, with 0 where nothing was."""
    padded = np.pad(images.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    moved = padded[:, 1 - down : 9 - down, 1 - right : 9 - right]
    return moved.reshape(-1, PIXELS)


def write_file(path: Path, x: Any, y: Any) -> None:
    """Write one file, which gets its name when it is complete and on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with h5py.File(temporary, "w") as file:
            file["x"] = x.astype(np.uint8)
            file["y"] = y.astype(np.uint8)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def prepare(pixels: Any, labels: Any) -> tuple[Any, Any]:
    """Return pixels from 0 to 1, and rows that are true in the column of the label."""
    columns = np.arange(CLASSES, like=labels)  # NumPy's, or on the GPU
    return pixels / BRIGHTEST, labels[:, None] == columns


def as_float32(x: Any, y: Any) -> tuple[Any, Any]:
    """Return pixels from 0 to 1, and labels, as PyTorch and JAX take them."""
    return x.astype(np.float32) / np.float32(BRIGHTEST), y.astype(np.int64)


def read(files: Sequence[Path]) -> tuple[Any, Any]:
    """Return the rows of all files in memory, as `as_float32` does."""
    pairs = []
    for path in files:
        with h5py.File(path) as file:
            pairs.append((np.array(file["x"]), np.array(file["y"])))
    x, y = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return as_float32(x, y)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all jobs have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), help="where the HDF5 files are")
    add("--shifts", type=int, default=4, choices=range(5), help="of training images")
    add("--epochs", type=at_least_one, default=40)
    add("--batch-size", type=at_least_one, default=720, help="rows over all ranks")
    add("--learning-rate", type=float, default=0.4)
    add("--hidden", type=at_least_one, default=512, help="units of the hidden layer")
    add("--seed", type=int, default=0, help="of the order of rows and first weights")
    add("--plot", type=Path, help="write a picture of the curves to this file")
    add("--devices", nargs="+", help="such as CPU:0; else this rank's GPU, or CPU")
    return parser


def at_least_one(text: str) -> int:
    """Convert `text` to an integer of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return int(text)


def rate_alone(
    fit: Callable[[Strategy, argparse.Namespace], tuple[Any, float]],
    options: argparse.Namespace,
) -> float:
    """Return the rate at which this rank alone trains for some epochs.

    Args:
      fit: trains, and returns anything and the rate.
      options: as `make_parser` gives them.
    """
    from mpi4py import MPI

    import mpidist

    alone = mpidist.MirroredStrategy(options.devices, communicator=MPI.COMM_SELF)
    some = {**vars(options), "epochs": min(options.epochs, 10)}
    return fit(alone, argparse.Namespace(**some))[1]


def report(
    history: Sequence[Sequence[float]],
    rate: float,
    ranks: int,
    picture: Path | None,
    rate_alone: float | None = None,
) -> None:
    """Print the results of the last epoch, and plot all. Call it on one rank.

    Args:
      history: training loss, test loss and accuracy of each epoch.
      rate: training rows per second.
      ranks: the number of ranks.
      picture: the path of a picture of the history, or None.
      rate_alone: training rows per second of one rank, where that is known.
    """
    if picture is not None:
        plot(history, picture)
    _, loss, accuracy = history[-1]
    scores = f"loss={loss:.6f} accuracy={accuracy:.4f}"
    speedup = f" speedup={rate / rate_alone:.2f}" if rate_alone else ""
    print(f"{scores} samples_per_s={rate:.0f} ranks={ranks}{speedup}")


def plot(history: Sequence[Sequence[float]], path: Path) -> None:
    """Draw training loss, test loss and accuracy by epoch."""
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
    figure.savefig(path, dpi=120)
