"""GPUs: which rank uses which, and whether MPI accepts GPU pointers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpidist.tools.doctor.results import (
    CheckResult,
    Status,
    all_same,
    by_rank,
    name_ranks,
)
from mpidist.util.settings import ALLOW_SHARED_GPU, CUDA_AWARE

__all__ = ["GpuChoice", "GpuFacts", "check_gpus", "check_support", "find_gpus"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Device files of NVIDIA's driver
_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


class GpuFacts(NamedTuple):
    """The GPUs that one rank sees.

    Args:
      cupy: its version; empty if it is not installed.
      error: why CuPy sees no GPU, or nothing.
      gpus: PCI bus id, UUID and model of each.
      cuda: versions of CUDA's driver and runtime, such as (13000, 13000).
      nccl: its version, such as 22703; 0 without.
      has_device: whether the machine has a device file of NVIDIA's driver.
      visible: the variable CUDA_VISIBLE_DEVICES, or nothing.
    """

    cupy: str
    error: str
    gpus: tuple[tuple[str, str, str], ...]
    cuda: tuple[int, int]
    nccl: int
    has_device: bool
    visible: str


class GpuChoice(NamedTuple):
    """The GPU of one rank, and MPI's CUDA support there.

    Args:
      host: the node.
      number: of the GPU among the visible ones.
      pci, uuid, name: PCI bus id, UUID and model.
      asked: what the MPI library reports; None if nothing.
      tried: the outcome of a test; None if another rank tested.
    """

    host: str
    number: int
    pci: str
    uuid: str
    name: str
    asked: tuple[bool, str] | None = None
    tried: tuple[bool, str] | None = None


def find_gpus() -> GpuFacts:
    """Return this process's facts. It starts CUDA: call it in a child."""
    has_device = any(Path(path).exists() for path in _DEVICES)
    visible = os.environ.get(_VISIBLE, "")
    nothing = GpuFacts("", "", (), (0, 0), 0, has_device, visible)
    if importlib.util.find_spec("cupy") is None:
        return nothing
    from mpidist.device.binding import (
        cuda_versions,
        cupy_version,
        gpu_count,
        identify_gpu,
        nccl_version,
    )

    try:
        count = gpu_count()
        found = [identify_gpu(index, "") for index in range(count)]
        return nothing._replace(
            cupy=cupy_version(),
            error="" if count else "CuPy sees no GPU",
            gpus=tuple((gpu.pci_bus_id, gpu.uuid, gpu.name) for gpu in found),
            cuda=cuda_versions() if count else (0, 0),
            nccl=nccl_version(),
        )
    except ImportError as error:
        return nothing._replace(cupy="broken", error=" ".join(str(error).split()))


def check_gpus(
    facts: Mapping[int, GpuFacts], choices: Mapping[int, GpuChoice | None]
) -> list[CheckResult]:
    """Return rows on which rank has which GPU; both by rank."""
    if not any(choices.values()):
        return [_check_none(facts)]
    without = [rank for rank, choice in choices.items() if choice is None]
    if without:
        remedy = "give every rank a GPU (srun --gpus-per-task=1), or none: pass "
        remedy += "devices=['CPU:0']"
        found = f"{name_ranks(without)} see no GPU, others do"
        errors = {rank: facts[rank].error for rank in without if facts[rank].error}
        found += f" ({by_rank(errors)})" if errors else ""
        return [CheckResult(Status.FAIL, "GPUs", found, remedy)]
    same = "install the same CuPy, driver and CUDA on all nodes"
    versions = {
        rank: f"CuPy {f.cupy}, driver for CUDA {_version(f.cuda[0])}, NCCL "
        f"{f.nccl or 'not found'}"
        for rank, f in facts.items()
    }
    return [_check_own(choices), all_same("CUDA", versions, same, Status.WARN)]


def _check_none(facts: Mapping[int, GpuFacts]) -> CheckResult:
    unused = {
        rank: fact.error or "CuPy is not installed" for rank, fact in facts.items()
    }
    has_device = [rank for rank, fact in facts.items() if fact.has_device]
    if any(fact.cupy == "broken" for fact in facts.values()):
        remedy = "reinstall it: pip install cupy-cuda12x or cupy-cuda13x"
        return CheckResult(
            Status.FAIL, "GPUs", f"CuPy is broken: {by_rank(unused)}", remedy
        )
    if has_device:
        remedy = (
            "pip install cupy-cuda12x or cupy-cuda13x, as the driver needs, and check "
        )
        remedy += f"that {_VISIBLE} is not empty"
        found = f"{name_ranks(has_device)} have an NVIDIA driver, but {by_rank(unused)}"
        return CheckResult(Status.WARN, "GPUs", found, remedy)
    return CheckResult(Status.OK, "GPUs", f"none ({by_rank(unused)})")


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _check_own(choices: Mapping[int, GpuChoice | None]) -> CheckResult:
    owners: dict[tuple[str, str, str], list[int]] = {}
    texts = {}
    for rank, choice in choices.items():
        assert choice is not None
        owners.setdefault((choice.host, choice.pci, choice.uuid), []).append(rank)
        texts[rank] = f"{choice.name} {choice.pci}"
    shared = [ranks for ranks in owners.values() if len(ranks) > 1]
    if not shared:
        return CheckResult(Status.OK, "GPUs", by_rank(texts))
    is_allowed = ALLOW_SHARED_GPU.read_or_default()
    remedy = (
        "start one rank per GPU (srun --gpus-per-task=1, or as many ranks per node "
    )
    remedy += f"as it has GPUs); if sharing is intended, set {ALLOW_SHARED_GPU.name}=1"
    names = "; ".join(map(name_ranks, shared))
    return CheckResult(
        Status.WARN if is_allowed else Status.FAIL,
        "GPUs",
        f"{names} share one; {by_rank(texts)}",
        remedy,
    )


def check_support(
    choices: Mapping[int, GpuChoice | None], has_nccl: bool
) -> list[CheckResult]:
    """Return a row on MPI's CUDA support; none without GPUs."""
    given = {rank: choice for rank, choice in choices.items() if choice is not None}
    if not given or len(choices) < 2:
        return []
    asked = {r: c.asked[1] if c.asked else "it does not say" for r, c in given.items()}
    tried = {r: c.tried[1] for r, c in given.items() if c.tried is not None}
    found = f"asked: {by_rank(asked)}"
    found += f"; {by_rank(tried)}" if tried else "; not tried, as it says no"
    claims = any(c.asked and c.asked[0] for c in given.values())
    is_aware = all(c.tried[0] for c in given.values() if c.tried) and bool(tried)
    if CUDA_AWARE.read_or_default() and not is_aware:
        remedy = f"unset {CUDA_AWARE.name}: ranks would crash"
        return [CheckResult(Status.FAIL, "MPI's CUDA support", found, remedy)]
    if claims and not is_aware:
        remedy = (
            f"set {CUDA_AWARE.name}=0, or repair the MPI library; arrays use another "
            "transport"
        )
        return [CheckResult(Status.WARN, "MPI's CUDA support", found, remedy)]
    if not is_aware and not has_nccl:
        remedy = "arrays go through host memory; use a CUDA-aware MPI, or install NCCL"
        return [CheckResult(Status.WARN, "MPI's CUDA support", found, remedy)]
    return [CheckResult(Status.OK, "MPI's CUDA support", found)]
