"""How fast rows of HDF5 files and of arrays get to a device.

    python benchmarks/bench_upload.py --output benchmarks/results/upload.json

On a GPU, ours is divided by copies of page-locked memory to it. Where there is no GPU
the device is one that takes no time: what is left is the host's part, which is divided
by `np.copyto` of as many bytes, by one thread and by as many as there are cores (the
best number of them). Shuffled batches, whole epochs, medians of several, in turn; all
bytes are in the page cache. For one rank; `taskset -c 0-3` gives it four cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import comparisons
import h5py
import measuring
import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import mpidist
from mpidist.device import binding, streams

Bytes = npt.NDArray[np.uint8]

# Shape of a row, rows per batch, how the file is laid out (None: arrays in memory)
CASES: dict[str, tuple[tuple[int, ...], int, dict[str, Any] | None]] = {
    "147 KB, batches of 256": ((3, 224, 224), 256, {}),
    "147 KB, chunks of a row": ((3, 224, 224), 256, {"chunks": (1, 3, 224, 224)}),
    "147 KB, arrays in memory": ((3, 224, 224), 256, None),
    "8 MB, batches of 4": ((128, 128, 128, 4), 4, {}),
    "3 KB, batches of 8192": ((3, 32, 32), 8192, {}),
    "3 KB, batches of 256": ((3, 32, 32), 256, {}),
}


class _Instantly:
    """A stream of copies that takes no time; also an event that has happened."""

    sent = 0

    def pin(self, size: int) -> Bytes:
        return np.ones(size, np.uint8)  # its pages are there

    def reserve(self, size: int) -> None:
        return None

    def holds(self, leaf: Any) -> bool:
        return False

    def send(self, host: Bytes, staged: Any, start: int) -> None:
        self.sent += host.size

    def record(self) -> _Instantly:
        return self

    def synchronize(self) -> None:
        return None

    wait = staticmethod(lambda event: None)

    def fetch(self, staged: Any, parts: Any, sent: Any) -> tuple[list[Any], Any]:
        return [np.empty(part.shape[:1], "V0") for part in parts], self


def write(path: Path, shape: tuple[int, ...], rows: int, options: Any) -> None:
    """Write rows of random bytes."""
    random, some = np.random.default_rng(0), max(1, (64 << 20) // int(np.prod(shape)))
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", (rows, *shape), np.uint8, **options)
        for start in range(0, rows, some):
            part = min(some, rows - start), *shape
            data[start : start + part[0]] = random.integers(0, 255, part, np.uint8)


def dataset(folder: Path, case: str, size: int) -> tuple[mpidist.Dataset, int]:
    """Return a case's rows, and how many bytes they have."""
    shape, batch, options = CASES[case]
    row_bytes = int(np.prod(shape))
    rows = max(3, size // row_bytes)
    path = folder / "rows.h5"
    write(path, shape, rows, options or {})
    if options is None:
        with h5py.File(path) as file:
            data = mpidist.Dataset.from_tensor_slices(file["x"][:])
    else:
        data = mpidist.Dataset.from_hdf5(path, "x")
    return data.shuffle(seed=0).batch(batch), rows * row_bytes


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def copies(size: int, threads: int) -> Callable[[], None]:
    """Return a function that copies so many bytes within the host's memory."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    edges = [size * i // threads for i in range(threads + 1)]
    pool = ThreadPoolExecutor(threads)

    def copy(i: int) -> None:
        part = slice(edges[i], edges[i + 1])
        np.copyto(target[part], source[part])

    return lambda: list(pool.map(copy, range(threads))) and None


def uploads(size: int) -> Callable[[], None]:
    """Return a function that copies so many page-locked bytes to the GPU."""
    import cupy

    host = np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
    there, stream = cupy.empty(size, np.uint8), cupy.cuda.Stream(non_blocking=True)

    def upload() -> None:
        there.set(host, stream)
        stream.synchronize()

    return upload


def rivals(size: int, on_gpu: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield other ways to move so many bytes."""
    if on_gpu:
        yield "page-locked memory to the GPU", uploads(size)
        return
    yield "copyto, one thread", copies(size, 1)
    cores = len(os.sched_getaffinity(0))
    if cores > 1:
        found = {n: copies(size, n) for n in range(2, cores + 1)}
        best = min(found, key=lambda n: min(seconds(found[n]) for _ in range(3)))
        yield f"copyto, {best} threads", found[best]


def compare(
    strategy: mpidist.Strategy, folder: Path, case: str, options: argparse.Namespace
) -> Iterator[comparisons.Comparison]:
    """Yield ours by each of the others, in GB/s."""
    on_gpu = strategy.extended.device.startswith("GPU")
    data, size = dataset(folder, case, options.mb << 20)
    batches = strategy.experimental_distribute_dataset(data)

    def epoch() -> None:
        for _ in batches:
            pass
        if on_gpu:
            import cupy

            cupy.cuda.Device().synchronize()

    others = dict(rivals(min(size, 256 << 20), on_gpu))
    epoch()
    ours: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in others}
    for _ in range(options.repetitions):
        ours.append(size / seconds(epoch) / 1e9)
        for name, other in others.items():
            took = min(seconds(other) for _ in range(3))
            theirs[name].append(min(size, 256 << 20) / took / 1e9)
    for name, rates in theirs.items():
        target = 0.8 if on_gpu else None
        yield comparisons.Comparison(case, name, "GB/s", ours, rates, target)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--mb", type=int, default=1024, help="of rows, per case")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="for the data")
    parser.add_argument("--tiny", action="store_true", help="only see that it runs")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.mb, options.repetitions = 2, 1
    if not binding.gpu_count():
        instantly = _Instantly()
        streams.copy_stream = lambda device: instantly
    strategy = mpidist.MirroredStrategy(communicator=MPI.COMM_SELF)
    print(comparisons.TABLE_HEAD, flush=True)
    results = []
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        machine = measuring.describe_machine(folder)
        for case in options.cases:
            for comparison in compare(strategy, folder, case, options):
                print(comparison.line(), flush=True)
                results.append(comparison.as_dict())
    if options.output is not None:
        device = strategy.extended.device if binding.gpu_count() else "none"
        result = {"machine": machine, "device": device, "comparisons": results}
        measuring.save(options.output, result)


if __name__ == "__main__":
    main()
