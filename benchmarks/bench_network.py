r"""What collectives take between nodes, beside MPI and beside what the wire takes.

    python benchmarks/bench_network.py --rate 1gbit \
        --output benchmarks/results/network-mpich.json

The nodes are virtual ones (`tests/support/virtual_nodes.py`), so all of them share the
cores of this machine: where there are more ranks than cores, ratios are told by how the
system shares those. All contestants of a case take turns; times are those of the
slowest rank, ratios medians of pairs.

    all_reduce   by MPI's Allreduce, and by 2 (nodes - 1) / nodes of the bytes over the
                 bandwidth that plain sockets have in the same run
                 and torch's gloo and TensorFlow, where they are installed
    all_gather   of lengths 1 : 2 : 3 ..., and broadcast, by MPI and the bytes alone
    bfloat16     by the same without compression
    gradients    GradientBuckets by MPI's Allreduce of one after the other, and behind
                 a backward pass that takes as long, by the longer of both alone
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import charts
import measuring
from comparisons import TABLE_HEAD

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import virtual_nodes

JOB = Path(__file__).with_name("network_job.py")
SIZES = [8, 64 << 10, 1 << 20, 16 << 20, 64 << 20]


def measure(
    count: int, ranks_per_node: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Return what the ranks measure over `count` nodes; print it."""
    sizes = SIZES[:3] if options.tiny else SIZES
    repetitions = 1 if options.tiny else options.repetitions
    with (
        tempfile.TemporaryDirectory() as folder,
        virtual_nodes.VirtualNodes(count, options.rate, options.delay) as nodes,
    ):
        path = Path(folder) / "result.json"
        arguments = [str(path), str(repetitions), *map(str, sizes)]
        ended = nodes.mpirun(ranks_per_node, str(JOB), *arguments)
        if ended.returncode:
            raise SystemExit(f"the job failed:\n{ended.stdout}")
        result: dict[str, Any] = json.loads(path.read_text())
    rates = [found["bytes_per_second"] * 8 / 1e9 for found in result["sockets"]]
    delays = [found["latency_seconds"] * 1e6 for found in result["sockets"]]
    print(
        f"\n{count} nodes x {ranks_per_node}; plain sockets, before and after: "
        f"{rates[0]:.3g}, {rates[1]:.3g} Gbit/s, {delays[0]:.3g}, {delays[1]:.3g} us"
    )
    print(TABLE_HEAD, *result.pop("lines"), sep="\n", flush=True)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--nodes", nargs="+", type=int, default=[2, 3, 4])
    add("--ranks-per-node", nargs="+", type=int, default=[1, 2])
    add("--rate", default="1gbit", help="of each cable, as tc writes it (1gbit)")
    add("--delay", help="of each packet, as tc writes it: 1ms")
    add("--repetitions", type=int, default=5)
    add("--tiny", action="store_true", help="only see that it runs")
    add("--output", type=Path, help="JSON file; and PNG")
    options = parser.parse_args(arguments)
    missing = virtual_nodes.what_is_missing()
    if missing:
        raise SystemExit(missing)
    layouts = [
        measure(count, ranks, options)
        for count in options.nodes
        for ranks in options.ranks_per_node
    ]
    if options.output is not None:
        now = datetime.datetime.now(datetime.timezone.utc)
        result = {
            "date": now.isoformat(timespec="seconds"),
            "machine": measuring.describe_machine(Path(tempfile.gettempdir())),
            "rate": options.rate,
            "delay": options.delay,
            "layouts": layouts,
        }
        measuring.save(options.output, result)
        charts.draw(charts.draw_network, result, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
