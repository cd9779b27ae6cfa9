r"""What an all-reduce should take on larger machines, by what was measured on this one.

    python benchmarks/cost_model.py benchmarks/results/collectives-mpich-2ranks.json \\
        --wire benchmarks/results/network-mpich.json \\
        --output benchmarks/results/model-mpich.json

Two levels, each with a latency and a bandwidth (R. W. Hockney, The communication
challenge for MPP, 1994): T = latency + bytes / bandwidth.

In a node, they are fitted to our measured all-reduces. Between nodes, `Traffic` says
how many messages wait for each other and how many bytes pass the cable of a node, for
the way that the library takes: the ranks compare their calls, by a gather or a
reduction; small arrays travel along, others are reduced by MPI or block by block. MPI's
reductions are those of MPICH (R. Thakur et al., Optimization of collective
communication operations in MPICH, 2005, section 4.5): recursive doubling for short
arrays, halving and doubling for long ones; where the number of ranks is no power of
two, some send everything to a partner first. `check_model.py` counts all that.

Blocks overlap: the slower level counts, and the first block of the other one. Where
more ranks share a machine than it has cores, as those of virtual nodes do, each message
takes a fixed time of a core, fitted to sums of 8 bytes.

There is no network in one machine. So the times are for assumed networks, which are
named; --network adds one, and --wire one that `bench_network.py` has measured with
plain sockets. How far the model is off from what all-reduces took there is told, and
what grows with the number of ranks, in the order in which it passes a limit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness

# isort: split
import numpy as np

from mpidist.comm.transports.base import MESSAGE_BYTES, MOST_RANKS
from mpidist.comm.transports.tuning import default_table

SLOWER = "25 Gbit/s, 20 us (assumed)"
NETWORKS = {
    "100 Gbit/s, 2 us (assumed)": (2e-6, 12.5e9),
    SLOWER: (20e-6, 3.125e9),
}
SIZES = {"1 MiB": 1 << 20, "ResNet-50, 102 MB": 102_228_128}
RANKS = [2 << n for n in range(14)]  # to 16,384
BLOCK_BYTES = 512 << 10
LARGE_BYTES = 16 << 20  # for caches
# Of a comparison of calls: by a gather of up to 16 ranks, or a reduction of more
GATHERED_RANKS, GATHERED_BYTES, PAYLOAD_BYTES, REDUCED_BYTES = 16, 288, 256, 48
DOUBLING_BYTES = 2048  # up to here MPICH does not halve
HEADER_BYTES = 13  # of each message, by MPICH over TCP
# What else grows: counted here by strace or timed, and assumed of a cluster
IMPORT_CALLS = 4100  # of the file system, on names of files, by `import mpidist`
OPEN_CALLS = 22  # by a dataset of one HDF5 file, see metadata.json
SERVED_PER_SECOND = 50_000  # such calls, by the file system (assumed)
OBJECT_SECONDS = 1e-6  # to unpickle what one rank has sent
STEP_SECONDS = 0.1  # of which 1 % matters (assumed)
COMPARISONS = 2  # in a step, of `run` and of an all-reduce
DESCRIPTORS = 1024  # of a process, by default


@dataclasses.dataclass(frozen=True)
class Level:
    """How long messages take: seconds, and bytes per second."""

    latency: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """Return how long so many bytes take."""
        return self.latency + size / self.bandwidth


def fit(seconds: Mapping[int, float]) -> Level:
    """Return the level of all-reduces that took so long, by their bytes.

    The latency is that of the smallest, the bandwidth the median of those that are too
    large for caches; in between they are faster than this says.
    """
    sizes = sorted(seconds)
    latency = seconds[sizes[0]]
    large = [size for size in sizes if size >= LARGE_BYTES] or sizes[-1:]
    rates = [size / (seconds[size] - latency) for size in large]
    return Level(latency, statistics.median(rates))


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a collective sends between nodes.

    Args:
      rounds: messages that wait for each other.
      messages: that the busiest node sends.
      size: bytes of these messages.
      serial: bytes that pass a node's cable before the end, one after the other.
    """

    rounds: float = 0
    messages: float = 0
    size: float = 0
    serial: float = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.add, *map(dataclasses.astuple, (self, other))))

    def times(self, count: float) -> Traffic:
        """Return what so many of it send, one after the other."""
        return Traffic(*(count * number for number in dataclasses.astuple(self)))

    def at_once(self, count: float) -> Traffic:
        """Return what so many ranks of a node send at the same time."""
        return dataclasses.replace(self.times(count), rounds=self.rounds)

    def seconds(self, network: Level) -> float:
        """Return how long it takes."""
        return self.rounds * network.latency + self.serial / network.bandwidth


