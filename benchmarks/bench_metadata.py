"""What reading costs a cluster's file system: metadata operations and bytes of a rank.

    python benchmarks/bench_metadata.py --output benchmarks/results/metadata.json

No Lustre is needed: jobs that read several HDF5 files run here under strace, which
counts the system calls of each rank on these files, with other numbers of files, steps,
epochs and ranks. Metadata operations of a rank must not depend on steps, epochs and
ranks; a linear model says what they depend on. Beside ours stands plain h5py, of which
every rank opens every file once.

On Lustre, where nothing is cached yet, each of these operations is a request to the
metadata server; those that ask for the size of a file (stat, seeking to the end) also
ask each object storage server that has a stripe of it (Lustre Operations Manual,
"Understanding Lustre Architecture"; Lustre protocol documentation, "Stat").
Of files in memory maps, where no system call shows what is read, all bytes count, which
is an upper bound.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness

# isort: split
import h5py
import input_files
import launching
import numpy as np
import system_calls
from input_files import NAME, ROW_BYTES
from mpi4py import MPI
from system_calls import METADATA, Counts

import mpidist
from mpidist.util import mounts

LAYOUTS = ("contiguous", "gzip")
BATCH = 32  # rows per rank and step
# More than HDF5 keeps in its cache of chunks
FILE_BYTES = 64 * 128 * 3072


@dataclasses.dataclass(frozen=True)
class Job:
    """A job that reads; its global batch is 32 rows for each rank."""

    files: int = 3
    steps: int = 8  # per epoch
    epochs: int = 2
    ranks: int = 2

    def terms(self, rank: int) -> list[float]:
        """Return what a linear model of a rank's metadata operations is made of."""
        f, e, s, r = self.files, self.epochs, self.steps * self.epochs, self.ranks
        # A rank looks into every ranks-th file for all
        looked_into = len(range(rank, f, r))
        return [1, f, looked_into, e, s, r, f * e, f * s]


TERMS = ["1", "files", "files looked into", "epochs", "steps", "ranks"]
SIMPLE = 3  # of them often suffice
TERMS += [f"files x {name}" for name in ("epochs", "steps")]
JOBS = [
    Job(),
    *(Job(files=n) for n in (1, 12)),
    *(Job(steps=n) for n in (4, 16)),
    *(Job(epochs=n) for n in (1, 4)),
    *(Job(ranks=n) for n in (1, 3, 4)),
    # How files go together with the rest
    Job(files=12, epochs=4),
    Job(files=12, steps=16),
    Job(files=12, ranks=4),
]
TINY = [Job(files=2, steps=2, epochs=1), Job(files=2, steps=4, epochs=1)]


@dataclasses.dataclass(frozen=True)
class Run:
    """What the ranks of one traced job did."""

    job: Job
    counts: list[Counts]

    @property
    def bytes_per_row(self) -> float:
        """The bytes that came from files for each row, headers and maps included."""
        found = sum(counts.read_bytes + counts.mapped_bytes for counts in self.counts)
        return found / (BATCH * self.job.steps * self.job.epochs * self.job.ranks)


def with_mpidist(strategy: mpidist.Strategy, folder: Path, job: Job) -> Iterator[Any]:
    """Yield this rank's rows of each batch, by this library. Collective.

    Read as on a network file system, where states of files are looked at less often.
    """
    mounts.LOCAL_FILE_SYSTEMS = frozenset()
    data = mpidist.Dataset.from_hdf5(folder / "*.h5", NAME).shuffle(seed=0)
    yield from each_batch(strategy, data, job)


def with_h5py(strategy: mpidist.Strategy, folder: Path, job: Job) -> Iterator[Any]:
    """Yield the same rows, in order, by plain h5py: each rank opens each file once."""
    opened = [h5py.File(path, "r") for path in sorted(folder.glob("*.h5"))]
    datasets = [file[NAME] for file in opened]
    starts = np.cumsum([0, *map(len, datasets)])
    numbers = mpidist.Dataset.range(int(starts[-1])).shuffle(seed=0)
    for rows in each_batch(strategy, numbers, job):
        in_order = np.sort(rows)
        edges = np.searchsorted(in_order, starts)
        parts = zip(datasets, starts, edges, edges[1:], strict=False)
        yield np.concatenate([d[in_order[a:b] - start] for d, start, a, b in parts])
    for file in opened:
        file.close()


def each_batch(
    strategy: mpidist.Strategy, data: mpidist.Dataset, job: Job
) -> Iterator[Any]:
    """Yield this rank's rows of the batches of each epoch. Collective."""
    batches = strategy.experimental_distribute_dataset(
        data.batch(BATCH * job.ranks).take(job.steps),
        mpidist.InputOptions(experimental_fetch_to_device=False),
    )
    for _ in range(job.epochs):
        for batch in batches:
            yield strategy.experimental_local_results(batch)[0]


READERS = {"mpidist": with_mpidist, "h5py": with_h5py}


def read(reader: str, folder: Path, job: Job) -> None:
    """Read as one of the ranks."""
    strategy = mpidist.MirroredStrategy()
    rows = sum(len(batch) for batch in READERS[reader](strategy, folder, job))
    assert rows == BATCH * job.steps * job.epochs, rows


def write_files(folder: Path, jobs: Sequence[Job]) -> None:
    """Write files of each layout, in folders of as many as the jobs read."""
    counts = {job.files for job in jobs}
    for layout in LAYOUTS:
        one = folder / f"{layout}.h5"
        input_files.write_cheaply(one, layout, FILE_BYTES)
        for count in counts:
            inside = data_folder(folder, layout, count)
            inside.mkdir()
            for i in range(count):
                # HDF5 must take them for different files, so links will not do
                shutil.copy(one, inside / f"part-{i:04}.h5")


