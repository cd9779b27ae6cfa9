"""One part of the GPU benchmark, on each rank. `run_all.py` starts it.

    mpirun -n 2 python benchmarks/gpu/bench_gpu.py sizes --records found.jsonl

Like OSU's benchmarks and NCCL's tests: after calls that warm up, the mean time of a
call in a loop, until the GPU has done all of them, of the slowest rank. Contestants
take turns; medians count. Raw MPI and raw NCCL get buffers that are there already, and
wait for no kernel before; ours is `ReplicaContext.all_reduce` with all its checks,
which returns new arrays. "Pageable staging" is what one writes first: `.get()`,
`Allreduce`, `cupy.asarray`. Every result is looked at once.

Each finding is a line of JSON in the file of records.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

# isort: split
import cupy
import gpu_checks
import h5py
import input_files
import numpy as np
import rivals
from gpu_findings import PAGEABLE, RAW, TORCHRUN, bytes_of_ipc, least_bytes
from mpi4py import MPI

import mpidist
from mpidist.resilience import exit_handling

# What is timed, by name
Calls = Mapping[str, Callable[[], Any]]

OURS = "mpidist"
RAW_HOST, KEPT, NCCL = "staged by hand", "pageable staging, buffers kept", "raw NCCL"
BY_HAND = "map, page-locked copy"
MOST_LOOPS = 1000
LOOP_SECONDS = 0.02
SLOW_SECONDS = 0.25
CASE_SECONDS = 4.0
REPETITIONS = (2, 9)  # at least and at most
COPIES = 8  # arrays of one size that all contestants together hold at a time
ROWS_OF_BATCH = 8192  # of each rank: 24 MiB


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all parts are given.

    Args:
      comm: of all ranks.
      strategy: over them, on GPUs.
      is_quick: whether only to see that all runs.
      records: the file that gets a line of JSON for each finding, from rank 0.
      ends: the time of time.monotonic by which to be done.
    """

    comm: MPI.Intracomm
    strategy: mpidist.MirroredStrategy
    is_quick: bool
    records: Path
    ends: float

    @property
    def large_bytes(self) -> int:
        """The size of the arrays by which the speed of large ones is judged."""
        return 64 << 10 if self.is_quick else 64 << 20

    @property
    def is_aware(self) -> bool:
        """Whether MPI takes addresses of memory on GPUs."""
        gpus = self.strategy.extended.gpus
        return gpus is not None and gpus.support.is_aware

    def record(self, kind: str, line: str, **fields: Any) -> None:
        """Keep a finding, so that no later failure loses it; and print a line of it."""
        if self.comm.rank == 0:
            print(line, flush=True)
            with open(self.records, "a") as file:
                file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def has_time_for(self, case: str) -> bool:
        """Return whether there is time; tell what is left out else. Collective."""
        has = self.comm.bcast(time.monotonic() < self.ends)
        if not has:
            self.skip(f"{case}: no time was left")
        return bool(has)

    def skip(self, reason: str) -> None:
        """Tell what was left out."""
        self.record("skipped", f"skipped: {reason}", reason=reason)

    def compare(self, case: str, size_bytes: int, calls: Calls) -> None:
        """Time calls in turn, and record it. Collective.

        Args:
          case: what all of them do.
          size_bytes: of one rank's data.
          calls: by name; the first one is ours.
        """
        seconds = self.time_in_turn(calls)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        first = next(iter(medians))
        words = [f"{name} {short_time(medians[name])}" for name in calls]
        line = f"{case}, {size_bytes:,} bytes, {first} first: {'; '.join(words)}"
        self.record("times", line, case=case, bytes=size_bytes, seconds=seconds)

    def time_in_turn(self, calls: Calls) -> dict[str, list[float]]:
        """Return the seconds of calls, measured several times in turn. Collective."""
        loops, once = {}, 0.0
        for name, call in calls.items():
            seconds = self.time(call, 1)
            if seconds < SLOW_SECONDS:  # the first call takes longer
                seconds = self.time(call, 1)
            most = 2 if self.is_quick else MOST_LOOPS
            loops[name] = max(1, min(most, int(LOOP_SECONDS / seconds)))
            once += loops[name] * seconds
        least, most = (1, 1) if self.is_quick else REPETITIONS
        repetitions = max(least, min(most, round(CASE_SECONDS / once)))
        warming_up = 1 if once < SLOW_SECONDS and not self.is_quick else 0
        measured: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(warming_up + repetitions):
            for name, call in calls.items():
                measured[name].append(self.time(call, loops[name]))
        return {name: times[warming_up:] for name, times in measured.items()}

    def time(self, call: Callable[[], Any], loops: int) -> float:
        """Return the seconds of one of so many calls, on the slowest rank. Collective.

        The GPU is done with what it did before, and in the end with all calls.
        """
        device = cupy.cuda.Device()
        device.synchronize()
        self.comm.Barrier()
        start = time.perf_counter()
        for _ in range(loops):
            call()
        device.synchronize()
        mine = (time.perf_counter() - start) / loops
        slowest: float = self.comm.allreduce(mine, MPI.MAX)
        return slowest

    def numbers(self, shape: int | tuple[int, ...]) -> Any:
        """Return small whole float32 numbers, other ones on each rank, on its GPU.

        Sums of them are exact in any order.
        """
        size = math.prod(shape) if isinstance(shape, tuple) else shape
        values = cupy.arange(size, dtype="f4") % 1000 + self.comm.rank
        return values.reshape(shape)

    def sum_of_numbers(self, shape: int | tuple[int, ...]) -> Any:
        """Return the sum over all ranks of what `numbers` gives."""
        ranks = self.comm.size
        first = self.numbers(shape) - self.comm.rank
        return first * ranks + ranks * (ranks - 1) / 2


