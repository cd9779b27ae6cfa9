"""Kill jobs at random moments, and look whether any row or step is lost.

    python benchmarks/resume.py [--kills 100] [--seed 0] [--elastic] [--json FILE]

`jobs/train_digits_resumable.py` is started under the mpirun of this environment, and
after a random time a fault happens: SIGKILL to one rank, to all, or to mpirun; SIGTERM
to one rank or to mpirun. It is started again, perhaps with another number of ranks,
until it ends by itself. The weights that it then has are compared with those of a job
that nobody disturbed: of the same number of ranks each bit, else 1e-6.

With --elastic, below Open MPI, ranks are killed one after the other, once training has
begun, and those that are left go on (`mpirun --with-ft ulfm`). Another start is needed
where Open MPI lets ranks crash with the dead, and is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness

# isort: split
import h5py
import launching
import numpy as np

JOB = str(harness.ROOT / "jobs" / "train_digits_resumable.py")
RANKS = (1, 2, 3)
# Many short steps
SMALL = ("--shifts", "0", "--hidden", "128", "--batch-size", "64")
SMALL += ("--learning-rate", "0.05")
FAULTS = ("kill a rank", "kill all ranks", "kill mpirun", "end a rank", "end mpirun")
MOST_ELASTIC = 4
LIMIT_SECONDS = 600
HANG_SECONDS = 30  # also where a rank dies while MPI starts


def start(
    ranks: int, folder: Path, epochs: int, options: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start the job; it saves and goes on in `folder`. The options are mpirun's."""
    arguments = ["--data-dir", str(folder.parent / "data"), "--epochs", str(epochs)]
    arguments += ["--checkpoint-dir", str(folder), "--save-every", "15", *SMALL]
    environment = {
        **launching.clean_environment(),
        "TQDM_DISABLE": "1",
        "MPIDIST_HANG_SECONDS": str(HANG_SECONDS),
    }
    return subprocess.Popen(
        [*launching.mpirun_command(ranks, *options), sys.executable, JOB, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and those have."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found = {pid}
    for _ in range(8):
        found |= {child for child, parent in parents.items() if parent in found}
    yield from found - {pid}


def ranks_of(pid: int) -> list[int]:
    """Return the processes of a job that are ranks."""
    ranks = []
    for child in descendants(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_python = Path(os.fsdecode(command[0])).name.startswith("python")
        if is_python and JOB.encode() in command:
            ranks.append(child)
    return sorted(ranks)


def cause(fault: str, job: subprocess.Popen[str], random: np.random.Generator) -> None:
    """Let a fault happen to a job."""
    ranks = ranks_of(job.pid)
    number = signal.SIGTERM if fault.startswith("end") else signal.SIGKILL
    if fault.endswith("mpirun"):
        hit = [job.pid]
    elif fault.endswith("all ranks"):
        hit = ranks
    else:
        hit = [int(random.choice(ranks))] if ranks else []
    for pid in hit:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def await_end(job: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and the output of a job, all of whose processes ended."""
    begun = time.monotonic()
    members = [job.pid, *descendants(job.pid)]
    out, _ = job.communicate(timeout=LIMIT_SECONDS)
    while any(Path(f"/proc/{pid}").exists() for pid in members):
        assert time.monotonic() - begun < LIMIT_SECONDS, f"left behind: {members}"
        time.sleep(0.01)
    return job.returncode, out


def weights_in(folder: Path) -> dict[str, Any]:
    """Return the weights of the last checkpoint, and their velocity."""
    last = max(folder.glob("ckpt-*.h5"), key=lambda p: int(p.stem.partition("-")[2]))
    with h5py.File(last, "r", locking=False) as file:
        groups = [file[name] for name in ("weights", "velocity")]
        return {a.name: a[...] for group in groups for a in group.values()}


def undisturbed(folder: Path, epochs: int) -> tuple[dict[int, Any], float]:
    """Return the weights of jobs that nobody disturbs, by ranks, and their seconds."""
    weights, seconds = {}, []
    for ranks in RANKS:
        place = folder / f"undisturbed-{ranks}" / "run"
        begun = time.monotonic()
        code, out = await_end(start(ranks, place, epochs))
        assert code == 0, out
        seconds.append(time.monotonic() - begun)
        weights[ranks] = weights_in(place)
    return weights, statistics.median(seconds)


def disturb(
    folder: Path, epochs: int, seconds: float, random: np.random.Generator
) -> tuple[list[str], set[int]]:
    """Run a job to its end, with faults; return those, and the numbers of ranks."""
    is_same = random.random() < 0.5
    ranks = int(random.choice(RANKS))
    faults, used = [], set()
    for attempt in range(100):
        ranks = ranks if is_same else int(random.choice(RANKS))
        used.add(ranks)
        job = start(ranks, folder, epochs)
        if attempt < 4:
            try:
                job.wait(random.uniform(0.1, seconds))
            except subprocess.TimeoutExpired:
                fault = str(random.choice(FAULTS))
                faults.append(fault)
                cause(fault, job, random)
        code, out = await_end(job)
        if code == 0:
            return faults, used
        if attempt >= 4:
            raise AssertionError(f"exit code {code} without a fault:\n{out}")
    raise AssertionError("it never ends")


def disturb_elastic(
    folder: Path, epochs: int, seconds: float, random: np.random.Generator
) -> tuple[list[str], set[int]]:
    """Run a job to its end, of which ranks die and others go on; see `disturb`."""
    ranks = int(random.integers(2, MOST_ELASTIC + 1))
    faults: list[str] = []
    for _ in range(10):
        job = start(ranks, folder, epochs, ["--with-ft", "ulfm"])
        while not folder.exists() and job.poll() is None:
            time.sleep(0.01)
        for _ in range(random.integers(1, ranks)):
            try:
                job.wait(random.uniform(0, seconds / 3))
            except subprocess.TimeoutExpired:
                if ranks_of(job.pid):
                    faults.append("kill a rank")
                    cause(faults[-1], job, random)
        code, out = await_end(job)
        if code == 0 and "loss=" in out:
            return faults, {ranks, 0}  # not one number of ranks
        print(f"started again, exit code {code}:\n{out[-2000:]}", flush=True)
        faults.append("start again")
    raise AssertionError(f"it never ends: exit code {code}\n{out}")


def compare(found: Any, expected: dict[int, Any], used: set[int]) -> float:
    """Return the largest difference; 0.0 is required for one number of ranks."""
    wanted = next(expected[ranks] for ranks in RANKS if ranks in used or 0 in used)
    assert found.keys() == wanted.keys()
    largest = max(float(np.abs(found[k] - wanted[k]).max()) for k in wanted)
    if len(used) == 1:
        assert all(found[k].tobytes() == wanted[k].tobytes() for k in wanted), largest
    assert largest < 1e-6
    return largest


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    random = np.random.default_rng(options.seed)
    faults: Counter[str] = Counter()
    jobs = {"same ranks": 0, "other ranks": 0}
    largest = 0.0
    with tempfile.TemporaryDirectory() as name:
        expected, seconds = undisturbed(Path(name), options.epochs)
        while sum(faults.values()) < options.kills:
            folder = Path(name, f"job-{sum(jobs.values())}", "run")
            one_job = disturb_elastic if options.elastic else disturb
            happened, used = one_job(folder, options.epochs, seconds, random)
            difference = compare(weights_in(folder), expected, used)
            largest = max(largest, difference)
            faults.update(happened)
            jobs["same ranks" if len(used) == 1 else "other ranks"] += 1
            print(f"{sum(faults.values())} faults, ranks {sorted(used)}", flush=True)
    result = {
        "faults": dict(faults),
        "jobs": jobs,
        "undisturbed_seconds": seconds,
        "largest_difference_other_ranks": largest,
    }
    print(json.dumps(result, indent=1))
    if options.json is not None:
        harness.save(options.json, **result)


if __name__ == "__main__":
    main()
