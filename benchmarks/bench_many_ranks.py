"""What a rank does in jobs of more and more ranks, by counting instead of timing.

    python benchmarks/bench_many_ranks.py --output benchmarks/results/many-ranks.json

Where many ranks share few cores, times say nothing. Counted are, for the busiest rank
and each stage of a job (`many_ranks_job.py`), the Python functions that are called, the
calls of MPI (by a library that stands between, `mpi_counts.c`) and the bytes passed to
them. From the numbers of ranks but the last, a model a + b log2(ranks) + c ranks is
fitted; it is checked by the last one, and says what a rank does in larger jobs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measuring
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import launching

HERE = Path(__file__).parent
LARGE = (1024, 16384)
COUNTS = ("Python functions", "calls of MPI", "bytes")


def build(folder: Path) -> Path:
    """Compile the library that counts, with the compiler that came with MPI."""
    library = folder / "libmpi_counts.so"
    compiler = Path(sys.executable).with_name("mpicc")
    command = [str(compiler), "-O2", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, str(HERE / "mpi_counts.c")], check=True)
    return library


def count(library: Path, ranks: int, ranks_per_node: int) -> dict[str, Any]:
    """Return what `many_ranks_job.py` counts in a job of some ranks."""
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {
            "LD_PRELOAD": str(library),
            "MPIDIST_RANKS_PER_NODE": str(ranks_per_node),
        }
        job = [sys.executable, str(HERE / "many_ranks_job.py"), folder]
        ended = subprocess.run(
            [*launching.mpirun_command(ranks), *job],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ended.returncode:
            raise SystemExit(f"the job of {ranks} ranks failed:\n{ended.stdout}")
        found: dict[str, Any] = json.loads((Path(folder) / "counts.json").read_text())
    for stage in found["stages"].values():
        known = (*COUNTS, "seconds")
        stage["calls of MPI"] = sum(n for kind, n in stage.items() if kind not in known)
    return found


def terms(ranks: int) -> list[float]:
    """Return what the model is made of."""
    return [1.0, math.log2(ranks), float(ranks)]


def fit(sizes: Sequence[int], numbers: Sequence[float]) -> list[float]:
    """Return the factors of `terms`; those that are nothing but rounding are 0."""
    matrix = np.array([terms(n) for n in sizes])
    factors = np.linalg.lstsq(matrix, np.array(numbers, float), rcond=None)[0]
    return [0.0 if abs(f) < 1e-6 * max(numbers, default=1) else f for f in factors]


def summarize(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each stage and count: the numbers, and the model of them."""
    sizes, rows = [job["ranks"] for job in jobs], []
    for stage in jobs[0]["stages"]:
        for kind in COUNTS:
            numbers = [job["stages"][stage].get(kind, 0) for job in jobs]
            factors = fit(sizes[:-1], numbers[:-1])
            told = [float(np.dot(factors, terms(n))) for n in (sizes[-1], *LARGE)]
            rows.append(
                {
                    "stage": stage,
                    "count": kind,
                    "numbers": numbers,
                    "factors": factors,
                    "model": told,
                }
            )
    return rows


def show(sizes: Sequence[int], rows: Sequence[dict[str, Any]]) -> None:
    """Print a table."""
    heads = [*map(str, sizes), f"model: {sizes[-1]}", *map(str, LARGE), "per rank"]
    print(f"{'stage':22}{'count':18}", *(f"{head:>12}" for head in heads))
    for row in rows:
        numbers = [*row["numbers"], *(round(n) for n in row["model"])]
        each = "".join(f"{n:13,}" for n in numbers)
        print(f"{row['stage']:22}{row['count']:18}{each}{row['factors'][2]:13.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", nargs="+", type=int, default=[24, 32, 48, 64, 128])
    add("--ranks-per-node", type=int, default=1, help="of pretended nodes")
    add("--output", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        jobs = []
        for ranks in options.ranks:
            jobs.append(count(library, ranks, options.ranks_per_node))
            seconds, memory = jobs[-1]["seconds"], jobs[-1]["MiB"]
            print(f"{ranks} ranks: {seconds:.1f} s, {memory:.0f} MiB each", flush=True)
    rows = summarize(jobs)
    show(options.ranks, rows)
    if options.output is not None:
        result = {
            "machine": measuring.describe_machine(Path(tempfile.gettempdir())),
            "date": datetime.date.today().isoformat(),
            "ranks_per_node": options.ranks_per_node,
            "jobs": jobs,
            "rows": rows,
            "model of": [options.ranks[-1], *LARGE],
        }
        measuring.save(options.output, result)


if __name__ == "__main__":
    main()
