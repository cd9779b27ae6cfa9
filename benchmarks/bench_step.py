"""What a training step costs, beside one by hand and by other libraries.

    mpirun -n 1 python benchmarks/bench_step.py --output .../step-mpich-1rank.json
    mpirun -n 2 python benchmarks/bench_step.py --output .../step-mpich-2ranks.json

The step is that of `jobs/train_digits.py`, of a small network: its own functions read
the batch, compute the gradients, reduce them and change the weights. By hand is the
same with NumPy, h5py and mpi4py, all rows in memory, and one flat all-reduce. The
contestants take turns of two epochs, in an order that changes. Only the second epoch
counts: in the first one, the caches still hold what the contestant before has used,
which no job would have beside it. Results are microseconds per step of the slowest
rank, medians over the epochs, and ratios of turns of the same round. The mean losses
are compared at the end: all have done the same work. The machine should do nothing
else.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# One rank is one share of the CPU
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import charts
import measuring
import numpy as np
import step_contestants
from comparisons import TABLE_HEAD, Comparison
from mpi4py import MPI
from step_contestants import Contestant, digits

import mpidist

# Where a step costs little, what the library costs shows
SMALL = ["--shifts=0", "--hidden=128", "--batch-size=64", "--learning-rate=0.05"]
UNCOUNTED = "mpidist without counters"
# What ours may cost at most, by each of the others
TARGETS = {
    "by hand": 1.5,
    UNCOUNTED: 1.01,
    "torch DDP (gloo)": 0.2,
    "TensorFlow MWMS": 0.1,
}
ALONE = "by hand", UNCOUNTED  # what ours is held against at one rank, too


def measure(
    comm: MPI.Intracomm,
    contestants: Mapping[str, Contestant],
    steps: int,
    epochs: int,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return microseconds per step of each epoch, and the last mean losses.

    Collective. The first turn of each is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    losses = {}
    order = np.random.default_rng(0)  # the same on all ranks
    for turn in range(1 + epochs):
        for name in order.permutation(list(contestants)).tolist():
            train = contestants[name]
            train()
            comm.Barrier()
            start = time.perf_counter()
            losses[name] = train()
            seconds = comm.allreduce(time.perf_counter() - start, MPI.MAX)
            if turn:
                times[name].append(seconds / steps * 1e6)
    return times, losses


def compare(times: Mapping[str, list[float]], ranks: int) -> list[Comparison]:
    """Return ours beside each of the others."""
    case = f"training step, {ranks} rank{'s' if ranks > 1 else ''}"
    return [
        Comparison(
            case,
            name,
            "us",
            times["mpidist"],
            theirs,
            target=TARGETS[name] if ranks > 1 or name in ALONE else None,
            is_at_least=False,
        )
        for name, theirs in times.items()
        if name != "mpidist"
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, help="JSON file; a PNG goes beside it")
    add("--epochs", type=int, default=30, help="of each contestant (default 30)")
    add("--tiny", action="store_true", help="only see that all run")
    options = parser.parse_args(arguments)
    comm = MPI.COMM_WORLD
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    with tempfile.TemporaryDirectory() as own, contextlib.ExitStack() as stack:
        folder = Path(comm.bcast(own))
        job = digits.make_parser(None).parse_args([*SMALL, f"--data-dir={folder}"])
        ours = step_contestants.Ours(strategy, job)  # writes the data
        files, _ = digits.paths(folder, job.shifts)
        contestants: dict[str, Contestant | None] = {
            "mpidist": ours.epoch,
            "by hand": step_contestants.ByHand(comm, files, job).epoch,
            UNCOUNTED: step_contestants.Ours(
                step_contestants.without_counters(), job
            ).epoch,
            "torch DDP (gloo)": stack.enter_context(
                step_contestants.torch_ddp(comm, files, job)
            ),
            "TensorFlow MWMS": step_contestants.tensorflow(comm, files, job),
        }
        present = {name: train for name, train in contestants.items() if train}
        rows = len(step_contestants.read_all(files)[0])
        steps = -(-rows // job.batch_size)
        epochs = 1 if options.tiny else options.epochs
        times, losses = measure(comm, present, steps, epochs)
        comm.Barrier()
    if comm.rank:
        return
    comparisons = compare(times, comm.size)
    print(TABLE_HEAD)
    for comparison in comparisons:
        print(comparison.line())
    print("mean losses:", *(f"{name} {loss:.4f}" for name, loss in losses.items()))
    missing = [name for name in contestants if name not in present]
    if missing:
        print("not installed:", ", ".join(missing))
    if options.output:
        result = {
            "machine": measuring.describe_machine(Path(tempfile.gettempdir())),
            "date": datetime.date.today().isoformat(),
            "ranks": comm.size,
            "rows_per_batch": job.batch_size,
            "hidden": job.hidden,
            "losses": losses,
            "skipped": missing,
            "comparisons": [comparison.as_dict() for comparison in comparisons],
        }
        measuring.save(options.output, result)
        charts.draw(charts.draw_step, result, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
