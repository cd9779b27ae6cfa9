"""A job whose report shows one cause: `balanced`, `slow-rank` or `slow-disk`.

    MPIDIST_TIMELINE=folder mpirun -n 3 python benchmarks/monitor_job.py slow-rank
    python -m mpidist report folder -o report.html

What would compute, or read, sleeps instead, so that it shows the same on few cores.
The pictures in docs/pictures are of these.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from mpi4py import MPI

import mpidist

CAUSES = ("balanced", "slow-rank", "slow-disk")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cause", choices=CAUSES)
    parser.add_argument("--steps", type=int, default=1500, help="(default 1500)")
    parser.add_argument(
        "--speed", type=float, default=1.0, help="how much shorter all sleeps are"
    )
    options = parser.parse_args(arguments)
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    rank, ranks = strategy.extended.replica_id, strategy.num_replicas_in_sync
    rng = np.random.default_rng(rank)
    is_slow = options.cause == "slow-rank" and rank == 1
    reading = (0.03 if options.cause == "slow-disk" else 0.001) / options.speed
    factor = (3 if is_slow else 1) / options.speed

    def read(x: object) -> object:
        time.sleep(reading)  # of a batch, in a thread
        return x

    def step(x: object) -> object:
        with mpidist.span("forward"):
            time.sleep(rng.uniform(0.001, 0.0015) * factor)
        with mpidist.span("backward"):
            time.sleep(rng.uniform(0.002, 0.003) * factor)
        return mpidist.get_replica_context().all_reduce("MEAN", gradient)

    gradient = np.ones(20_000)
    rows = mpidist.Dataset.range(8 * ranks * options.steps).batch(8 * ranks).map(read)
    with strategy.scope():
        w = mpidist.Variable(np.zeros(20_000))
    checkpoint = mpidist.Checkpoint(w=w)
    with tempfile.TemporaryDirectory() as own:
        folder = MPI.COMM_WORLD.bcast(own)
        batches = strategy.experimental_distribute_dataset(rows)
        for number, batch in enumerate(batches, 1):
            strategy.run(step, args=(batch,))
            if number % (options.steps // 3 or 1) == 0:
                checkpoint.save(f"{folder}/ckpt")
        strategy.barrier()


if __name__ == "__main__":
    main()
