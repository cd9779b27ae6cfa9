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

import dataclasses
import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness

# isort: split
import numpy as np
import rivals
import virtual_nodes
from collective_cases import COPY, Setting
from harness import OURS, TABLE_HEAD, Comparison
from mpi4py import MPI
from rivals import MODELS, RAW

import mpidist

SIZES = [8, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
WIRE = "plain sockets"
MOST_BYTES = 16 << 20  # of all cases but the first
PROBE_BYTES = 32 << 20
PINGS = 200


def wire(
    comm: MPI.Intracomm, peer: int, size: int = PROBE_BYTES, pings: int = PINGS
) -> tuple[float, float]:
    """Return bytes per second and seconds per message, from rank 0 to `peer`.

    By plain sockets, while the others wait. Collective.
    """
    bandwidth = latency = 0.0
    if comm.rank == 0:
        with socket.create_server((socket.gethostname(), 0)) as server:
            comm.send(server.getsockname()[:2], peer)
            connection, _ = server.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                bandwidth, latency = _measure(connection, size, pings)
    elif comm.rank == peer:
        with socket.create_connection(comm.recv(source=0)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _answer(connection, size, pings)
    measured: tuple[float, float] = comm.bcast((bandwidth, latency))
    return measured


def _measure(connection: socket.socket, size: int, pings: int) -> tuple[float, float]:
    start = time.perf_counter()
    for _ in range(pings):
        connection.sendall(b"8 bytes.")
        connection.recv(8, socket.MSG_WAITALL)
    latency = (time.perf_counter() - start) / pings / 2
    start = time.perf_counter()
    connection.sendall(bytes(size))
    connection.recv(8, socket.MSG_WAITALL)
    return size / (time.perf_counter() - start - latency), latency


def _answer(connection: socket.socket, size: int, pings: int) -> None:
    for _ in range(pings):
        connection.sendall(connection.recv(8, socket.MSG_WAITALL))
    left, block = size, bytearray(1 << 20)
    while left:
        left -= connection.recv_into(block, min(left, len(block)))
    connection.sendall(b"8 bytes.")


def compare_sizes(
    setting: Setting, sizes: list[int], bandwidth: float
) -> Iterator[Comparison]:
    """Compare an all-reduce with those of others, and with what the wire takes."""
    nodes = len(setting.strategy.extended.topology.node_sizes)
    for size in sizes:
        value = np.ones(max(1, size // 4), "f4")
        others = setting.rivals([value], [np.empty_like(value)])
        del others[COPY]
        # A turn of 100 of the smallest would last for 2 ms, less than a time slice
        calls = 1000 if size < 1 << 10 else setting.most_calls
        turns = dataclasses.replace(setting, most_calls=calls)
        contestants = {OURS: setting.all_reduce(value), **others}
        found = turns.run(f"all_reduce, {size:,} bytes", size, contestants)
        yield from found
        if size >= 1 << 20:  # else it is latency that counts
            yield by_the_wire(found[0], 2 * (nodes - 1) / nodes * size / bandwidth)


def by_the_wire(found: Comparison, seconds: float) -> Comparison:
    """Compare ours with the seconds that the bytes alone take."""
    wires = [seconds * 1e6] * len(found.ours)
    return Comparison(found.case, WIRE, "us", found.ours, wires, None, False)


def compare_gathers(
    setting: Setting, size: int, bandwidth: float
) -> Iterator[Comparison]:
    """Compare an all-gather of unlike lengths, and a broadcast."""
    comm, strategy = setting.comm, setting.strategy
    shares = np.arange(1, comm.size + 1)
    counts = (size // 4 * shares / shares.sum()).astype(int)
    mine = np.ones(counts[comm.rank], "f4")
    everything = np.empty(counts.sum(), "f4")
    contestants = {
        OURS: lambda: strategy.gather(mine, axis=0),
        RAW: lambda: comm.Allgatherv(mine, [everything, counts]),
    }
    found = setting.run(f"all_gather, {size:,} bytes", size, contestants)
    yield from found
    # The node with the least of its own gets the most from others
    of_nodes = counts.reshape(-1, strategy.extended.topology.node_sizes[0]).sum(1)
    yield by_the_wire(found[0], 4 * (counts.sum() - of_nodes.min()) / bandwidth)

    value = np.ones(size // 4, "f4")
    contestants = {
        OURS: lambda: strategy.extended.broadcast_to(value, "CPU:0"),
        RAW: lambda: comm.Bcast(value),
    }
    found = setting.run(f"broadcast, {size:,} bytes", size, contestants)
    yield from found
    yield by_the_wire(found[0], size / bandwidth)


def compare_compression(setting: Setting, size: int) -> Iterator[Comparison]:
    """Compare an all-reduce that sends bfloat16 with one that does not."""
    value = np.ones(size // 4, "f4")
    narrow = mpidist.CommunicationOptions(compression="bfloat16")
    contestants = {
        OURS: setting.all_reduce(value, narrow),
        "float32": setting.all_reduce(value),
    }
    yield from setting.run(f"all_reduce, {size:,} bytes, bfloat16", size, contestants)


def compare_gradients(setting: Setting, most_bytes: int) -> Iterator[Comparison]:
    """Compare gradient buckets with one call of MPI for each gradient."""
    shapes = MODELS["ResNet-50"]
    sizes = np.cumsum([4 * int(np.prod(shape)) for shape in shapes])
    gradients = {
        f"{number:03}": np.ones(shape, "f4")
        for number, shape in enumerate(shapes)
        if sizes[number] <= most_bytes
    }
    buckets = setting.strategy.gradient_buckets(gradients, "SUM")
    totals = {name: np.empty_like(value) for name, value in gradients.items()}

    def backward(work: Callable[[float], None]) -> Iterator[str]:
        """Do the work of each gradient's bytes, and yield its name."""
        for name in reversed(gradients):
            work(gradients[name].nbytes)
            yield name

    def in_buckets(work: Callable[[float], None] = lambda _: None) -> None:
        with buckets:
            for name in backward(work):
                buckets.put(name, gradients[name])

    def raw() -> None:
        for name in reversed(gradients):
            setting.comm.Allreduce(gradients[name], totals[name])

    size = sum(value.nbytes for value in gradients.values())
    case = f"{len(gradients)} gradients, {size:,} bytes"
    contestants = {OURS: in_buckets, f"{RAW}, one by one": raw}
    found = setting.run(case, size, contestants)
    yield from found

    # A backward pass that takes about as long as the transfer: on a GPU, which leaves
    # the cores to the transfer, and on the core that each rank has
    per_byte = setting.comm.allreduce(found[0].ours[-1], MPI.MAX) / 1e6 / size
    matrix, start, products = np.ones((128, 128), "f4"), time.perf_counter(), 0
    while time.perf_counter() - start < 0.1:
        matrix @ matrix
        products += 1

    def compute(size: float) -> None:
        for _ in range(round(products / 0.1 * per_byte * size)):
            matrix @ matrix

    def wait(size: float) -> None:
        time.sleep(per_byte * size)

    for device, work in (("GPU", wait), ("core", compute)):
        contestants = {
            OURS: lambda w=work: in_buckets(w),
            "transfer": in_buckets,
            "backward": lambda w=work: list(backward(w)),
        }
        by_transfer, by_backward = setting.run(case, size, contestants)
        pairs = zip(by_transfer.theirs, by_backward.theirs, strict=True)
        longer, times = [max(pair) for pair in pairs], by_transfer.ours
        title = f"behind a backward pass on a {device}"
        against = "the longer of both alone"
        yield Comparison(title, against, "us", times, longer, 1.15, False)


def run_ranks(path: Path, repetitions: int, sizes: list[int]) -> None:
    """Measure one layout of nodes, as one of its ranks, into a JSON file."""
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    node_sizes = strategy.extended.topology.node_sizes
    comm = MPI.COMM_WORLD.Dup()
    by_tensorflow = rivals.multi_worker(comm, socket.gethostname())
    most = min(MOST_BYTES, max(sizes))
    with strategy.scope(), rivals.gloo(comm, str(path.parent)) as sum_by_gloo:
        setting = Setting(comm, strategy, repetitions, 100, sum_by_gloo, by_tensorflow)
        before = wire(comm, node_sizes[0])
        comparisons = [
            *compare_sizes(setting, sizes, before[0]),
            *compare_gathers(setting, most, before[0]),
            *compare_compression(setting, most),
            *compare_gradients(setting, most),
        ]
        after = wire(comm, node_sizes[0])
    if comm.rank == 0:
        result = {
            "nodes": len(node_sizes),
            "ranks_per_node": node_sizes[0],
            "sockets": [
                {"bytes_per_second": bandwidth, "latency_seconds": latency}
                for bandwidth, latency in (before, after)
            ],
            "comparisons": [c.as_dict() for c in comparisons],
            "lines": [c.line() for c in comparisons],
        }
        path.write_text(json.dumps(result))


def measure(count: int, ranks_per_node: int, options: Any) -> dict[str, Any]:
    """Return what the ranks measure over `count` nodes; print it."""
    sizes = SIZES[:3] if options.tiny else SIZES
    repetitions = 1 if options.tiny else options.repetitions
    with (
        tempfile.TemporaryDirectory() as folder,
        virtual_nodes.VirtualNodes(count, options.rate, options.delay) as nodes,
    ):
        path = Path(folder) / "result.json"
        arguments = [str(path), str(repetitions), *map(str, sizes)]
        ended = nodes.mpirun(ranks_per_node, __file__, "--ranks-of", *arguments)
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
    parser = harness.parser(__doc__, 5)
    add = parser.add_argument
    add("--nodes", nargs="+", type=int, default=[2, 3, 4])
    add("--ranks-per-node", nargs="+", type=int, default=[1, 2])
    add("--rate", default="1gbit", help="of each cable, as tc writes it (1gbit)")
    add("--delay", type=float, default=0.0, help="seconds that a cable takes")
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
        facts = {"rate": options.rate, "delay": options.delay}
        harness.save(options.output, **facts, layouts=layouts)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ranks-of"]:  # started by `measure`
        run_ranks(Path(sys.argv[2]), int(sys.argv[3]), list(map(int, sys.argv[4:])))
    else:
        main()
