"""What must be shown on GPUs, and what was found. Needs neither a GPU nor MPI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

OURS = "mpidist"
RAW, PAGEABLE = "raw CUDA-aware MPI", "pageable staging"
COPIES, PINNED = "copies within GPU memory", "page-locked memory to GPU"
LARGE, GRADIENTS = "all_reduce, large, the best way", "gradients of ResNet-50"
INPUT = "HDF5 rows to GPU"
DDP, TORCHRUN = "step of torch's DDP by NCCL", "as torchrun starts it"
# Digits of the loss that do not depend on where it was computed
_DIGITS = 4
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)s?\b")
_PROGRESS = re.compile(r"^([.sFEx]+) +\[ *\d+%\]$", re.MULTILINE)
_FAILED = re.compile(
    r"^(?:FAILED|ERROR) (\S+)|^rank \d+ of \d+: (.+) failed in ", re.MULTILINE
)
_LAST_LINE = re.compile(r"loss=([\d.]+) accuracy=([\d.]+) samples_per_s=(\d+)")


class Target(NamedTuple):
    """What a ratio has to be.

    Args:
      case, against: of a `harness.Comparison`.
      ratio: to be reached, at least or at most.
      least_ranks: fewer do not measure it.
    """

    case: str
    against: str
    ratio: float
    is_at_least: bool = True
    least_ranks: int = 2


TARGETS = (
    Target("all_reduce, 8 bytes", RAW, 1.5, is_at_least=False),
    Target(LARGE, PAGEABLE, 10.0),
    Target(GRADIENTS, RAW, 3.0),
    Target("ipc, bytes it moves", COPIES, 0.6),
    Target("ipc, bytes of arrays", COPIES, 0.6),
    Target(f"{INPUT}, contiguous", PINNED, 0.8, least_ranks=1),
    Target(DDP, TORCHRUN, 1.02, is_at_least=False, least_ranks=1),
)


def target_of(case: str, against: str) -> Target | None:
    """Return what a comparison has to show, if anything."""
    return next((t for t in TARGETS if t[:2] == (case, against)), None)


def contract_of(output: str) -> dict[str, Any]:
    """Return how many tests passed, and which failed, out of what pytest printed."""
    ends = [_COUNT.findall(line) for line in output.splitlines() if " in " in line]
    counts = {kind: int(n) for n, kind in next(filter(None, reversed(ends)), [])}
    if not counts:  # it did not come to its end
        letters = "".join(_PROGRESS.findall(output))
        counts = {"passed": letters.count("."), "skipped": letters.count("s")}
    failures = sorted({a or b for a, b in _FAILED.findall(output)})
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return {
        "passed": counts.get("passed", 0),
        "failed": max(failed, len(failures)),
        "skipped": counts.get("skipped", 0),
        "failures": failures,
    }


def job_of(output: str) -> dict[str, float]:
    """Return what the main job printed at last; nothing if it did not."""
    numbers = map(float, (_LAST_LINE.findall(output) or [()])[-1])
    return dict(zip(("loss", "accuracy", "samples_per_second"), numbers))


def same_digits(gpu: Mapping[str, float], cpu: Mapping[str, float]) -> bool | None:
    """Return whether two runs of the main job learned the same; None without both."""
    if not (gpu and cpu):
        return None
    is_near = abs(gpu["loss"] - cpu["loss"]) < 0.5 * 10**-_DIGITS
    return is_near and gpu["accuracy"] == cpu["accuracy"]


def bytes_of_ipc(size: int, ranks: int) -> float:
    """Return how many bytes each rank's GPU reads and writes to add up with `ipc`.

    A rank copies its array to its slot. Of two ranks, each reads both slots and writes
    the totals; of more, each adds up a part, puts it into its slot, and copies the
    other parts from those of the others.
    """
    if ranks == 2:
        return 5 * size
    part = size / ranks
    return 2 * size + (ranks + 1) * part + 2 * part + 2 * (size - part)


def least_bytes(size: int, ranks: int) -> float:
    """Return the bytes of reading all ranks' arrays, and writing the totals, once."""
    return (ranks + 1) * size


def lines_of(jobs: Mapping[str, Mapping[str, Any]], ranks: int) -> list[str]:
    """Return the table of what must be shown, checks, and tests that failed.

    Args:
      jobs: by name, how each ended, with its "records", "tests" or "learned".
      ranks: of these jobs.
    """
    records = [record for job in jobs.values() for record in job.get("records", ())]
    lines = [_line("case", "against", "target", "ratio", "")]
    found = {
        (r["case"], r["against"]): r["ratio"]
        for r in records
        if r["kind"] == "comparison"
    }
    for case, against, target, is_at_least, least_ranks in TARGETS:
        ratio = found.get((case, against))
        if ratio is not None:
            is_reached = ratio >= target if is_at_least else ratio <= target
            word = "reached" if is_reached else "MISSED"
        elif ranks < least_ranks:
            continue
        else:
            word = "not measured"
        sign, shown = (
            ">=" if is_at_least else "<=",
            "-" if ratio is None else f"{ratio:.3g}",
        )
        lines.append(_line(case, against, f"{sign} {target:g}", shown, word))
    tests = {name: job for name, job in jobs.items() if "tests" in job}
    lines.append(_line("contract tests", "NumPy", "equal", "", _word_of(tests)))
    learned = {
        job["label"]: job["learned"] for job in jobs.values() if "learned" in job
    }
    same = same_digits(learned.get("GPU", {}), learned.get("CPU", {}))
    word = {True: "reached", False: "MISSED", None: "not measured"}[same]
    lines.append(
        _line("jobs/train_digits.py, GPU", "CPU", f"{_DIGITS} places", "", word)
    )
    checks = [r for r in records if r["kind"] == "check"]
    lines += [f"{r['name']:26} {r['word']:5} {r['seen']}" for r in checks]
    return [
        *lines,
        *(test for job in tests.values() for test in job["tests"]["failures"]),
    ]


def _word_of(jobs: Mapping[str, Mapping[str, Any]]) -> str:
    if not jobs:
        return "not measured"
    passed, failed, skipped = (
        sum(job["tests"][key] for job in jobs.values())
        for key in ("passed", "failed", "skipped")
    )
    bad = [
        f"{name} {job['ended']}" for name, job in jobs.items() if job["ended"] != "ok"
    ]
    if passed and not bad:
        return f"reached: {passed} passed, {failed} failed, {skipped} skipped"
    return f"MISSED: {passed} passed, {failed} failed; {'; '.join(bad) or 'ok'}"


def _line(case: str, against: str, target: str, ratio: str, word: str) -> str:
    return f"{case:50} {against:28} {target:>9} {ratio:>8}  {word}".rstrip()
