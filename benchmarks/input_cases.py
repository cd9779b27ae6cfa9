"""The comparisons of `bench_input.py`: ours against other ways to read."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import input_rivals
import measuring
import numpy as np
from comparisons import Comparison
from input_files import NAME
from measuring import Epoch, Epochs
from mpi4py import MPI

import mpidist


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all cases are given.

    Args:
      folder: has `ours/` and `theirs/` with the same files in each, so that no cache
        inside HDF5 serves both.
      rows: in each file.
      total: the sum of the bytes of all rows.
      batch: rows per global batch.
      repetitions: how often each contestant is timed.
      overlap_steps: steps of the case with a computing step.
      memory_bytes: how large the two files are whose reading takes memory.
      workers: how many worker processes a DataLoader is tried with.
      skipped: what could not be compared here, and why; added to.
    """

    strategy: mpidist.Strategy
    comm: MPI.Intracomm
    folder: Path
    rows: int
    total: int
    batch: int
    repetitions: int
    overlap_steps: int
    memory_bytes: tuple[int, int]
    workers: tuple[int, ...]
    skipped: list[str] = dataclasses.field(default_factory=list)

    @property
    def share(self) -> int:
        """How many rows of a global batch one rank gets."""
        return -(-self.batch // self.comm.size)

    def ours(self, layout: str, steps: int | None = None) -> Epochs:
        """Return epochs of this library's public interface. Collective."""
        files = self.folder / "ours" / f"{layout}.h5"
        data = mpidist.Dataset.from_hdf5(files, NAME).shuffle(seed=0).batch(self.batch)
        return self._distribute(data if steps is None else data.take(steps))

    def batches(self) -> list[Any]:
        """Return the numbers of this rank's rows in each batch of an epoch of ours."""
        numbers = mpidist.Dataset.range(self.rows).shuffle(seed=0).batch(self.batch)
        return [np.array(batch) for batch in self._distribute(numbers)()]

    def theirs(self, layout: str) -> Path:
        """Return the file that other ways to read get."""
        return self.folder / "theirs" / f"{layout}.h5"

    def _distribute(self, data: mpidist.Dataset) -> Epochs:
        on_host = mpidist.InputOptions(experimental_fetch_to_device=False)
        batches = self.strategy.experimental_distribute_dataset(data, on_host)

        def epoch() -> Iterator[Any]:
            for batch in batches:
                yield batch if self.comm.size == 1 else batch.values[0]

        return epoch

    def run(self, contestants: dict[str, Epochs]) -> dict[str, list[Epoch]]:
        """Check all contestants and time them in turn. Collective."""
        for contestant in contestants.values():
            measuring.check_epoch(self.comm, contestant, self.rows, self.total)
        return measuring.alternate(self.comm, contestants, self.repetitions)


def compare_rates(
    case: str,
    epochs: dict[str, list[Epoch]],
    targets: dict[str, float],
    notes: dict[str, str],
) -> list[Comparison]:
    """Return ours by each of the others, in rows per second."""
    return [
        Comparison(
            case,
            against,
            "rows/s",
            [e.rows_per_second for e in epochs["ours"]],
            [e.rows_per_second for e in theirs],
            targets.get(against),
            note=notes.get(against, ""),
        )
        for against, theirs in epochs.items()
        if against != "ours"
    ]


def compare_contiguous(setting: Setting) -> list[Comparison]:
    """Compare random rows of a contiguous dataset."""
    path, batches = setting.theirs("contiguous"), setting.batches()
    bare, plain = "np.take from a memory map", "h5py, sorted fancy indexing"
    contestants = {
        "ours": setting.ours("contiguous"),
        bare: input_rivals.take_from_map(path, batches),
        plain: input_rivals.fancy(path, batches),
    }
    targets, notes = {bare: 0.7}, {}
    for kind, dataset in {
        "one row per call": input_rivals.RowDataset,
        "a batch per call": input_rivals.BatchDataset,
    }.items():
        if importlib.util.find_spec("torch") is None:
            setting.skipped.append(f"torch DataLoader, {kind}: torch is not installed")
            continue
        name = f"torch DataLoader, {kind}"
        contestants[name], notes[name] = _fastest_loader(setting, dataset, path)
        targets[name] = 20
    epochs = setting.run(contestants)
    return compare_rates("contiguous, shuffle", epochs, targets, notes)


def _fastest_loader(
    setting: Setting, kind: type[input_rivals.RowDataset], path: Path
) -> tuple[Epochs, str]:
    """Return the epochs of the fastest number of workers, and how fast each was."""
    comm, found = setting.comm, {}
    for workers in setting.workers:
        share = input_rivals.Share(setting.rows, comm.size, comm.rank)
        dataset = kind(path, setting.rows)
        epochs = input_rivals.loader(dataset, share, setting.share, workers)
        measuring.time_epoch(comm, epochs)  # the workers start
        found[workers] = measuring.time_epoch(comm, epochs).rows_per_second, epochs
    rates = ", ".join(f"{workers}: {rate:.0f}" for workers, (rate, _) in found.items())
    best = max(found, key=lambda workers: found[workers][0])
    return found[best][1], f"{best} workers; rows/s by workers: {rates}"


def compare_chunked(setting: Setting) -> list[Comparison]:
    """Compare random rows of a dataset in chunks, which are not compressed."""
    batches = setting.batches()
    plain, tuned = "h5py, sorted fancy indexing", "h5py, row by row, no chunk cache"
    again = setting.theirs("chunked-again")
    contestants = {
        "ours": setting.ours("chunked"),
        plain: input_rivals.fancy(setting.theirs("chunked"), batches),
        tuned: input_rivals.row_by_row(again, batches, rdcc_nbytes=0),
    }
    epochs = setting.run(contestants)
    return compare_rates("chunks of 128, shuffle", epochs, {plain: 50}, {})


def compare_gzip(setting: Setting) -> list[Comparison]:
    """Compare shuffled rows of compressed chunks to reading them in order."""
    against = "h5py, in order"
    comm, path = setting.comm, setting.theirs("gzip")
    epochs = setting.run(
        {
            "ours": setting.ours("gzip"),
            against: input_rivals.sequential(path, comm.rank, comm.size, setting.share),
        }
    )
    case = "chunks of 128, gzip-4, shuffle"
    ours, theirs = epochs["ours"], epochs[against]
    per_core = Comparison(
        case,
        f"{against}, per core used",
        "rows/cpu s",
        [e.rows_per_cpu_second for e in ours],
        [e.rows_per_cpu_second for e in theirs],
        1.4,
    )
    return [per_core, *compare_rates(case, epochs, {}, {})]


Case = Callable[[Setting], list[Comparison]]