def short_time(seconds: float) -> str:
    """Return a time with its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def by_hand(comm: MPI.Intracomm, given: Any) -> Any:
    """Return the sum by way of host memory: copy, MPI, copy back. Collective."""
    mine = given.get()
    total = np.empty_like(mine)
    comm.Allreduce(mine, total, MPI.SUM)
    return cupy.asarray(total)


def by_hand_with_buffers(comm: MPI.Intracomm, given: Any) -> Callable[[], None]:
    """Return a function that does what `by_hand` does in memory that it has already."""
    mine, total = np.zeros(given.shape, "f4"), np.zeros(given.shape, "f4")
    result = cupy.zeros_like(given)

    def call() -> None:
        given.get(out=mine)
        comm.Allreduce(mine, total, MPI.SUM)
        result.set(total)

    return call


def one_by_one(comm: MPI.Intracomm, given: Sequence[Any]) -> Callable[[], list[Any]]:
    """Return a function that adds up arrays on GPUs by one Allreduce each."""
    totals = [cupy.zeros_like(array) for array in given]

    def call() -> list[Any]:
        for array, total in zip(given, totals, strict=True):
            comm.Allreduce(array, total, MPI.SUM)
        return totals

    return call


def nccl_sum(
    strategy: mpidist.MirroredStrategy, comm: MPI.Intracomm
) -> Callable[[Any, Any], None] | None:
    """Return a function that adds up by bare NCCL; None without. Collective.

    NCCL refuses ranks that share a GPU.
    """
    gpus = strategy.extended.gpus
    if gpus is None or gpus.no_nccl:
        return None
    from cupy.cuda import nccl

    number = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None)
    float32, sum_op = 7, 0
    communicator = nccl.NcclCommunicator(comm.size, number, comm.rank)

    def call(given: Any, total: Any) -> None:
        communicator.allReduce(
            given.data.ptr,
            total.data.ptr,
            given.size,
            float32,
            sum_op,
            cupy.cuda.get_current_stream().ptr,
        )

    return call


def compare_sizes(setting: Setting) -> None:
    """Compare all-reduces of one array, each transport and the public call."""
    nccl = nccl_sum(setting.strategy, setting.comm)
    # First those for which there are targets
    sizes = [8, setting.large_bytes]
    others = [8 << (2 * n) for n in range(1, 13)] + [1 << 30]
    sizes += [4096] if setting.is_quick else [n for n in others if n not in sizes]
    for size in sizes:
        case = f"all_reduce, {size:,} bytes"
        if setting.has_time_for(case) and _has_memory_for(setting, case, size):
            _compare_size(setting, size, nccl)
            cupy.get_default_memory_pool().free_all_blocks()


def _has_memory_for(setting: Setting, case: str, size: int) -> bool:
    """Return whether the GPU's memory suffices for all of its ranks."""
    comm = setting.comm
    free, _ = cupy.cuda.runtime.memGetInfo()
    least = comm.allreduce(free, MPI.MIN)
    if least >= COPIES * size * comm.size:
        return True
    setting.skip(f"{case}: {least:,} bytes of GPU memory are free")
    return False


