"""How fast packages from PyPI inflate HDF5's chunks, on one core.

    python benchmarks/bench_inflate.py --output benchmarks/results/inflate.json

The chunks are those of bench_input.py's compressed file, and of the same rows as
float32. Each package inflates all of them in turn, several times; medians are given.
The reader uses `deflate`, the fastest or nearly so; the others are compared where they
are installed (`pip install isal zlib-ng`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import deflate
import h5py
import input_files
import measuring
import numpy as np

Inflate = Callable[[bytes, int], bytes]


def inflaters() -> Iterator[tuple[str, Inflate]]:
    """Yield each package that is there, and its function."""
    yield "deflate", deflate.zlib_decompress
    yield "zlib", lambda data, size: zlib.decompress(data, bufsize=size)
    for package, module in [("isal", "isal_zlib"), ("zlib_ng", "zlib_ng")]:
        try:
            found: Any = importlib.import_module(f"{package}.{module}")
        except ImportError:
            continue
        yield package, lambda data, size, m=found: m.decompress(data, bufsize=size)


def chunks_of(path: Path, dtype: str, rows: int) -> tuple[list[bytes], int]:
    """Return compressed chunks of so many rows, and the size of each before."""
    data = input_files.images(np.random.default_rng(0), rows).astype(dtype)
    with h5py.File(path, "w") as file:
        shape = (128, *data.shape[1:])
        options = {"chunks": shape, "compression": "gzip", "compression_opts": 4}
        dataset = file.create_dataset("x", data=data, shuffle=True, **options)
        starts = [(row, 0, 0, 0) for row in range(0, rows - 127, 128)]
        return [dataset.id.read_direct_chunk(s)[1] for s in starts], data[:128].nbytes


def compare(dtype: str, rows: int, repetitions: int) -> dict[str, float]:
    """Return the bytes per second that each package gives, in MB/s."""
    with tempfile.TemporaryDirectory() as folder:
        chunks, size = chunks_of(Path(folder, "x.h5"), dtype, rows)
    speeds: dict[str, list[float]] = {}
    for _ in range(repetitions + 1):  # the first one warms up
        for name, inflate in inflaters():
            start = time.perf_counter()
            for chunk in chunks:
                assert len(inflate(chunk, size)) == size
            seconds = time.perf_counter() - start
            speeds.setdefault(name, []).append(len(chunks) * size / seconds / 1e6)
    return {name: round(statistics.median(s[1:]), 1) for name, s in speeds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--tiny", action="store_true", help="a few chunks, once")
    options = parser.parse_args(arguments)
    rows, repetitions = (256, 1) if options.tiny else (12_800, 9)
    found = {d: compare(d, rows, repetitions) for d in ("uint8", "float32")}
    for dtype, speeds in found.items():
        best = speeds["zlib"]
        text = ", ".join(f"{n} {s:g} ({s / best:.2f}x)" for n, s in speeds.items())
        print(f"{dtype}: MB/s: {text}")
    if options.output:
        with tempfile.TemporaryDirectory() as folder:
            machine = measuring.describe_machine(Path(folder))
        result = {"machine": machine, "megabytes_per_second": found}
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
