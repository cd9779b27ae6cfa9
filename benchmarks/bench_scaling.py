r"""Strong and weak scaling of `jobs/train_digits.py`.

    python benchmarks/bench_scaling.py --mpirun .venv/bin/mpirun --ranks 1 2 4 \\
        --output benchmarks/results/scaling-mpich.json

Strong: a global batch of --batch rows, however many ranks divide it. Weak: so many rows
for each rank. Rates are those that the job prints, rows per second of training; medians
of several runs, taken in turn. Where there are more ranks than cores, it is said: they
share them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import charts
import measuring

JOB = Path(__file__).parents[1] / "jobs" / "train_digits.py"


def rate(command: Sequence[str], ranks: int, arguments: Sequence[str]) -> float:
    """Run the job, and return the rows per second that it prints."""
    run = [*command, "-n", str(ranks), sys.executable, str(JOB), *arguments]
    done = subprocess.run(run, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(run)} failed:\n{done.stderr}")
    found = re.search(r"samples_per_s=(\d+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mpirun", default="mpirun", help="with its options, in quotes")
    add("--ranks", nargs="+", type=int, default=[1, 2, 4])
    add("--batch", type=int, default=256, help="rows (default 256)")
    add("--hidden", type=int, default=512, help="units (default 512)")
    add("--epochs", type=int, default=20)
    add("--repetitions", type=int, default=5)
    add("--output", type=Path, help="JSON file; a PNG goes beside it")
    options = parser.parse_args(arguments)
    command = options.mpirun.split()
    rates: dict[str, dict[int, list[float]]] = {
        kind: {ranks: [] for ranks in options.ranks} for kind in ("strong", "weak")
    }
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"--data-dir={folder}", f"--hidden={options.hidden}"]
        fixed += [f"--epochs={options.epochs}", "--shifts=0"]
        for _ in range(options.repetitions):
            for ranks in options.ranks:
                for kind, batch in (
                    ("strong", options.batch),
                    ("weak", options.batch * ranks),
                ):
                    more = [*fixed, f"--batch-size={batch}"]
                    rates[kind][ranks].append(rate(command, ranks, more))
    cores = len(os.sched_getaffinity(0))
    print(f"{'':8} {'ranks':>5} {'rows/s':>10} {'speedup':>8} {'efficiency':>10}")
    summary = []
    for kind, measured in rates.items():
        medians = {ranks: statistics.median(found) for ranks, found in measured.items()}
        first = min(medians)
        for ranks, median in medians.items():
            speedup = median / medians[first]
            row = {
                "kind": kind,
                "ranks": ranks,
                "rows_per_second": median,
                "speedup": speedup,
                "efficiency": speedup * first / ranks,
                "all": measured[ranks],
            }
            summary.append(row)
            note = "" if ranks <= cores else f"  ({cores} cores)"
            print(
                f"{kind:8} {ranks:5} {median:10,.0f} {speedup:8.2f} "
                f"{row['efficiency']:10.2f}{note}"
            )
    if options.output:
        result = {
            "machine": measuring.describe_machine(Path(tempfile.gettempdir())),
            "date": datetime.date.today().isoformat(),
            "batch": options.batch,
            "hidden": options.hidden,
            "epochs": options.epochs,
            "rows": summary,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")
        charts.draw(charts.draw_scaling, result, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
