"""Arrays of more than 2**31 bytes and elements: that they come out right, and how fast.

    mpirun -n 2 python benchmarks/bench_large.py --output .../large.json

MPI before version 4 counts in 32 bits. int8 arrays of 2.2e9 elements are all-reduced,
by shared memory and by MPI's own calls, gathered, and broadcast; every element of every
result is checked. Each rank needs four times as much memory as an array has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measuring
import numpy as np
from mpi4py import MPI

import mpidist

_STEP = 1 << 24  # of elements that are checked at a time


def pattern(start: int, stop: int, rank: int) -> Any:
    """Return the elements of a rank's array from `start` to `stop`."""
    return ((np.arange(start, stop) % 13) + rank).astype(np.int8)


def fill(count: int, rank: int) -> Any:
    """Return a rank's array."""
    array = np.empty(count, np.int8)
    for start in range(0, count, _STEP):
        stop = min(start + _STEP, count)
        array[start:stop] = pattern(start, stop, rank)
    return array


def is_right(found: Any, expected: Callable[[int, int], Any]) -> bool:
    """Return whether an array has what a function gives piece by piece."""
    return all(
        np.array_equal(
            found[start : start + _STEP],
            expected(start, min(start + _STEP, found.size)),
        )
        for start in range(0, found.size, _STEP)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--count", type=int, default=2_200_000_000)
    options = parser.parse_args(arguments)
    comm, count = MPI.COMM_WORLD, options.count
    strategy = mpidist.MirroredStrategy()
    ranks = comm.size
    given = fill(count, comm.rank)
    by_mpi = mpidist.CommunicationOptions(implementation="MPI")
    in_order = mpidist.CommunicationOptions(implementation="MPI", reproducible=True)
    rows: list[dict[str, Any]] = []

    def total(start: int, stop: int) -> Any:
        # Sums wrap around as those of NumPy do
        return sum(pattern(start, stop, r) for r in range(ranks)).astype(np.int8)

    def measure(name: str, call: Callable[[], Any], expected: Any) -> None:
        comm.Barrier()
        start = time.perf_counter()
        found = call()
        seconds = comm.allreduce(time.perf_counter() - start, MPI.MAX)
        right = comm.allreduce(is_right(found, expected), MPI.LAND)
        rows.append({"case": name, "bytes": count, "seconds": seconds, "right": right})
        if comm.rank == 0:
            print(f"{name:32} {count:>14,} bytes {seconds:8.2f} s  right: {right}")
        assert right, name

    def run() -> None:
        replica = mpidist.get_replica_context()
        assert replica is not None
        for name, o in (("", None), (", by MPI", by_mpi), (", in order", in_order)):
            measure(
                f"all_reduce{name}",
                lambda o=o: replica.all_reduce("SUM", given, o),
                total,
            )
        # All ranks together have as many
        part = given[: count // ranks + 1]
        for name, o in (("", None), (", by MPI", by_mpi)):
            measure(
                f"all_gather{name}",
                lambda o=o: replica.all_gather(part, 0, o),
                lambda a, b: gathered(a, b, part.size),
            )

    def gathered(start: int, stop: int, size: int) -> Any:
        pieces = []
        for rank in range(start // size, (stop - 1) // size + 1):
            first, last = max(start, rank * size), min(stop, (rank + 1) * size)
            pieces.append(pattern(first - rank * size, last - rank * size, rank))
        return np.concatenate(pieces)

    strategy.run(run)
    measure(
        "broadcast",
        lambda: strategy.extended.broadcast_from_first("broadcast", given),
        lambda a, b: pattern(a, b, 0),
    )
    if comm.rank == 0 and options.output:
        result = {
            "machine": measuring.describe_machine(Path(tempfile.gettempdir())),
            "date": datetime.date.today().isoformat(),
            "ranks": ranks,
            "rows": rows,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
