"""Measure which transport is the fastest for each size on this machine.

    mpirun -n 8 python -m mpidist tune

measures for jobs with as many nodes and ranks per node, and writes a tuning table to
the file from which strategies read it.
"""

from __future__ import annotations

import datetime
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidist.comm.replica_group import ReplicaGroup
from mpidist.comm.transports.base import Transport
from mpidist.comm.transports.tuning_file import write_table
from mpidist.device import arrays
from mpidist.strategy.mirrored_strategy import MirroredStrategy

__all__ = ["choose_rows", "tune"]

# Switch only to a clearly faster transport, as measurements are noisy
_GAIN = 0.9
_LOOP_SECONDS = 2e-3
_METHODS = ("allreduce", "allgatherv", "broadcast")
# Chosen by an option for the order of additions, not for speed
_NOT_MEASURED = ("ordered",)


def tune(path: Path, largest_bytes: int, repetitions: int) -> dict[str, Any]:
    """Measure, write the tuning table of this layout, and return it. Collective.

    Args:
      path: of the file of tables, on rank 0.
      largest_bytes: up to which size to measure.
      repetitions: of each timing, of which the median is taken.
    """
    strategy = MirroredStrategy()
    group = strategy.extended
    sizes = [1 << n for n in range(3, largest_bytes.bit_length())]
    seconds = {
        method: _measure(group, method, sizes, repetitions) for method in _METHODS
    }
    default = group.collectives.transports.default_table
    table = {
        method: choose_rows(
            sizes, seconds[method], [name for _, name in default[method]]
        )
        for method in _METHODS
    }
    note = {
        "date": datetime.date.today().isoformat(),
        "host": platform.node(),
        "sizes_bytes": sizes,
        "seconds": seconds,
    }
    layout = group.layout
    group.consensus.root_only("tune", lambda: write_table(path, layout, table, note))
    strategy.experimental_finalize()
    return {"rank": group.replica_id, "layout": layout, "table": table, **note}


def _measure(
    group: ReplicaGroup, method: str, sizes: Sequence[int], repetitions: int
) -> dict[str, list[float]]:
    """Return the seconds of a call for each transport, by size of the result.

    They are the same on all ranks.
    """
    transports = {
        name: transport
        for name, transport in group.collectives.transports.by_name.items()
        if name not in _NOT_MEASURED
    }
    medians: dict[str, list[float]] = {name: [] for name in transports}
    for size in sizes:
        calls = {
            name: _call(group, transport, method, size)
            for name, transport in transports.items()
        }
        loops = _agree_on_loops(group, list(calls.values()))
        times: dict[str, list[float]] = {name: [] for name in transports}
        for _, (name, call) in itertools.product(range(repetitions), calls.items()):
            times[name].append(_time(group.topology.comm, call, loops))
        for name, measured in times.items():
            medians[name].append(statistics.median(measured))
    return medians


def _call(
    group: ReplicaGroup, transport: Transport, method: str, size: int
) -> Callable[[], None]:
    count, ranks = max(1, size // 8), group.num_replicas
    if method == "broadcast":
        buffer = _ones(group, count)
        return _synchronized(lambda: transport.broadcast(buffer, 0, None), buffer)
    if method == "allreduce":
        send, receive = _ones(group, count), _ones(group, count)
        return _synchronized(
            lambda: transport.allreduce_sum(send, receive, None), receive
        )
    counts = [max(1, count // ranks)] * ranks
    part, gathered = _ones(group, counts[0]), _ones(group, sum(counts))
    return _synchronized(
        lambda: transport.allgatherv(part, gathered, counts, None), gathered
    )


def _synchronized(call: Callable[[], None], result: Any) -> Callable[[], None]:
    """Return a call that also waits for the GPU of the result, if there is one."""
    if not arrays.is_device_array(result):
        return call

    def synchronized() -> None:
        call()
        arrays.synchronize(result)

    return synchronized


def _ones(group: ReplicaGroup, count: int) -> Any:
    """Return a written array: unwritten zeros may all map to one page of memory."""
    ones = group.zeros((count,), np.dtype(np.float64))
    ones += 1
    return ones


def _agree_on_loops(group: ReplicaGroup, calls: Sequence[Callable[[], None]]) -> int:
    """Warm up, and return how many calls to time at once. Collective."""
    comm = group.topology.comm
    slowest = max(_time(comm, call, 3) for call in calls)
    return max(1, min(1000, int(_LOOP_SECONDS / slowest)))


def _time(comm: MPI.Intracomm, call: Callable[[], None], loops: int) -> float:
    """Return the seconds of one call on the slowest rank. Collective."""
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(loops):
        call()
    own = (time.perf_counter() - start) / loops
    slowest: float = comm.allreduce(own, MPI.MAX)
    return slowest


def choose_rows(
    sizes: Sequence[int], seconds: Mapping[str, Sequence[float]], first: Sequence[str]
) -> list[tuple[int, str]]:
    """Return rows of the tuning table: from which size to use which transport.

    Args:
      sizes: in bytes, ascending.
      seconds: of each transport, for each size.
      first: the default transports; another than the first must be clearly faster.
    """
    return list(_merge(sizes, seconds, first[0]))


def _merge(
    sizes: Sequence[int], seconds: Mapping[str, Sequence[float]], name: str
) -> Iterator[tuple[int, str]]:
    for j, size in enumerate(sizes):
        fastest = min(seconds, key=lambda other: seconds[other][j])
        is_better = seconds[fastest][j] < _GAIN * seconds[name][j]
        name = fastest if is_better else name
        if j == 0:
            last = name
            yield 0, name
        elif name != last:
            last = name
            yield size, name
