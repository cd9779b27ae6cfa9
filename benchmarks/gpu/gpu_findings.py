"""What was found on GPUs, beside what it must show. Needs neither a GPU nor MPI."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
from harness import Comparison

Records = Sequence[Mapping[str, Any]]

SMALL_BYTES = 8
RAW = "raw CUDA-aware MPI"
PAGEABLE = "pageable staging"
COPIES, PINNED = "copies within GPU memory", "page-locked memory to GPU"
_OURS = "mpidist"
DDP, TORCHRUN = "step of torch's DDP by NCCL", "as torchrun starts it"
# Digits of the loss that do not depend on where it was computed
_DIGITS = 4
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
_PROGRESS = re.compile(r"^([.sFEx]+) +\[ *\d+%\]$", re.MULTILINE)
_FAILED = re.compile(
    r"^(?:FAILED|ERROR) (\S+)|^rank \d+ of \d+: (.+) failed in ", re.MULTILINE
)
_LAST_LINE = re.compile(r"loss=([\d.]+) accuracy=([\d.]+) samples_per_s=(\d+)")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the findings in a file, which need not be there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def contract_of(output: str, how: str) -> dict[str, Any]:
    """Return how many tests passed, out of what pytest printed."""
    lines = [line for line in output.splitlines() if " in " in line]
    counts: dict[str, int] = {}
    for line in lines:
        found = {kind.rstrip("s"): int(n) for n, kind in _COUNT.findall(line)}
        counts = found or counts
    if not counts:  # it did not come to its end
        letters = "".join(_PROGRESS.findall(output))
        counts = {"passed": letters.count("."), "skipped": letters.count("s")}
    return {
        "ended": how,
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "skipped": counts.get("skipped", 0),
        "failures": sorted({a or b for a, b in _FAILED.findall(output)}),
    }


def all_of(contracts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what several runs of pytest came to; nothing for none.

    Args:
      contracts: what `contract_of` returned, by name.
    """
    if not contracts:
        return {}
    found = contracts.values()
    total: dict[str, Any] = {
        key: sum(contract[key] for contract in found)
        for key in ("passed", "failed", "skipped")
    }
    bad = [f"{n} {c['ended']}" for n, c in contracts.items() if c["ended"] != "ok"]
    failures = [test for contract in found for test in contract["failures"]]
    return {"ended": "; ".join(bad) or "ok", **total, "failures": failures}


def job_of(outputs: Mapping[str, str]) -> dict[str, Any]:
    """Return what the main job printed at last, on the GPU and on the CPU.

    Args:
      outputs: by where it ran.
    """
    found: dict[str, Any] = {}
    for where in ("GPU", "CPU"):
        matches = _LAST_LINE.findall(outputs.get(where, ""))
        if matches:
            loss, accuracy, rate = matches[-1]
            found[where] = {
                "loss": float(loss),
                "accuracy": float(accuracy),
                "samples_per_second": int(rate),
            }
    if len(found) == 2:
        gpu, cpu = found["GPU"], found["CPU"]
        is_near = abs(gpu["loss"] - cpu["loss"]) < 0.5 * 10**-_DIGITS
        found["same"] = is_near and gpu["accuracy"] == cpu["accuracy"]
    return found


def judge(records: Records, job: Mapping[str, Any]) -> list[Comparison]:
    """Return what was found beside its targets, and beside other ways.

    Args:
      records: see `bench_gpu.Setting.record`.
      job: see `job_of`.
    """
    found = [
        *_judge_sizes([r for r in records if r.get("case") == "all_reduce"]),
        *_judge_memory(records),
        *_judge_others(records, "gradients of ResNet-50", 3.0),
        *_judge_others(records, "all_gather", None),
        *_judge_input([r for r in records if r["kind"] == "input"]),
        *_judge_torch([r for r in records if r["kind"] == "torch"]),
    ]
    if "same" in job:
        rates = ([float(job[where]["samples_per_second"])] for where in ("GPU", "CPU"))
        found.append(Comparison("jobs/train_digits.py, GPU", "CPU", "rows/s", *rates))
    return found


def _is_rival(name: str) -> bool:
    return not name.startswith((_OURS, "transport"))


def _by_rate(
    case: str,
    size: float,
    seconds: Mapping[str, Sequence[float]],
    ours: str,
    rival: str,
    target: float | None,
) -> Comparison:
    """Return a comparison of bytes per second: how many times ours is as fast."""
    rates = ([size / s / 1e9 for s in seconds[name]] for name in (ours, rival))
    return Comparison(case, rival, "GB/s", *rates, target)


def _judge_sizes(records: Records) -> Iterator[Comparison]:
    by_size = {record["bytes"]: record["seconds"] for record in records}
    # 64 MiB, but in a quick run
    large = 64 << 20 if 64 << 20 in by_size else max(by_size, default=0)
    for size, seconds in sorted(by_size.items()):
        case = f"all_reduce, {size:,} bytes"
        if size == large:
            mine = (name for name in seconds if not _is_rival(name))
            best = min(mine, key=lambda name: statistics.median(seconds[name]))
            yield _by_rate(f"{case}, {best}", size, seconds, best, PAGEABLE, 10.0)
        targets = {RAW: 1.5} if size == SMALL_BYTES else {}
        times = {n: s for n, s in seconds.items() if n == _OURS or _is_rival(n)}
        yield from harness.beside(case, times, targets, ours=_OURS)


