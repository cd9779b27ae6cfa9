"""Read some batches; print the most memory that it took on any rank, in bytes.

    mpirun -n 2 python benchmarks/input_memory_job.py FILE --batch 256 --steps 130

That is RssAnon + RssShmem of /proc/self/status, looked at every millisecond. So the
pages of files do not count: processes share them, and the kernel takes them back when
it needs memory.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

# One rank is one share of the CPU, as in bench_input.py
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

from input_files import NAME
from mpi4py import MPI

import mpidist


class PeakMemory:
    """The most memory that this process had in a `with` block, in `peak_bytes`."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._is_over.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, own_memory_bytes())

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, own_memory_bytes())


def own_memory_bytes() -> int:
    """Return the memory of this process that is not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    kibibytes = (int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return sum(kibibytes) * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args(arguments)

    strategy = mpidist.MirroredStrategy()
    with PeakMemory() as memory:
        rows = mpidist.Dataset.from_hdf5(options.file, NAME).shuffle(seed=0)
        batches = rows.batch(options.batch).take(options.steps)
        for _ in strategy.experimental_distribute_dataset(batches):
            pass
    peak = MPI.COMM_WORLD.allreduce(memory.peak_bytes, MPI.MAX)
    if MPI.COMM_WORLD.rank == 0:
        print(peak)


if __name__ == "__main__":
    main()
