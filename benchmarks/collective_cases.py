"""What `bench_collectives.py` and `bench_network.py` compare. All is collective."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness
import numpy as np
from harness import Comparison
from mpi4py import MPI
from rivals import GLOO, MWMS, RAW, Reducer, Shape

import mpidist

LOOP_BYTES = 16 << 20  # so many in one measurement, at least one call
COPY = "copy"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all cases need.

    Args:
      strategy: of the ranks of `comm`.
      repetitions: how often each contestant is timed.
      most_calls: how many calls each measurement has, at most.
      sum_by_gloo: sums an array of all ranks in place; None without torch.
      reducer_by_tensorflow: see `rivals.multi_worker`; None without TensorFlow.
      skipped: what could not be measured, and why.
    """

    comm: MPI.Intracomm
    strategy: mpidist.Strategy
    repetitions: int
    most_calls: int
    sum_by_gloo: Callable[[Any], Any] | None
    reducer_by_tensorflow: Reducer | None
    skipped: list[str] = dataclasses.field(default_factory=list)

    def run(
        self,
        case: str,
        size: int,
        contestants: harness.Calls,
        targets: dict[str, float] | None = None,
    ) -> list[Comparison]:
        """Time contestants in turn; return ours by each other one."""
        calls = max(1, min(self.most_calls, LOOP_BYTES // max(1, size)))
        turns = self.repetitions
        times = harness.take_turns(self.comm, contestants, turns, calls=calls)
        return harness.beside(case, times, targets)

    def numbers(self, shape: int | Shape) -> Any:
        """Return random float32 numbers, other ones on each rank."""
        return np.random.default_rng(self.comm.rank).random(shape, np.float32)

    def all_reduce(
        self, value: Any, options: mpidist.CommunicationOptions | None = None
    ) -> Callable[[], Any]:
        """Return a function that adds up an array, or a list, in either context."""
        context = mpidist.get_replica_context() or self.strategy.extended
        return lambda: context.all_reduce("SUM", value, options)

    def rivals(self, given: Sequence[Any], totals: Sequence[Any]) -> dict[str, Any]:
        """Return how others add up arrays, one by one, and copy them."""

        def by_mpi() -> None:
            for a, b in zip(given, totals, strict=True):
                self.comm.Allreduce(a, b, MPI.SUM)

        def copy() -> None:
            for a, b in zip(given, totals, strict=True):
                np.copyto(b, a)

        def by_gloo() -> None:
            for total in totals:
                self.sum_by_gloo(total)

        others = {RAW: by_mpi, COPY: copy}
        if self.sum_by_gloo is not None:
            others[GLOO] = by_gloo
        if self.reducer_by_tensorflow is not None:
            others[MWMS] = self.reducer_by_tensorflow(given)
        return others

    def check(self, found: Sequence[Any], given: Sequence[Any]) -> None:
        """Raise AssertionError if arrays are not the sums of all ranks'."""
        for a, b in zip(found, given, strict=True):
            expected = self.comm.allreduce(b.astype(np.float64))
            np.testing.assert_allclose(a, expected, rtol=1e-5)


def compare_sizes(setting: Setting, sizes: Sequence[int]) -> Iterator[Comparison]:
    """Compare all-reduces of one array, from small to large."""
    is_intel = MPI.Get_library_version().startswith("Intel")
    for size in sorted(set(sizes)):
        given = setting.numbers(size // 4)
        ours = setting.all_reduce(given)
        setting.check([ours()], [given])
        contestants = {"ours": ours, **setting.rivals([given], [np.zeros_like(given)])}
        targets = {}
        if size == 8:
            targets[RAW] = 3.0
        elif size >= 64 << 10:
            large = 0.95 if is_intel else 0.6
            targets[RAW] = large if size >= 16 << 20 else 1.1
        if size == 64 << 20:
            targets[COPY] = 2.0
        yield from setting.run(
            f"all_reduce, {size:,} bytes", size, contestants, targets
        )


def compare_models(
    setting: Setting, models: dict[str, list[Shape]]
) -> Iterator[Comparison]:
    """Compare all-reduces of all gradients of a model."""
    for model, shapes in models.items():
        given = [setting.numbers(shape) for shape in shapes]
        ours = setting.all_reduce(given)
        setting.check(ours(), given)
        totals = [np.zeros_like(a) for a in given]
        contestants = {"ours": ours, **setting.rivals(given, totals)}
        is_judged = model == "ResNet-50"
        targets = {RAW: 0.5, GLOO: 0.25, MWMS: 0.05} if is_judged else {}
        case, size = f"gradients of {model}", sum(a.nbytes for a in given)
        yield from setting.run(case, size, contestants, targets)
        symmetric = setting.strategy.symmetric_like(given)
        for a, b in zip(symmetric, given, strict=True):
            a[...] = b
        contestants["ours"] = setting.all_reduce(symmetric)
        yield from setting.run(f"{case}, symmetric", size, contestants)


def compare_gathers(setting: Setting, size: int) -> Iterator[Comparison]:
    """Compare all-gathers of lengths that differ by a tenth."""
    comm, replica = setting.comm, mpidist.get_replica_context()
    columns = 64
    rows = [max(1, size // 4 // columns * (10 + r % 2) // 10) for r in range(comm.size)]
    counts = [n * columns for n in rows]
    gathered = np.empty(sum(counts), np.float32)
    for axis, target in ((0, 1.15), (1, 2.0)):
        given = setting.numbers((rows[comm.rank], columns)[:: 1 - 2 * axis])
        contestants: dict[str, Callable[[], Any]] = {
            "ours": lambda a=given, i=axis: replica.all_gather(a, i),
            RAW: lambda a=given: comm.Allgatherv(a, [gathered, counts]),
        }
        expected = np.concatenate(comm.allgather(given), axis=axis)
        assert np.array_equal(contestants["ours"](), expected)
        case = f"all_gather, {size:,} bytes per rank, axis {axis}"
        yield from setting.run(case, size, contestants, {RAW: target})


def compare_symmetric(setting: Setting, sizes: Sequence[int]) -> Iterator[Comparison]:
    """Compare all-reduces of arrays that lie in shared memory."""
    for size in sizes:
        given = setting.numbers(size // 4)
        symmetric = setting.strategy.symmetric_like(given)
        symmetric[...] = given
        ours = setting.all_reduce(symmetric)
        setting.check([ours()], [given])
        others = setting.rivals([given], [np.zeros_like(given)])
        contestants = {
            "ours": ours,
            **{name: others[name] for name in (RAW, COPY)},
            "ours, plain": setting.all_reduce(given),
        }
        targets = {RAW: 0.3 if size >= 64 << 20 else 0.5}
        yield from setting.run(f"symmetric, {size:,} bytes", size, contestants, targets)


OPTIONS = {
    "reproducible": {"reproducible": True},
    "reproducible, by MPI": {"reproducible": True, "implementation": "MPI"},
    "float16": {"compression": "float16"},
    "bfloat16": {"compression": "bfloat16"},
    "float16, by MPI": {"compression": "float16", "implementation": "MPI"},
}


def compare_options(setting: Setting, sizes: Sequence[int]) -> Iterator[Comparison]:
    """Compare options to the defaults."""
    against = "the default"
    for size in sizes:
        given = setting.numbers(size // 4)
        for name, fields in OPTIONS.items():
            default = mpidist.CommunicationOptions(
                implementation=fields.get("implementation", "AUTO")
            )
            contestants = {
                "ours": setting.all_reduce(
                    given, mpidist.CommunicationOptions(**fields)
                ),
                against: setting.all_reduce(given, default),
            }
            targets = {against: 1.5} if name == "reproducible" else {}
            yield from setting.run(
                f"{name}, {size:,} bytes", size, contestants, targets
            )


def compare_overlap(setting: Setting, shapes: Sequence[Shape]) -> Iterator[Comparison]:
    """Compare gradients reduced while others are computed to one after the other.

    Each rank has two cores; computing takes as long as reducing.
    """
    comm = setting.comm
    mine = harness.own_cores(comm, 2)
    if not all(comm.allgather(len(mine) == 2)):
        setting.skipped.append("overlap: there are not 2 cores for each rank")
        return
    given = [setting.numbers(shape) for shape in shapes]
    sizes = [a.size for a in given]
    buckets = setting.strategy.gradient_buckets(given)
    matrix = setting.numbers((160, 160))
    product = np.empty_like(matrix)
    products = 100  # as many as take as long as the reduction

    def backward(number: int) -> None:
        first, last = (
            products * sum(sizes[n:]) // sum(sizes) for n in (number, number + 1)
        )
        for _ in range(first - last):
            np.matmul(matrix, matrix, out=product)

    def compute() -> None:
        for number in reversed(range(len(sizes))):
            backward(number)

    def overlapped() -> Any:
        with buckets:
            for number in reversed(range(len(sizes))):
                backward(number)
                buckets.put(number, given[number])
        return buckets.result

    setting.check(overlapped(), given)
    reduce = setting.all_reduce(given)
    contestants = {"compute": compute, "reduce": reduce, "both": overlapped}
    parts: harness.Times = {name: [] for name in contestants}
    with harness.on_cores(mine):
        for _ in range(3 + setting.repetitions):
            once = harness.take_turns(comm, contestants, 1, warm_up=0)
            for name, (seconds,) in once.items():
                parts[name].append(seconds * 1e3)
            # Go on computing as long as reducing
            ratio = once["reduce"][0] / max(once["compute"][0], 1e-6)
            products = max(1, round(products * ratio**0.7))
    parts = {name: measured[3:] for name, measured in parts.items()}
    buckets.close()
    computing, reducing = (statistics.median(parts[n]) for n in ("compute", "reduce"))
    yield Comparison(
        "overlap with a backward pass",
        "computing, then reducing",
        "ms",
        parts["both"],
        [a + b for a, b in zip(parts["compute"], parts["reduce"], strict=True)],
        0.65,
        is_at_least=False,
        note=f"computing {computing:.3g} ms, reducing {reducing:.3g} ms",
    )
