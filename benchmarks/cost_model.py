r"""What an all-reduce should take on larger machines, by what was measured on this one.

    python benchmarks/cost_model.py benchmarks/results/collectives-mpich-2ranks.json \\
        --output benchmarks/results/model-mpich.json

Two levels, each with a latency and a bandwidth (R. W. Hockney, The communication
challenge for MPP, 1994): T = latency + bytes / bandwidth.

In a node, they are fitted to our measured all-reduces. Between nodes, a
reduce-scatter and an all-gather take 2 log2(nodes) latencies and move 2 (nodes - 1) /
nodes of the bytes (R. Thakur et al., Optimization of collective communication
operations in MPICH, 2005, section 4.5). Each rank of a node sends its part, all share
the node's network, and blocks overlap: the slower level counts, and the first block of
the other one.

There is no network in one machine. So the times are for assumed networks, which are
named; --network adds one, and --wire one that `bench_network.py` has measured with
plain sockets. How far the model is off from what all-reduces took there is told, too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness

NETWORKS = {
    "100 Gbit/s, 2 us (assumed)": (2e-6, 12.5e9),
    "25 Gbit/s, 20 us (assumed)": (20e-6, 3.125e9),
}
SIZES = {"1 MiB": 1 << 20, "ResNet-50, 102 MB": 102_228_128}
RANKS = [2 << n for n in range(12)]  # to 4096
BLOCK_BYTES = 512 << 10
LARGE_BYTES = 16 << 20  # for caches


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


def all_reduce_seconds(
    size: float, ranks: int, ranks_per_node: int, node: Level, network: Level
) -> float:
    """Return how long an all-reduce should take."""
    nodes = math.ceil(ranks / ranks_per_node)
    inside = node.seconds(size) if min(ranks, ranks_per_node) > 1 else 0.0
    if nodes == 1:
        return inside
    blocks = max(1, math.ceil(size / BLOCK_BYTES))
    hops = 2 * math.ceil(math.log2(nodes)) * network.latency
    moved = 2 * (nodes - 1) / nodes * size / network.bandwidth
    # While one block is on the network, the node works on the next
    between = moved + hops * blocks
    first = min(inside, between) / blocks
    return max(inside, between) + first


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


def errors_between_nodes(
    layouts: Sequence[Mapping[str, Any]], node: Level
) -> dict[str, dict[int, float]]:
    """Return by how much the model is off, by the layout and the bytes."""
    errors = {}
    for layout in layouts:
        nodes, per_node = layout["nodes"], layout["ranks_per_node"]
        wire = wire_of([layout])
        errors[f"{nodes} x {per_node}"] = {
            size: all_reduce_seconds(size, nodes * per_node, per_node, node, wire)
            / seconds
            - 1
            for size, seconds in measured(layout).items()
        }
    return errors


def model(
    result: Mapping[str, Any],
    networks: Mapping[str, tuple[float, float]],
    per_node: int,
    layouts: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the fitted level, its errors, and all curves."""
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
    return {
        "node": dataclasses.asdict(node),
        "errors_by_bytes": errors,
        "errors_between_nodes": errors_between_nodes(layouts, node),
        "ranks_per_node": per_node,
        "networks": {
            n: dict(zip(("latency", "bandwidth"), v)) for n, v in networks.items()
        },
        "curves": curves,
        "machine": result["machine"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("results", type=Path, help="JSON file of bench_collectives.py")
    add("--ranks-per-node", type=int, default=8)
    text = "latency in microseconds, and bandwidth in Gbit/s"
    add("--network", nargs=2, type=float, metavar=("US", "GBIT"), help=text)
    add("--wire", type=Path, help="JSON file of bench_network.py")
    options = parser.parse_args(arguments)
    networks, layouts = dict(NETWORKS), []
    if options.wire:
        layouts = json.loads(options.wire.read_text())["layouts"]
        level = wire_of(layouts)
        name = f"{level.bandwidth * 8e-9:.2g} Gbit/s, {level.latency * 1e6:.2g} us"
        networks[f"{name} (virtual)"] = dataclasses.astuple(level)
    if options.network:
        us, gbit = options.network
        networks[f"{gbit:g} Gbit/s, {us:g} us"] = (us * 1e-6, gbit * 1e9 / 8)
    result = json.loads(options.results.read_text())
    found = model(result, networks, options.ranks_per_node, layouts)
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
    if options.output:
        options.output.write_text(harness.as_text(found) + "\n")


if __name__ == "__main__":
    main()
