"""What benchmarks share: timing all ranks, telling the machine."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from mpi4py import MPI

# A function that starts one pass over this rank's batches
Epochs = Callable[[], Iterable[Any]]


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One pass over the data by all ranks.

    Args:
      rows: of all ranks.
      seconds: of the slowest rank.
      cpu_seconds: of all threads of all ranks, but not of their child processes.
    """

    rows: int
    seconds: float
    cpu_seconds: float

    @property
    def rows_per_second(self) -> float:
        """How many rows all ranks together got per second."""
        return self.rows / self.seconds

    @property
    def rows_per_cpu_second(self) -> float:
        """How many rows were got per second of one core."""
        return self.rows / self.cpu_seconds


def time_epoch(comm: MPI.Intracomm, start_epoch: Epochs) -> Epoch:
    """Go through one epoch on all ranks at the same time. Collective."""
    comm.Barrier()
    cpu, start, rows = time.process_time(), time.perf_counter(), 0
    for batch in start_epoch():
        rows += len(batch)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Epoch(
        comm.allreduce(rows), comm.allreduce(seconds, MPI.MAX), comm.allreduce(cpu)
    )


def check_epoch(
    comm: MPI.Intracomm, start_epoch: Epochs, rows: int, total: int
) -> None:
    """Go through one epoch, to warm up, and look at every byte of it. Collective.

    All ranks together must get so many `rows`, whose bytes have the sum `total`.
    """
    found = np.zeros(2, np.int64)
    for batch in start_epoch():
        found += len(batch), int(np.asarray(batch).sum(dtype=np.int64))
    found = comm.allreduce(found)
    assert found.tolist() == [rows, total], (found, rows, total)


def alternate(
    comm: MPI.Intracomm, contestants: Mapping[str, Epochs], repetitions: int
) -> dict[str, list[Epoch]]:
    """Time all contestants in turn, several times. Collective."""
    epochs: dict[str, list[Epoch]] = {name: [] for name in contestants}
    for _ in range(repetitions):
        for name, start_epoch in contestants.items():
            epochs[name].append(time_epoch(comm, start_epoch))
    return epochs


def describe_machine(folder: Path) -> dict[str, Any]:
    """Return what the numbers depend on: hardware, versions, file system."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_of_this_process": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": file_system_of(folder),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "hdf5": h5py.version.hdf5_version,
        "mpi": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        **dict(_versions(["mpidist", "numpy", "h5py", "mpi4py", "torch"])),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def file_system_of(folder: Path) -> str:
    """Return the type of the file system that holds a folder, such as ext4."""
    where, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        is_inside = folder.resolve().is_relative_to(mount)
        if is_inside and len(mount) >= len(where):
            where, kind = mount, found
    return kind


def _versions(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name == "mpidist":  # it runs in a clone, uninstalled
                import mpidist

                yield name, mpidist.__version__


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
