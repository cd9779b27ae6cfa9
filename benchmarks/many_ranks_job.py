"""What one rank does at each stage of a job, counted, for `bench_many_ranks.py`.

    LD_PRELOAD=libmpi_counts.so mpirun -n 64 python many_ranks_job.py FOLDER

Rank 0 writes FOLDER/counts.json: for each stage, the Python functions that a rank
calls, its calls of MPI by name and the bytes passed to them, of the busiest rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

# One rank is one share of the CPU
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import h5py
import numpy as np
from mpi4py import MPI

import mpidist

STEPS = 4
BEGIN = time.monotonic()
# How often these are called, or what is in these files, says how long a rank waits
WAITING = {"Test", "Iprobe", "Improbe"}
WAITING_FILES = ("waiting.py", "barrier.py", "failures.py")


def is_waiting(frame: FrameType | None) -> bool:
    """Return whether a function is called only because a rank has to wait."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(WAITING_FILES):
            return True
        frame = frame.f_back
    return False


class MpiCounts:
    """The counters of `mpi_counts.c` in this process."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        count = ctypes.c_int.in_dll(library, "mpi_kinds").value
        numbers = ctypes.c_int64 * count
        self._calls = numbers.in_dll(library, "mpi_counts")
        self._bytes = numbers.in_dll(library, "mpi_bytes")
        names = (ctypes.c_char_p * count).in_dll(library, "mpi_names")
        self._names = [name.decode() for name in names]

    def read(self) -> dict[str, int]:
        """Return the calls by name, and the bytes of all, since the program began."""
        found = dict(zip(self._names, self._calls))
        found = {name: n for name, n in found.items() if name not in WAITING}
        return {**found, "bytes": sum(self._bytes)}


class Counter:
    """Counts what this rank does in the stages of a job."""

    def __init__(self) -> None:
        self._mpi = MpiCounts()
        self.stages: dict[str, dict[str, int]] = {}
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what is done inside as one stage."""
        functions = 0

        def note(frame: FrameType, event: str, _: Any) -> None:
            nonlocal functions
            functions += event == "call" and not is_waiting(frame)

        before, start = self._mpi.read(), time.monotonic()
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
        self.seconds[name] = time.monotonic() - start
        after = self._mpi.read()
        done = {kind: n - before[kind] for kind, n in after.items()}
        self.stages[name] = {kind: n for kind, n in done.items() if n}
        self.stages[name]["Python functions"] = functions


def run(counter: Counter, folder: Path) -> None:
    """Do what a training job does. Collective."""
    comm = MPI.COMM_WORLD
    path = folder / "rows.h5"
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            file["x"] = np.zeros((comm.size * 8 * STEPS, 4), "f4")
    comm.Barrier()
    with counter.stage("strategy"):
        strategy = mpidist.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        with counter.stage("variables"):
            weights = [mpidist.Variable(np.zeros(100)) for _ in range(4)]
            big = mpidist.Variable(np.zeros(1 << 16))
        data = mpidist.Dataset.from_hdf5(path, "x").shuffle(seed=1)
        with counter.stage("dataset"):
            rows = strategy.experimental_distribute_dataset(data.batch(8 * comm.size))
            batches = iter(rows)
            next(batches)

        small, large = np.ones(16), np.ones(1 << 18)

        def reduce(value: Any) -> Any:
            return mpidist.get_replica_context().all_reduce("SUM", value)

        def gather(value: Any) -> Any:
            return mpidist.get_replica_context().all_gather(value, 0)

        calls = {
            "all_reduce, 128 bytes": lambda: strategy.run(reduce, (small,)),
            "all_reduce, 2 MiB": lambda: strategy.run(reduce, (large,)),
            "all_gather, 128 bytes": lambda: strategy.run(gather, (small,)),
            "next": lambda: next(batches),
        }
        for name, call in calls.items():
            for _ in range(STEPS // 2 if name == "next" else 2):
                call()
            comm.Barrier()
            with counter.stage(name):
                call()
        checkpoint = mpidist.Checkpoint(weights=weights, big=big)
        manager = mpidist.CheckpointManager(checkpoint, folder / "saved", 3)
        for _ in range(2):
            comm.Barrier()
            with counter.stage("save"):
                manager.save()
        comm.Barrier()
        with counter.stage("restore"):
            manager.restore_or_initialize()


def main() -> None:
    comm, folder = MPI.COMM_WORLD, Path(sys.argv[1])
    counter = Counter()
    run(counter, folder)
    everyone = comm.gather((counter.stages, counter.seconds))
    if comm.rank == 0:
        stages: dict[str, Any] = {}
        for name in counter.stages:
            kinds = sorted({k for s, _ in everyone for k in s[name]})
            stages[name] = {
                k: max(s[name].get(k, 0) for s, _ in everyone) for k in kinds
            }
            stages[name]["seconds"] = max(t[name] for _, t in everyone)
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = {"ranks": comm.size, "MiB": kib / 1024, "stages": stages}
        result["seconds"] = time.monotonic() - BEGIN
        (folder / "counts.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