@dataclasses.dataclass(frozen=True)
class Cores:
    """Those that all nodes share, and how long one is busy with a message."""

    count: int
    message_seconds: float


def reduced_by_mpi(size: float, nodes: int, per_node: int = 1) -> Traffic:
    """Return the traffic of MPI's all-reduce of float32 over all ranks."""
    steps = math.floor(math.log2(nodes * per_node))
    inside = math.floor(math.log2(per_node))  # those between ranks of a node come first
    between = steps - inside
    # With one rank per node. Else these partners are on the same node
    extra = int(per_node == 1 and nodes != 1 << steps)
    if size <= DOUBLING_BYTES or size / 4 < 1 << steps:
        one = Traffic(between, between, between * size, between * size)
    else:
        moved = 2 * size / (1 << inside) * (1 - 0.5**between)
        one = Traffic(2 * between, 2 * between, moved, moved)
    return (one + Traffic(2 * extra, extra, extra * size, 2 * extra * size)).at_once(
        per_node
    )


def compared(nodes: int, per_node: int = 1) -> Traffic:
    """Return the traffic of the comparison of calls."""
    ranks = nodes * per_node
    if ranks > GATHERED_RANKS:
        return reduced_by_mpi(REDUCED_BYTES, nodes, per_node)
    inside = math.floor(math.log2(per_node))
    rounds = math.ceil(math.log2(ranks)) - inside
    size = GATHERED_BYTES * (ranks - (1 << inside))
    return Traffic(rounds, rounds, size, size).at_once(per_node)


def added_in_parts(size: float, nodes: int) -> Traffic:
    """Return the traffic of a block of which each node adds a part, for all."""
    pieces = math.ceil(size / nodes / MESSAGE_BYTES)
    moved = 2 * (nodes - 1) / nodes * size
    return Traffic(2, 2 * (nodes - 1) * pieces, moved, moved)


def blocks_between(size: float, nodes: int, per_node: int) -> tuple[int, Traffic]:
    """Return how many blocks are reduced, and the traffic of all."""
    in_node = "hierarchical" if per_node > 1 else "mpi"
    rows = default_table(in_node, "", nodes * per_node)["allreduce"]
    way = next(name for least, name in reversed(rows) if size >= least)
    if way == "mpi":
        return 1, reduced_by_mpi(size, nodes, per_node)
    if way == "ordered":
        # Blocks are in flight together: only of the first one there is a latency
        return 1, added_in_parts(size, nodes)
    blocks = math.ceil(size / BLOCK_BYTES)
    part = size / blocks / per_node
    if nodes > MOST_RANKS:
        one = reduced_by_mpi(part, nodes)
    else:
        one = added_in_parts(part, nodes)
    return blocks, one.at_once(per_node).times(blocks)


def all_reduce_traffic(size: float, nodes: int, per_node: int = 1) -> Traffic:
    """Return the traffic of an all-reduce, with its comparison."""
    travels = size <= PAYLOAD_BYTES and nodes * per_node <= GATHERED_RANKS
    _, data = blocks_between(size, nodes, per_node)
    return compared(nodes, per_node) + (Traffic() if travels else data)


