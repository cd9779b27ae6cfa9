"""The parts of the GPU benchmark that communicate. All are collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy
import gpu_rivals
import numpy as np
import rivals
from gpu_rivals import KEPT, NCCL, PAGEABLE, RAW, RAW_HOST
from gpu_timing import Setting
from mpi4py import MPI

import mpidist

__all__ = ["compare_gathers", "compare_gradients", "compare_sizes", "sizes_to_measure"]

OURS = "mpidist"
LARGE_BYTES, SMALL_LARGE_BYTES = 64 << 20, 64 << 10  # the second one if quick
# Arrays of one size that all contestants together hold at a time
_COPIES = 8


def sizes_to_measure(is_quick: bool) -> list[int]:
    """Return sizes in bytes; first those for which there are targets."""
    if is_quick:
        return [8, SMALL_LARGE_BYTES, 4096]
    judged = [8, LARGE_BYTES]
    others = [8 << (2 * n) for n in range(1, 13)] + [1 << 30]
    return judged + [size for size in others if size not in judged]


def compare_sizes(setting: Setting) -> None:
    """Compare all-reduces of one array, each transport and the public call."""
    nccl = gpu_rivals.nccl_sum(setting.strategy, setting.comm)
    for size in sizes_to_measure(setting.is_quick):
        case = f"all_reduce, {size:,} bytes"
        if setting.has_time_for(case) and _has_memory_for(setting, case, size):
            _compare_size(setting, size, nccl)
            cupy.get_default_memory_pool().free_all_blocks()


def _has_memory_for(setting: Setting, case: str, size: int) -> bool:
    """Return whether the GPU's memory suffices for all of its ranks."""
    comm = setting.comm
    free, _ = cupy.cuda.runtime.memGetInfo()
    least = comm.allreduce(free, MPI.MIN)
    if least >= _COPIES * size * comm.size:
        return True
    setting.skip(f"{case}: {least:,} bytes of GPU memory are free")
    return False


def _compare_size(
    setting: Setting, size: int, nccl: Callable[[Any, Any], None] | None
) -> None:
    comm, replica = setting.comm, mpidist.get_replica_context()
    assert replica is not None
    count = size // 4
    given, total = setting.numbers(count), cupy.zeros(count, "f4")
    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: replica.all_reduce("SUM", given)
    }
    for name, way in _transports(setting).items():
        calls[name] = lambda way=way: _into(total, way.allreduce_sum, given, None)
    if _is_aware(setting):
        calls[RAW] = lambda: _into(total, comm.Allreduce, given)
    if nccl is not None:
        calls[NCCL] = lambda: _into(total, nccl, given)
    calls[PAGEABLE] = lambda: gpu_rivals.by_hand(comm, given)
    expected = setting.sum_of_numbers(count)
    for name, call in calls.items():
        total[...] = -1
        cupy.cuda.Device().synchronize()
        assert (call() == expected).all(), f"{name} is wrong"
    del expected
    calls[KEPT] = gpu_rivals.by_hand_with_buffers(comm, given)
    setting.compare("all_reduce", size, calls)


def _into(total: Any, function: Callable[..., Any], given: Any, *rest: Any) -> Any:
    function(given, total, *rest)
    return total


def _transports(setting: Setting) -> dict[str, Any]:
    """Return what there is, but for one that is there for its order of additions."""
    by_name = setting.strategy.extended.collectives.transports.by_name
    return {f"transport {n}": way for n, way in by_name.items() if n != "ordered"}


def _is_aware(setting: Setting) -> bool:
    gpus = setting.strategy.extended.gpus
    return gpus is not None and gpus.support.is_aware


def compare_gathers(setting: Setting) -> None:
    """Compare all-gathers along both axes of a matrix to Allgatherv along the first."""
    comm, replica = setting.comm, mpidist.get_replica_context()
    assert replica is not None
    columns = 64
    sizes = [4096] if setting.is_quick else [4 << 10, 1 << 20, 16 << 20, 64 << 20]
    for size in sizes:
        if not setting.has_time_for(f"all_gather, {size:,} bytes"):
            return
        rows = size // 4 // columns
        given = setting.numbers((rows, columns))
        parts = [given - comm.rank + rank for rank in range(comm.size)]
        for axis in (0, 1):
            expected = cupy.concatenate(parts, axis=axis)
            assert (replica.all_gather(given, axis) == expected).all()
        counts = [given.size] * comm.size
        gathered = cupy.zeros(sum(counts), "f4")
        calls: dict[str, Callable[[], Any]] = {
            OURS: lambda a=given: replica.all_gather(a, 0),
            f"{OURS}, axis 1": lambda a=given: replica.all_gather(a, 1),
        }
        if _is_aware(setting):
            calls[RAW] = lambda a=given, b=gathered, n=counts: comm.Allgatherv(
                a, [b, n]
            )
        calls[RAW_HOST] = lambda a=given, n=counts: _gather_by_hand(comm, a, n)
        setting.compare("all_gather", size, calls)


def _gather_by_hand(comm: MPI.Intracomm, given: Any, counts: Sequence[int]) -> Any:
    gathered = np.empty(sum(counts), "f4")
    comm.Allgatherv(given.get(), [gathered, counts])
    return cupy.asarray(gathered)


def compare_gradients(setting: Setting) -> None:
    """Compare the gradients of a model, put together, to one array at a time."""
    comm, replica = setting.comm, mpidist.get_replica_context()
    assert replica is not None
    model = "ResNet-50"
    shapes = rivals.MODELS[model]
    if setting.is_quick:
        shapes = shapes[:6]
    given = [setting.numbers(shape) for shape in shapes]
    buckets = replica.strategy.gradient_buckets(given)

    def by_buckets() -> Any:
        with buckets:
            for number in reversed(range(len(given))):
                buckets.put(number, given[number])
        return buckets.result

    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: replica.all_reduce("SUM", given),
        f"{OURS}, buckets": by_buckets,
        RAW_HOST: gpu_rivals.one_by_one(comm, given, False),
    }
    if _is_aware(setting):
        calls[RAW] = gpu_rivals.one_by_one(comm, given, True)
    expected = [setting.sum_of_numbers(shape) for shape in shapes]
    for name, call in calls.items():
        for total, right in zip(call(), expected, strict=True):
            assert (total == right).all(), f"{name} is wrong"
    size = sum(array.nbytes for array in given)
    setting.compare(f"gradients of {model}", size, calls)
    buckets.close()