def _compare_size(
    setting: Setting, size: int, nccl: Callable[[Any, Any], None] | None
) -> None:
    comm, replica = setting.comm, mpidist.get_replica_context()
    count = size // 4
    given, total = setting.numbers(count), cupy.zeros(count, "f4")
    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: replica.all_reduce("SUM", given)
    }
    by_name = setting.strategy.extended.collectives.transports.by_name
    for name, transport in by_name.items():
        if name != "ordered":  # which is there for its order of additions
            calls[f"transport {name}"] = lambda t=transport: _into(
                total, lambda *a: t.allreduce([a[0]], *a[1:]), given, None
            )
    if setting.is_aware:
        calls[RAW] = lambda: _into(total, comm.Allreduce, given)
    if nccl is not None:
        calls[NCCL] = lambda: _into(total, nccl, given)
    calls[PAGEABLE] = lambda: by_hand(comm, given)
    expected = setting.sum_of_numbers(count)
    for name, call in calls.items():
        total[...] = -1
        cupy.cuda.Device().synchronize()
        assert (call() == expected).all(), f"{name} is wrong"
    del expected
    calls[KEPT] = by_hand_with_buffers(comm, given)
    setting.compare("all_reduce", size, calls)


def _into(total: Any, function: Callable[..., Any], given: Any, *rest: Any) -> Any:
    function(given, total, *rest)
    return total


