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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import harness

# isort: split
import collective_cases
from harness import Comparison
from mpi4py import MPI
from rivals import GLOO, MODELS, MWMS, gloo, multi_worker

import mpidist

SIZES = [8 << (2 * i) for i in range(13)] + [64 << 10, 16 << 20, 64 << 20, 256 << 20]
CASES = ("sizes", "models", "gather", "symmetric", "options", "overlap")


def compare(
    setting: collective_cases.Setting, names: Sequence[str], is_tiny: bool
) -> Iterator[Comparison]:
    """Yield the comparisons of some cases. Collective."""
    sizes = SIZES[:6] if is_tiny else SIZES
    large = [1 << 18, 1 << 19] if is_tiny else [4 << 20, 64 << 20]
    models = {"tiny": [(3, 4), (2,)]} if is_tiny else MODELS
    arguments = {
        "sizes": (collective_cases.compare_sizes, sizes),
        "models": (collective_cases.compare_models, models),
        "gather": (collective_cases.compare_gathers, 1 << 12 if is_tiny else 16 << 20),
        "symmetric": (collective_cases.compare_symmetric, large),
        "options": (collective_cases.compare_options, large),
        "overlap": (collective_cases.compare_overlap, next(iter(models.values()))),
    }
    for name in names:
        function, argument = arguments[name]
        yield from function(setting, argument)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, 9)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    options = parser.parse_args(arguments)
    comm = MPI.COMM_WORLD
    if comm.size < 2:
        raise SystemExit("start it by mpirun, on at least 2 ranks")
    strategy = mpidist.MirroredStrategy()
    repetitions, calls = (1, 5) if options.tiny else (options.repetitions, 1000)

    def run() -> None:
        with gloo(comm) as sum_by_gloo:
            setting = collective_cases.Setting(
                comm, strategy, repetitions, calls, sum_by_gloo, multi_worker(comm)
            )
            if sum_by_gloo is None:
                setting.skipped.append(f"{GLOO}: torch is not installed")
            if setting.reducer_by_tensorflow is None:
                setting.skipped.append(f"{MWMS}: tensorflow is not installed")
            harness.report(
                compare(setting, options.cases, options.tiny),
                options.output,
                comm,
                skipped=setting.skipped,
                transport=strategy.extended.collectives.transport.name,
            )

    strategy.run(run)


if __name__ == "__main__":
    main()
