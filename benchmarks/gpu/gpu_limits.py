"""What a GPU's memory can do, and how near to that the transport `ipc` comes."""

from __future__ import annotations

import statistics
from typing import Any

import cupy
from gpu_cases import LARGE_BYTES, SMALL_LARGE_BYTES
from gpu_findings import bytes_of_ipc, least_bytes
from gpu_timing import Setting

__all__ = ["compare_to_memory"]

_COPIED_BYTES, _FEW_COPIED_BYTES = 1 << 30, 1 << 20  # the second one if quick


def compare_to_memory(setting: Setting) -> None:
    """Compare the bytes that `ipc` moves per second to those of a copy. Collective."""
    comm, group = setting.comm, setting.strategy.extended
    alone = _copy_rate(setting, only_first=True)
    together = _copy_rate(setting, only_first=False)
    setting.record(
        "memory_bandwidth",
        f"copies on one GPU, bytes read and written: {alone / 1e9:.4g} GB/s by one "
        f"rank; {together / 1e9:.4g} GB/s by each rank when all copy",
        bytes_per_second_alone=alone,
        bytes_per_second_each=together,
    )
    way = group.collectives.transports.by_name.get("ipc")
    if way is None:
        setting.skip(
            "ipc beside the memory's bandwidth: there is no transport ipc here"
        )
        return
    size = SMALL_LARGE_BYTES if setting.is_quick else LARGE_BYTES
    given = setting.numbers(size // 4)
    total = cupy.zeros_like(given)
    calls = {"transport ipc": lambda: way.allreduce_sum(given, total, None)}
    seconds = setting.time_in_turn(calls)["transport ipc"]
    assert (total == setting.sum_of_numbers(size // 4)).all(), "ipc is wrong"
    # Ranks that share a GPU share its memory's bandwidth
    sharing = max(map(len, _ranks_by_gpu(group.gpus)))
    moved = sharing * bytes_of_ipc(size, comm.size)
    least = sharing * least_bytes(size, comm.size)
    median = statistics.median(seconds)
    setting.record(
        "ipc",
        f"ipc, {size:,} bytes: {median * 1e6:.4g} us, {moved / median / 1e9:.4g} GB/s, "
        f"{moved / median / alone:.3g} of copies",
        bytes=size,
        seconds=seconds,
        moved_bytes=moved,
        least_bytes=least,
        is_shared=bool(group.gpus and group.gpus.is_shared),
    )


def _ranks_by_gpu(gpus: Any) -> list[list[int]]:
    ranks: dict[Any, list[int]] = {}
    for rank, identity in enumerate(gpus.identities):
        ranks.setdefault(identity, []).append(rank)
    return list(ranks.values())


def _copy_rate(setting: Setting, only_first: bool) -> float:
    """Return the bytes per second that one rank reads and writes in a copy."""
    size = _FEW_COPIED_BYTES if setting.is_quick else _COPIED_BYTES
    source, target = cupy.zeros(size, "u1"), cupy.zeros(size, "u1")
    is_idle = only_first and setting.comm.rank > 0

    def copy() -> None:
        if not is_idle:
            target.data.copy_from_device_async(source.data, size)

    seconds = setting.time_in_turn({"copy": copy})["copy"]
    return 2 * size / statistics.median(seconds)
