"""A job that steps until its network or a node fails.

    node_faults_job.py KIND FOLDER

KIND is what it does in each step: "collective", "input", "checkpoint", or "elastic",
which are collectives in `run_elastic`. It ends well when there is a file `enough` in
FOLDER. Rank 0 prints "a step" after each step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np

import mpidist

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
ROWS = 1000


def collective(strategy: mpidist.Strategy) -> Iterator[None]:
    """Reduce small and large arrays, and check the sums."""
    rank, size = strategy.extended.replica_id, strategy.num_replicas_in_sync
    step = 0
    while True:
        for count in (1, 100_000):
            total = strategy.reduce("SUM", np.full(count, float(step + rank)))
            assert (total == size * step + size * (size - 1) / 2).all(), "a wrong sum"
        step += 1
        yield


def read(strategy: mpidist.Strategy) -> Iterator[None]:
    """Read a file that rank 0 has written, epoch after epoch."""
    path, data = FOLDER / "data.h5", np.arange(ROWS * 100.0).reshape(ROWS, 100)
    if strategy.extended.replica_id == 0:
        with h5py.File(path, "w") as file:
            file["x"] = data
    strategy.barrier()
    dataset = mpidist.Dataset.from_hdf5([path], ["x"]).shuffle(seed=1).batch(50)
    divided = strategy.experimental_distribute_dataset(dataset)
    while True:
        total = 0.0
        for (rows,) in divided:
            total += strategy.reduce("SUM", rows, axis=0).sum()
            yield
        assert total == data.sum(), "a wrong sum"


def save(strategy: mpidist.Strategy) -> Iterator[None]:
    """Save checkpoints that all ranks write."""
    with strategy.scope():
        w = mpidist.Variable(np.zeros((1000, 1000)))
    checkpoint = mpidist.Checkpoint(w=w, shard_bytes=1000)
    with mpidist.CheckpointManager(checkpoint, FOLDER / "run", 2) as manager:
        while True:
            manager.save()
            yield


WORK: dict[str, Callable[[mpidist.Strategy], Iterator[None]]] = {
    "collective": collective,
    "input": read,
    "checkpoint": save,
    "elastic": collective,
}


def work(strategy: mpidist.Strategy) -> None:
    """Step until rank 0 sees that it is enough."""
    rank = strategy.extended.replica_id
    for _ in WORK[KIND](strategy):
        if rank == 0:
            print("a step", flush=True)
        is_enough = rank == 0 and (FOLDER / "enough").exists()
        if strategy.reduce("MAX", float(is_enough)):
            break
    print(f"rank {rank} of {strategy.num_replicas_in_sync} ends well", flush=True)


if KIND == "elastic":
    mpidist.run_elastic(work)
else:
    work(mpidist.MirroredStrategy(["CPU:0"]))
