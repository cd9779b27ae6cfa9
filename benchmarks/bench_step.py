"""What a step of `jobs/train_digits.py` costs, beside one of the same job by hand.

    python benchmarks/bench_step.py --mpirun .venv/bin/mpirun --output step-mpich.json

The two are the job itself, as a user starts it, and `digits_by_hand.py`: the same with
NumPy, h5py and mpi4py alone. They run one after the other, each in processes of its
own, several times: with small steps, where what the library costs shows, and with those
that the job has by default. Times are microseconds per step, from the rates that the
jobs print (each the median of its epochs); medians of all runs, and ratios of pairs of
runs. The machine should do nothing else.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence

import harness
from bench_scaling import JOB, rate

HAND = harness.ROOT / "benchmarks" / "digits_by_hand.py"
ROWS = 5 * 1437  # of an epoch: the training images, and each moved in 4 directions
# Name, rows of a batch, other options, and by ranks what ours may cost at most
SIZES: list[tuple[str, int, list[str], dict[int, float]]] = [
    ("small step", 64, ["--hidden=128"], {1: 1.25, 2: 1.35}),
    ("step", 720, [], {1: 1.1, 2: 1.1}),
]


def measure(
    mpirun: Sequence[str], ranks: Sequence[int], repetitions: int, epochs: int
) -> Iterator[harness.Comparison]:
    """Yield the times of steps of both jobs, by size and number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        for name, batch, options, targets in SIZES:
            steps = -(-ROWS // batch)
            words = [f"--batch-size={batch}", *options, f"--epochs={epochs}"]
            words.append(f"--data-dir={folder}")
            for n in ranks:
                start = [*mpirun, "-n", str(n), sys.executable]
                times: dict[str, list[float]] = {"ours": [], "by hand": []}
                for _ in range(repetitions):
                    for side, script in zip(times, (JOB, HAND)):
                        rows_per_s = rate([*start, str(script), *words])
                        times[side].append(ROWS / steps / rows_per_s)
                case = f"{name}, {n} rank{'s' if n > 1 else ''}"
                yield from harness.beside(case, times, {"by hand": targets.get(n)})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, 5)
    add = parser.add_argument
    add("--mpirun", default="mpirun", help="with its options, in quotes")
    add("--ranks", nargs="+", type=int, default=[1, 2])
    add("--epochs", type=int, default=40)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.repetitions, options.epochs = 1, 1
    load = os.getloadavg()[0]
    what = options.ranks, options.repetitions, options.epochs
    comparisons = measure(shlex.split(options.mpirun), *what)
    facts = {"repetitions": options.repetitions, "epochs": options.epochs}
    harness.report(comparisons, options.output, load_before=load, **facts)


if __name__ == "__main__":
    main()
