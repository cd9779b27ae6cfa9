r"""Whether the cost model says what all-reduces send over 16 virtual nodes, and take.

    python benchmarks/check_model.py --output benchmarks/results/model-16-nodes.json

All nodes share the cores of this machine, so what small messages take there says how
cores are shared. Three checks do without:

    bytes    that leave the busiest node, by the counters of its network interface, with
             the headers that MPICH puts before each message: so messages count, too
    rounds   the time of small arrays, over cables that delay each packet for so long
             that the cores hardly matter
    time     of large arrays, over cables that are so slow

Times are those of the slowest rank; told is the least of some turns, since other
processes can only add to it. The model takes latency and bandwidth of plain sockets,
from the same run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness

# isort: split
import cost_model
import numpy as np
import virtual_nodes
from bench_network import wire
from mpi4py import MPI

import mpidist

# Nodes, ranks of each
LAYOUTS = [(16, 1), (8, 2), (12, 1), (20, 1), (32, 1)]
COUNTED = [8, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20]
TIMED = 2  # of the layouts
DELAYED = [8, 1 << 10, 8 << 10]
SLOW = [64 << 10, 256 << 10, 1 << 20, 4 << 20]
DELAY_SECONDS = 0.05
RATE, BURST, SMALL_BUFFER = "20mbit", "16kb", "128kb"
NO_RATE, NO_DELAY = None, 0.0
PROBE_BYTES, PINGS = 4 << 20, 10
CALLS = 3  # of small ones in a turn: ranks do not leave a barrier together
_PACKET_HEADER_BYTES = 14 + 20 + 32  # Ethernet, IP, and TCP with time stamps
_QUIET_SECONDS = 0.2  # until what was sent has left


def bytes_sent() -> int:
    """Return how many bytes this node has sent, without the headers of packets."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            sent, packets = map(int, numbers.split()[8:10])
            return sent - _PACKET_HEADER_BYTES * packets
    raise OSError("there is no eth0: this is no virtual node")


def measure_size(comm: MPI.Intracomm, size: int, turns: int) -> dict[str, float]:
    """Return what an all-reduce of so many bytes sends, and takes. Collective."""
    context, value = mpidist.get_replica_context(), np.ones(max(1, size // 4), "f4")
    for _ in range(2):
        context.all_reduce("SUM", value)
    calls = CALLS if size < SLOW[0] else 1
    times = [
        harness.slowest(comm, lambda: context.all_reduce("SUM", value), calls)
        for _ in range(turns)
    ]
    sent = []
    for _ in range(3):  # packets that are lost are sent again
        comm.Barrier()
        time.sleep(_QUIET_SECONDS)
        before = bytes_sent()
        context.all_reduce("SUM", value)
        time.sleep(_QUIET_SECONDS)
        sent.append(max(comm.allgather(bytes_sent() - before)))
    return {"bytes": size, "sent": min(sent), "seconds": min(times, default=0.0)}


def run_ranks(path: Path, turns: int, sizes: list[int]) -> None:
    """Measure as one of the ranks, into a JSON file."""
    comm = MPI.COMM_WORLD.Dup()
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    peer = strategy.extended.topology.node_sizes[0]
    probe = (comm, peer, PROBE_BYTES, PINGS)
    probes = [wire(*probe)] if turns else []
    rows: list[dict[str, float]] = []
    strategy.run(lambda: rows.extend(measure_size(comm, n, turns) for n in sizes))
    probes += [wire(*probe)] if turns else []
    if comm.rank == 0:
        names = ("bytes_per_second", "latency_seconds")
        sockets = [dict(zip(names, probe, strict=True)) for probe in probes]
        path.write_text(json.dumps({"rows": rows, "sockets": sockets}))


def measure(
    nodes: int, per_node: int, cables: Sequence[Any], turns: int, sizes: list[int]
) -> dict[str, Any]:
    """Return what the ranks measure over such nodes, beside the model."""
    with (
        tempfile.TemporaryDirectory() as folder,
        virtual_nodes.VirtualNodes(nodes, *cables) as network,
    ):
        path = Path(folder) / "result.json"
        arguments = [str(path), str(turns), *map(str, sizes)]
        command = [sys.executable, __file__, "--ranks-of", *arguments]
        ended = network.start(per_node, command).wait(None)
        if ended.returncode:
            raise SystemExit(f"the job failed:\n{ended.stdout}")
        result: dict[str, Any] = json.loads(path.read_text())
    node = cost_model.Level(0.0, float("inf"))
    level = cost_model.wire_of([result]) if turns else None
    for row in result["rows"]:
        size = row["bytes"]
        traffic = cost_model.all_reduce_traffic(size, nodes, per_node)
        row["model_sent"] = traffic.size + cost_model.HEADER_BYTES * traffic.messages
        row["rounds"] = traffic.rounds
        if level is not None:
            row["model_seconds"] = cost_model.all_reduce_seconds(
                size, nodes * per_node, per_node, node, level
            )
    return {"nodes": nodes, "ranks_per_node": per_node, **result}


def show(title: str, result: dict[str, Any]) -> None:
    """Print a table."""
    nodes, per_node = result["nodes"], result["ranks_per_node"]
    print(f"\n{nodes} nodes x {per_node}, {title}")
    print(f"{'bytes':>9} {'rounds':>7} {'sent':>11} {'model':>11} {'':>7}", end=" ")
    print(f"{'ms':>9} {'model':>9}")
    for row in result["rows"]:
        sent, model = row["sent"], row["model_sent"]
        line = f"{row['bytes']:9,} {row['rounds']:7.0f} {sent:11,.0f} {model:11,.0f}"
        line += f" {model / sent - 1:+7.2%}"
        if "model_seconds" in row:
            seconds, model = row["seconds"], row["model_seconds"]
            line += (
                f" {seconds * 1e3:9.1f} {model * 1e3:9.1f} {model / seconds - 1:+.0%}"
            )
        print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = harness.parser(__doc__, 5).parse_args(arguments)
    missing = virtual_nodes.what_is_missing()
    if missing:
        raise SystemExit(missing)
    layouts, turns, sizes = LAYOUTS, options.repetitions, COUNTED
    delayed, slow, rate = DELAYED, SLOW, RATE
    if options.tiny:
        layouts, turns, sizes, rate = [(3, 1), (2, 2)], 1, COUNTED[:5], "1gbit"
        delayed, slow = DELAYED[:1], SLOW[:1]
    results = []

    def run(title: str, layout: tuple[int, int], *what: Any) -> None:
        result = measure(*layout, *what)
        show(title, result)
        results.append({"cables": title, **result})
        if options.output is not None:
            harness.save(options.output, layouts=results)

    for layout in layouts:
        run("as fast as the machine", layout, (), 0, sizes)
    for layout in layouts[:TIMED]:
        cables = (NO_RATE, DELAY_SECONDS)
        run(f"{DELAY_SECONDS} s each way", layout, cables, turns, delayed)
    slowly = (rate, NO_DELAY, BURST if rate == RATE else "256kb")
    for layout in layouts[: TIMED + 1]:
        run(rate, layout, slowly, turns, slow)
    run(f"{rate}, small buffers", layouts[0], (*slowly, SMALL_BUFFER), turns, slow)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ranks-of"]:  # started by `measure`
        run_ranks(Path(sys.argv[2]), int(sys.argv[3]), list(map(int, sys.argv[4:])))
    else:
        main()
