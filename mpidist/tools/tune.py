"""Measure which transport is the fastest for each size on this machine.

    mpirun -n 8 python -m mpidist tune

measures for jobs with as many nodes and ranks per node, and writes a tuning table to
the file from which strategies read it.
"""

from __future__ import annotations

import datetime
import itertools
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpidist.comm.replica_group import ReplicaGroup
from mpidist.comm.transports.base import Transport
from mpidist.comm.transports.tuning import write_table
from mpidist.device import arrays
from mpidist.strategy.mirrored_strategy import MirroredStrategy
from mpidist.util.available_memory import as_text

# Smaller gains do not change the table
_LEAST_GAIN = 0.03
# Of the time of a call: with more noise, the machine is too busy to be measured
MOST_NOISE = 0.3
_LOOP_SECONDS = 2e-3
_METHODS = ("allreduce", "allgatherv", "broadcast")
# Chosen by an option for the order of additions, not for speed, where it is not used
_NOT_MEASURED = ("ordered",)


class Timing(NamedTuple):
    """The time of a call, the same on all ranks.

    Args:
      seconds: the median of all repetitions.
      noise_seconds: half the interquartile range.
      halves: the medians of the first and the second half of the repetitions.
    """

    seconds: float
    noise_seconds: float
    halves: tuple[float, ...] = ()


def tune(
    path: Path, largest_bytes: int, repetitions: int, most_noise: float = MOST_NOISE
) -> dict[str, Any]:
    """Measure, write the tuning table of this layout, and return it. Collective.

    With one rank nothing is measured; nor is anything written if it, or the machine,
    is too busy.

    Args:
      path: of the file of tables, on rank 0.
      largest_bytes: the largest size to measure.
      repetitions: of each timing; the median counts.
      most_noise: of the time of a call, in the median of all timings.

    Returns:
      "rank" and "layout"; "table", "former" (what was used so far), "sizes_bytes" and
      "timings", by method and transport; "noise" and "is_written"; at one rank no
      table.
    """
    strategy = MirroredStrategy()
    group = strategy.extended
    about = {"rank": group.replica_id, "layout": group.layout}
    if group.num_replicas == 1:
        strategy.experimental_finalize()
        return about
    sizes = [1 << n for n in range(3, largest_bytes.bit_length())]
    timings = {
        method: _measure(group, method, sizes, repetitions) for method in _METHODS
    }
    former = group.collectives.transports.table
    table = {
        method: choose_rows(sizes, timings[method], former[method])
        for method in _METHODS
    }
    note = {
        "date": datetime.date.today().isoformat(),
        "host": platform.node(),
        "sizes_bytes": sizes,
        "seconds": _each(timings, "seconds"),
        "noise_seconds": _each(timings, "noise_seconds"),
    }
    every = [t for of in timings.values() for times in of.values() for t in times]
    noise = float(np.median([t.noise_seconds / t.seconds for t in every]))
    is_written, layout = noise <= most_noise, group.layout
    if is_written:  # the same on all ranks
        group.consensus.root_only(
            "tune", lambda: write_table(path, layout, table, note)
        )
    strategy.experimental_finalize()
    about |= {"noise": noise, "is_written": is_written, "former": former}
    return {**about, "table": table, "timings": timings, **note}


def _each(
    timings: Mapping[str, Mapping[str, Sequence[Timing]]], name: str
) -> dict[str, dict[str, list[float]]]:
    return {
        method: {key: [getattr(t, name) for t in times] for key, times in of.items()}
        for method, of in timings.items()
    }


def _measure(
    group: ReplicaGroup, method: str, sizes: Sequence[int], repetitions: int
) -> dict[str, list[Timing]]:
    """Return the time of a call for each transport, by size of the result.

    They are the same on all ranks.
    """
    comm = group.topology.comm
    used = {name for _, name in group.collectives.transports.table[method]}
    transports = {
        name: transport
        for name, transport in group.collectives.transports.by_name.items()
        if name not in _NOT_MEASURED or name in used
    }
    timings: dict[str, list[Timing]] = {name: [] for name in transports}
    for size in sizes:
        calls = {
            name: _call(group, transport, method, size)
            for name, transport in transports.items()
        }
        # Warm up, which says how many calls to time at once
        slowest = max(_time(comm, call, 3) for call in calls.values())
        loops = max(1, min(1000, int(_LOOP_SECONDS / slowest)))
        times: dict[str, list[float]] = {name: [] for name in transports}
        for _, (name, call) in itertools.product(range(repetitions), calls.items()):
            times[name].append(_time(comm, call, loops))
        for name, measured in times.items():
            low, middle, high = np.quantile(measured, [0.25, 0.5, 0.75]).tolist()
            halves = np.array_split(measured, 2)
            medians = tuple(float(np.median(part)) for part in halves if part.size)
            timings[name].append(Timing(middle, (high - low) / 2, medians))
    return timings


