"""How fast all ranks reduce an array, and whether the sum is right."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpidist.comm.device_info import GpuRequest
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.device import arrays
from mpidist.tools.doctor.finding import Finding, Status
from mpidist.util.available_memory import as_text

__all__ = ["Speed", "check_speed", "measure"]

_LARGE_BYTES = 4 << 20
_LATENCIES, _BANDWIDTHS, _WARM_UP = 200, 10, 3
# Of 8 bytes. Ranks with cores of their own take less over any network
_SLOW_SECONDS = 1e-3


class Speed(NamedTuple):
    """Medians of the slowest rank.

    Args:
      device: what the arrays lie on.
      latency_seconds: of 8 bytes.
      large_seconds: of _LARGE_BYTES.
      transport: what moved the large array.
      is_right: whether the sums were.
    """

    device: str
    latency_seconds: float
    large_seconds: float
    transport: str
    is_right: bool


def measure(comm: MPI.Intracomm, gpu: int | None, is_aware: bool) -> Speed:
    """Make a strategy's collectives, and time them. Collective.

    Args:
      comm: the ranks.
      gpu: the number of this rank's GPU; None for CPUs, on all ranks.
      is_aware: whether MPI takes addresses of GPUs.
    """
    devices = ["CPU:0"] if gpu is None else [f"GPU:{gpu}"]
    group = ReplicaGroup(
        devices, None, comm, GpuRequest(allow_shared=True, cuda_aware=is_aware)
    )
    try:
        small, is_small_right = _time(group, 1, _LATENCIES)
        large, is_large_right = _time(group, _LARGE_BYTES // 8, _BANDWIDTHS)
        return Speed(
            group.device.partition(":")[0],
            comm.allreduce(small, MPI.MAX),
            comm.allreduce(large, MPI.MAX),
            group.collectives.transport.name,
            comm.allreduce(is_small_right and is_large_right, MPI.LAND),
        )
    finally:
        group.close()


def _time(group: ReplicaGroup, count: int, repetitions: int) -> tuple[float, bool]:
    """Return the median time of an all_reduce, and whether all sums were right."""
    values: Any = group.zeros((count,), np.dtype(np.float64)) + (group.replica_id + 1)
    seconds, is_right = [], True
    expected = group.num_replicas * (group.num_replicas + 1) / 2
    for _ in range(_WARM_UP + repetitions):
        start = time.perf_counter()
        total = group.reduce("all_reduce", "SUM", values)
        if arrays.is_device_array(total):
            arrays.synchronize(total)
        seconds.append(time.perf_counter() - start)
        is_right = is_right and bool((total == expected).all())
    return sorted(seconds[_WARM_UP:])[repetitions // 2], is_right


def check_speed(speed: Speed, ranks: int) -> list[Finding]:
    """Return a row."""
    what = f"all_reduce, {speed.device}"
    rate = _LARGE_BYTES / speed.large_seconds
    found = f"{ranks} ranks: 8 bytes in {speed.latency_seconds * 1e6:.3g} us, "
    found += f"{as_text(_LARGE_BYTES)} at {as_text(rate)}/s by {speed.transport}"
    if not speed.is_right:
        remedy = (
            "do not compute there; try another MPI library, and MPIDIST_CUDA_AWARE=0"
        )
        return [Finding(Status.FAIL, what, f"WRONG SUMS; {found}", remedy)]
    if speed.latency_seconds > _SLOW_SECONDS:
        remedy = (
            "see that nothing else runs there, that ranks have cores of their own, "
        )
        remedy += "and that MPI uses the fast network"
        return [Finding(Status.WARN, what, found, remedy)]
    return [Finding(Status.OK, what, found)]
