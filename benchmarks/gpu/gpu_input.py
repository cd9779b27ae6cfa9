"""How fast rows of HDF5 files come to the memory of a GPU."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import h5py
import input_files
import numpy as np
from gpu_timing import Setting

import mpidist

__all__ = ["compare_input"]

_ROWS_OF_BATCH = 8192  # of each rank: 24 MiB
_BY_HAND = "map, page-locked copy"


def compare_input(setting: Setting) -> None:
    """Compare rows per second, as bytes, to copies from page-locked memory. Collective.

    All ranks copy at the same time in both. The files are in the page cache.
    """
    rate = _upload_rate(setting)
    setting.record(
        "upload",
        f"page-locked memory to GPU: {rate / 1e9:.4g} GB/s by all ranks",
        bytes_per_second=rate,
    )
    comm = setting.comm
    with tempfile.TemporaryDirectory() as own:
        folder = Path(comm.bcast(own))
        rows_of = {"contiguous": 600_000, "gzip": 25 * 128 * 75}
        if setting.is_quick:
            rows_of = {"contiguous": 2_000, "gzip": 1_280}
        if comm.rank == 0:
            for layout, rows in rows_of.items():
                _write(folder / f"{layout}.h5", layout, rows)
        comm.Barrier()
        batch = (256 if setting.is_quick else _ROWS_OF_BATCH) * comm.size
        cases: dict[str, Callable[[], None]] = {}
        for layout in rows_of:
            data = mpidist.Dataset.from_hdf5(folder / f"{layout}.h5", input_files.NAME)
            cases[layout] = _epoch(setting, data.batch(batch))
            if layout == "contiguous":
                shuffled = data.shuffle(seed=0).batch(batch)
                cases[f"{layout}, shuffle"] = _epoch(setting, shuffled)
        cases[_BY_HAND] = _by_hand(setting, folder / "contiguous.h5", batch)
        for name, epoch in cases.items():
            size = rows_of.get(name, rows_of["contiguous"]) * input_files.ROW_BYTES
            if setting.has_time_for(f"input, {name}"):
                _measure(setting, name, epoch, size, rate)
        comm.Barrier()


def _measure(
    setting: Setting, name: str, epoch: Callable[[], None], size: int, rate: float
) -> None:
    """Time epochs, and record them. Collective."""
    setting.time(epoch, 1)  # everything is in the page cache afterwards
    times = 1 if setting.is_quick else 3
    seconds = [setting.time(epoch, 1) for _ in range(times)]
    found = size / statistics.median(seconds)
    setting.record(
        "input",
        f"rows to GPU, {name}: {found / 1e9:.4g} GB/s, {found / rate:.3g} of copies",
        case=name,
        bytes=size,
        seconds=seconds,
        upload_bytes_per_second=rate,
        is_ours=name != _BY_HAND,
    )


def _upload_rate(setting: Setting) -> float:
    """Return the bytes per second of all ranks from page-locked memory. Collective."""
    size = (1 << 20) if setting.is_quick else (256 << 20)
    memory = cupy.cuda.alloc_pinned_memory(size)
    target = cupy.zeros(size, "u1")
    np.frombuffer(memory, "u1", size)[...] = 1
    stream = cupy.cuda.get_current_stream()

    def upload() -> None:
        target.data.copy_from_host_async(memory.ptr, size, stream)

    seconds = setting.time_in_turn({"upload": upload})["upload"]
    return setting.comm.size * size / statistics.median(seconds)


def _write(path: Path, layout: str, rows: int) -> None:
    """Write the same pictures again and again."""
    pictures = input_files.images(np.random.default_rng(0), 32 * input_files.CHUNK_ROWS)
    if layout != "contiguous":
        input_files.write_cheaply(path, layout, rows * input_files.ROW_BYTES)
        return
    with h5py.File(path, "w") as file:
        shape = (rows, *input_files.ROW_SHAPE)
        dataset = file.create_dataset(input_files.NAME, shape, np.uint8)
        for start in range(0, rows, len(pictures)):
            part = pictures[: rows - start]
            dataset[start : start + len(part)] = part


def _epoch(setting: Setting, data: mpidist.Dataset) -> Callable[[], None]:
    """Return a function that brings all rows to the GPU. Collective, as the call."""
    batches = setting.strategy.experimental_distribute_dataset(data)

    def epoch() -> None:
        for batch in batches:
            (mine,) = setting.strategy.experimental_local_results(batch)
            assert isinstance(mine, cupy.ndarray)

    return epoch


def _by_hand(setting: Setting, path: Path, batch: int) -> Callable[[], None]:
    """Return what one writes by hand: each rank copies its rows, one thread each.

    From a memory map to one of two page-locked buffers, while the GPU reads the other.
    """
    with h5py.File(path, "r", locking=False) as file:
        dataset = file[input_files.NAME]
        where = {"offset": dataset.id.get_offset(), "shape": dataset.shape}
    rows: Any = np.memmap(path, np.uint8, "r", **where)
    comm, share = setting.comm, batch // setting.comm.size
    size = share * input_files.ROW_BYTES
    memories = [cupy.cuda.alloc_pinned_memory(size) for _ in range(2)]
    stream = cupy.cuda.Stream(non_blocking=True)

    def epoch() -> None:
        events: list[Any] = [None, None]
        for step, start in enumerate(range(share * comm.rank, len(rows), batch)):
            if events[step % 2] is not None:
                events[step % 2].synchronize()
            part = rows[start : start + share].reshape(-1)
            memory = memories[step % 2]
            np.copyto(np.frombuffer(memory, "u1", part.size), part)
            target = cupy.empty(part.size, "u1")
            target.data.copy_from_host_async(memory.ptr, part.size, stream)
            events[step % 2] = stream.record()
        stream.synchronize()

    return epoch
