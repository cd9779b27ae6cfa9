"""Read some shuffled batches of several HDF5 files, for `bench_metadata.py`.

    mpirun -n 2 python benchmarks/metadata_job.py FOLDER --reader mpidist
        --batch 32 --steps 8 --epochs 2 --report PREFIX

Every rank writes to `<PREFIX>.<rank>` how many rows it got, and how many bytes of the
files were in its memory at most, through maps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# One rank is one share of the CPU, as in bench_input.py
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import h5py
import numpy as np
from input_files import NAME
from mpi4py import MPI

import mpidist
from mpidist.util import mounts


def with_mpidist(
    strategy: mpidist.Strategy, options: argparse.Namespace
) -> Iterator[Any]:
    """Yield this rank's rows of each batch, by this library. Collective.

    Read as on a network file system, where states of files are looked at less often.
    """
    mounts.LOCAL_FILE_SYSTEMS = frozenset()
    data = mpidist.Dataset.from_hdf5(options.folder / "*.h5", NAME).shuffle(seed=0)
    yield from each_batch(strategy, data, options)


def with_h5py(strategy: mpidist.Strategy, options: argparse.Namespace) -> Iterator[Any]:
    """Yield the same rows, in order, by plain h5py: each rank opens each file once."""
    opened = [h5py.File(path, "r") for path in sorted(options.folder.glob("*.h5"))]
    datasets = [file[NAME] for file in opened]
    starts = np.cumsum([0, *map(len, datasets)])
    numbers = mpidist.Dataset.range(int(starts[-1])).shuffle(seed=0)
    for rows in each_batch(strategy, numbers, options):
        in_order = np.sort(rows)
        edges = np.searchsorted(in_order, starts)
        yield np.concatenate(
            [
                dataset[in_order[first:last] - start]
                for dataset, start, first, last in zip(
                    datasets, starts, edges, edges[1:], strict=False
                )
            ]
        )
    for file in opened:
        file.close()


def each_batch(
    strategy: mpidist.Strategy, data: mpidist.Dataset, options: argparse.Namespace
) -> Iterator[Any]:
    """Yield this rank's rows of `options.steps` batches of each epoch. Collective."""
    on_host = mpidist.InputOptions(experimental_fetch_to_device=False)
    batches = strategy.experimental_distribute_dataset(
        data.batch(options.batch * strategy.num_replicas_in_sync).take(options.steps),
        on_host,
    )
    for _ in range(options.epochs):
        for batch in batches:
            yield strategy.experimental_local_results(batch)[0]


def resident_bytes(folder: Path) -> int:
    """Return how many bytes of the files in a folder this process has in maps."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            is_inside = str(folder) in line
        elif is_inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


READERS = {"mpidist": with_mpidist, "h5py": with_h5py}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reader", choices=READERS, required=True)
    parser.add_argument("--batch", type=int, required=True, help="rows per rank")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args(arguments)

    strategy = mpidist.MirroredStrategy()
    rows = resident = 0
    for batch in READERS[options.reader](strategy, options):
        rows += len(batch)
        resident = max(resident, resident_bytes(options.folder))
    rank = MPI.COMM_WORLD.rank
    report = json.dumps({"rows": rows, "resident_bytes": resident})
    Path(f"{options.report}.{rank}").write_text(report)


if __name__ == "__main__":
    main()
