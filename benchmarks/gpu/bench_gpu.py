"""One part of the GPU benchmark, on each rank. `run_all.py` starts it.

    mpirun -n 2 python benchmarks/gpu/bench_gpu.py sizes --records found.jsonl

After calls that warm up, the mean time of a call in a loop, until the GPU has done all
of them, of the slowest rank. Contestants take turns; medians count. Raw MPI and raw
NCCL get buffers that are there already, and wait for no kernel before; ours is
`ReplicaContext.all_reduce` with all its checks, which returns new arrays. "Pageable
staging" is what one writes first: `.get()`, `Allreduce`, `cupy.asarray`. Every result
is looked at once. Each finding is a line of JSON in the file of records.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
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
from gpu_findings import (
    COPIES,
    DDP,
    GRADIENTS,
    INPUT,
    LARGE,
    OURS,
    PAGEABLE,
    PINNED,
    RAW,
    TORCHRUN,
    bytes_of_ipc,
    least_bytes,
    target_of,
)
from mpi4py import MPI

import mpidist
from mpidist.resilience import exit_handling

Calls = Mapping[str, Callable[[], Any]]
RAW_HOST, KEPT, NCCL = "staged by hand", "pageable staging, buffers kept", "raw NCCL"
BY_HAND = "map, page-locked copy"
MOST_LOOPS, LOOP_SECONDS, SLOW_SECONDS, CASE_SECONDS = 1000, 0.02, 0.25, 4.0
REPETITIONS = (2, 9)  # at least and at most
COPIES_HELD = 8  # arrays of one size that all contestants together hold at a time
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
    def gpus(self) -> Any:
        """What is known of the GPUs of all ranks."""
        return self.strategy.extended.gpus

    def record(self, kind: str, line: str, **fields: Any) -> None:
        """Keep a finding, so that no later failure loses it; and print a line of it."""
        if self.comm.rank == 0:
            print(line, flush=True)
            with open(self.records, "a") as file:
                file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def skip(self, reason: str) -> None:
        """Tell what was left out."""
        self.record("skipped", f"skipped: {reason}", reason=reason)

    def has_time_for(self, case: str) -> bool:
        """Return whether there is time; tell what is left out else. Collective."""
        has = bool(self.comm.bcast(time.monotonic() < self.ends))
        if not has:
            self.skip(f"{case}: no time was left")
        return has

    def beside(
        self,
        case: str,
        times: Mapping[str, list[float]],
        amount: float = 0.0,
        ours: str = OURS,
        **facts: Any,
    ) -> None:
        """Record one contestant beside the others; see `harness.beside`.

        Its rates are compared where it moves bytes, the `amount`, else its times.
        """
        unit, size = ("GB/s", amount / 1e9) if amount else ("us", 0.0)
        for found in harness.beside(case, times, None, unit, size, ours):
            wanted = target_of(case, found.against)
            is_at_least = wanted.is_at_least if wanted else amount > 0
            found = dataclasses.replace(
                found, target=wanted and wanted.ratio, is_at_least=is_at_least
            )
            self.record("comparison", found.line(), **found.as_dict(), **facts)

    def beside_rate(
        self, case: str, against: str, size: float, times: list[float], rate: float
    ) -> None:
        """Record bytes per second beside what is possible."""
        self.beside(case, {OURS: times, against: [size / rate] * len(times)}, size)

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
        warming_up = int(once < SLOW_SECONDS and not self.is_quick)
        measured: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(warming_up + repetitions):
            for name, call in calls.items():
                measured[name].append(self.time(call, loops[name]))
        return {name: times[warming_up:] for name, times in measured.items()}

    def time(self, call: Callable[[], Any], loops: int = 1) -> float:
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
        return float(self.comm.allreduce(mine, MPI.MAX))

    def numbers(self, shape: int | tuple[int, ...], rank: int | None = None) -> Any:
        """Return small whole float32 numbers, other ones on each rank, on its GPU.

        Sums of them are exact in any order.
        """
        values = cupy.arange(np.prod(shape), dtype="f4") % 1000
        return (values + (self.comm.rank if rank is None else rank)).reshape(shape)

    def sum_of_numbers(self, shape: int | tuple[int, ...]) -> Any:
        """Return the sum over all ranks of what `numbers` gives."""
        ranks = self.comm.size
        return self.numbers(shape, 0) * ranks + ranks * (ranks - 1) / 2


def require_right(name: str, found: Iterable[Any], expected: Iterable[Any]) -> None:
    """Raise unless all arrays are as expected."""
    for array, right in zip(found, expected, strict=True):
        assert (array == right).all(), f"{name} is wrong"


def by_hand(comm: MPI.Intracomm, given: Any) -> Any:
    """Return the sum by way of host memory: copy, MPI, copy back. Collective."""
    mine = given.get()
    total = np.empty_like(mine)
    comm.Allreduce(mine, total, MPI.SUM)
    return cupy.asarray(total)


def by_hand_with_buffers(comm: MPI.Intracomm, given: Any, result: Any) -> Any:
    """Return a function that does what `by_hand` does in memory that it has already."""
    mine, total = np.zeros(given.shape, "f4"), np.zeros(given.shape, "f4")

    def call() -> Any:
        given.get(out=mine)
        comm.Allreduce(mine, total, MPI.SUM)
        result.set(total)
        return result

    return call


def nccl_sum(setting: Setting) -> Callable[[Any, Any], None] | None:
    """Return a function that adds up by bare NCCL; None without. Collective.

    NCCL refuses ranks that share a GPU.
    """
    comm = setting.comm
    if setting.gpus.no_nccl:
        return None
    from cupy.cuda import nccl

    number = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None)
    float32, sum_op = 7, 0
    communicator = nccl.NcclCommunicator(comm.size, number, comm.rank)

    def call(given: Any, total: Any) -> None:
        ends, stream = (given.data.ptr, total.data.ptr), cupy.cuda.get_current_stream()
        communicator.allReduce(*ends, given.size, float32, sum_op, stream.ptr)

    return call


def compare_sizes(setting: Setting) -> None:
    """Compare all-reduces of one array, each transport and the public call."""
    comm, by_nccl = setting.comm, nccl_sum(setting)
    large = 64 << 10 if setting.is_quick else 64 << 20
    # First those for which there are targets
    others = [8 << (2 * n) for n in range(1, 13)] + [1 << 30]
    others = [4096] if setting.is_quick else [n for n in others if n != large]
    for size in [8, large, *others]:
        case = f"all_reduce, {size:,} bytes"
        if not setting.has_time_for(case):
            return
        free = comm.allreduce(cupy.cuda.runtime.memGetInfo()[0], MPI.MIN)
        if free < COPIES_HELD * size * comm.size:  # for all of the GPU's ranks
            setting.skip(f"{case}: {free:,} bytes of GPU memory are free")
            continue
        given, total = setting.numbers(size // 4), cupy.zeros(size // 4, "f4")
        calls = _sums(setting, given, total, by_nccl)
        for name, call in calls.items():
            total[...] = -1
            cupy.cuda.Device().synchronize()
            require_right(name, [call()], [setting.sum_of_numbers(size // 4)])
        times = setting.time_in_turn(calls)
        ways = [name for name in times if name == OURS or name.startswith("transport")]
        rivals_of = {n: t for n, t in times.items() if n not in ways}
        setting.beside(case, {OURS: times[OURS], **rivals_of})
        for way in ways[1:]:
            pair = {way: times[way], OURS: times[OURS]}
            setting.beside(f"{case}, {way}", pair, ours=way)
        if size == large:
            best = min(ways, key=lambda name: statistics.median(times[name]))
            found = {OURS: times[best], PAGEABLE: times[PAGEABLE]}
            setting.beside(LARGE, found, size, by=best)
        del given, total, calls
        cupy.get_default_memory_pool().free_all_blocks()


def _sums(setting: Setting, given: Any, total: Any, by_nccl: Any) -> Calls:
    comm, replica = setting.comm, mpidist.get_replica_context()

    def into(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        return lambda: (function(*arguments), total)[1]

    calls = {OURS: lambda: replica.all_reduce("SUM", given)}
    for name, way in setting.strategy.extended.collectives.transports.by_name.items():
        if name != "ordered":  # which is there for its order of additions
            calls[f"transport {name}"] = into(way.allreduce, [given], total, None)
    if setting.gpus.support.is_aware:
        calls[RAW] = into(comm.Allreduce, given, total)
    if by_nccl is not None:
        calls[NCCL] = into(by_nccl, given, total)
    calls[PAGEABLE] = lambda: by_hand(comm, given)
    calls[KEPT] = by_hand_with_buffers(comm, given, total)
    return calls


def compare_gathers(setting: Setting) -> None:
    """Compare all-gathers along both axes of a matrix to Allgatherv along the first."""
    comm, replica = setting.comm, mpidist.get_replica_context()
    sizes = [4096] if setting.is_quick else [4 << 10, 1 << 20, 16 << 20, 64 << 20]
    for size in sizes:
        case = f"all_gather, {size:,} bytes"
        if not setting.has_time_for(case):
            return
        shape = size // 4 // 64, 64
        given = setting.numbers(shape)
        parts = [setting.numbers(shape, rank) for rank in range(comm.size)]
        for axis in (0, 1):
            expected = cupy.concatenate(parts, axis=axis)
            require_right(case, [replica.all_gather(given, axis)], [expected])
        counts = [given.size] * comm.size
        total = cupy.zeros(sum(counts), "f4")

        def raw(given: Any = given, total: Any = total, counts: Any = counts) -> None:
            comm.Allgatherv(given, [total, counts])

        def staged(raw: Any = raw, given: Any = given, size: int = total.size) -> Any:
            gathered = np.empty(size, "f4")
            raw(given.get(), gathered)
            return cupy.asarray(gathered)

        calls: dict[str, Callable[[], Any]] = {
            OURS: lambda a=given: replica.all_gather(a, 0),
            f"{OURS}, axis 1": lambda a=given: replica.all_gather(a, 1),
            RAW_HOST: staged,
        }
        if setting.gpus.support.is_aware:
            calls[RAW] = raw
        setting.beside(case, setting.time_in_turn(calls), size)


def compare_gradients(setting: Setting) -> None:
    """Compare the gradients of a model, put together, to one array at a time."""
    comm, replica = setting.comm, mpidist.get_replica_context()
    shapes = rivals.MODELS["ResNet-50"][: 6 if setting.is_quick else None]
    given = [setting.numbers(shape) for shape in shapes]
    totals = [cupy.zeros_like(array) for array in given]
    buckets = replica.strategy.gradient_buckets(given)

    def by_buckets() -> Any:
        with buckets:
            for number in reversed(range(len(given))):
                buckets.put(number, given[number])
        return buckets.result

    def one_by_one() -> list[Any]:
        for array, total in zip(given, totals, strict=True):
            comm.Allreduce(array, total, MPI.SUM)
        return totals

    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: replica.all_reduce("SUM", given),
        f"{OURS}, buckets": by_buckets,
        RAW_HOST: lambda: [by_hand(comm, array) for array in given],
    }
    if setting.gpus.support.is_aware:
        calls[RAW] = one_by_one
    for name, call in calls.items():
        require_right(name, call(), map(setting.sum_of_numbers, shapes))
    size, times = sum(a.nbytes for a in given), setting.time_in_turn(calls)
    setting.beside(GRADIENTS, times, size)
    in_buckets = {name: times[name] for name in times if name != OURS}
    setting.beside(f"{GRADIENTS}, buckets", in_buckets, size, f"{OURS}, buckets")
    buckets.close()


def compare_to_memory(setting: Setting) -> None:
    """Compare the bytes that `ipc` moves per second to those of a copy. Collective."""
    comm = setting.comm
    alone, together = (_copy_rate(setting, is_alone) for is_alone in (True, False))
    setting.record(
        "memory_bandwidth",
        f"copies on one GPU, bytes read and written: {alone / 1e9:.4g} GB/s by one "
        f"rank; {together / 1e9:.4g} GB/s by each rank when all copy",
        bytes_per_second_alone=alone,
        bytes_per_second_each=together,
    )
    way = setting.strategy.extended.collectives.transports.by_name.get("ipc")
    if way is None:
        setting.skip("ipc beside the memory's bandwidth: there is no transport ipc")
        return
    size = 64 << 10 if setting.is_quick else 64 << 20
    given, total = setting.numbers(size // 4), cupy.zeros(size // 4, "f4")
    times = setting.time_in_turn({"": lambda: way.allreduce([given], total, None)})[""]
    require_right("ipc", [total], [setting.sum_of_numbers(size // 4)])
    # Ranks that share a GPU share its memory's bandwidth. GPUs of their own read each
    # other's memory over a link, which is another limit
    sharing = max(collections.Counter(setting.gpus.identities).values())
    start = "ipc" if setting.gpus.is_shared else "ipc over a link"
    for bytes_of, what in ((bytes_of_ipc, "it moves"), (least_bytes, "of arrays")):
        moved = sharing * bytes_of(size, comm.size)
        setting.beside_rate(f"{start}, bytes {what}", COPIES, moved, times, alone)


def _copy_rate(setting: Setting, is_alone: bool) -> float:
    """Return the bytes per second that one rank reads and writes in a copy."""
    size = 1 << 20 if setting.is_quick else 1 << 30
    source, target = cupy.zeros(size, "u1"), cupy.zeros(size, "u1")

    def copy() -> None:
        if not is_alone or setting.comm.rank == 0:
            target.data.copy_from_device_async(source.data, size)

    return 2 * size / statistics.median(setting.time_in_turn({"": copy})[""])


def compare_input(setting: Setting) -> None:
    """Compare rows per second, as bytes, to copies from page-locked memory. Collective.

    All ranks copy at the same time in both. The files are in the page cache.
    """
    comm, rate, is_quick = setting.comm, _upload_rate(setting), setting.is_quick
    setting.record(
        "upload",
        f"page-locked memory to GPU: {rate / 1e9:.4g} GB/s by all ranks",
        bytes_per_second=rate,
    )
    chunks_of = {"contiguous": 4700, "gzip": 1875}
    if is_quick:
        chunks_of = {"contiguous": 16, "gzip": 10}
    chunk_bytes = input_files.CHUNK_ROWS * input_files.ROW_BYTES
    bytes_of = {layout: n * chunk_bytes for layout, n in chunks_of.items()}
    with tempfile.TemporaryDirectory() as own:
        folder = Path(comm.bcast(own))
        for layout, size in bytes_of.items() if comm.rank == 0 else ():
            input_files.write_cheaply(folder / f"{layout}.h5", layout, size)
            if layout == "contiguous":
                _fill(folder / f"{layout}.h5")
        comm.Barrier()
        batch = (256 if is_quick else ROWS_OF_BATCH) * comm.size
        cases: dict[str, Callable[[], None]] = {}
        for layout in bytes_of:
            data = mpidist.Dataset.from_hdf5(folder / f"{layout}.h5", input_files.NAME)
            shuffled = data.shuffle(seed=0).batch(batch)
            cases[layout] = _epoch(setting, data.batch(batch))
            cases[f"{layout}, shuffle"] = _epoch(setting, shuffled)
        del cases["gzip, shuffle"]
        cases[BY_HAND] = _by_hand(setting, folder / "contiguous.h5", batch)
        for name, epoch in cases.items():
            if setting.has_time_for(f"input, {name}"):
                setting.time(epoch)  # everything is in the page cache afterwards
                times = [setting.time(epoch) for _ in range(1 if is_quick else 3)]
                size = bytes_of.get(name, bytes_of["contiguous"])
                setting.beside_rate(f"{INPUT}, {name}", PINNED, size, times, rate)
        comm.Barrier()


def _fill(path: Path) -> None:
    """Write the same pictures again and again: a hole is read faster."""
    count = 32 * input_files.CHUNK_ROWS
    pictures = input_files.images(np.random.default_rng(0), count)
    with h5py.File(path, "r+") as file:
        rows = file[input_files.NAME]
        for start in range(0, len(rows), count):
            rows[start : start + count] = pictures[: len(rows) - start]


def _upload_rate(setting: Setting) -> float:
    """Return the bytes per second of all ranks from page-locked memory. Collective."""
    size = (1 << 20) if setting.is_quick else (256 << 20)
    memory, target = cupy.cuda.alloc_pinned_memory(size), cupy.zeros(size, "u1")
    np.frombuffer(memory, "u1", size)[...] = 1
    stream = cupy.cuda.get_current_stream()

    def upload() -> None:
        target.data.copy_from_host_async(memory.ptr, size, stream)

    times = setting.time_in_turn({"": upload})[""]
    return setting.comm.size * size / statistics.median(times)


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
    share = batch // setting.comm.size
    size = share * input_files.ROW_BYTES
    memories = [cupy.cuda.alloc_pinned_memory(size) for _ in range(2)]
    stream = cupy.cuda.Stream(non_blocking=True)

    def epoch() -> None:
        events: list[Any] = [None, None]
        starts = range(share * setting.comm.rank, len(rows), batch)
        for turn, start in enumerate(starts):
            if events[turn % 2] is not None:
                events[turn % 2].synchronize()
            part = rows[start : start + share].reshape(-1)
            memory = memories[turn % 2]
            np.copyto(np.frombuffer(memory, "u1", part.size), part)
            target = cupy.empty(part.size, "u1")
            target.data.copy_from_host_async(memory.ptr, part.size, stream)
            events[turn % 2] = stream.record()
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

    import mpidist.torch

    device, backend, case = "cpu", "gloo", "step of torch's DDP by gloo"
    if torch.cuda.is_available():
        device, backend = f"cuda:{cupy.cuda.Device().id}", "cpu:gloo,cuda:nccl"
        case = DDP
        if setting.gpus.is_shared:
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
    for name, start in [*starts.items()] * turns:
        start()
        model = torch.nn.Sequential(*layers).to(device)
        model = torch.nn.parallel.DistributedDataParallel(model)

        def step(model: Any = model) -> None:
            model.zero_grad()
            model(rows).sum().backward()

        times[name] += setting.time_in_turn({name: step})[name]
        del model, step
        torch.distributed.destroy_process_group()
    few = min(map(len, times.values()))  # quick steps are measured more often
    setting.beside(case, {name: each[:few] for name, each in times.items()})


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
    collectives, gpus = setting.strategy.extended.collectives, setting.gpus
    if gpus is None:
        raise SystemExit("the replicas are not on GPUs")
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
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
    is_aware, ways = gpus.support.is_aware, list(collectives.transports.by_name)
    setting.record(
        "facts",
        f"{machine['gpu']}, {machine['gpus_used']} used by {setting.comm.size} ranks; "
        f"{machine['mpi']}, CUDA-aware: {is_aware} ({gpus.support.why}); "
        f"transports: {', '.join(ways)}",
        machine=machine,
        is_aware=is_aware,
        why=gpus.support.why,
        is_shared=gpus.is_shared,
        transports=ways,
        default=collectives.transport.name,
    )


# Whether each is called in replica context: datasets are not for that
PARTS = {
    "facts": (find_facts, False),
    "checks": (gpu_checks.run_checks, False),
    "sizes": (compare_sizes, True),
    "gathers": (compare_gathers, True),
    "gradients": (compare_gradients, True),
    "limit": (compare_to_memory, False),
    "input": (compare_input, False),
    "torch": (compare_torch, False),
}


def main() -> None:
    ends = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("part", choices=PARTS)
    add("--records", type=Path, required=True, help="file to append findings to")
    add("--seconds", type=float, default=3600, help="after which no case is begun")
    add("--quick", action="store_true", help="only see that it runs")
    given = parser.parse_args()
    exit_handling.abort_on_exception()
    strategy = mpidist.MirroredStrategy(allow_shared_gpu=True)
    ends += given.seconds
    setting = Setting(MPI.COMM_WORLD, strategy, given.quick, given.records, ends)
    part, in_replica_context = PARTS[given.part]
    if in_replica_context:
        strategy.run(part, (setting,))
    else:
        part(setting)
    strategy.experimental_finalize()


if __name__ == "__main__":
    main()
