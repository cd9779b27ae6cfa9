"""How much memory reading takes: `bench_input.py`'s case `memory`.

Each measurement is a job of its own, `input_memory_job.py`, of as many ranks.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from comparisons import Comparison
from input_cases import Setting
from input_files import ROW_BYTES, write_cheaply

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import launching

JOB = Path(__file__).with_name("input_memory_job.py")


def compare_memory(setting: Setting) -> list[Comparison]:
    """Compare the peak memory of reading a large file to that of a small one."""
    comparisons = []
    for layout in ("contiguous", "gzip"):
        peaks: list[list[float]] = [[], []]
        for size, found in zip(setting.memory_bytes, peaks, strict=True):
            for _ in range(min(3, setting.repetitions)):
                found.append(_peak_of_job(setting, layout, size) / 2**20)
        small, large = setting.memory_bytes
        steps = _steps(setting)
        comparisons.append(
            Comparison(
                f"{layout}, peak memory, {_size(large)}",
                f"a file of {_size(small)}",
                "MiB",
                peaks[1],
                peaks[0],
                1.1,
                is_at_least=False,
                note=f"the rank that takes most, without the pages of files; {steps} "
                "steps of each file, spread over all of it",
            )
        )
    return comparisons


def _size(size_bytes: int) -> str:
    return (
        f"{size_bytes / 1e6:g} MB" if size_bytes < 1e9 else f"{size_bytes / 1e9:g} GB"
    )


def _steps(setting: Setting) -> int:
    """Return the steps of an epoch of the small file."""
    return max(1, setting.memory_bytes[0] // ROW_BYTES // setting.batch)


def _peak_of_job(setting: Setting, layout: str, size_bytes: int) -> float:
    """Return the peak of a job of as many ranks. Collective."""
    comm = setting.comm
    path = setting.folder / f"memory-{layout}-{size_bytes}.h5"
    peak: float | None = None
    if comm.rank == 0:
        if not path.exists():
            write_cheaply(path, layout, size_bytes)
        sizes = [f"--batch={setting.batch}", f"--steps={_steps(setting)}"]
        command = [sys.executable, str(JOB), str(path), *sizes]
        job = [*launching.mpirun_command(comm.size), *command]
        ended = launching.run(job, seconds=1800)
        assert ended.returncode == 0, ended
        peak = float(ended.stdout.split()[-1])
    # Wait without taking the job's processor time
    done = comm.Ibarrier()
    while not done.Test():
        time.sleep(0.01)
    peak = comm.bcast(peak)
    assert peak is not None
    return peak
