"""Checkpoints: how fast they are written, and how long training stops for them.

    mpirun -n 2 python benchmarks/bench_checkpoint.py [--folder DIR] [--output FILE]

The state is mirrored variables of 1 GB. Compared are, in turn,

- a save with all its checks, against every rank writing its share of as many bytes to a
  file of its own with os.write and os.fsync: the disk's plain speed;
- what a save in the background costs a loop that computes and reduces, against what a
  save costs it that is waited for: how much longer the loop lasts than without a save.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness

# isort: split
import numpy as np
from harness import Comparison
from mpi4py import MPI

import mpidist
from mpidist.checkpoint.directory import removal

WRITTEN_BYTES = 16 << 20  # by each os.write
VARIABLES = 16


def make_state(strategy: mpidist.Strategy, size_bytes: int) -> mpidist.Checkpoint:
    """Return a checkpoint of variables of so many bytes, and a few small things."""
    rng = np.random.default_rng(0)
    count = size_bytes // VARIABLES // 4
    with strategy.scope():
        weights = [
            mpidist.Variable(rng.random(count, dtype=np.float32))
            for _ in range(VARIABLES)
        ]
    return mpidist.Checkpoint(weights=weights, rng=rng, step=0)


def measure_speed(
    comm: MPI.Intracomm, checkpoint: mpidist.Checkpoint, folder: Path, options: Any
) -> Comparison:
    """Compare saves with plain writes, in bytes per second."""
    manager = mpidist.CheckpointManager(checkpoint, folder / "speed", 1)
    share = np.concatenate([w.local for w in checkpoint.weights]).view(np.uint8)
    share = share[: options.size_bytes // comm.size]
    path = folder / f"plain-{comm.rank}"
    ours, theirs = [], []
    for i in range(options.repetitions + 1):
        theirs.append(seconds(comm, lambda: write_plainly(path, share)))
        path.unlink()
        ours.append(seconds(comm, manager.save))
        if i == 0:  # to warm up
            ours, theirs = [], []
    return Comparison(
        "save, blocking",
        "os.write and fsync, each rank its share",
        "B/s",
        [options.size_bytes / s for s in ours],
        [options.size_bytes / s for s in theirs],
        0.7,
        note=f"{options.size_bytes} bytes by {comm.size} ranks",
    )


def write_plainly(path: Path, data: Any) -> None:
    """Write bytes to a new file, and bring them to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    rest = memoryview(data)
    while rest.nbytes:
        rest = rest[os.write(descriptor, rest[:WRITTEN_BYTES]) :]
    os.fsync(descriptor)
    os.close(descriptor)


def seconds(comm: MPI.Intracomm, work: Callable[[], Any]) -> float:
    """Return the time of the slowest rank."""
    removal.wait()  # nobody else is to feel that old files are being removed
    return harness.slowest(comm, work)


def measure_stall(
    comm: MPI.Intracomm, checkpoint: mpidist.Checkpoint, folder: Path, options: Any
) -> Iterator[Comparison]:
    """Compare what saves cost a training loop, in seconds."""
    strategy = checkpoint.strategy
    managers = {
        name: mpidist.CheckpointManager(
            checkpoint, folder / name, 1, is_background=name == "background"
        )
        for name in ("blocking", "background")
    }
    saving = seconds(comm, managers["blocking"].save)
    steps = count_steps(comm, strategy, 3 * saving)
    loops: dict[str, list[float]] = {"none": [], "blocking": [], "background": []}
    calls = []
    for i in range(options.repetitions + 1):
        for name, found in loops.items():
            manager = managers.get(name)
            took, call = loop(comm, strategy, steps, manager)
            found.append(took)
            if name == "background":
                calls.append(call)
                manager.wait()
        if i == 0:  # to warm up
            loops, calls = {name: [] for name in loops}, []
    # Other work on the machine only adds: the shortest loops say the most
    base, blocking, background = (min(found) for found in loops.values())
    wait, stall, call = blocking - base, background - base, min(calls)
    note = f"{steps} steps in {base:.3f} s without a save; the shortest loops of each"
    against = "blocking save"
    yield Comparison(
        "stall, background", against, "s", [stall], [wait], 0.1, False, note
    )
    yield Comparison("the call of save itself", against, "s", [call], [wait])


def count_steps(
    comm: MPI.Intracomm, strategy: mpidist.Strategy, wanted_seconds: float
) -> int:
    """Return how many steps take about so long."""
    took, _ = loop(comm, strategy, 20, None)
    return max(20, int(20 * wanted_seconds / took))


def loop(
    comm: MPI.Intracomm,
    strategy: mpidist.Strategy,
    steps: int,
    manager: mpidist.CheckpointManager | None,
) -> tuple[float, float]:
    """Return the seconds of a loop with one save, and those of the call of save."""
    a = np.random.default_rng(0).random((300, 300))
    call = 0.0

    def step() -> Any:
        context = mpidist.get_replica_context()
        assert context is not None
        return context.all_reduce("MEAN", a @ a)

    def work() -> None:
        nonlocal call
        for i in range(steps):
            strategy.run(step)
            if i == 2 and manager is not None:
                start = time.perf_counter()
                manager.save()
                call = time.perf_counter() - start

    took = seconds(comm, work)
    return took, max(comm.allgather(call))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, 7)
    add = parser.add_argument
    add("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    add("--size-bytes", type=int, default=10**9)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.size_bytes, options.repetitions = 4 << 20, 1
    comm = MPI.COMM_WORLD
    made = tempfile.mkdtemp(dir=options.folder) if comm.rank == 0 else ""
    folder = Path(comm.bcast(made))

    def compare() -> Iterator[Comparison]:
        checkpoint = make_state(mpidist.MirroredStrategy(), options.size_bytes)
        yield measure_speed(comm, checkpoint, folder, options)
        yield from measure_stall(comm, checkpoint, folder, options)

    try:
        facts = {"folder": options.folder, "size_bytes": options.size_bytes}
        harness.report(compare(), options.output, comm, **facts)
    finally:
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
