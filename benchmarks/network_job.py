"""The ranks of `bench_network.py`: one layout of nodes, measured into a JSON file.

network_job.py FILE REPETITIONS SIZE...
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# One rank is one share of the CPU
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import collective_rivals
import measuring
import numpy as np
from collective_cases import GLOO, MWMS, RAW, Setting
from comparisons import Comparison
from gradient_shapes import MODELS
from mpi4py import MPI

import mpidist

WIRE = "plain sockets"
NARROW_BYTES = 16 << 20
GRADIENT_BYTES = 16 << 20
PROBE_BYTES = 32 << 20
PINGS = 200


def wire(comm: MPI.Intracomm, peer: int) -> tuple[float, float]:
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
                bandwidth, latency = _measure(connection)
    elif comm.rank == peer:
        with socket.create_connection(comm.recv(source=0)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _answer(connection)
    measured: tuple[float, float] = comm.bcast((bandwidth, latency))
    return measured


def _measure(connection: socket.socket) -> tuple[float, float]:
    start = time.perf_counter()
    for _ in range(PINGS):
        connection.sendall(b"8 bytes.")
        connection.recv(8, socket.MSG_WAITALL)
    latency = (time.perf_counter() - start) / PINGS / 2
    start = time.perf_counter()
    connection.sendall(bytes(PROBE_BYTES))
    connection.recv(8, socket.MSG_WAITALL)
    return PROBE_BYTES / (time.perf_counter() - start - latency), latency


def _answer(connection: socket.socket) -> None:
    for _ in range(PINGS):
        connection.sendall(connection.recv(8, socket.MSG_WAITALL))
    left, block = PROBE_BYTES, bytearray(1 << 20)
    while left:
        left -= connection.recv_into(block, min(left, len(block)))
    connection.sendall(b"8 bytes.")


def compare_sizes(
    setting: Setting,
    strategy: mpidist.Strategy,
    sizes: list[int],
    bandwidth: float,
) -> Iterator[Comparison]:
    """Compare an all-reduce with MPI's, and with what the wire takes."""
    nodes = len(strategy.extended.topology.node_sizes)
    for size in sizes:
        value = np.ones(max(1, size // 4), "f4")
        total = np.empty_like(value)
        contestants = {
            "ours": reducer(strategy, value),
            RAW: lambda s=value, r=total: setting.comm.Allreduce(s, r),
        }
        if setting.sum_by_gloo is not None:
            contestants[GLOO] = lambda r=total: setting.sum_by_gloo(r)
        if setting.reducer_by_tensorflow is not None:
            contestants[MWMS] = setting.reducer_by_tensorflow([value])
        # A turn of 100 of the smallest would last for 2 ms, less than a time slice
        calls = 1000 if size < 1 << 10 else setting.most_calls
        turns = dataclasses.replace(setting, most_calls=calls)
        found = turns.run(f"all_reduce, {size:,} bytes", size, contestants, {})
        yield from found
        if size >= 1 << 20:  # else it is latency that counts
            yield by_the_wire(found[0], 2 * (nodes - 1) / nodes * size / bandwidth)


def by_the_wire(found: Comparison, seconds: float) -> Comparison:
    """Compare ours with the seconds that the bytes alone take."""
    wires = [seconds * 1e6] * len(found.ours)
    return Comparison(found.case, WIRE, "us", found.ours, wires, None, False)


def compare_gathers(
    setting: Setting, strategy: mpidist.Strategy, size: int, bandwidth: float
) -> Iterator[Comparison]:
    """Compare an all-gather of unlike lengths, and a broadcast."""
    comm = setting.comm
    shares = np.arange(1, comm.size + 1)
    counts = (size // 4 * shares / shares.sum()).astype(int)
    mine = np.ones(counts[comm.rank], "f4")
    everything = np.empty(counts.sum(), "f4")
    contestants = {
        "ours": lambda: strategy.gather(mine, axis=0),
        RAW: lambda: comm.Allgatherv(mine, [everything, counts]),
    }
    found = setting.run(f"all_gather, {size:,} bytes", size, contestants, {})
    yield from found
    # The node with the least of its own gets the most from others
    of_nodes = counts.reshape(-1, strategy.extended.topology.node_sizes[0]).sum(1)
    yield by_the_wire(found[0], 4 * (counts.sum() - of_nodes.min()) / bandwidth)

    value = np.ones(size // 4, "f4")
    contestants = {
        "ours": lambda: strategy.extended.broadcast_to(value, "CPU:0"),
        RAW: lambda: comm.Bcast(value),
    }
    found = setting.run(f"broadcast, {size:,} bytes", size, contestants, {})
    yield from found
    yield by_the_wire(found[0], size / bandwidth)


def compare_compression(
    setting: Setting, strategy: mpidist.Strategy, size: int
) -> Iterator[Comparison]:
    """Compare an all-reduce that sends bfloat16 with one that does not."""
    value = np.ones(size // 4, "f4")
    narrow = mpidist.CommunicationOptions(compression="bfloat16")
    contestants = {
        "ours": reducer(strategy, value, narrow),
        "float32": reducer(strategy, value),
    }
    case = f"all_reduce, {size:,} bytes, bfloat16"
    yield from setting.run(case, size, contestants, {})


def compare_gradients(
    setting: Setting, strategy: mpidist.Strategy, most_bytes: int
) -> Iterator[Comparison]:
    """Compare gradient buckets with one call of MPI for each gradient."""
    gradients: dict[str, Any] = {}
    left = most_bytes
    for number, shape in enumerate(MODELS["ResNet-50"]):
        left -= 4 * int(np.prod(shape))
        if left < 0:
            break
        gradients[f"{number:03}"] = np.ones(shape, "f4")
    buckets = strategy.gradient_buckets(gradients, "SUM")
    totals = {name: np.empty_like(value) for name, value in gradients.items()}

    def ours() -> None:
        with buckets:
            for name in reversed(gradients):
                buckets.put(name, gradients[name])

    def raw() -> None:
        for name in reversed(gradients):
            setting.comm.Allreduce(gradients[name], totals[name])

    size = sum(value.nbytes for value in gradients.values())
    case = f"{len(gradients)} gradients, {size:,} bytes"
    one_by_one = f"{RAW}, one by one"
    found = setting.run(case, size, {"ours": ours, one_by_one: raw}, {})
    yield from found

    # A backward pass that takes about as long as the transfer: on a GPU, which leaves
    # the cores to the transfer, and on the core that each rank has
    per_byte = setting.comm.allreduce(found[0].ours[-1], MPI.MAX) / 1e6 / size
    matrix, start, products = np.ones((128, 128), "f4"), time.perf_counter(), 0
    while time.perf_counter() - start < 0.1:
        matrix @ matrix
        products += 1

    def compute(seconds: float) -> None:
        for _ in range(round(products / 0.1 * seconds)):
            matrix @ matrix

    def backward(work: Callable[[float], None]) -> None:
        for name in reversed(gradients):
            work(per_byte * gradients[name].nbytes)

    def overlapped(work: Callable[[float], None]) -> None:
        with buckets:
            for name in reversed(gradients):
                work(per_byte * gradients[name].nbytes)
                buckets.put(name, gradients[name])

    for place, work in (("GPU", time.sleep), ("core", compute)):
        contestants = {
            "ours": lambda w=work: overlapped(w),
            "transfer": ours,
            "backward": lambda w=work: backward(w),
        }
        by_transfer, by_backward = setting.run(case, size, contestants, {})
        pairs = zip(by_transfer.theirs, by_backward.theirs, strict=True)
        longer, times = [max(pair) for pair in pairs], by_transfer.ours
        case = f"behind a backward pass on a {place}"
        against = "the longer of both alone"
        yield Comparison(case, against, "us", times, longer, 1.15, False)


def reducer(
    strategy: mpidist.Strategy,
    value: Any,
    options: mpidist.CommunicationOptions | None = None,
) -> Callable[[], Any]:
    """Return a function that all-reduces an array as a training step does."""
    extended = strategy.extended
    return lambda: extended.all_reduce("SUM", value, options)


def main() -> None:
    path, repetitions = Path(sys.argv[1]), int(sys.argv[2])
    sizes = [int(word) for word in sys.argv[3:]]
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    topology = strategy.extended.topology
    comm = MPI.COMM_WORLD.Dup()
    by_tensorflow = collective_rivals.multi_worker(comm, socket.gethostname())
    with (
        strategy.scope(),
        collective_rivals.gloo(comm, str(path.parent)) as sum_by_gloo,
    ):
        setting = Setting(comm, repetitions, 100, sum_by_gloo, by_tensorflow)
        before = wire(comm, topology.node_sizes[0])
        comparisons = [
            *compare_sizes(setting, strategy, sizes, before[0]),
            *compare_gathers(
                setting, strategy, min(NARROW_BYTES, max(sizes)), before[0]
            ),
            *compare_compression(setting, strategy, min(NARROW_BYTES, max(sizes))),
            *compare_gradients(setting, strategy, min(GRADIENT_BYTES, max(sizes))),
        ]
        after = wire(comm, topology.node_sizes[0])
    if comm.rank == 0:
        result = {
            "nodes": len(topology.node_sizes),
            "ranks_per_node": topology.node_sizes[0],
            "sockets": [
                {"bytes_per_second": bandwidth, "latency_seconds": latency}
                for bandwidth, latency in (before, after)
            ],
            "comparisons": [c.as_dict() for c in comparisons],
            "lines": [c.line() for c in comparisons],
        }
        measuring.save(path, result)


if __name__ == "__main__":
    main()
