"""The HDF5 files that the benchmarks of input read: rows of 3x32x32 bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

ROW_SHAPE = (3, 32, 32)
ROW_BYTES = 3 * 32 * 32
CHUNK_ROWS = 128
NAME = "x"

_GZIP = {"compression": "gzip", "compression_opts": 4, "shuffle": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": (CHUNK_ROWS, *ROW_SHAPE)},
    "gzip": {"chunks": (CHUNK_ROWS, *ROW_SHAPE), **_GZIP},
}


def images(random: np.random.Generator, count: int) -> npt.NDArray[np.uint8]:
    """Return pictures of smooth blocks with some noise, which gzip makes smaller."""
    blocks = random.integers(0, 128, (count, 3, 8, 8), np.uint8)
    smooth = blocks.repeat(4, axis=2).repeat(4, axis=3)
    noise: npt.NDArray[np.uint8] = random.integers(0, 4, smooth.shape, np.uint8)
    return noise + smooth


def write_all_layouts(folder: Path, rows: int) -> int:
    """Write the same rows in each layout, to `<layout>.h5`; return the sum of bytes."""
    total = 0
    files = {layout: h5py.File(folder / f"{layout}.h5", "w") for layout in LAYOUTS}
    datasets = [
        files[layout].create_dataset(NAME, (rows, *ROW_SHAPE), np.uint8, **options)
        for layout, options in LAYOUTS.items()
    ]
    for start, batch in _slabs(rows):
        total += int(batch.sum(dtype=np.int64))
        for dataset in datasets:
            dataset[start : start + len(batch)] = batch
    for file in files.values():
        file.close()
    return total


def _slabs(rows: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    random = np.random.default_rng(0)
    for start in range(0, rows, 32 * CHUNK_ROWS):
        yield start, images(random, min(32 * CHUNK_ROWS, rows - start))


def compression_ratio(path: Path) -> float:
    """Return the bytes that a file's dataset takes, by the bytes of its rows."""
    with h5py.File(path, "r", locking=False) as file:
        dataset = file[NAME]
        return float(dataset.id.get_storage_size() / dataset.nbytes)


def write_cheaply(path: Path, layout: str, size_bytes: int) -> None:
    """Write a file of about `size_bytes` of rows, without making that many.

    A contiguous one is a hole, which reads as zeros; a compressed one has the same
    chunk again and again.
    """
    chunks = max(1, size_bytes // ROW_BYTES // CHUNK_ROWS)
    shape = (chunks * CHUNK_ROWS, *ROW_SHAPE)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset(NAME, shape, np.uint8, **LAYOUTS[layout])
        if layout == "contiguous":
            dataset[-1] = 0
            return
        # Of single bytes, HDF5's shuffle filter changes nothing
        chunk = images(np.random.default_rng(0), CHUNK_ROWS).tobytes()
        packed = zlib.compress(chunk, 4) if layout == "gzip" else chunk
        for i in range(chunks):
            dataset.id.write_direct_chunk((i * CHUNK_ROWS, 0, 0, 0), packed)