class _Call(NamedTuple):
    """A call to measure, and the array of its result."""

    run: Callable[[], None]
    result: Any


def _call(group: ReplicaGroup, transport: Transport, method: str, size: int) -> _Call:
    def ones(count: int) -> Any:
        array = group.zeros((count,), np.dtype(np.float64))
        array += 1  # unwritten zeros may all map to one page of memory
        return array

    count, ranks = max(1, size // 8), group.num_replicas
    if method == "broadcast":
        buffer = ones(count)
        return _Call(lambda: transport.broadcast(buffer, 0, None), buffer)
    if method == "allreduce":
        send, receive = ones(count), ones(count)
        return _Call(lambda: transport.allreduce([send], receive, None), receive)
    counts = [max(1, count // ranks)] * ranks
    part, gathered = ones(counts[0]), ones(sum(counts))
    return _Call(lambda: transport.allgatherv(part, gathered, counts, None), gathered)


def _time(comm: MPI.Intracomm, call: _Call, loops: int) -> float:
    """Return the seconds of one call on the slowest rank. Collective."""
    is_device = arrays.is_device_array(call.result)
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(loops):
        call.run()
        if is_device:
            arrays.synchronize(call.result)
    own = (time.perf_counter() - start) / loops
    slowest: float = comm.allreduce(own, MPI.MAX)
    return slowest


def choose_rows(
    sizes: Sequence[int],
    timings: Mapping[str, Sequence[Timing]],
    former: Sequence[tuple[int, str]],
) -> list[tuple[int, str]]:
    """Return rows of the tuning table: from which size to use which transport.

    For each size the transport that was used so far stays, unless another one is faster
    by more than the noise of both: measuring again changes nothing by chance.

    Args:
      sizes: in bytes, ascending.
      timings: of each transport, for each size.
      former: rows of the table that holds so far.
    """
    rows: list[tuple[int, str]] = []
    for j, size in enumerate(sizes):
        at_size = {name: measured[j] for name, measured in timings.items()}
        # The row before comes second, so that there are no more rows than needed
        before = [row[1] for row in rows[-1:]]
        name = choose(at_size, [name_at(former, size), *before])
        if not rows:
            rows.append((0, name))
        elif name != rows[-1][1]:
            rows.append((size, name))
    return rows


def name_at(rows: Sequence[tuple[int, str]], size: int) -> str:
    """Return the transport for a size in the rows of a table."""
    return [name for edge, name in rows if edge <= size][-1]


def choose(timings: Mapping[str, Timing], preferred: Sequence[str]) -> str:
    """Return the first of the preferred transports that none clearly beats.

    Args:
      timings: of each transport.
      preferred: names, of which some may not have been measured.

    Returns:
      the fastest one's name if all preferred are beaten.
    """
    fastest = min(timings, key=lambda name: timings[name].seconds)
    for name in preferred:
        if name in timings and not is_clear(timings[fastest], timings[name]):
            return name
    return fastest


def is_clear(faster: Timing, slower: Timing) -> bool:
    """Return whether one time is shorter than another by more than the noise.

    And in both halves of the repetitions: what does not repeat is chance.
    """
    noise = faster.noise_seconds + slower.noise_seconds
    if any(a >= b for a, b in zip(faster.halves, slower.halves)):
        return False
    return slower.seconds - faster.seconds > max(noise, _LEAST_GAIN * slower.seconds)


def describe(result: Mapping[str, Any], path: Path) -> list[str]:
    """Return lines that show times, noise, what is used, what that gains, and where.

    Args:
      result: what `tune` returned, of more than one rank.
      path: of the file of tables.
    """
    lines, sizes = (
        ["microseconds of a call, by size of the result"],
        result["sizes_bytes"],
    )
    for method, timings in result["timings"].items():
        titles = "".join(f"{name:>20}" for name in timings)
        lines.append(f"{method:>12}{titles}   used, gain")
        for j, size in enumerate(sizes):
            at_size = {name: measured[j] for name, measured in timings.items()}
            cells = "".join(
                f"{1e6 * t.seconds:>12.2f} +-{100 * t.noise_seconds / t.seconds:3.0f} %"
                for t in at_size.values()
            )
            rows = result["table"][method], result["former"][method]
            name, old = (name_at(each, size) for each in rows)
            gain = ""
            if name != old and old in at_size:
                ratio = at_size[old].seconds / at_size[name].seconds
                gain = f", {ratio:.2f} times as fast as {old}"
            lines.append(f"{as_text(size):>12}{cells}   {name}{gain}")
    if not result["is_written"]:
        return lines
    lines.append(f"{path}: {result['layout']}")
    for method, table in result["table"].items():
        text = ", ".join(f"from {edge:,} bytes {name}" for edge, name in table)
        lines.append(f"{method}: {text}")
    return lines
