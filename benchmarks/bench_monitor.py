"""What statistics and timelines cost, on and off in turns.

    mpirun -n 2 python benchmarks/bench_monitor.py

A step of about a millisecond reads a batch, computes, reduces a gradient in two spans
and changes nothing. Epochs with a timeline and without follow each other; told are
medians of the ratios of neighbours, and how many bytes a step takes in the files.
Before that, what one collective costs the recorder and its counters. The machine should
do nothing else.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import harness

# isort: split
import numpy as np
from mpi4py import MPI

import mpidist
from mpidist.comm.consensus.signatures import CallSignature, digest

CALLS = 1000


def recorder_ns(strategy: mpidist.Strategy) -> float:
    """Return nanoseconds that the recorder takes for a collective. Not collective."""
    consensus = strategy.extended.consensus
    call = CallSignature("bench_monitor")
    number = digest(call)
    recorder, best = consensus.recorder, float("inf")
    for _ in range(200):
        start = time.perf_counter()
        for i in range(CALLS):
            recorder.begin(i, call, number)
            recorder.note_arrivals(True, consensus.comparison)
            recorder.end()
        best = min(best, time.perf_counter() - start)
    return best / CALLS * 1e9


def work_of(comm: MPI.Intracomm, seconds: float) -> Callable[[], None]:
    """Return a function that multiplies matrices for about so long. Collective."""
    matrix, products = np.eye(64), 1

    def multiply() -> None:
        for _ in range(products):
            matrix @ matrix

    while min(harness.slowest(comm, multiply) for _ in range(10)) < seconds:
        products *= 2
    return multiply


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--epochs", type=int, default=30, help="with and without (default 30)")
    add("--steps", type=int, default=300, help="of an epoch (default 300)")
    add("--milliseconds", type=float, default=1.0, help="of a step (default 1)")
    options = parser.parse_args(arguments)
    epochs, steps = (2, 5) if options.tiny else (options.epochs, options.steps)
    comm = MPI.COMM_WORLD
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    rows = mpidist.Dataset.range(2 * comm.size * steps).batch(2 * comm.size)
    batches = strategy.experimental_distribute_dataset(rows)
    work = work_of(comm, 0 if options.tiny else options.milliseconds / 2e3)
    gradient = np.zeros(1000)

    def step(batch: object) -> Any:
        for name in ("forward", "backward"):
            with mpidist.span(name):
                work()
        return mpidist.get_replica_context().all_reduce("MEAN", gradient)

    def epoch() -> None:
        for batch in batches:
            strategy.run(step, args=(batch,))

    epoch()
    off, on = [], []
    with tempfile.TemporaryDirectory() as own:
        folder = Path(comm.bcast(own))
        for number in range(2 * epochs):
            # On first in every other pair
            is_on = number % 4 in (1, 2)
            with strategy.timeline(folder) if is_on else nullcontext():
                seconds = harness.slowest(comm, epoch)
            (on if is_on else off).append(seconds / steps * 1e6)
        size_bytes = sum(path.stat().st_size for path in folder.glob("timeline-*"))
        comm.Barrier()
    ratios = [a / b for a, b in zip(on, off)]
    if comm.rank == 0:
        print(f"recorder and counters: {recorder_ns(strategy):.0f} ns a collective")
        print(
            f"step: {statistics.median(off):.1f} us without a timeline, "
            f"{statistics.median(on):.1f} us with; ratio "
            f"{statistics.median(ratios):.4f} (quartiles "
            f"{np.quantile(ratios, 0.25):.4f}, {np.quantile(ratios, 0.75):.4f}), "
            f"of the best {min(on) / min(off):.4f}"
        )
        print(f"{size_bytes / comm.size / steps:.0f} bytes a step and rank")


if __name__ == "__main__":
    main()
