"""Arrays of more than 2**31 bytes and elements: that they come out right, and how fast.

    mpirun -n 2 python benchmarks/bench_large.py --output .../large.json

MPI before version 4 counts in 32 bits. int8 arrays of 2.2e9 elements are all-reduced,
by shared memory and by MPI's own calls, gathered, and broadcast; every element of every
result is checked. Each rank needs four times as much memory as an array has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import harness

# isort: split
import numpy as np
from mpi4py import MPI

import mpidist

STEP = 1 << 24  # of elements that are checked at a time
PATHS = {
    "": None,
    ", by MPI": mpidist.CommunicationOptions(implementation="MPI"),
    ", in order": mpidist.CommunicationOptions(implementation="MPI", reproducible=True),
}


def pattern(start: int, stop: int, rank: int) -> Any:
    """Return the elements of a rank's array from `start` to `stop`."""
    return ((np.arange(start, stop) % 13) + rank).astype(np.int8)


def pieces(count: int) -> list[tuple[int, int]]:
    """Return beginnings and ends that go through an array."""
    return [(start, min(start + STEP, count)) for start in range(0, count, STEP)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--count", type=int, default=2_200_000_000)
    options = parser.parse_args(arguments)
    comm, count = MPI.COMM_WORLD, 100_000 if options.tiny else options.count
    strategy = mpidist.MirroredStrategy()
    given = np.empty(count, np.int8)
    for start, stop in pieces(count):
        given[start:stop] = pattern(start, stop, comm.rank)
    part = given[: count // comm.size + 1]  # all ranks together have as many
    rows: list[dict[str, Any]] = []

    def total(start: int, stop: int) -> Any:
        # Sums wrap around as those of NumPy do
        return sum(pattern(start, stop, r) for r in range(comm.size)).astype(np.int8)

    def gathered(start: int, stop: int) -> Any:
        parts = []
        for rank in range(start // part.size, (stop - 1) // part.size + 1):
            first, last = (n - rank * part.size for n in (start, stop))
            parts.append(pattern(max(first, 0), min(last, part.size), rank))
        return np.concatenate(parts)

    def measure(name: str, call: Callable[[], Any], expected: Any) -> None:
        found: list[Any] = []
        seconds = harness.slowest(comm, lambda: found.append(call()))
        is_right = all(
            np.array_equal(found[0][start:stop], expected(start, stop))
            for start, stop in pieces(found[0].size)
        )
        right = all(comm.allgather(is_right))
        rows.append({"case": name, "bytes": count, "seconds": seconds, "right": right})
        line = f"{name:32} {count:>14,} bytes {seconds:8.2f} s  right: {right}"
        harness.say(comm, line)
        assert right, name

    def run() -> None:
        replica = mpidist.get_replica_context()
        for name, options in PATHS.items():
            call = functools.partial(replica.all_reduce, "SUM", given, options)
            measure(f"all_reduce{name}", call, total)
        for name in ("", ", by MPI"):
            call = functools.partial(replica.all_gather, part, 0, PATHS[name])
            measure(f"all_gather{name}", call, gathered)

    strategy.run(run)
    measure(
        "broadcast",
        lambda: strategy.extended.broadcast_from_first("broadcast", given),
        lambda start, stop: pattern(start, stop, 0),
    )
    if comm.rank == 0 and options.output:
        harness.save(options.output, ranks=comm.size, rows=rows)


if __name__ == "__main__":
    main()
