"""What `bench_collectives.py` compares."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import input_overlap
import numpy as np
from comparisons import Comparison
from mpi4py import MPI

import mpidist

__all__ = [
    "Setting",
    "compare_gathers",
    "compare_models",
    "compare_options",
    "compare_overlap",
    "compare_sizes",
    "compare_symmetric",
]

LOOP_BYTES = 16 << 20  # so many in one measurement, at least one call
RAW, GLOO, COPY = "raw MPI", "torch gloo", "copy"
MWMS = "TF MultiWorkerMirrored"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all cases are given.

    Args:
      repetitions: how often each contestant is timed.
      most_calls: how many calls each measurement has, at most.
      sum_by_gloo: sums an array of all ranks in place; None without torch.
      reducer_by_tensorflow: see `collective_rivals.multi_worker`.
      skipped: what could not be measured, and why.
    """

    comm: MPI.Intracomm
    repetitions: int
    most_calls: int
    sum_by_gloo: Callable[[Any], None] | None
    reducer_by_tensorflow: Callable[[Sequence[Any]], Callable[[], None]] | None
    skipped: list[str] = dataclasses.field(default_factory=list)

    def run(
        self,
        case: str,
        size: int,
        contestants: dict[str, Callable[[], Any]],
        targets: dict[str, float],
    ) -> list[Comparison]:
        """Time contestants in turn; return ours by each other one. Collective."""
        loops = max(1, min(self.most_calls, LOOP_BYTES // max(1, size)))
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for repetition in range(self.repetitions + 1):
            for name, call in contestants.items():
                seconds = self.time(call, loops)
                if repetition:  # the first one warms up
                    times[name].append(seconds * 1e6)
        return [
            Comparison(case, name, "us", times["ours"], other, targets.get(name), False)
            for name, other in times.items()
            if name != "ours"
        ]

    def time(self, call: Callable[[], Any], loops: int) -> float:
        """Return the seconds of one call, on the slowest rank. Collective."""
        self.comm.Barrier()
        start = time.perf_counter()
        for _ in range(loops):
            call()
        mine = (time.perf_counter() - start) / loops
        return self.comm.allreduce(mine, MPI.MAX)

    def numbers(self, shape: int | tuple[int, ...]) -> Any:
        """Return random float32 numbers, other ones on each rank."""
        return np.random.default_rng(self.comm.rank).random(shape, np.float32)


def compare_sizes(setting: Setting, sizes: Sequence[int]) -> Iterator[Comparison]:
    """Compare all-reduces of one array, from small to large."""
    comm, replica = setting.comm, mpidist.get_replica_context()
    assert replica is not None
    for size in sorted(set(sizes)):
        given = setting.numbers(size // 4)
        total = np.zeros_like(given)
        contestants: dict[str, Callable[[], Any]] = {
            "ours": lambda a=given: replica.all_reduce("SUM", a),
            RAW: lambda a=given, b=total: comm.Allreduce(a, b, MPI.SUM),
            COPY: lambda a=given, b=total: np.copyto(b, a),
        }
        expected = comm.allreduce(given.astype(np.float64))
        np.testing.assert_allclose(contestants["ours"](), expected, rtol=1e-5)
        if setting.sum_by_gloo is not None:
            contestants[GLOO] = lambda a=total: setting.sum_by_gloo(a)
        if setting.reducer_by_tensorflow is not None:
            contestants[MWMS] = setting.reducer_by_tensorflow([given])
        targets = {}
        if size == 8:
            targets[RAW] = 3.0
        elif size >= 64 << 10:
            is_intel = MPI.Get_library_version().startswith("Intel")
            large = 0.95 if is_intel else 0.6
            targets[RAW] = large if size >= 16 << 20 else 1.1
        if size == 64 << 20:
            targets[COPY] = 2.0
        case = f"all_reduce, {size:,} bytes"
        yield from setting.run(case, size, contestants, targets)


def compare_models(
    setting: Setting, models: dict[str, list[tuple[int, ...]]]
) -> Iterator[Comparison]:
    """Compare all-reduces of all gradients of a model."""
    comm, replica = setting.comm, mpidist.get_replica_context()
    assert replica is not None
    for model, shapes in models.items():
        given = [setting.numbers(shape) for shape in shapes]
        totals = [np.zeros_like(a) for a in given]

        def one_by_one(given: Any = given, totals: Any = totals) -> None:
            for a, b in zip(given, totals, strict=True):
                comm.Allreduce(a, b, MPI.SUM)

        def ours(given: Any = given) -> Any:
            return replica.all_reduce("SUM", given)

        one_by_one()
        for a, b in zip(ours(), totals, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
        contestants: dict[str, Callable[[], Any]] = {
            "ours": ours,
            RAW: one_by_one,
            COPY: lambda given=given, totals=totals: list(
                map(np.copyto, totals, given)
            ),
        }
        if setting.sum_by_gloo is not None:

            def by_gloo(totals: Any = totals) -> None:
                for total in totals:
                    setting.sum_by_gloo(total)

            contestants[GLOO] = by_gloo
        if setting.reducer_by_tensorflow is not None:
            contestants[MWMS] = setting.reducer_by_tensorflow(given)
        targets = {}
        if model == "ResNet-50":
            targets = {RAW: 0.5, GLOO: 0.25, MWMS: 0.05}
        case = f"gradients of {model}"
        size = sum(a.nbytes for a in given)
        yield from setting.run(case, size, contestants, targets)
        symmetric = replica.strategy.symmetric_like(given)
        for a, b in zip(symmetric, given, strict=True):
            a[...] = b
        contestants["ours"] = lambda given=symmetric: replica.all_reduce("SUM", given)
        yield from setting.run(f"{case}, symmetric", size, contestants, {})


def compare_gathers(setting: Setting, size: int) -> Iterator[Comparison]:
    """Compare all-gathers of lengths that differ by a tenth."""
    comm, replica = setting.comm, mpidist.get_replica_context()
    assert replica is not None
    columns = 64
    rows = [max(1, size // 4 // columns * (10 + r % 2) // 10) for r in range(comm.size)]
    for axis, target in ((0, 1.15), (1, 2.0)):
        shape = (rows[comm.rank], columns)[:: 1 - 2 * axis]
        given = setting.numbers(shape)
        counts = [n * columns for n in rows]
        gathered = np.empty(sum(counts), np.float32)
        contestants: dict[str, Callable[[], Any]] = {
            "ours": lambda a=given, i=axis: replica.all_gather(a, i),
            RAW: lambda a=given, b=gathered, n=counts: comm.Allgatherv(a, [b, n]),
        }
        expected = np.concatenate(comm.allgather(given), axis=axis)
        assert np.array_equal(contestants["ours"](), expected)
        case = f"all_gather, {size:,} bytes per rank, axis {axis}"
        yield from setting.run(case, size, contestants, {RAW: target})


def compare_symmetric(setting: Setting, sizes: Sequence[int]) -> Iterator[Comparison]:
    """Compare all-reduces of arrays that lie in shared memory."""
    comm, replica = setting.comm, mpidist.get_replica_context()
    assert replica is not None
    for size in sizes:
        given = setting.numbers(size // 4)
        total = np.zeros_like(given)
        symmetric = replica.strategy.symmetric_like(given)
        symmetric[...] = given
        contestants: dict[str, Callable[[], Any]] = {
            "ours": lambda a=symmetric: replica.all_reduce("SUM", a),
            RAW: lambda a=given, b=total: comm.Allreduce(a, b, MPI.SUM),
            COPY: lambda a=given, b=total: np.copyto(b, a),
            "ours, plain": lambda a=given: replica.all_reduce("SUM", a),
        }
        expected = comm.allreduce(given.astype(np.float64))
        np.testing.assert_allclose(contestants["ours"](), expected, rtol=1e-5)
        case = f"symmetric, {size:,} bytes"
        targets = {RAW: 0.3 if size >= 64 << 20 else 0.5}
        yield from setting.run(case, size, contestants, targets)


def compare_options(setting: Setting, sizes: Sequence[int]) -> Iterator[Comparison]:
    """Compare options to the defaults."""
    replica = mpidist.get_replica_context()
    assert replica is not None
    settings = {
        "reproducible": {"reproducible": True},
        "reproducible, by MPI": {"reproducible": True, "implementation": "MPI"},
        "float16": {"compression": "float16"},
        "bfloat16": {"compression": "bfloat16"},
        "float16, by MPI": {"compression": "float16", "implementation": "MPI"},
    }
    for size in sizes:
        given = setting.numbers(size // 4)
        for name, fields in settings.items():
            options = mpidist.CommunicationOptions(**fields)
            default = mpidist.CommunicationOptions(
                implementation=fields.get("implementation", "AUTO")
            )
            contestants: dict[str, Callable[[], Any]] = {
                "ours": lambda a=given, o=options: replica.all_reduce("SUM", a, o),
                "the default": lambda a=given, o=default: replica.all_reduce(
                    "SUM", a, o
                ),
            }
            targets = {"the default": 1.5} if name == "reproducible" else {}
            case = f"{name}, {size:,} bytes"
            yield from setting.run(case, size, contestants, targets)


def compare_overlap(
    setting: Setting, shapes: Sequence[tuple[int, ...]]
) -> Iterator[Comparison]:
    """Compare gradients reduced while others are computed to one after the other.

    Each rank has two cores; computing takes as long as reducing.
    """
    comm, replica = setting.comm, mpidist.get_replica_context()
    assert replica is not None
    mine = input_overlap.own_cores(comm)
    if not all(comm.allgather(len(mine) == 2)):
        setting.skipped.append("overlap: there are not 2 cores for each rank")
        return
    given = [setting.numbers(shape) for shape in shapes]
    sizes = [a.size for a in given]
    buckets = replica.strategy.gradient_buckets(given)
    matrix = setting.numbers((160, 160))
    product = np.empty_like(matrix)
    times = [0]  # how many multiplications take as long as the reduction

    def backward(number: int) -> None:
        share = times[0] * sum(sizes[number:]) // sum(sizes)
        share -= times[0] * sum(sizes[number + 1 :]) // sum(sizes)
        for _ in range(share):
            np.matmul(matrix, matrix, out=product)

    def compute() -> None:
        for number in reversed(range(len(sizes))):
            backward(number)

    def reduce() -> Any:
        return replica.all_reduce("SUM", given)

    def overlapped() -> Any:
        with buckets:
            for number in reversed(range(len(sizes))):
                backward(number)
                buckets.put(number, given[number])
        return buckets.result

    for a, b in zip(overlapped(), reduce(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    parts: dict[str, list[float]] = {"compute": [], "reduce": [], "both": []}
    contestants = {"compute": compute, "reduce": reduce, "both": overlapped}
    with input_overlap.on_cores(mine):
        times[0] = 100
        for _ in range(3 + setting.repetitions):
            for name, call in contestants.items():
                parts[name].append(setting.time(call, 1) * 1e3)
            # Go on computing as long as reducing
            ratio = parts["reduce"][-1] / max(parts["compute"][-1], 1e-3)
            times[0] = max(1, round(times[0] * ratio**0.7))
    parts = {name: measured[3:] for name, measured in parts.items()}
    buckets.close()
    compute_ms, reduce_ms = (statistics.median(parts[n]) for n in ("compute", "reduce"))
    yield Comparison(
        "overlap with a backward pass",
        "computing, then reducing",
        "ms",
        parts["both"],
        [a + b for a, b in zip(parts["compute"], parts["reduce"], strict=True)],
        0.65,
        is_at_least=False,
        note=f"computing {compute_ms:.3g} ms, reducing {reduce_ms:.3g} ms",
    )
