"""How fast models of PyTorch train, beside torch's DistributedDataParallel over gloo.

    mpirun -n 2 python benchmarks/bench_frameworks.py --output .../frameworks-mpich.json
    python benchmarks/bench_frameworks.py --nodes 2 --output .../frameworks-wire.json

The latter starts one rank on each of some virtual nodes (`tests/support/`), with a
network of 1 Gbit/s between them, and sends gradients as bfloat16, too.
Ours, torch's own over "mpidist", and torch's own over gloo train copies of models with
batches that lie ready, in turns of some steps; a transformer is sharded by FSDP2; "no
communication" is each rank by itself. Told are the medians of the slowest rank, and
ratios of turns that followed each other. At the end all must have the same weights.
Each rank computes on one core. The machine should do nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# One rank is one share of the CPU
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import charts
import measuring
from comparisons import TABLE_HEAD, Comparison
from mpi4py import MPI

import mpidist

FRAMEWORKS = ["torch"]
# Of `torch_cases`, which needs PyTorch
OURS, NARROW, ALONE = "mpidist", "mpidist, bfloat16", "no communication"


def measure(
    comm: MPI.Intracomm, trainers: Mapping[str, Any], steps: int, turns: int
) -> dict[str, list[float]]:
    """Return microseconds per step of each turn, of the slowest rank. Collective.

    Two turns of each are not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(2 + turns):
        for name, trainer in trainers.items():
            comm.Barrier()
            start = time.perf_counter()
            trainer.train(steps)
            seconds = comm.allreduce(time.perf_counter() - start, MPI.MAX)
            if turn >= 2:
                times[name].append(seconds / steps * 1e6)
    return times


def compare(
    case: Any, times: Mapping[str, list[float]], ranks: int
) -> list[Comparison]:
    """Return ours beside each of the others: samples per second, or time per step."""

    def numbers(name: str) -> list[float]:
        if case.is_time:
            return times[name]
        return [case.rows * ranks / (t / 1e6) for t in times[name]]

    is_wire = NARROW in times
    return [
        Comparison(
            case.name if own == OURS else f"{case.name}, {own}",
            other,
            "us" if case.is_time else "samples/s",
            numbers(own),
            numbers(other),
            target=target if ranks > 1 and is_wire == (own == NARROW) else None,
            is_at_least=not case.is_time,
        )
        for (own, other), target in case.targets.items()
        if own in times
    ]


def run_torch(
    comm: MPI.Intracomm,
    strategy: mpidist.Strategy,
    cases: Sequence[str],
    turns: int,
    folder: str | None,
) -> tuple[list[Comparison], dict[str, float]]:
    """Return what was compared, and by how much weights differ at the end.

    Args:
      comm: the ranks.
      strategy: of the same.
      cases: which of `torch_cases.CASES`.
      turns: of each contestant.
      folder: that all nodes see, if there are several; None on one.
    """
    import torch
    import torch_cases

    torch.set_num_threads(1)
    found, differences = [], {}
    with torch_cases.gloo(comm, folder):
        for name in cases:
            case = torch_cases.CASES[name]
            trainers = torch_cases.contestants(
                case, comm, strategy, is_wire=folder is not None
            )
            steps = case.steps if turns > 1 else 2
            found += compare(case, measure(comm, trainers, steps, turns), comm.size)
            exact = [t for n, t in trainers.items() if n not in (ALONE, NARROW)]
            pairs = itertools.chain(
                *(zip(exact[0].weights(), t.weights()) for t in exact[1:])
            )
            most = max(float((a - b).abs().max()) for a, b in pairs)
            differences[case.name] = comm.allreduce(most, MPI.MAX)
            # While gloo is there: its threads may wait for Python's lock
            del trainers, pairs, exact
            gc.collect()
    return found, differences


def run_on_nodes(options: argparse.Namespace) -> None:
    """Run this program on virtual nodes, with a rank on each."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    import virtual_nodes

    missing = virtual_nodes.what_is_missing()
    if missing:
        raise SystemExit(missing)
    words = ["--turns", str(options.turns), "--cases", *options.cases]
    if options.output is not None:
        words += ["--output", str(options.output.absolute())]
    words += ["--tiny"] * options.tiny
    with (
        tempfile.TemporaryDirectory() as folder,
        virtual_nodes.VirtualNodes(options.nodes, options.rate) as nodes,
    ):
        ended = nodes.mpirun(1, __file__, "--folder", folder, *words)
    print(ended.stdout)
    if ended.returncode:
        raise SystemExit(ended.returncode)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, help="JSON file; a PNG goes beside it")
    add("--turns", type=int, default=15, help="of each contestant (default 15)")
    add("--cases", nargs="+", default=["mlp", "deep", "small", "resnet", "fsdp"])
    add("--tiny", action="store_true", help="only see that all run")
    add("--nodes", type=int, help="start this on so many virtual nodes")
    add("--rate", default="1gbit", help="of each node's cable, as tc writes it (1gbit)")
    add("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.nodes:
        run_on_nodes(options)
        return
    comm = MPI.COMM_WORLD
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    is_there = {name: importlib.util.find_spec(name) is not None for name in FRAMEWORKS}
    comparisons: list[Comparison] = []
    differences: dict[str, float] = {}
    if comm.allreduce(is_there["torch"], MPI.LAND):
        turns = 1 if options.tiny else options.turns
        comparisons, differences = run_torch(
            comm, strategy, options.cases, turns, options.folder
        )
    if comm.rank:
        return
    print(TABLE_HEAD)
    for comparison in comparisons:
        print(comparison.line())
    for name, difference in differences.items():
        print(f"{name}: weights differ from DDP's by {difference:g} at most")
    if options.output:
        result = {
            "machine": measuring.describe_machine(Path(tempfile.gettempdir())),
            "date": datetime.date.today().isoformat(),
            "ranks": comm.size,
            "differences": differences,
            "skipped": [name for name, found in is_there.items() if not found],
            "comparisons": [comparison.as_dict() for comparison in comparisons],
        }
        measuring.save(options.output, result)
        charts.draw(charts.draw_frameworks, result, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
