r"""Strong and weak scaling of `jobs/train_digits.py`.

    python benchmarks/bench_scaling.py --mpirun .venv/bin/mpirun --ranks 1 2 4 \\
        --output benchmarks/results/scaling-mpich.json

Strong: a global batch of --batch rows, however many ranks divide it. Weak: so many rows
for each rank. Rates are those that the job prints, rows per second of training; medians
of several runs, taken in turn. Where there are more ranks than cores, it is said: they
share them.
"""

from __future__ import annotations

import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import harness

JOB = harness.ROOT / "jobs" / "train_digits.py"


def rate(command: Sequence[str]) -> float:
    """Run the job, and return the rows per second that it prints."""
    done = subprocess.run(
        command,
        env=harness.USERS_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stderr}")
    found = re.search(r"samples_per_s=(\d+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, 5)
    add = parser.add_argument
    add("--mpirun", default="mpirun", help="with its options, in quotes")
    add("--ranks", nargs="+", type=int, default=[1, 2, 4])
    add("--batch", type=int, default=256, help="rows (default 256)")
    add("--hidden", type=int, default=512, help="units (default 512)")
    add("--epochs", type=int, default=20)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.ranks, options.repetitions, options.epochs = [1, 2], 1, 1
    cases = [(kind, n) for kind in ("strong", "weak") for n in options.ranks]
    rates: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        job = [sys.executable, str(JOB), f"--data-dir={folder}", "--shifts=0"]
        job += [f"--hidden={options.hidden}", f"--epochs={options.epochs}"]
        for _ in range(options.repetitions):
            for kind, ranks in cases:
                batch = options.batch * (ranks if kind == "weak" else 1)
                mpirun = [*shlex.split(options.mpirun), "-n", str(ranks)]
                command = [*mpirun, *job, f"--batch-size={batch}"]
                rates[kind, ranks].append(rate(command))
    cores, first, rows = len(os.sched_getaffinity(0)), min(options.ranks), []
    print(f"{'':8} {'ranks':>5} {'rows/s':>10} {'speedup':>8} {'efficiency':>10}")
    for kind, ranks in cases:
        median = statistics.median(rates[kind, ranks])
        speedup = median / statistics.median(rates[kind, first])
        row = {"kind": kind, "ranks": ranks, "rows_per_second": median}
        row |= {"speedup": speedup, "efficiency": speedup * first / ranks}
        rows.append(row)
        note = "" if ranks <= cores else f"  ({cores} cores)"
        print(
            f"{kind:8} {ranks:5} {median:10,.0f} {speedup:8.2f} "
            f"{row['efficiency']:10.2f}{note}"
        )
    if options.output:
        facts = {name: getattr(options, name) for name in ("batch", "hidden", "epochs")}
        harness.save(options.output, **facts, rows=rows)


if __name__ == "__main__":
    main()
