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
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# One rank is one share of the CPU
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import cupy
import gpu_cases
import gpu_checks
import gpu_input
import gpu_limits
import harness
from gpu_timing import Setting
from mpi4py import MPI

import mpidist
from mpidist.resilience import exit_handling


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
    "sizes": gpu_cases.compare_sizes,
    "gathers": gpu_cases.compare_gathers,
    "gradients": gpu_cases.compare_gradients,
    "limit": gpu_limits.compare_to_memory,
    "input": gpu_input.compare_input,
}
# They distribute datasets, which is not for replica context
IN_CROSS_REPLICA = ("facts", "checks", "limit", "input")


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
