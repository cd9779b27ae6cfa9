"""The ranks of `bench_network.py`: one layout of nodes, measured into a JSON file.

network_job.py FILE REPETITIONS SIZE...
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# One rank is one share of the CPU
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import measuring
import numpy as np
from collective_cases import RAW, Setting
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
        found = setting.run(
            f"all_reduce, {size:,} bytes",
            size,
            {
                "ours": reducer(strategy, value),
                RAW: lambda s=value, r=total: setting.comm.Allreduce(s, r),
            },
            {},
        )
        yield from found
        if size >= 1 << 20:  # else it is latency that counts
            seconds = 2 * (nodes - 1) / nodes * size / bandwidth
            times = found[0].ours
            wires = [seconds * 1e6] * len(times)
            yield Comparison(found[0].case, WIRE, "us", times, wires, None, False)


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
    yield from setting.run(case, size, {"ours": ours, one_by_one: raw}, {})


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
    with strategy.scope():
        setting = Setting(comm, repetitions, 100, None, None)
        before = wire(comm, topology.node_sizes[0])
        comparisons = [
            *compare_sizes(setting, strategy, sizes, before[0]),
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
