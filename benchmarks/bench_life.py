"""The life of the digits job on hundreds of ranks of one machine, stage by stage.

    python benchmarks/bench_life.py --output benchmarks/results/life-mpich.json

`jobs/train_digits_resumable.py` starts, trains, saves and ends; fewer ranks resume it;
and of as many ranks as at first, one is killed. For each stage the table has

- seconds: from when the last rank left the stage before, until it left this one;
- cores: seconds for which each rank has used a core, on average. Ranks that share cores
  wait for each other's;
- KiB: how much larger a rank's own memory is than before (`RssAnon`, the median).

Beside these is a program that does nothing but start MPI, and wait once. At the end,
`Pss` is the memory of all ranks together: what several ranks map counts once.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness

# isort: split
import digits
import launching
from life_job import BEGUN, BETWEEN, KILLED, LAST, SAVE_EVERY

JOB = str(Path(__file__).with_name("life_job.py"))
HANG_SECONDS, LIMIT_SECONDS = 600, 7200.0


def is_running(mark: bytes) -> bool:
    """Return whether any process has this among its environment variables."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if int(path.parent.name) != os.getpid() and mark in path.read_bytes():
                return True
    return False


def start(ranks: int, *arguments: str, killed: int | None = None) -> dict[str, Any]:
    """Run a job until none of its processes is left; return what it noted.

    Args:
      ranks: how many.
      *arguments: of the digits job; none for the program that only starts MPI.
      killed: the rank that dies.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, begun = Path(name), time.time()
        environ = {BEGUN: str(begun), "MPIDIST_HANG_SECONDS": str(HANG_SECONDS)}
        paths = [str(harness.ROOT / "jobs"), os.environ.get("PYTHONPATH")]
        joined = os.pathsep.join(filter(None, paths))
        environ |= {"TQDM_DISABLE": "1", "PYTHONPATH": joined}
        environ |= {} if killed is None else {KILLED: str(killed)}
        command = [*launching.mpirun_command(ranks), sys.executable, JOB, name]
        ended = launching.run([*command, *arguments], LIMIT_SECONDS, **environ)
        while is_running(f"{BEGUN}={begun}".encode()):
            time.sleep(0.01)
        end, code = time.time(), ended.returncode
        told = ended.stdout + ended.stderr
        assert (code != 0) == (killed is not None), f"ended with {code}:\n{told}"
        if killed is not None:
            seconds = end - float((folder / "killed").read_text())
            lines = len(told.splitlines())
            return {"ranks": ranks, "code": code, "seconds": seconds, "lines": lines}
        noted = [json.loads((folder / f"{r}.json").read_text()) for r in range(ranks)]
    return {"ranks": ranks, "stages": summarize(noted, end - begun), **total(noted)}


def total(noted: Sequence[Any]) -> dict[str, float]:
    """Return the MiB of all ranks together, by kind."""
    kinds = noted[0]["sizes"]
    return {kind: sum(rank["sizes"][kind] for rank in noted) / 1024 for kind in kinds}


def summarize(noted: Sequence[Any], end: float) -> list[dict[str, Any]]:
    """Return one row for each stage; of calls after the first, the median.

    Args:
      noted: what each rank has written.
      end: when the last process has ended, in seconds since the start.
    """
    calls: dict[str, list[tuple[float, float, float]]] = {}
    before, used = 0.0, [0.0] * len(noted)
    for notes in zip(*(rank["rows"] for rank in noted), strict=True):
        (name,) = {name for name, *_ in notes}
        left = max(now for _, now, _, _ in notes)
        cores = statistics.mean(c - u for (*_, c, _), u in zip(notes, used))
        own = statistics.median(own for *_, own in notes)
        calls.setdefault(name, []).append((left - before, cores, own))
        before, used = left, [c for _, _, c, _ in notes]
    calls["end"] = [(end - before, 0.0, own)]
    rows = []
    for name, found in calls.items():
        parts = {name: found[:1], f"{name}, again": found[1:]}
        if name in (BETWEEN, LAST):
            continue
        rows += [
            {
                "stage": part,
                "seconds": statistics.median(seconds for seconds, _, _ in group),
                "cores": statistics.median(cores for _, cores, _ in group),
                "MiB": group[-1][2] / 1024,
                "calls": len(group),
            }
            for part, group in parts.items()
            if group
        ]
    return rows


def show(name: str, job: dict[str, Any]) -> None:
    """Print what a job has noted."""
    print(f"\n{name}, {job['ranks']} ranks")
    for row in job.get("stages", ()):
        numbers = f"{row['seconds']:9.2f} s {row['cores']:8.3f} s {row['MiB']:8.1f} MiB"
        print(f"  {row['stage']:20}{numbers} {row['calls']:4}")
    print(
        "  ", {key: value for key, value in job.items() if key != "stages"}, flush=True
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=256)
    add("--fewer", type=int, default=64, help="ranks that resume it")
    options = parser.parse_args(arguments)
    ranks, fewer = (4, 2) if options.tiny else (options.ranks, options.fewer)
    jobs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        data, saved = Path(name, "data"), Path(name, "saved")
        digits.write_missing(data, 4)
        job = [f"--data-dir={data}", f"--save-every={SAVE_EVERY}"]
        first, again = [*job, f"--checkpoint-dir={saved}"], [*job, "--epochs=2"]
        cases: dict[str, Callable[[], dict[str, Any]]] = {
            "MPI alone": lambda: start(ranks),
            "the job": lambda: start(ranks, *first, "--epochs=1"),
            "resumed": lambda: start(fewer, *first, "--epochs=2"),
            "a rank is killed": lambda: start(
                ranks, *again, f"--checkpoint-dir={saved}-2", killed=ranks // 2
            ),
        }
        for case, run in cases.items():
            jobs[case] = run()
            show(case, jobs[case])
    if options.output is not None:
        harness.save(options.output, jobs=jobs)


if __name__ == "__main__":
    main()
