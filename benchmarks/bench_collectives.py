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
    models     the gradients of ResNet-50: raw, one by one <= 0.5; gloo <= 0.25
    gather     16 MiB, lengths that differ: along axis 0 raw Allgatherv <= 1.15,
               along axis 1 raw Allgatherv (without bringing it into order) <= 2

Written are a JSON file and, with matplotlib, a PNG file beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# One rank is one share of the CPU
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import charts
import measuring
import numpy as np
from gradient_shapes import MODELS
from measuring import Comparison
from mpi4py import MPI

import mpidist

CASES = ("sizes", "models", "gather")
SIZES = [8 << (2 * i) for i in range(13)] + [64 << 10, 16 << 20, 64 << 20, 256 << 20]
LOOP_BYTES = 16 << 20  # so many in one measurement, at least one call
RAW, GLOO, COPY = "raw MPI", "torch gloo", "copy"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all cases are given.

    Args:
      repetitions: how often each contestant is timed.
      most_calls: how many calls each measurement has, at most.
      sum_by_gloo: sums an array of all ranks in place; None without torch.
    """

    comm: MPI.Intracomm
    repetitions: int
    most_calls: int
    sum_by_gloo: Callable[[Any], None] | None

    def run(
        self,
        case: str,
        size: int,
        contestants: dict[str, Callable[[], Any]],
        targets: dict[str, float],
    ) -> list[Comparison]:
        """Time contestants in turn; return ours by each other one. Collective."""
        loops = max(1, min(self.most_calls, LOOP_BYTES // max(1, size)))
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for repetition in range(self.repetitions + 1):
            for name, call in contestants.items():
                seconds = self._time(call, loops)
                if repetition:  # the first one warms up
                    times[name].append(seconds * 1e6)
        return [
            Comparison(case, name, "us", times["ours"], other, targets.get(name), False)
            for name, other in times.items()
            if name != "ours"
        ]

    def _time(self, call: Callable[[], Any], loops: int) -> float:
        self.comm.Barrier()
        start = time.perf_counter()
        for _ in range(loops):
            call()
        mine = (time.perf_counter() - start) / loops
        return self.comm.allreduce(mine, MPI.MAX)

    def numbers(self, shape: int | tuple[int, ...]) -> Any:
        """Return random float32 numbers, other ones on each rank."""
        return np.random.default_rng(self.comm.rank).random(shape, np.float32)


def compare_sizes(setting: Setting, sizes: Sequence[int]) -> Iterator[Comparison]:
    """Compare all-reduces of one array, from small to large."""
    comm, replica = setting.comm, mpidist.get_replica_context()
    assert replica is not None
    for size in sorted(set(sizes)):
        given = setting.numbers(size // 4)
        total = np.zeros_like(given)
        contestants: dict[str, Callable[[], Any]] = {
            "ours": lambda a=given: replica.all_reduce("SUM", a),
            RAW: lambda a=given, b=total: comm.Allreduce(a, b, MPI.SUM),
            COPY: lambda a=given, b=total: np.copyto(b, a),
        }
        expected = comm.allreduce(given.astype(np.float64))
        np.testing.assert_allclose(contestants["ours"](), expected, rtol=1e-5)
        if setting.sum_by_gloo is not None:
            contestants[GLOO] = lambda a=total: setting.sum_by_gloo(a)
        targets = {}
        if size == 8:
            targets[RAW] = 3.0
        elif size >= 64 << 10:
            targets[RAW] = 0.6 if size >= 16 << 20 else 1.1
        if size == 64 << 20:
            targets[COPY] = 2.0
        case = f"all_reduce, {size:,} bytes"
        yield from setting.run(case, size, contestants, targets)


def compare_models(
    setting: Setting, models: dict[str, list[tuple[int, ...]]]
) -> Iterator[Comparison]:
    """Compare all-reduces of all gradients of a model."""
    comm, replica = setting.comm, mpidist.get_replica_context()
    assert replica is not None
    for model, shapes in models.items():
        given = [setting.numbers(shape) for shape in shapes]
        totals = [np.zeros_like(a) for a in given]

        def one_by_one(given: Any = given, totals: Any = totals) -> None:
            for a, b in zip(given, totals, strict=True):
                comm.Allreduce(a, b, MPI.SUM)

        def ours(given: Any = given) -> Any:
            return replica.all_reduce("SUM", given)

        one_by_one()
        for a, b in zip(ours(), totals, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
        contestants: dict[str, Callable[[], Any]] = {"ours": ours, RAW: one_by_one}
        if setting.sum_by_gloo is not None:

            def by_gloo(totals: Any = totals) -> None:
                for total in totals:
                    setting.sum_by_gloo(total)

            contestants[GLOO] = by_gloo
        targets = {RAW: 0.5, GLOO: 0.25} if model == "ResNet-50" else {}
        case = f"gradients of {model}"
        size = sum(a.nbytes for a in given)
        yield from setting.run(case, size, contestants, targets)


def compare_gathers(setting: Setting, size: int) -> Iterator[Comparison]:
    """Compare all-gathers of lengths that differ by a tenth."""
    comm, replica = setting.comm, mpidist.get_replica_context()
    assert replica is not None
    columns = 64
    rows = [max(1, size // 4 // columns * (10 + r % 2) // 10) for r in range(comm.size)]
    for axis, target in ((0, 1.15), (1, 2.0)):
        shape = (rows[comm.rank], columns)[:: 1 - 2 * axis]
        given = setting.numbers(shape)
        counts = [n * columns for n in rows]
        gathered = np.empty(sum(counts), np.float32)
        contestants: dict[str, Callable[[], Any]] = {
            "ours": lambda a=given, i=axis: replica.all_gather(a, i),
            RAW: lambda a=given, b=gathered, n=counts: comm.Allgatherv(a, [b, n]),
        }
        expected = np.concatenate(comm.allgather(given), axis=axis)
        assert np.array_equal(contestants["ours"](), expected)
        case = f"all_gather, {size:,} bytes per rank, axis {axis}"
        yield from setting.run(case, size, contestants, {RAW: target})


@contextlib.contextmanager
def gloo(comm: MPI.Intracomm) -> Iterator[Callable[[Any], None] | None]:
    """Give a function that sums an array over all ranks, or None. Collective."""
    found = importlib.util.find_spec("torch") is not None
    if not comm.allreduce(found, MPI.LAND):
        yield None
        return
    import torch
    import torch.distributed as torch_distributed

    torch.set_num_threads(1)
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    store = torch_distributed.FileStore(f"{folder}/store", comm.size)
    torch_distributed.init_process_group(
        "gloo",
        store=store,
        rank=comm.rank,
        world_size=comm.size,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        yield lambda array: torch_distributed.all_reduce(torch.from_numpy(array))
    finally:
        comm.Barrier()
        torch_distributed.destroy_process_group()


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
    models = {"tiny": [(3, 4), (2,)]} if options.tiny else MODELS

    def run() -> None:
        with gloo(comm) as sum_by_gloo:
            setting = Setting(comm, repetitions, most_calls, sum_by_gloo)
            if sum_by_gloo is None and comm.rank == 0:
                print("torch is not installed: gloo was not compared")
            cases = {
                "sizes": lambda: compare_sizes(setting, sizes),
                "models": lambda: compare_models(setting, models),
                "gather": lambda: compare_gathers(
                    setting, 1 << 12 if options.tiny else 16 << 20
                ),
            }
            for name in options.cases:
                for comparison in cases[name]():
                    comparisons.append(comparison)
                    if comm.rank == 0:
                        print(comparison.line(), flush=True)

    if comm.rank == 0:
        print(measuring.TABLE_HEAD)
    strategy.run(run)
    if comm.rank == 0 and options.output:
        result = {
            "machine": measuring.describe_machine(Path(tempfile.gettempdir())),
            "date": datetime.date.today().isoformat(),
            "ranks": comm.size,
            "transport": strategy.extended.collectives.transport.name,
            "comparisons": [comparison.as_dict() for comparison in comparisons],
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")
        charts.draw(charts.draw_collectives, result, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
