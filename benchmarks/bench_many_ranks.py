"""What a rank does in jobs of more and more ranks, by counting instead of timing.

    python benchmarks/bench_many_ranks.py --output benchmarks/results/many-ranks.json

Where many ranks share few cores, times say nothing. Counted are, for the busiest rank
and each stage of a job, the Python functions that are called, the calls of MPI (by a
library that stands between, `mpi_counts.c`) and the bytes passed to them. From the
numbers of ranks but the last, a model a + b log2(ranks) + c ranks is fitted; it is
checked by the last one, and says what a rank does in larger jobs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import harness

# isort: split
import h5py
import launching
import numpy as np
from mpi4py import MPI

import mpidist
from mpidist.comm.consensus import waiting

HERE = Path(__file__).parent
LARGE = (1024, 16384)
STEPS = 4
LIMIT_SECONDS = 7200.0
COUNTS = ("Python functions", "calls of MPI", "bytes")


def build(folder: Path) -> Path:
    """Compile the library that counts, with the compiler that came with MPI."""
    library = folder / "libmpi_counts.so"
    compiler = Path(sys.executable).with_name("mpicc")
    command = [str(compiler), "-O2", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, str(HERE / "mpi_counts.c")], check=True)
    return library


def count(library: Path, ranks: int, ranks_per_node: int) -> dict[str, Any]:
    """Return what `run_rank` counts in a job of some ranks."""
    with tempfile.TemporaryDirectory() as folder:
        job = [sys.executable, __file__, "--rank-of", folder]
        ended = launching.run(
            [*launching.mpirun_command(ranks), *job],
            LIMIT_SECONDS,
            LD_PRELOAD=str(library),
            MPIDIST_RANKS_PER_NODE=str(ranks_per_node),
        )
        if ended.returncode:
            raise SystemExit(f"the job of {ranks} ranks failed:\n{ended.stderr}")
        return json.loads((Path(folder) / "counts.json").read_text())


def terms(ranks: int) -> list[float]:
    """Return what the model is made of."""
    return [1.0, math.log2(ranks), float(ranks)]


def fit(sizes: Sequence[int], numbers: Sequence[float]) -> list[float]:
    """Return the factors of `terms`; those that are nothing but rounding are 0."""
    matrix = np.array([terms(n) for n in sizes])
    factors = np.linalg.lstsq(matrix, np.array(numbers, float), rcond=None)[0]
    return [0.0 if abs(f) < 1e-6 * max(numbers, default=1) else f for f in factors]


def summarize(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each stage and count: the numbers, and the model of them."""
    sizes, rows = [job["ranks"] for job in jobs], []
    for stage in jobs[0]["stages"]:
        for kind in COUNTS:
            numbers = [job["stages"][stage][kind] for job in jobs]
            factors = fit(sizes[:-1], numbers[:-1])
            model = [float(np.dot(factors, terms(n))) for n in (sizes[-1], *LARGE)]
            row = {"stage": stage, "count": kind, "numbers": numbers}
            rows.append(row | {"factors": factors, "model": model})
    return rows


def show(sizes: Sequence[int], rows: Sequence[dict[str, Any]]) -> None:
    """Print a table."""
    heads = [*map(str, sizes), f"model: {sizes[-1]}", *map(str, LARGE), "per rank"]
    print(f"{'stage':22}{'count':18}", *(f"{head:>12}" for head in heads))
    for row in rows:
        numbers = [*row["numbers"], *(round(n) for n in row["model"])]
        each = "".join(f"{n:13,}" for n in numbers)
        print(f"{row['stage']:22}{row['count']:18}{each}{row['factors'][2]:13.2f}")


# How often these are called, or what is in these files, says how long a rank waits
WAITING = {"Test", "Iprobe", "Improbe"}
WAITING_FILES = ("waiting.py", "barrier.py", "failures.py")


def is_waiting(frame: FrameType | None) -> bool:
    """Return whether a function is called only because a rank has to wait."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(WAITING_FILES) or code.co_name == "wait":
            return True
        frame = frame.f_back
    return False


class Counter:
    """Counts what this rank does in the stages of a job."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)  # with `mpi_counts.c`
        kinds = ctypes.c_int.in_dll(library, "mpi_kinds").value
        names = (ctypes.c_char_p * kinds).in_dll(library, "mpi_names")
        self._calls = (ctypes.c_int64 * kinds).in_dll(library, "mpi_counts")
        self._bytes = (ctypes.c_int64 * kinds).in_dll(library, "mpi_bytes")
        self._counted = [i for i in range(kinds) if names[i].decode() not in WAITING]
        self.stages: dict[str, dict[str, int]] = {}

    def _read(self) -> Any:
        return np.array([sum(self._calls[i] for i in self._counted), sum(self._bytes)])

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what is done inside as one stage."""
        functions = 0

        def note(frame: FrameType, event: str, _: Any) -> None:
            nonlocal functions
            functions += event == "call" and not is_waiting(frame)

        before = self._read()
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
        done = (self._read() - before).tolist()
        self.stages[name] = dict(zip(COUNTS, (functions, *done), strict=True))


def run(counter: Counter, folder: Path) -> None:
    """Do what a training job does. Collective."""
    comm = MPI.COMM_WORLD
    # Ranks that wait for more than a second tell each other so. How often that happens
    # depends on what else these cores have to do
    waiting._ANNOUNCE_SECONDS = math.inf
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


def run_rank(folder: Path) -> None:
    """Count as one of the ranks; rank 0 writes the counts of the busiest."""
    comm, counter, begin = MPI.COMM_WORLD, Counter(), time.monotonic()
    run(counter, folder)
    everyone = comm.gather(counter.stages)
    if comm.rank == 0:
        stages = {
            name: {kind: max(s[name][kind] for s in everyone) for kind in COUNTS}
            for name in counter.stages
        }
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = {"ranks": comm.size, "MiB": kib / 1024, "stages": stages}
        result["seconds"] = time.monotonic() - begin
        (folder / "counts.json").write_text(json.dumps(result))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--ranks", nargs="+", type=int, default=[24, 32, 48, 64, 128])
    add("--ranks-per-node", type=int, default=1, help="of pretended nodes")
    options = parser.parse_args(arguments)
    sizes = [4, 6, 8] if options.tiny else options.ranks
    jobs = []
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        for ranks in sizes:
            jobs.append(count(library, ranks, options.ranks_per_node))
            seconds, memory = jobs[-1]["seconds"], jobs[-1]["MiB"]
            print(f"{ranks} ranks: {seconds:.1f} s, {memory:.0f} MiB each", flush=True)
    rows = summarize(jobs)
    show(sizes, rows)
    if options.output is not None:
        facts = [{key: job[key] for key in ("ranks", "seconds", "MiB")} for job in jobs]
        harness.save(
            options.output,
            ranks_per_node=options.ranks_per_node,
            jobs=facts,
            rows=rows,
            **{"model of": [sizes[-1], *LARGE]},
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:  # started by `count`
        run_rank(Path(sys.argv[2]))
    else:
        main()