def messages_of_all(size: float, nodes: int, per_node: int = 1) -> float:
    """Return how many messages all ranks send in an all-reduce, within nodes too."""
    ranks = nodes * per_node
    if all_reduce_traffic(size, nodes, per_node) == compared(nodes, per_node):
        return ranks * compared(ranks).messages
    _, data = blocks_between(size, nodes, per_node)
    if data == reduced_by_mpi(size, nodes, per_node):
        return ranks * (compared(ranks) + reduced_by_mpi(size, ranks)).messages
    return ranks * compared(ranks).messages + nodes * data.messages


def all_reduce_seconds(
    size: float,
    ranks: int,
    ranks_per_node: int,
    node: Level,
    network: Level,
    cores: Cores | None = None,
) -> float:
    """Return how long an all-reduce should take."""
    nodes = math.ceil(ranks / ranks_per_node)
    inside = node.seconds(size) if min(ranks, ranks_per_node) > 1 else 0.0
    if nodes <= 1:
        return inside
    blocks, data = blocks_between(size, nodes, ranks_per_node)
    traffic = all_reduce_traffic(size, nodes, ranks_per_node)
    seconds = traffic.seconds(network) + node.latency
    if blocks > 1:
        # While one block is on the network, the node works on the next
        between = data.seconds(network)
        seconds += max(inside - between, 0.0) + min(inside, between) / blocks
    if cores is not None and ranks > cores.count:
        messages = messages_of_all(size, nodes, ranks_per_node)
        seconds = max(seconds, messages * cores.message_seconds / cores.count)
    return seconds


def measured(result: Mapping[str, Any]) -> dict[int, float]:
    """Return how many seconds our all-reduces took, by their bytes."""
    seconds = {}
    for comparison in result["comparisons"]:
        kind, _, rest = comparison["case"].partition(", ")
        size = rest.removesuffix(" bytes").replace(",", "")
        if kind == "all_reduce" and size.isdecimal():
            seconds[int(size)] = comparison["ours"] * 1e-6
    return seconds


def wire_of(layouts: Sequence[Mapping[str, Any]]) -> Level:
    """Return the medians of what plain sockets took, of results of `bench_network`."""
    found = [probe for layout in layouts for probe in layout["sockets"]]
    return Level(
        statistics.median(probe["latency_seconds"] for probe in found),
        statistics.median(probe["bytes_per_second"] for probe in found),
    )


def fit_cores(layouts: Sequence[Mapping[str, Any]], count: int) -> Cores:
    """Return how long messages take a core, by the smallest sums over such nodes."""
    found = []
    for layout in layouts:
        nodes, per_node = layout["nodes"], layout["ranks_per_node"]
        size, seconds = min(measured(layout).items())
        if nodes * per_node > count:
            found.append(seconds * count / messages_of_all(size, nodes, per_node))
    return Cores(count, statistics.median(found))


def errors_between_nodes(
    layouts: Sequence[Mapping[str, Any]], node: Level, cores: Cores | None
) -> dict[str, dict[int, float]]:
    """Return by how much the model is off, by the layout and the bytes."""
    errors = {}
    for layout in layouts:
        nodes, per_node = layout["nodes"], layout["ranks_per_node"]
        level, wire = (nodes * per_node, per_node, node), wire_of([layout])
        errors[f"{nodes} x {per_node}"] = {
            size: all_reduce_seconds(size, *level, wire, cores) / seconds - 1
            for size, seconds in measured(layout).items()
        }
    return errors


