"""How fast packages from PyPI inflate HDF5's chunks, on one core.

    python benchmarks/bench_inflate.py --output benchmarks/results/inflate.json

The chunks are those of bench_input.py's compressed file, and of the same rows as
float32. Each package inflates all of them in turn, several times; medians are given.
The reader uses `deflate`, the fastest or nearly so; the others are compared where they
are installed (`pip install isal zlib-ng`).
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness

# isort: split
import deflate
import h5py
import input_files
import numpy as np
from mpi4py import MPI

Inflate = Callable[[bytes, int], bytes]


def inflaters() -> dict[str, Inflate]:
    """Return the function of each package that is there."""
    found: dict[str, Inflate] = {
        "deflate": deflate.zlib_decompress,
        "zlib": lambda data, size: zlib.decompress(data, bufsize=size),
    }
    for package, module in [("isal", "isal_zlib"), ("zlib_ng", "zlib_ng")]:
        try:
            other: Any = importlib.import_module(f"{package}.{module}")
        except ImportError:
            continue
        found[package] = lambda data, size, m=other: m.decompress(data, bufsize=size)
    return found


def chunks_of(path: Path, dtype: str, rows: int) -> tuple[list[bytes], int]:
    """Return compressed chunks of so many rows, and the size of each before."""
    data = input_files.images(np.random.default_rng(0), rows).astype(dtype)
    with h5py.File(path, "w") as file:
        options = input_files.LAYOUTS["gzip"]
        dataset = file.create_dataset("x", data=data, **options)
        starts = [(row, 0, 0, 0) for row in range(0, rows - 127, 128)]
        return [dataset.id.read_direct_chunk(s)[1] for s in starts], data[:128].nbytes


def compare(dtype: str, rows: int, repetitions: int) -> dict[str, float]:
    """Return the bytes per second that each package gives, in MB/s."""
    with tempfile.TemporaryDirectory() as folder:
        chunks, size = chunks_of(Path(folder, "x.h5"), dtype, rows)

    def inflate_all(inflate: Inflate) -> None:
        for chunk in chunks:
            assert len(inflate(chunk, size)) == size

    calls = {name: lambda f=f: inflate_all(f) for name, f in inflaters().items()}
    times = harness.take_turns(MPI.COMM_SELF, calls, repetitions)
    amount = len(chunks) * size / 1e6
    return {n: round(amount / statistics.median(s), 1) for n, s in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    options = harness.parser(__doc__).parse_args(arguments)
    rows, repetitions = (256, 1) if options.tiny else (12_800, 9)
    found = {d: compare(d, rows, repetitions) for d in ("uint8", "float32")}
    for dtype, speeds in found.items():
        best = speeds["zlib"]
        text = ", ".join(f"{n} {s:g} ({s / best:.2f}x)" for n, s in speeds.items())
        print(f"{dtype}: MB/s: {text}")
    if options.output:
        harness.save(options.output, megabytes_per_second=found)


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
