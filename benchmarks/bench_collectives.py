"""How fast collectives are, beside the MPI they stand on and torch's gloo.

    mpirun -n 2 python benchmarks/bench_collectives.py --output .../collectives.json

Like the OSU micro-benchmarks: sizes from 8 bytes to 256 MiB, warm-up, the mean time of
a call in a loop, of the slowest rank. All contestants of a size take turns; ratios are
medians of pairs. Ours is `ReplicaContext.all_reduce` and `all_gather` with all options
as they are, which checks each call and returns new arrays; raw is mpi4py with buffers
that are there already. "copy" is each rank copying its input to its output at the same
time: the least that any all-reduce must do. The machine should do nothing else.

Cases (see --cases), and what the time of ours may be, by that of another:

    sizes      8 bytes: raw <= 3; from 64 KiB: raw <= 1.1; from 16 MiB: raw <= 0.6;
               64 MiB: copy <= 2
    models     the gradients of ResNet-50: raw, one by one <= 0.5; gloo <= 0.25;
               TensorFlow's MultiWorkerMirroredStrategy <= 0.05
    symmetric  arrays of symmetric_like; 4 MiB: raw <= 0.5; 64 MiB: raw <= 0.3
    options    reproducible: the default <= 1.5; compression, which is for networks
    overlap    GradientBuckets, two cores per rank, computing for as long as reducing
               takes: one after the other <= 0.65
    gather     16 MiB, lengths that differ: along axis 0 raw Allgatherv <= 1.15,
               along axis 1 raw Allgatherv (without bringing it into order) <= 2

Written are a JSON file and, with matplotlib, a PNG file beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

# One rank is one share of the CPU
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import charts
import collective_cases
import measuring
from collective_cases import Setting
from collective_rivals import gloo, multi_worker
from comparisons import TABLE_HEAD, Comparison
from gradient_shapes import MODELS
from mpi4py import MPI

import mpidist

CASES = ("sizes", "models", "gather", "symmetric", "options", "overlap")
SIZES = [8 << (2 * i) for i in range(13)] + [64 << 10, 16 << 20, 64 << 20, 256 << 20]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file; a PNG goes beside it")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="only see that it runs")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    comm = MPI.COMM_WORLD
    if comm.size < 2:
        raise SystemExit("start it by mpirun, on at least 2 ranks")
    strategy = mpidist.MirroredStrategy()
    comparisons: list[Comparison] = []
    repetitions, most_calls = (1, 5) if options.tiny else (options.repetitions, 1000)
    sizes = SIZES[:6] if options.tiny else SIZES
    large = [1 << 18, 1 << 19] if options.tiny else [4 << 20, 64 << 20]
    models = {"tiny": [(3, 4), (2,)]} if options.tiny else MODELS
    skipped: list[str] = []

    def run() -> None:
        with gloo(comm) as sum_by_gloo:
            reducer = multi_worker(comm)
            setting = Setting(
                comm, repetitions, most_calls, sum_by_gloo, reducer, skipped
            )
            if sum_by_gloo is None:
                skipped.append("torch gloo: torch is not installed")
            if reducer is None:
                skipped.append("TF MultiWorkerMirrored: tensorflow is not installed")
            cases = {
                "sizes": lambda: collective_cases.compare_sizes(setting, sizes),
                "models": lambda: collective_cases.compare_models(setting, models),
                "gather": lambda: collective_cases.compare_gathers(
                    setting, 1 << 12 if options.tiny else 16 << 20
                ),
                "symmetric": lambda: collective_cases.compare_symmetric(setting, large),
                "options": lambda: collective_cases.compare_options(setting, large),
                "overlap": lambda: collective_cases.compare_overlap(
                    setting, next(iter(models.values()))
                ),
            }
            for name in options.cases:
                for comparison in cases[name]():
                    comparisons.append(comparison)
                    if comm.rank == 0:
                        print(comparison.line(), flush=True)

    if comm.rank == 0:
        print(TABLE_HEAD)
    strategy.run(run)
    if comm.rank == 0 and skipped:
        print("skipped:", "; ".join(skipped))
    if comm.rank == 0 and options.output:
        result = {
            "machine": measuring.describe_machine(Path(tempfile.gettempdir())),
            "date": datetime.date.today().isoformat(),
            "ranks": comm.size,
            "skipped": skipped,
            "transport": strategy.extended.collectives.transport.name,
            "comparisons": [comparison.as_dict() for comparison in comparisons],
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")
        charts.draw(charts.draw_collectives, result, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
