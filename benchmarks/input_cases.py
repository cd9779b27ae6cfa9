"""What `bench_input.py` compares: ours beside other ways to read."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness

# isort: split
import input_files
import input_rivals
import launching
import numpy as np
from harness import OURS, Comparison
from input_files import NAME
from input_rivals import Epochs
from mpi4py import MPI

import mpidist

SCRIPT = Path(__file__).with_name("bench_input.py")
MATRIX_ROWS = 192
CORES = 2  # of each rank: one computes, one reads


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


def time_epoch(comm: MPI.Intracomm, start_epoch: Epochs) -> Epoch:
    """Go through one epoch on all ranks at the same time. Collective."""
    rows, cpu = 0, 0.0

    def read() -> None:
        nonlocal rows, cpu
        cpu = time.process_time()
        for batch in start_epoch():
            rows += len(batch)
        cpu = time.process_time() - cpu

    seconds = harness.slowest(comm, read)
    return Epoch(comm.allreduce(rows), seconds, comm.allreduce(cpu))


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
                yield batch.values[0]

        return epoch

    def check(self, start_epoch: Epochs) -> None:
        """Go through one epoch, to warm up, and look at every byte. Collective."""
        found = np.zeros(2, np.int64)
        for batch in start_epoch():
            found += len(batch), int(np.asarray(batch).sum(dtype=np.int64))
        found = self.comm.allreduce(found)
        assert found.tolist() == [self.rows, self.total], (found, self.rows, self.total)

    def run(
        self,
        case: str,
        contestants: Mapping[str, Epochs],
        targets: Mapping[str, float],
        notes: Mapping[str, str] | None = None,
        target_per_core: float | None = None,
    ) -> Iterator[Comparison]:
        """Check contestants, time them in turn, and compare rates. Collective.

        With `target_per_core`, the rates per second of a core are compared, too.
        """
        for contestant in contestants.values():
            self.check(contestant)
        epochs: dict[str, list[Epoch]] = {name: [] for name in contestants}
        for _ in range(self.repetitions):
            for name, contestant in contestants.items():
                epochs[name].append(time_epoch(self.comm, contestant))
        ours = epochs.pop(OURS)
        for name, theirs in epochs.items():
            pair = (ours, theirs)
            if target_per_core is not None:
                rates = ([e.rows / e.cpu_seconds for e in side] for side in pair)
                against, unit = f"{name}, per core used", "rows/cpu s"
                yield Comparison(case, against, unit, *rates, target_per_core)
            rates = ([e.rows / e.seconds for e in side] for side in pair)
            note = (notes or {}).get(name, "")
            target = targets.get(name)
            yield Comparison(case, name, "rows/s", *rates, target, note=note)


def compare_contiguous(setting: Setting) -> Iterator[Comparison]:
    """Compare random rows of a contiguous dataset."""
    path, batches = setting.theirs("contiguous"), setting.batches()
    bare, plain = "np.take from a memory map", "h5py, sorted fancy indexing"
    contestants = {
        OURS: setting.ours("contiguous"),
        bare: input_rivals.take_from_map(path, batches),
        plain: input_rivals.fancy(path, batches),
    }
    targets, notes = {bare: 0.7}, {}
    for kind, dataset in {
        "one row per call": input_rivals.RowDataset,
        "a batch per call": input_rivals.BatchDataset,
    }.items():
        name = f"torch DataLoader, {kind}"
        if not harness.is_everywhere(setting.comm, "torch"):
            setting.skipped.append(f"{name}: torch is not installed")
            continue
        contestants[name], notes[name] = _fastest_loader(setting, dataset, path)
        targets[name] = 20
    yield from setting.run("contiguous, shuffle", contestants, targets, notes)


def _fastest_loader(
    setting: Setting, kind: type[input_rivals.RowDataset], path: Path
) -> tuple[Epochs, str]:
    """Return the epochs of the fastest number of workers, and how fast each was."""
    comm, found = setting.comm, {}
    for workers in setting.workers:
        share = input_rivals.Share(setting.rows, comm.size, comm.rank)
        dataset = kind(path, setting.rows)
        epochs = input_rivals.loader(dataset, share, setting.share, workers)
        time_epoch(comm, epochs)  # the workers start
        epoch = time_epoch(comm, epochs)
        found[workers] = epoch.rows / epoch.seconds, epochs
    rates = ", ".join(f"{workers}: {rate:.0f}" for workers, (rate, _) in found.items())
    best = max(found, key=lambda workers: found[workers][0])
    return found[best][1], f"{best} workers; rows/s by workers: {rates}"


def compare_chunked(setting: Setting) -> Iterator[Comparison]:
    """Compare random rows of a dataset in chunks, which are not compressed."""
    batches = setting.batches()
    plain, tuned = "h5py, sorted fancy indexing", "h5py, row by row, no chunk cache"
    again = setting.theirs("chunked-again")
    contestants = {
        OURS: setting.ours("chunked"),
        plain: input_rivals.fancy(setting.theirs("chunked"), batches),
        tuned: input_rivals.row_by_row(again, batches, rdcc_nbytes=0),
    }
    yield from setting.run("chunks of 128, shuffle", contestants, {plain: 50})


def compare_gzip(setting: Setting) -> Iterator[Comparison]:
    """Compare shuffled rows of compressed chunks to reading them in order."""
    comm, path = setting.comm, setting.theirs("gzip")
    contestants = {
        OURS: setting.ours("gzip"),
        "h5py, in order": input_rivals.sequential(
            path, comm.rank, comm.size, setting.share
        ),
    }
    case = "chunks of 128, gzip-4, shuffle"
    yield from setting.run(case, contestants, {}, target_per_core=1.4)


def compare_overlap(setting: Setting) -> Iterator[Comparison]:
    """Compare a loop that reads and computes to reading, then computing.

    Reading alone and computing alone have one core per rank, both together two.
    """
    comm, steps = setting.comm, setting.overlap_steps
    mine = harness.own_cores(comm, CORES)
    if not all(comm.allgather(len(mine) == CORES)):
        setting.skipped.append(f"overlap: there are not {CORES} cores for each rank")
        return
    with harness.on_cores(mine):  # so many are to be used for reading
        epochs = setting.ours("gzip", steps)
    with harness.on_cores(mine[:1]):
        time_epoch(comm, epochs)
        step = _step_that_takes(time_epoch(comm, epochs).seconds / steps)

    def read() -> None:
        for _ in epochs():
            pass

    def compute() -> None:
        for _ in range(steps):
            step()

    def both() -> None:
        for _ in epochs():
            step()

    times: harness.Times = {"read": [], "compute": [], "both": []}
    contestants = {"read": (read, 1), "compute": (compute, 1), "both": (both, CORES)}
    for _ in range(setting.repetitions):
        for name, (contestant, cores) in contestants.items():
            with harness.on_cores(mine[:cores]):
                times[name].append(harness.slowest(comm, contestant))
    reading, computing = (statistics.median(times[n]) for n in ("read", "compute"))
    yield Comparison(
        "gzip, a step that computes",
        "reading, then computing",
        "s",
        times["both"],
        [a + b for a, b in zip(times["read"], times["compute"], strict=True)],
        0.6,
        is_at_least=False,
        note=f"{steps} steps; reading {reading:.3g} s, computing {computing:.3g} s",
    )


def _step_that_takes(seconds: float) -> Callable[[], None]:
    """Return a function that multiplies matrices for so long; it lets threads run."""
    a, b = np.random.default_rng(0).random((2, MATRIX_ROWS, MATRIX_ROWS), np.float32)
    out = np.empty_like(a)

    def multiply(times: int) -> None:
        for _ in range(times):
            np.matmul(a, b, out=out)

    once = min(harness.slowest(MPI.COMM_SELF, lambda: multiply(100)) for _ in range(5))
    times = max(1, round(seconds / once * 100))
    return lambda: multiply(times)


def compare_memory(setting: Setting) -> Iterator[Comparison]:
    """Compare the peak memory of reading a large file to that of a small one."""
    steps = max(1, setting.memory_bytes[0] // input_files.ROW_BYTES // setting.batch)
    names = [
        f"{n / 1e6:g} MB" if n < 1e9 else f"{n / 1e9:g} GB"
        for n in setting.memory_bytes
    ]
    for layout in ("contiguous", "gzip"):
        small, large = (
            [
                _peak_of_job(setting, layout, size, steps) / 2**20
                for _ in range(min(3, setting.repetitions))
            ]
            for size in setting.memory_bytes
        )
        yield Comparison(
            f"{layout}, peak memory, {names[1]}",
            f"a file of {names[0]}",
            "MiB",
            large,
            small,
            1.1,
            is_at_least=False,
            note=f"the rank that takes most, without the pages of files; {steps} "
            "steps of each file, spread over all of it",
        )


def _peak_of_job(setting: Setting, layout: str, size_bytes: int, steps: int) -> float:
    """Return the peak of a job of its own, of as many ranks. Collective."""
    comm, peak = setting.comm, None
    if comm.rank == 0:
        path = setting.folder / f"memory-{layout}-{size_bytes}.h5"
        if not path.exists():
            input_files.write_cheaply(path, layout, size_bytes)
        job = [sys.executable, str(SCRIPT), f"--peak-of={path}", f"--steps={steps}"]
        job = [*launching.mpirun_command(comm.size), *job, f"--batch={setting.batch}"]
        ended = launching.run(job, seconds=1800)
        assert ended.returncode == 0, ended
        peak = float(ended.stdout.split()[-1])
    # Wait without taking the job's processor time
    done = comm.Ibarrier()
    while not done.Test():
        time.sleep(0.01)
    return comm.bcast(peak)


def print_peak(path: Path, batch: int, steps: int) -> None:
    """Read some batches; print the most memory that it took on any rank, in bytes.

    That is RssAnon + RssShmem of /proc/self/status, looked at every millisecond. So the
    pages of files do not count: processes share them, and the kernel takes them back
    when it needs memory.
    """
    peak, is_over = 0, threading.Event()

    def look() -> None:
        nonlocal peak
        is_last = False
        while not is_last:
            is_last = is_over.wait(0.001)
            peak = max(peak, own_memory_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    strategy = mpidist.MirroredStrategy()
    rows = mpidist.Dataset.from_hdf5(path, NAME).shuffle(seed=0)
    batches = rows.batch(batch).take(steps)
    for _ in strategy.experimental_distribute_dataset(batches):
        pass
    is_over.set()
    thread.join()
    harness.say(MPI.COMM_WORLD, str(MPI.COMM_WORLD.allreduce(peak, MPI.MAX)))


def own_memory_bytes() -> int:
    """Return the memory of this process that is not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    kibibytes = (int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return sum(kibibytes) * 1024


CASES: dict[str, Callable[[Setting], Iterable[Comparison]]] = {
    "contiguous": compare_contiguous,
    "chunked": compare_chunked,
    "gzip": compare_gzip,
    "overlap": compare_overlap,
    "memory": compare_memory,
}


def parse(doc: str | None, arguments: Sequence[str] | None) -> Any:
    parser = harness.parser(doc, 5)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--rows", type=int, default=50_000)
    add("--batch", type=int, default=256)
    add("--steps", type=int, default=195, help="of the case `overlap` (default 195)")
    add("--memory-mb", type=int, nargs=2, default=(100, 4000))
    add("--workers", type=int, nargs="+", default=(0, 2, 4))
    add("--folder", type=Path, help="that all ranks see, for the data")
    add("--peak-of", type=Path, help="only read this file, and print the peak memory")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.rows, options.batch, options.repetitions = 500, 64, 1
        options.steps, options.memory_mb, options.workers = 3, (1, 4), (0, 1)
    return options


def prepare(folder: Path, rows: int) -> dict[str, Any]:
    """Write all files; return what they are."""
    (folder / "ours").mkdir()
    total = input_files.write_all_layouts(folder / "ours", rows)
    shutil.copytree(folder / "ours", folder / "theirs")
    shutil.copy(folder / "ours/chunked.h5", folder / "theirs/chunked-again.h5")
    return {
        "rows": rows,
        "row": "3x32x32 uint8",
        "chunk_rows": input_files.CHUNK_ROWS,
        "gzip_bytes_by_bytes": input_files.compression_ratio(folder / "ours/gzip.h5"),
        "sum_of_bytes": total,
    }


def main(doc: str | None, arguments: Sequence[str] | None = None) -> None:
    options = parse(doc, arguments)
    if options.peak_of is not None:
        print_peak(options.peak_of, options.batch, options.steps)
        return
    comm = MPI.COMM_WORLD
    made = tempfile.mkdtemp(dir=options.folder) if comm.rank == 0 else None
    folder = Path(comm.bcast(made))
    try:
        data = comm.bcast(prepare(folder, options.rows) if comm.rank == 0 else None)
        setting = Setting(
            strategy=mpidist.MirroredStrategy(),
            comm=comm,
            folder=folder,
            rows=options.rows,
            total=data["sum_of_bytes"],
            batch=options.batch,
            repetitions=options.repetitions,
            overlap_steps=options.steps,
            memory_bytes=tuple(10**6 * size for size in options.memory_mb),
            workers=options.workers,
        )
        harness.report(
            (found for name in options.cases for found in CASES[name](setting)),
            options.output,
            comm,
            folder,
            batch=options.batch,
            repetitions=options.repetitions,
            data=data,
            skipped=setting.skipped,
        )
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder)