def compare_gathers(setting: Setting) -> None:
    """Compare all-gathers along both axes of a matrix to Allgatherv along the first."""
    comm, replica = setting.comm, mpidist.get_replica_context()
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
        if setting.is_aware:
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
        RAW_HOST: lambda: [by_hand(comm, array) for array in given],
    }
    if setting.is_aware:
        calls[RAW] = one_by_one(comm, given)
    expected = [setting.sum_of_numbers(shape) for shape in shapes]
    for name, call in calls.items():
        for total, right in zip(call(), expected, strict=True):
            assert (total == right).all(), f"{name} is wrong"
    size = sum(array.nbytes for array in given)
    setting.compare(f"gradients of {model}", size, calls)
    buckets.close()


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
    size = setting.large_bytes
    given = setting.numbers(size // 4)
    total = cupy.zeros_like(given)
    calls = {"transport ipc": lambda: way.allreduce([given], total, None)}
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
    size = 1 << 20 if setting.is_quick else 1 << 30
    source, target = cupy.zeros(size, "u1"), cupy.zeros(size, "u1")
    is_idle = only_first and setting.comm.rank > 0

    def copy() -> None:
        if not is_idle:
            target.data.copy_from_device_async(source.data, size)

    seconds = setting.time_in_turn({"copy": copy})["copy"]
    return 2 * size / statistics.median(seconds)


def compare_input(setting: Setting) -> None:
    """Compare rows per second, as bytes, to copies from page-locked memory. Collective.

    All ranks copy at the same time in both. The files are in the page cache.
    """
    rate = _upload_rate(setting)
    setting.record(
        "upload",
        f"page-locked memory to GPU: {rate / 1e9:.4g} GB/s by all ranks",
        bytes_per_second=rate,
    )
    comm = setting.comm
    with tempfile.TemporaryDirectory() as own:
        folder = Path(comm.bcast(own))
        rows_of = {"contiguous": 600_000, "gzip": 25 * 128 * 75}
        if setting.is_quick:
            rows_of = {"contiguous": 2_000, "gzip": 1_280}
        if comm.rank == 0:
            for layout, rows in rows_of.items():
                _write(folder / f"{layout}.h5", layout, rows)
        comm.Barrier()
        batch = (256 if setting.is_quick else ROWS_OF_BATCH) * comm.size
        cases: dict[str, Callable[[], None]] = {}
        for layout in rows_of:
            data = mpidist.Dataset.from_hdf5(folder / f"{layout}.h5", input_files.NAME)
            cases[layout] = _epoch(setting, data.batch(batch))
            if layout == "contiguous":
                shuffled = data.shuffle(seed=0).batch(batch)
                cases[f"{layout}, shuffle"] = _epoch(setting, shuffled)
        cases[BY_HAND] = _by_hand(setting, folder / "contiguous.h5", batch)
        for name, epoch in cases.items():
            size = rows_of.get(name, rows_of["contiguous"]) * input_files.ROW_BYTES
            if setting.has_time_for(f"input, {name}"):
                _measure(setting, name, epoch, size, rate)
        comm.Barrier()


def _measure(
    setting: Setting, name: str, epoch: Callable[[], None], size: int, rate: float
) -> None:
    """Time epochs, and record them. Collective."""
    setting.time(epoch, 1)  # everything is in the page cache afterwards
    times = 1 if setting.is_quick else 3
    seconds = [setting.time(epoch, 1) for _ in range(times)]
    found = size / statistics.median(seconds)
    setting.record(
        "input",
        f"rows to GPU, {name}: {found / 1e9:.4g} GB/s, {found / rate:.3g} of copies",
        case=name,
        bytes=size,
        seconds=seconds,
        upload_bytes_per_second=rate,
        is_ours=name != BY_HAND,
    )


def _upload_rate(setting: Setting) -> float:
    """Return the bytes per second of all ranks from page-locked memory. Collective."""
    size = (1 << 20) if setting.is_quick else (256 << 20)
    memory = cupy.cuda.alloc_pinned_memory(size)
    target = cupy.zeros(size, "u1")
    np.frombuffer(memory, "u1", size)[...] = 1
    stream = cupy.cuda.get_current_stream()

    def upload() -> None:
        target.data.copy_from_host_async(memory.ptr, size, stream)

    seconds = setting.time_in_turn({"upload": upload})["upload"]
    return setting.comm.size * size / statistics.median(seconds)


def _write(path: Path, layout: str, rows: int) -> None:
    """Write the same pictures again and again."""
    pictures = input_files.images(np.random.default_rng(0), 32 * input_files.CHUNK_ROWS)
    if layout != "contiguous":
        input_files.write_cheaply(path, layout, rows * input_files.ROW_BYTES)
        return
    with h5py.File(path, "w") as file:
        shape = (rows, *input_files.ROW_SHAPE)
        dataset = file.create_dataset(input_files.NAME, shape, np.uint8)
        for start in range(0, rows, len(pictures)):
            part = pictures[: rows - start]
            dataset[start : start + len(part)] = part


def _epoch(setting: Setting, data: mpidist.Dataset) -> Callable[[], None]:
    """Return a function that brings all rows to the GPU. Collective, as the call."""
    batches = setting.strategy.experimental_distribute_dataset(data)

    def epoch() -> None:
        for batch in batches:
            (mine,) = setting.strategy.experimental_local_results(batch)
            assert isinstance(mine, cupy.ndarray)

    return epoch


def _by_hand(setting: Setting, path: Path, batch: int) -> Callable[[], None]:
    """Return what one writes by hand: each rank copies its rows, one thread each.

    From a memory map to one of two page-locked buffers, while the GPU reads the other.
    """
    with h5py.File(path, "r", locking=False) as file:
        dataset = file[input_files.NAME]
        where = {"offset": dataset.id.get_offset(), "shape": dataset.shape}
    rows: Any = np.memmap(path, np.uint8, "r", **where)
    comm, share = setting.comm, batch // setting.comm.size
    size = share * input_files.ROW_BYTES
    memories = [cupy.cuda.alloc_pinned_memory(size) for _ in range(2)]
    stream = cupy.cuda.Stream(non_blocking=True)

    def epoch() -> None:
        events: list[Any] = [None, None]
        for step, start in enumerate(range(share * comm.rank, len(rows), batch)):
            if events[step % 2] is not None:
                events[step % 2].synchronize()
            part = rows[start : start + share].reshape(-1)
            memory = memories[step % 2]
            np.copyto(np.frombuffer(memory, "u1", part.size), part)
            target = cupy.empty(part.size, "u1")
            target.data.copy_from_host_async(memory.ptr, part.size, stream)
            events[step % 2] = stream.record()
        stream.synchronize()

    return epoch


def compare_torch(setting: Setting) -> None:
    """Compare steps of torch's DDP, started by mpidist and by `env://`. Collective.

    The second is torchrun's way. By NCCL; where torch has no CUDA, by gloo on the
    CPU, which shows that it runs.
    """
    if not harness.is_everywhere(setting.comm, "torch"):
        setting.skip("torch's DDP: torch is not installed")
        return
    import torch
    import torch.distributed

    import mpidist.torch

    gpus = setting.strategy.extended.gpus
    device, backend = "cpu", "gloo"
    if torch.cuda.is_available():
        device, backend = f"cuda:{cupy.cuda.Device().id}", "cpu:gloo,cuda:nccl"
        if gpus is not None and gpus.is_shared:
            setting.skip("torch's DDP: NCCL refuses ranks that share a GPU")
            return
    starts = {
        OURS: lambda: mpidist.torch.init_process_group(backend=backend),
        TORCHRUN: lambda: _start_as_torchrun(setting.comm, backend),
    }
    width, turns = (16, 1) if setting.is_quick else (1000, 5)
    layers = [torch.nn.Linear(width, width) for _ in range(10)]
    rows = torch.ones(32, width, device=device)
    times: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(turns):
        for name, start in starts.items():
            start()
            model = torch.nn.parallel.DistributedDataParallel(
                torch.nn.Sequential(*layers).to(device)
            )

            def step(model: Any = model) -> None:
                model.zero_grad()
                model(rows).sum().backward()

            times[name] += setting.time_in_turn({name: step})[name]
            del model, step
            torch.distributed.destroy_process_group()
    words = [f"{name} {short_time(statistics.median(t))}" for name, t in times.items()]
    line = f"step of torch's DDP by {backend}: {'; '.join(words)}"
    setting.record("torch", line, backend=backend, seconds=times)


def _start_as_torchrun(comm: MPI.Intracomm, backend: str) -> None:
    """Start torch.distributed by the variables that torchrun sets. Collective."""
    import torch.distributed

    with socket.socket() as free:
        free.bind(("", 0))
        port = comm.bcast(free.getsockname()[1])
    hosts = comm.allgather(socket.gethostname())
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1" if len(set(hosts)) == 1 else hosts[0],
        "MASTER_PORT": str(port),
        "RANK": str(comm.rank),
        "WORLD_SIZE": str(comm.size),
    }
    torch.distributed.init_process_group(backend, init_method="env://")


