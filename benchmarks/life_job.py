"""A rank of the digits job that notes how long its stages last: see `bench_life.py`.

    mpirun -n 4 python benchmarks/life_job.py FOLDER [ARGUMENTS OF THE JOB]

Without arguments it only starts MPI. It imports nothing before the job does, other than
what Python has imported itself, or nearly so.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SAVE_EVERY = 5
BEGUN = "LIFE_BEGUN"  # when the launcher was started
KILLED = "LIFE_KILLED"  # the rank that dies
BETWEEN = "between"
LAST = "last"


def read_sizes(path: str, *names: str) -> dict[str, int]:
    """Return KiB by name, from a file about this process."""
    rows = (line.split() for line in Path(path).read_text().splitlines())
    sizes = {row[0].rstrip(":"): row[1] for row in rows if len(row) > 1}
    return {name: int(sizes[name]) for name in names}


class Stages:
    """Notes when this rank leaves each stage, and what it has used until then."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float, int]] = []
        self.leave("Python")

    def leave(self, name: str) -> None:
        """Note that a stage is over."""
        own = read_sizes("/proc/self/status", "RssAnon")["RssAnon"]
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        self.rows.append((name, time.time() - float(os.environ[BEGUN]), used, own))

    @contextlib.contextmanager
    def at_calls(self, owner: Any, name: str, stage: str) -> Iterator[None]:
        """Let each call of a function be a stage."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.leave(BETWEEN)
            result = function(*args, **kwargs)
            self.leave(stage)
            return result

        setattr(owner, name, call)
        yield
        setattr(owner, name, function)

    def write(self, folder: Path) -> None:
        """Write all to a file of this rank, once all ranks are here. Collective."""
        from mpi4py import MPI

        self.leave(LAST)
        MPI.COMM_WORLD.Barrier()
        kinds = "Pss", "Pss_Anon", "Pss_File", "Pss_Shmem"
        sizes = read_sizes("/proc/self/smaps_rollup", *kinds)
        path = folder / f"{MPI.COMM_WORLD.rank}.json"
        path.write_text(json.dumps({"rows": self.rows, "sizes": sizes}))


def import_all(stages: Stages) -> None:
    """Import what the job needs, one by one, and start MPI. Collective."""
    import digits  # noqa: F401 - it sets the number of threads, before NumPy

    stages.leave("NumPy, h5py")
    import mpi4py

    mpi4py.rc(initialize=False, finalize=True)
    from mpi4py import MPI

    stages.leave("mpi4py, libmpi")
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    stages.leave("MPI_Init")


def run_plain(folder: Path) -> None:
    """Do what every program of MPI does. Collective."""
    stages = Stages()
    import_all(stages)
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    stages.leave("barrier")
    stages.write(folder)


def run_job(folder: Path, arguments: Sequence[str]) -> None:
    """Be a rank of the job. Collective."""
    stages = Stages()
    import_all(stages)
    import mpidist

    stages.leave("mpidist")
    import train_digits
    import train_digits_resumable as job

    later = mpidist.CheckpointManager, mpidist.PreemptionCheckpointHandler
    assert all((*later, mpidist.Checkpoint, mpidist.run_elastic))
    stages.leave("tqdm, checkpoints")
    die_in_step(train_digits.Network, os.environ.get(KILLED), folder)
    timed = [
        (mpidist, "MirroredStrategy", "strategy"),
        (train_digits, "read", "datasets"),
        (train_digits, "Network", "variables"),
        (mpidist, "PreemptionCheckpointHandler", "restore"),
        (train_digits.Network, "step", "step"),
        (train_digits, "evaluate", "evaluation"),
        (mpidist.CheckpointManager, "save", "save"),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, stage in timed:
            stack.enter_context(stages.at_calls(owner, name, stage))
        job.main(arguments)
    stages.write(folder)


def die_in_step(network: Any, killed: str | None, folder: Path) -> None:
    """Let a rank kill itself after some steps, and write when."""
    from mpi4py import MPI

    if killed is None or MPI.COMM_WORLD.rank != int(killed):
        return
    step, steps = network.step, itertools.count()

    def die(*args: Any) -> Any:
        if next(steps) > SAVE_EVERY:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*args)

    network.step = die


if __name__ == "__main__":
    place, *options = sys.argv[1:]
    run_job(Path(place), options) if options else run_plain(Path(place))