def _judge_others(
    records: Records, case: str, target: float | None
) -> Iterator[Comparison]:
    """Compare with all rivals; the target is that of our default beside `RAW`."""
    for record in (r for r in records if r.get("case") == case):
        seconds, size = record["seconds"], record["bytes"]
        for name in (name for name in seconds if name.startswith(_OURS)):
            label = f"{case}{name[len(_OURS) :]}, {size:,} bytes"
            for rival in filter(_is_rival, seconds):
                wanted = target if (name, rival) == (_OURS, RAW) else None
                yield _by_rate(label, size, seconds, name, rival, wanted)


def _beside_limit(
    case: str,
    against: str,
    size: float,
    seconds: Sequence[float],
    limit: float,
    target: float | None,
) -> Comparison:
    """Return bytes per second beside what is possible."""
    rates = [size / s / 1e9 for s in seconds]
    limits = [limit / 1e9] * len(rates)
    return Comparison(case, against, "GB/s", rates, limits, target)


def _judge_memory(records: Records) -> Iterator[Comparison]:
    limits = [r for r in records if r["kind"] == "memory_bandwidth"]
    for record in (r for r in records if r["kind"] == "ipc"):
        limit = limits[-1]["bytes_per_second_alone"]
        # GPUs of their own read each other's memory over a link, which is another limit
        target = 0.6 if record["is_shared"] else None
        for name, key in (("it moves", "moved_bytes"), ("of arrays", "least_bytes")):
            case = f"ipc, {record['bytes']:,} bytes, bytes {name}"
            moved, seconds = record[key], record["seconds"]
            yield _beside_limit(case, COPIES, moved, seconds, limit, target)


def _judge_input(records: Records) -> Iterator[Comparison]:
    for record in records:
        case, size, seconds = record["case"], record["bytes"], record["seconds"]
        limit, target = record["upload_bytes_per_second"], None
        if case == "contiguous":
            target = 0.8
        title = f"HDF5 rows to GPU, {case}"
        yield _beside_limit(title, PINNED, size, seconds, limit, target)


def _judge_torch(records: Records) -> Iterator[Comparison]:
    for record in records:
        if "nccl" in record["backend"]:  # by gloo it is only seen to run
            yield from harness.beside(
                DDP, record["seconds"], {TORCHRUN: 1.02}, ours=_OURS
            )


def bytes_of_ipc(size: int, ranks: int) -> float:
    """Return how many bytes each rank's GPU reads and writes to add up with `ipc`.

    A rank copies its array to its slot. Of two ranks, each reads both slots and writes
    the totals; of more, each adds up a part, puts it into its slot, and copies the
    other parts from those of the others.
    """
    copied = 2 * size
    if ranks == 2:
        return copied + 3 * size
    part = size / ranks
    return copied + (ranks + 1) * part + 2 * part + 2 * (size - part)


def least_bytes(size: int, ranks: int) -> float:
    """Return the bytes of reading all ranks' arrays, and writing the totals, once."""
    return (ranks + 1) * size


def table(
    comparisons: Sequence[Comparison],
    contract: Mapping[str, Any],
    job: Mapping[str, Any],
    ranks: int,
) -> list[str]:
    """Return the lines of what must be shown, with its targets."""
    lines = [_line("case", "against", "target", "ratio", "")]
    for c in comparisons:
        if c.target is not None:
            sign = ">=" if c.is_at_least else "<="
            word = "reached" if c.is_reached else "MISSED"
            target, ratio = f"{sign} {c.target:g}", f"{c.ratio:.3g}"
            lines.append(_line(c.case, c.against, target, ratio, word))
    lines += [
        _line(case, against, target, "-", "not measured")
        for case, against, target in _missing(comparisons, ranks)
    ]
    lines.append(_line("contract tests", "NumPy", "equal", "", _word_of(contract)))
    word = {True: "reached", False: "MISSED"}.get(job.get("same"), "not measured")
    lines.append(
        _line("jobs/train_digits.py, GPU", "CPU", f"{_DIGITS} places", "", word)
    )
    return lines


def checks_of(records: Records) -> list[str]:
    """Return the lines of what `gpu_checks` found."""
    return [
        f"{r['name']:26} {r['word']:5} {r['seen']}"
        for r in records
        if r["kind"] == "check"
    ]


def _word_of(contract: Mapping[str, Any]) -> str:
    if not contract:
        return "not measured"
    counts = ", ".join(f"{contract[key]} {key}" for key in ("passed", "failed"))
    if contract["ended"] == "ok" and contract["passed"]:
        return f"reached: {counts}, {contract['skipped']} skipped"
    return f"MISSED: {counts}; pytest {contract['ended']}"


def _missing(
    comparisons: Sequence[Comparison], ranks: int
) -> Iterator[tuple[str, str, str]]:
    judged = {(c.case.partition(",")[0], c.against) for c in comparisons if c.target}
    wanted = [("HDF5 rows to GPU", PINNED, ">= 0.8"), (DDP, TORCHRUN, "<= 1.02")]
    if ranks > 1:
        wanted += [
            ("all_reduce", PAGEABLE, ">= 10"),
            ("ipc", COPIES, ">= 0.6"),
            ("gradients of ResNet-50", RAW, ">= 3"),
            ("all_reduce", RAW, "<= 1.5"),
        ]
    return (row for row in wanted if row[:2] not in judged)


def _line(case: str, against: str, target: str, ratio: str, word: str) -> str:
    return f"{case:50} {against:28} {target:>9} {ratio:>8}  {word}".rstrip()