@dataclasses.dataclass(frozen=True)
class Growth:
    """Something that grows with the number of ranks.

    Args:
      what: it is.
      unit: of the limit.
      limit: from which on it hurts.
      at: how much it is, by the number of ranks.
    """

    what: str
    unit: str
    limit: float
    at: Callable[[int], float]

    def as_dict(self, step: int) -> dict[str, Any]:
        """Return where it passes the limit; None if not up to 16,384 ranks."""
        found = (
            n for n in range(step, RANKS[-1] + 1, step) if self.at(n) >= self.limit
        )
        numbers = {str(n): self.at(n) for n in (RANKS[-5], RANKS[-1])}
        first = next(found, None)
        return dataclasses.asdict(self) | {"at": numbers, "ranks": first}


def growths_of_messages(per_node: int, node: Level, network: Level) -> list[Growth]:
    """Return what grows by what ranks send each other in a step."""

    def gradients(n: int) -> float:
        nodes, size = n // per_node, SIZES["ResNet-50, 102 MB"]
        if nodes < 2:
            return 0.0
        _, data = blocks_between(size, nodes, per_node)
        return data.rounds * network.latency / (data.serial / network.bandwidth)

    def comparing(n: int) -> float:
        seconds = node.latency
        if n > per_node:
            seconds = compared(n // per_node, per_node).seconds(network)
        return 100 * COMPARISONS * seconds / STEP_SECONDS

    def objects(n: int) -> float:
        return 100 * n * OBJECT_SECONDS / STEP_SECONDS

    sums = "latencies of a sum of 102 MB, by the time of its bytes"
    own = "objects that a step of own generators gathers, of 0.1 s"
    open_ = "connections of a rank, reproducible sums over TCP"
    return [
        Growth(sums, "x", 1.0, gradients),
        Growth("comparisons of a step of 0.1 s", "%", 1.0, comparing),
        Growth(own, "%", 1.0, objects),
        Growth(open_, "", DESCRIPTORS, lambda n: n - 1.0),
        Growth("all_gather of 1 MiB of each rank", "GiB", 1.0, lambda n: n / 1024),
    ]


def growths_of_jobs(
    counts: Mapping[str, Any], per_node: int, network: Level
) -> list[Growth]:
    """Return what grows by a result of `bench_many_ranks`, and in the file system."""
    factors = {(r["stage"], r["count"]): r["factors"] for r in counts["rows"]}
    ranks = [job["ranks"] for job in counts["jobs"]]
    slope, base = np.polyfit(ranks, [job["MiB"] for job in counts["jobs"]], 1)

    def counted(stage: str, count: str, n: int) -> float:
        # Never negative: some factors are the noise of what does not grow
        number = float(np.dot(factors[stage, count], [1, math.log2(n), n]))
        return max(number, 0.0)

    def start(n: int) -> float:
        rounds = counted("strategy", "calls of MPI", n) * math.log2(n)
        size = counted("strategy", "bytes", n) + counted("dataset", "bytes", n)
        return rounds * network.latency + size / network.bandwidth

    def served(calls: float) -> float:
        return calls / SERVED_PER_SECOND

    importing = "import mpidist, once per node, of one file server"
    opening = "all ranks open one HDF5 file at once"
    first = "messages of a strategy and a dataset at the start"
    return [
        Growth(importing, "s", 1.0, lambda n: served(n / per_node * IMPORT_CALLS)),
        Growth(opening, "s", 1.0, lambda n: served(n * OPEN_CALLS)),
        Growth(first, "s", 1.0, start),
        Growth("memory of a rank", "GiB", 1.0, lambda n: (base + slope * n) / 1024),
    ]


def what_breaks(
    counts: Mapping[str, Any], per_node: int, node: Level, network: Level
) -> list[dict[str, Any]]:
    """Return what grows, in the order in which it passes its limit."""
    found = growths_of_messages(per_node, node, network)
    found += growths_of_jobs(counts, per_node, network)
    rows = [growth.as_dict(per_node) for growth in found]
    return sorted(rows, key=lambda row: row["ranks"] or math.inf)


def model(
    result: Mapping[str, Any],
    networks: Mapping[str, tuple[float, float]],
    per_node: int,
    wires: Mapping[str, Any] | None = None,
    counts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fitted level, its errors, all curves, and what breaks first."""
    seconds = measured(result)
    node = fit(seconds)
    errors = {size: node.seconds(size) / found - 1 for size, found in seconds.items()}
    curves = [
        {
            "size": name,
            "bytes": size,
            "network": network,
            "ranks": RANKS,
            "seconds": [
                all_reduce_seconds(size, ranks, per_node, node, Level(*numbers))
                for ranks in RANKS
            ],
        }
        for name, size in SIZES.items()
        for network, numbers in networks.items()
    ]
    cores, layouts = None, []
    if wires is not None:
        layouts = wires["layouts"]
        cores = fit_cores(layouts, wires["machine"]["cores"])
    ethernet = Level(*NETWORKS[SLOWER])
    return {
        "node": dataclasses.asdict(node),
        "message_seconds_of_a_shared_core": cores and cores.message_seconds,
        "errors_by_bytes": errors,
        "errors_between_nodes": errors_between_nodes(layouts, node, cores),
        "breaks_first": what_breaks(counts, per_node, node, ethernet) if counts else [],
        "ranks_per_node": per_node,
        "networks": {
            n: dict(zip(("latency", "bandwidth"), v)) for n, v in networks.items()
        },
        "curves": curves,
        "machine": result["machine"],
    }


def show_growths(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what breaks first."""
    for row in rows:
        passed = (
            f"from {row['ranks']:,} ranks"
            if row["ranks"]
            else f"not up to {RANKS[-1]:,}"
        )
        at = ", ".join(f"{n:.3g} at {int(ranks):,}" for ranks, n in row["at"].items())
        limit = f"{row['limit']:.4g} {row['unit']}".strip()
        print(f"{row['what']}: {limit} {passed} ({at})")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("results", type=Path, help="JSON file of bench_collectives.py")
    add("--ranks-per-node", type=int, default=8)
    text = "latency in microseconds, and bandwidth in Gbit/s"
    add("--network", nargs=2, type=float, metavar=("US", "GBIT"), help=text)
    add("--wire", type=Path, help="JSON file of bench_network.py")
    add("--counts", type=Path, help="JSON file of bench_many_ranks.py")
    options = parser.parse_args(arguments)
    networks, wires, counts = dict(NETWORKS), None, None
    if options.wire:
        wires = json.loads(options.wire.read_text())
        level = wire_of(wires["layouts"])
        name = f"{level.bandwidth * 8e-9:.2g} Gbit/s, {level.latency * 1e6:.2g} us"
        networks[f"{name} (virtual)"] = dataclasses.astuple(level)
    if options.network:
        us, gbit = options.network
        networks[f"{gbit:g} Gbit/s, {us:g} us"] = (us * 1e-6, gbit * 1e9 / 8)
    result = json.loads(options.results.read_text())
    if options.counts:
        counts = json.loads(options.counts.read_text())
    found = model(result, networks, options.ranks_per_node, wires, counts)
    node = found["node"]
    print(
        f"in a node: {node['latency'] * 1e6:.1f} us + bytes / "
        f"{node['bandwidth'] / 1e9:.2f} GB/s; the model is off by"
    )
    for size, error in found["errors_by_bytes"].items():
        print(f"  {error:+.0%} at {size:,} bytes")
    for layout, errors in found["errors_between_nodes"].items():
        told = ", ".join(f"{error:+.0%} at {n:,} bytes" for n, error in errors.items())
        print(f"  over {layout}: {told}")
    for curve in found["curves"]:
        print(
            f"{curve['size']}, {curve['network']}, {RANKS[-1]} ranks: "
            f"{curve['seconds'][-1] * 1e3:.3g} ms"
        )
    show_growths(found["breaks_first"])
    if options.output:
        options.output.write_text(harness.as_text(found) + "\n")


if __name__ == "__main__":
    main()
