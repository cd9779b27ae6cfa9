"""Whether batches are read while a step computes: `bench_input.py`'s case `overlap`."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import measuring
import numpy as np
from comparisons import Comparison
from input_cases import Setting
from measuring import Epochs
from mpi4py import MPI

_SIZE = 192
_CORES = 2  # of each rank: one computes, one reads


def compare_overlap(setting: Setting) -> list[Comparison]:
    """Compare a loop that reads and computes to reading, then computing.

    Reading alone and computing alone have one core per rank, both together two.
    """
    comm = setting.comm
    mine = own_cores(comm)
    if not all(comm.allgather(len(mine) == _CORES)):
        setting.skipped.append(f"overlap: there are not {_CORES} cores for each rank")
        return []
    with on_cores(mine):  # so many are to be used for reading
        epochs = setting.ours("gzip", setting.overlap_steps)
    with on_cores(mine[:1]):
        measuring.time_epoch(comm, epochs)
        reading = measuring.time_epoch(comm, epochs).seconds / setting.overlap_steps
        step = _step_that_takes(reading)

    def only_compute() -> Iterator[Any]:
        for _ in range(setting.overlap_steps):
            step()
            yield ()

    def both() -> Iterator[Any]:
        for batch in epochs():
            step()
            yield batch

    parts: dict[str, list[float]] = {"read": [], "compute": [], "both": []}
    contestants: dict[str, tuple[Epochs, int]] = {
        "read": (epochs, 1),
        "compute": (only_compute, 1),
        "both": (both, _CORES),
    }
    for _ in range(setting.repetitions):
        for name, (contestant, cores) in contestants.items():
            with on_cores(mine[:cores]):
                parts[name].append(measuring.time_epoch(comm, contestant).seconds)
    read, compute = (statistics.median(parts[name]) for name in ("read", "compute"))
    return [
        Comparison(
            "gzip, a step that computes",
            "reading, then computing",
            "s",
            parts["both"],
            [a + b for a, b in zip(parts["read"], parts["compute"], strict=True)],
            0.6,
            is_at_least=False,
            note=f"{setting.overlap_steps} steps; reading {read:.3g} s, computing "
            f"{compute:.3g} s",
        )
    ]


def _step_that_takes(seconds: float) -> Callable[[], None]:
    """Return a function that multiplies matrices for so long; it lets threads run."""
    a, b = np.random.default_rng(0).random((2, _SIZE, _SIZE), np.float32)
    out = np.empty_like(a)

    def multiply(times: int) -> None:
        for _ in range(times):
            np.matmul(a, b, out=out)

    once = min(_seconds(lambda: multiply(100)) for _ in range(5)) / 100
    times = max(1, round(seconds / once))
    return lambda: multiply(times)


def _seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def own_cores(comm: MPI.Intracomm) -> list[int]:
    """Return the cores that are for this rank alone, as many as are needed. Collective.

    Ranks of a node that may use the same cores divide them; others keep to theirs.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    allowed: list[list[int]] = node.allgather(sorted(os.sched_getaffinity(0)))
    is_shared = all(cores == allowed[0] for cores in allowed)
    first = _CORES * node.rank if is_shared else 0
    mine = allowed[node.rank][first : first + _CORES]
    node.Free()
    return mine


@contextlib.contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Keep all threads of this process on some cores."""
    allowed = os.sched_getaffinity(0)
    _set_cores(cores)
    try:
        yield
    finally:
        _set_cores(allowed)


def _set_cores(cores: Collection[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)
