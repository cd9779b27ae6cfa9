"""How fast rows of HDF5 files come, beside other ways to read them.

    python benchmarks/bench_input.py --output benchmarks/results/input-1rank.json
    mpirun -n 2 python benchmarks/bench_input.py --output .../input-2ranks.json

Rows are 3x32x32 bytes like pictures, in a temporary folder (on local disk; all of it
fits in the page cache, and every contestant goes through it once before it is timed,
its bytes being checked). Global batches of 256 rows come in random order. Ours is the
public interface:

    data = mpidist.Dataset.from_hdf5(path, "x").shuffle(seed=0).batch(256)
    for batch in strategy.experimental_distribute_dataset(data): ...

Ours and the others are timed in turn, whole epochs; ratios are medians of pairs. With
several ranks the others run on all ranks at the same time too, each on its share of the
rows and of the global batch, and without any communication: so a ratio always is all
rows by the time of the slowest rank, for both. A rank waiting for the others spins, in
MPI, and that counts as CPU time of ours. The machine should do nothing else.

Cases (see --cases), and what the ratio of ours has to be:

    contiguous  torch DataLoader over h5py (best of 0, 2, 4 workers),
                one row per call, and a sorted batch per call            >= 20
                np.take from a memory map into a buffer                  >= 0.7
    chunked     h5py, sorted fancy indexing                              >= 50
    gzip        h5py, whole batches in order, rows per CPU second        >= 1.4
    overlap     a step that computes as long as reading takes, with a
                spare core: the sum of both times                        <= 0.6
    memory      4 GB, beside a file of 100 MB                            <= 1.1

Written are a JSON file and, with matplotlib, a PNG file beside it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# One rank is one share of the CPU: its BLAS must not take the others' cores
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

CASES = ("contiguous", "chunked", "gzip", "overlap", "memory")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file; a PNG goes beside it")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--overlap-steps", type=int, default=195)
    parser.add_argument("--memory-mb", type=int, nargs=2, default=(100, 4000))
    parser.add_argument("--workers", type=int, nargs="+", default=(0, 2, 4))
    parser.add_argument("--folder", type=Path, help="that all ranks see, for the data")
    parser.add_argument("--tiny", action="store_true", help="only see that it runs")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.rows, options.batch, options.repetitions = 500, 64, 1
        options.overlap_steps, options.memory_mb = 3, (1, 4)
        options.workers = (0, 1)
    return options


def prepare(folder: Path, rows: int) -> dict[str, Any]:
    """Write all files; return what they are."""
    import input_files

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


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the cases in a folder that all ranks see. Collective."""
    # Not above: a DataLoader's workers import this file and must not start MPI
    import comparisons
    import input_cases
    import input_memory
    import input_overlap
    import measuring
    from mpi4py import MPI

    import mpidist

    comm = MPI.COMM_WORLD
    data = comm.bcast(prepare(folder, options.rows) if comm.rank == 0 else None)
    setting = input_cases.Setting(
        strategy=mpidist.MirroredStrategy(),
        comm=comm,
        folder=folder,
        rows=options.rows,
        total=data["sum_of_bytes"],
        batch=options.batch,
        repetitions=options.repetitions,
        overlap_steps=options.overlap_steps,
        memory_bytes=tuple(10**6 * size for size in options.memory_mb),
        workers=options.workers,
    )
    cases: dict[str, input_cases.Case] = {
        "contiguous": input_cases.compare_contiguous,
        "chunked": input_cases.compare_chunked,
        "gzip": input_cases.compare_gzip,
        "overlap": input_overlap.compare_overlap,
        "memory": input_memory.compare_memory,
    }
    machine, results = measuring.describe_machine(folder), []
    say(comm, comparisons.TABLE_HEAD)
    for name in options.cases:
        for comparison in cases[name](setting):
            say(comm, comparison.line())
            results.append(comparison.as_dict())
    for reason in setting.skipped:
        say(comm, f"skipped: {reason}")
    return {
        "machine": machine,
        "ranks": comm.size,
        "batch": options.batch,
        "repetitions": options.repetitions,
        "data": data,
        "comparisons": results,
        "skipped": setting.skipped,
    }


def say(comm: Any, line: str) -> None:
    if comm.rank == 0:
        print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    made = tempfile.mkdtemp(dir=options.folder) if comm.rank == 0 else None
    folder = Path(comm.bcast(made))
    try:
        result = run(options, folder)
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder)
    if comm.rank == 0 and options.output is not None:
        import charts
        import measuring

        measuring.save(options.output, result)
        charts.draw(charts.draw_input, result, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
