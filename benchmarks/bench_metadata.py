"""What reading costs a cluster's file system: metadata operations and bytes of a rank.

    python benchmarks/bench_metadata.py --output benchmarks/results/metadata.json

No Lustre is needed: jobs that read several HDF5 files run here under strace, which
counts the system calls of each rank on these files, with other numbers of files, steps,
epochs and ranks. A linear model of the counts is then extrapolated to 64 and 4,096
ranks. Metadata operations of a rank must not depend on steps, epochs and ranks. Beside
ours stands plain h5py, of which every rank opens every file once.

What a system call costs on Lustre, where nothing is cached yet (so it is an upper
bound; a client that still holds a lock on the file answers by itself):

- open: one request to the metadata server (MDS), an intent lock enqueue that brings the
  layout; close: one more. Data then go between client and object storage servers (OST)
  alone. (Lustre Operations Manual, "Understanding Lustre Architecture",
  "Lustre File System Storage and I/O".)
- stat, fstat, access, lseek to the end: one request to the MDS for the attributes, and
  one to each OST that has a stripe of the file, since only these know its size: a lock
  enqueue with getattr intent, "glimpse". (Lustre protocol documentation, "Stat".)
- flock, fcntl locks: one request to the MDS, if the client has mounted with `flock`
  (mount.lustre(8)).
- listing a folder: one request to the MDS for each getdents.
- read, pread: requests to OSTs of up to 1 MiB each (manual, "Tuning the Client I/O RPC
  Stream", max_pages_per_rpc: 256 pages; newer versions take more). Of files in memory
  maps, where no system call shows what is read, all bytes count that were in memory at
  the end (which at once is an upper bound, as Linux maps pages around).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import charts
import input_files
import measuring
import metadata_model
import system_calls
from metadata_model import BATCH, CLUSTERS, LARGE, Job, Run
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import launching

JOB = Path(__file__).with_name("metadata_job.py")
READERS = ("mpidist", "h5py")
LAYOUTS = ("contiguous", "gzip")
# More than HDF5 keeps in its cache of chunks
FILE_BYTES = 64 * 128 * 3072

USUAL = Job()
JOBS = [
    USUAL,
    *(Job(files=n) for n in (1, 12)),
    *(Job(steps=n) for n in (4, 16)),
    *(Job(epochs=n) for n in (1, 4)),
    *(Job(ranks=n) for n in (1, 3, 4)),
    # How files go together with the rest
    Job(files=12, epochs=4),
    Job(files=12, steps=16),
    Job(files=12, ranks=4),
]
TINY = [Job(files=2, steps=2, epochs=1)]


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
        arguments = {"reader": reader, "batch": BATCH, "report": f"{logs}/report"}
        arguments |= {"steps": job.steps, "epochs": job.epochs}
        options = [f"--{name}={value}" for name, value in arguments.items()]
        command = [sys.executable, str(JOB), str(data), *options]
        ended = launching.run(
            [*launching.mpirun_command(job.ranks), "sh", "-c", shell, "sh", *command],
            seconds=300,
        )
        assert ended.returncode == 0, ended
        each = range(job.ranks)
        counts = [
            system_calls.count(Path(logs).glob(f"calls.{rank}.*"), data)
            for rank in each
        ]
        reports = [Path(f"{logs}/report.{rank}").read_text() for rank in each]
    return Run(reader, layout, job, counts, [json.loads(text) for text in reports])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file; a PNG goes beside it")
    parser.add_argument("--tiny", action="store_true", help="only see that it runs")
    options = parser.parse_args(arguments)
    if MPI.COMM_WORLD.size > 1:
        parser.error("start it without mpirun; it starts its jobs by itself")
    if (reason := system_calls.why_not()) is not None:
        parser.exit(1, f"system calls cannot be counted: {reason}\n")

    jobs, summaries, runs = TINY if options.tiny else JOBS, [], []
    print(f"counted: about {jobs[0]}, {BATCH} rows per rank and step")
    print(f"extrapolated: {LARGE} on {CLUSTERS} ranks")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        machine = measuring.describe_machine(folder)
        write_files(folder, jobs)
        for reader in READERS:
            for layout in LAYOUTS:
                found = [trace(folder, reader, layout, job) for job in jobs]
                summaries.append(metadata_model.summarize(found))
                lines = metadata_model.lines(summaries[-1])
                print("\n".join(lines), flush=True)
                runs += [run.as_dict() for run in found]
    if options.output is not None:
        result = {
            "machine": machine,
            "usual_job": dataclasses.asdict(jobs[0]),
            "large_job": dataclasses.asdict(LARGE),
            "rows_per_rank_and_step": BATCH,
            "summaries": summaries,
            "runs": runs,
        }
        measuring.save(options.output, result)
        charts.draw(charts.draw_metadata, result, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