def find_facts(setting: Setting) -> None:
    """Record what there is. Collective."""
    group = setting.strategy.extended
    gpus, index = group.gpus, cupy.cuda.Device().id
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    ways = group.collectives.transports.by_name
    if gpus is None:
        raise SystemExit("the replicas are not on GPUs")
    machine = harness.describe_machine(Path.cwd()) | {
        "gpu": gpus.identities[0].name,
        "gpus_used": len(set(gpus.identities)),
        "gpu_memory_bytes": properties["totalGlobalMem"],
        "multiprocessors": properties["multiProcessorCount"],
        "cuda_driver": gpus.identities[0].driver,
        "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "nccl": gpus.nccl,
    }
    is_aware = gpus.support.is_aware
    setting.record(
        "facts",
        f"{machine['gpu']}, {machine['gpus_used']} used by {setting.comm.size} ranks; "
        f"{machine['mpi']}, CUDA-aware: {is_aware} ({gpus.support.why}); "
        f"transports: {', '.join(ways)}",
        machine=machine,
        is_aware=is_aware,
        why=gpus.support.why,
        is_shared=gpus.is_shared,
        transports=list(ways),
        default=group.collectives.transport.name,
    )


PARTS = {
    "facts": find_facts,
    "checks": gpu_checks.run_checks,
    "sizes": compare_sizes,
    "gathers": compare_gathers,
    "gradients": compare_gradients,
    "limit": compare_to_memory,
    "input": compare_input,
    "torch": compare_torch,
}
# They distribute datasets, which is not for replica context
IN_CROSS_REPLICA = ("facts", "checks", "limit", "input", "torch")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("part", choices=PARTS)
    add("--records", type=Path, required=True, help="file to append findings to")
    add("--seconds", type=float, default=3600, help="after which no case is begun")
    add("--quick", action="store_true", help="only see that it runs")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.monotonic()
    options = parse(arguments)
    exit_handling.abort_on_exception()
    strategy = mpidist.MirroredStrategy(allow_shared_gpu=True)
    setting = Setting(
        MPI.COMM_WORLD,
        strategy,
        options.quick,
        options.records,
        started + options.seconds,
    )
    part = PARTS[options.part]
    if options.part in IN_CROSS_REPLICA:
        part(setting)
    else:
        strategy.run(lambda: part(setting))
    strategy.experimental_finalize()


if __name__ == "__main__":
    main()
