"""What only a GPU can show: where its driver and CuPy are other than was thought.

Each check either passes or fails, or only says what there is.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import cupy
import numpy as np
from mpi4py import MPI

from mpidist.device import arrays, kernels, streams
from mpidist.device.streams import DeviceBuffer

if TYPE_CHECKING:
    from bench_gpu import Setting

# Whether it is as it should be, None where anything may be; and what was seen
Outcome = tuple[bool | None, str]

_CONTEXT = """
import ctypes, sys
driver = ctypes.CDLL("libcuda.so.1")
context, device = ctypes.c_void_p(), ctypes.c_int()
assert driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
print("made", flush=True)
sys.stdin.read()
"""


def keep_subnormal_numbers(setting: Setting) -> Outcome:
    """Add up numbers that CuPy's option -ftz=true takes for 0."""
    narrow = np.arange(1, 1024, dtype="u2").view("f2")
    wide = np.arange(1, 1024, dtype="u4").view("f4")
    wrong = []
    for values in (narrow, wide):
        there, total = cupy.asarray(values), cupy.empty(values.size, "f4")
        kernels.add_parts([there.data.ptr] * 3, total, values.dtype)
        expected = 3 * values.astype("f4")
        if total.get().tobytes() != expected.tobytes():
            lost = int((total.get() == 0).sum())
            wrong.append(f"{values.dtype}: {lost} of {values.size} became 0")
    return not wrong, "; ".join(wrong) or "float16 and float32 are exact"


def average_subnormal_numbers(setting: Setting) -> Outcome:
    """See what a mean, which a kernel of CuPy's own divides, makes of them."""
    mean = setting.strategy.reduce("MEAN", cupy.full(100_000, 1e-40, "f4"))
    return None, f"the mean of 1e-40 is {float(mean[0]):.3g}"


def share_memory(setting: Setting) -> Outcome:
    """See which transports there are, and why not the others."""
    gpus = setting.strategy.extended.collectives.transports._gpus
    assert gpus is not None
    missing = [f"no {name}: {reason}" for name, reason in gpus.missing.items()]
    is_needed = setting.comm.size > 1
    names = ", ".join(gpus.by_name)
    return "ipc" in gpus.by_name or not is_needed, "; ".join([names, *missing])


def pin_memory(setting: Setting) -> Outcome:
    """See in which sizes page-locked memory comes."""
    stream = streams.copy_stream(setting.strategy.extended.device)
    assert stream is not None
    asked = [1_100_000, 2_100_000]
    got = [stream.pin(size).size for size in asked]
    is_power = all(size & (size - 1) == 0 for size in got)
    return is_power, f"{asked} bytes asked for: {got}"


def take_memory_of_the_pool(setting: Setting) -> Outcome:
    """Take plain memory where CuPy's pool holds what is free; one rank at a time."""
    outcome: Outcome = True, "CuPy's pool has given its memory back"
    for rank in range(setting.comm.size):
        setting.comm.Barrier()
        if rank != setting.comm.rank:
            continue
        size = int(0.6 * cupy.cuda.runtime.memGetInfo()[0])
        try:
            cupy.empty(size, "u1")  # which the pool keeps
            DeviceBuffer(size)
        except Exception as error:
            outcome = False, f"{size:,} bytes: {error}"
        cupy.get_default_memory_pool().free_all_blocks()
    setting.comm.Barrier()
    return outcome


def tell_gpus_apart(setting: Setting) -> Outcome:
    """See what tells one GPU from another."""
    gpus = setting.strategy.extended.gpus
    assert gpus is not None
    own = gpus.identities[setting.comm.rank]
    # CuPy cuts it at its first zero byte
    return bool(own.pci_bus_id), f"{own.pci_bus_id}, {len(own.uuid) // 2} bytes of uuid"


def measure_context(setting: Setting) -> Outcome:
    """See how much memory a process takes that computes nothing on a GPU."""
    outcome: Outcome = None, "rank 0 tells"
    if setting.comm.rank == 0:
        before = cupy.cuda.runtime.memGetInfo()[0]
        with subprocess.Popen(
            [sys.executable, "-c", _CONTEXT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            taken = before - cupy.cuda.runtime.memGetInfo()[0]
            process.communicate()
        outcome = None, f"{taken / 1e6:.0f} MB per process"
    return outcome


def list_kinds_of_memory(setting: Setting) -> Outcome:
    """See what MPI says of the memory that it takes (MPI-4.1, section 12.4.3)."""
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    return None, f"mpi_memory_alloc_kinds is {kinds}"


def use_other_pools(setting: Setting) -> Outcome:
    """Gather and broadcast memory of CUDA's own pool, which others cannot map."""
    with cupy.cuda.using_allocator(cupy.cuda.malloc_async):
        for count in (7, 300_000):
            mine = cupy.full(count, setting.comm.rank, "f4")
            everyone = setting.strategy.gather(mine, axis=0)
            expected = np.repeat(np.arange(setting.comm.size, dtype="f4"), count)
            if not np.array_equal(arrays.to_host(everyone), expected):
                return False, f"gathers of {count} numbers are wrong"
    return True, "gathers are right"


# What may end the process comes last
CHECKS: dict[str, Callable[[Setting], Outcome]] = {
    "subnormal numbers in sums": keep_subnormal_numbers,
    "subnormal numbers in means": average_subnormal_numbers,
    "transports": share_memory,
    "page-locked memory": pin_memory,
    "what tells GPUs apart": tell_gpus_apart,
    "kinds of memory": list_kinds_of_memory,
    "a context": measure_context,
    "memory of CuPy's pool": take_memory_of_the_pool,
    "memory of CUDA's pool": use_other_pools,
}


def run_checks(setting: Setting) -> None:
    """Record what each check finds, on the rank where it is worst. Collective."""
    for name, check in CHECKS.items():
        try:
            own = check(setting)
        except Exception as error:
            own = False, f"{type(error).__name__}: {error}"
        found = setting.comm.allgather(own)
        failed = [
            (rank, seen) for rank, (is_ok, seen) in enumerate(found) if is_ok is False
        ]
        rank, seen = failed[0] if failed else (0, found[0][1])
        word = "seen" if found[rank][0] is None else "FAIL" if failed else "pass"
        where = f"rank {rank}: " if failed else ""
        line = f"check: {name}: {word}: {where}{seen}"
        setting.record("check", line, name=name, word=word, seen=where + seen)