def data_folder(folder: Path, layout: str, files: int) -> Path:
    return folder / f"{layout}-{files}"


def trace(folder: Path, reader: str, layout: str, job: Job) -> Run:
    """Run one job and count what its ranks do with the data files."""
    data = data_folder(folder, layout, job.files)
    with tempfile.TemporaryDirectory(dir=folder) as logs:
        traced = system_calls.trace_command(f"{logs}/calls.$RANK", ['"$@"'])
        rank = "${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${PMI_RANK:-$SLURM_PROCID}}}"
        shell = f"RANK={rank}; exec {' '.join(traced)}"
        numbers = map(str, dataclasses.astuple(job))
        words = [sys.executable, __file__, "--rank-of", reader, str(data), *numbers]
        ended = launching.run(
            [*launching.mpirun_command(job.ranks), "sh", "-c", shell, "sh", *words],
            seconds=300,
        )
        assert ended.returncode == 0, ended
        counts = [
            system_calls.count(Path(logs).glob(f"calls.{rank}.*"), data)
            for rank in range(job.ranks)
        ]
    return Run(job, counts)


def model_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return a linear model of a rank other than 0; nothing for too few runs."""
    ranks = [min(1, run.job.ranks - 1) for run in runs]
    terms = np.array([run.job.terms(rank) for run, rank in zip(runs, ranks)])
    if np.linalg.matrix_rank(terms) < len(TERMS):
        return {}
    found = np.array([run.counts[rank].metadata for run, rank in zip(runs, ranks)])
    for count in (SIMPLE, len(TERMS)):
        fit = np.linalg.lstsq(terms[:, :count], found, rcond=None)[0]
        off = float(np.abs(terms[:, :count] @ fit - found).max())
        if off <= 3:  # a rank may need no row of some file, and not open it
            break
    parts = [f"{c:g} x {t}" for c, t in zip(fit.round(3), TERMS) if c]
    text = " + ".join(parts).replace(" x 1", "")
    return {"model": text, "model_is_off_by": round(off, 6)}


def seen_by(name: str, runs: Sequence[Run]) -> dict[int, int]:
    """Return the metadata operations of a rank where only `name` differs from usual."""
    usual = runs[0].job
    return {
        getattr(run.job, name): max(counts.metadata for counts in run.counts)
        for run in sorted(runs, key=lambda run: getattr(run.job, name))
        if dataclasses.replace(run.job, **{name: getattr(usual, name)}) == usual
    }


def summarize(reader: str, layout: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return what the runs of one reader and layout show."""
    seen = {name: seen_by(name, runs) for name in ("files", "steps", "epochs", "ranks")}
    varying = [n for n in ("steps", "epochs") if len(set(seen[n].values())) > 1]
    by_ranks = [seen["ranks"][n] for n in sorted(seen["ranks"])]
    if any(more > fewer for fewer, more in itertools.pairwise(by_ranks)):
        varying.append("ranks")  # fewer on more ranks is no harm
    return {
        "reader": reader,
        "layout": layout,
        "usual_rank": runs[0].counts[-1].as_dict(),
        "bytes_per_row": runs[0].bytes_per_row,
        "metadata_by": seen,
        "metadata_depends_on": varying,
        **model_of(runs),
    }


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that say what one reader does with one layout."""
    calls, seen = summary["usual_rank"], summary["metadata_by"]
    kinds = ", ".join(f"{kind} {calls[kind]}" for kind in METADATA if calls[kind])
    yield f"\n{summary['reader']}, {summary['layout']}"
    yield f"  metadata operations of a rank: {calls['metadata']} ({kinds})"
    for name, found in seen.items():
        yield f"    by {name:7} " + ", ".join(f"{n}: {k}" for n, k in found.items())
    varying = " and ".join(summary["metadata_depends_on"])
    constant = "do not grow with steps, epochs or ranks"
    yield f"    they {f'GROW with {varying}' if varying else constant}"
    yield (
        f"  data: {calls['read']} reads, {calls['map']} maps, "
        f"{summary['bytes_per_row']:.0f} bytes per row of {ROW_BYTES}"
    )
    if "model" in summary:
        off = summary["model_is_off_by"]
        yield f"  model: {summary['model']} (off by at most {off:g})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    options = parser.parse_args(arguments)
    if MPI.COMM_WORLD.size > 1:
        parser.error("start it without mpirun; it starts its jobs by itself")
    if (reason := system_calls.why_not()) is not None:
        parser.exit(1, f"system calls cannot be counted: {reason}\n")

    jobs, summaries = TINY if options.tiny else JOBS, []
    print(f"counted: about {jobs[0]}, {BATCH} rows per rank and step")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        write_files(folder, jobs)
        for reader, layout in itertools.product(READERS, LAYOUTS):
            runs = [trace(folder, reader, layout, job) for job in jobs]
            summaries.append(summarize(reader, layout, runs))
            print("\n".join(lines(summaries[-1])), flush=True)
    if options.output is not None:
        harness.save(
            options.output,
            usual_job=dataclasses.asdict(jobs[0]),
            rows_per_rank_and_step=BATCH,
            summaries=summaries,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:  # started by `trace`
        read(sys.argv[2], Path(sys.argv[3]), Job(*map(int, sys.argv[4:])))
    else:
        main()
