"""What a step of `jobs/train_digits.py` costs, beside one of the same job by hand.

    python benchmarks/bench_step.py --mpirun .venv/bin/mpirun --output step-mpich.json

The two are the job itself and `digits_by_hand.py`: the same with NumPy, h5py and mpi4py
alone. They run one after the other, each in processes of its own, several times: with
small steps, where what the library costs shows, and with those that the job has by
default. A time is the median of one run, in microseconds, from the begin of a step to
that of the next one, so that interruptions by other processes do not count (nor does
what is done once in many steps: reading the next group of batches takes 3 us a step).
Results are medians of all runs, and ratios of pairs of runs.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import harness

# The job and the one by hand: modules with a `Network` that has a `step`, and a `main`
SIDES = {"ours": "train_digits", "by hand": "digits_by_hand"}
# Name, options of the job, and by ranks what ours may cost at most
SIZES: list[tuple[str, list[str], dict[int, float]]] = [
    ("small step", ["--hidden=128", "--batch-size=64"], {1: 1.25, 2: 1.35}),
    ("step", [], {1: 1.1, 2: 1.1}),
]


def run_timed(module: str) -> None:
    """Run a job, with the rest of the command line, and print the time of its steps."""
    job: Any = importlib.import_module(module)
    step, begins = job.Network.step, list[float]()

    def timed(*args: Any) -> Any:
        begins.append(time.perf_counter())
        return step(*args)

    job.Network.step = timed
    job.main()
    print(f"step_us={1e6 * statistics.median(b - a for a, b in pairwise(begins)):.2f}")


def step_us(command: Sequence[str]) -> float:
    """Run a job; return the microseconds of its steps, those of the slowest rank."""
    done = subprocess.run(
        command,
        env=harness.USERS_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stderr}")
    return max(map(float, re.findall(r"step_us=([\d.]+)", done.stdout)))


def measure(
    mpirun: Sequence[str], ranks: Sequence[int], repetitions: int, epochs: int
) -> Iterator[harness.Comparison]:
    """Yield the times of steps of both jobs, by size and number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        for name, options, targets in SIZES:
            words = [f"--data-dir={folder}", *options, f"--epochs={epochs}"]
            for n in ranks:
                start = [*mpirun, "-n", str(n), sys.executable, __file__, "--job"]
                times: harness.Times = {side: [] for side in SIDES}
                for _ in range(repetitions):
                    for side, module in SIDES.items():
                        times[side].append(step_us([*start, module, *words]) / 1e6)
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
    if sys.argv[1:2] == ["--job"]:
        del sys.argv[1]
        run_timed(sys.argv.pop(1))
    else:
        main()
