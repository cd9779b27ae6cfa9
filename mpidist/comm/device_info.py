"""Information about the GPUs of a strategy, the same on all ranks."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpi4py import MPI

from mpidist.comm.consensus.consensus import Consensus
from mpidist.device import probe
from mpidist.device.binding import (
    GpuIdentity,
    identify_gpu,
    nccl_version,
    require_own_gpus,
    shared_gpus,
)
from mpidist.errors import LaunchError
from mpidist.launch.launchers import environ_of_another_job
from mpidist.util.files import read_regular, replace_file, user_directory
from mpidist.util.settings import ALLOW_SHARED_GPU, CUDA_AWARE, resolve

_CALL = "MirroredStrategy: GPUs"


@dataclasses.dataclass(frozen=True)
class GpuRequest:
    """The user's options for GPUs; see `MirroredStrategy`."""

    allow_shared: bool = False
    cuda_aware: bool | None = None


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """The GPUs of a strategy.

    Args:
      index: of this rank's GPU; all else is the same on all ranks.
      identities: of each rank's GPU, by rank.
      is_shared: whether ranks share one.
      support: whether MPI accepts pointers to their memory.
      nccl: the version of NCCL on rank 0, such as 22703; 0 without.
      no_nccl: why NCCL cannot connect these ranks; "" if it may.
    """

    index: int
    identities: tuple[GpuIdentity, ...]
    is_shared: bool
    support: Support
    nccl: int
    no_nccl: str


def find_facts(consensus: Consensus, index: int, request: GpuRequest) -> GpuFacts:
    """Return the information for all ranks, which all have a GPU. Collective.

    Args:
      consensus: of all ranks.
      index: of this rank's GPU, in this process.
      request: the user's options.

    Raises, on all ranks:
      LaunchError: ranks share a GPU and a rank does not allow it; see also
        `find_support`.
    """

    # May fail on this rank alone (a broken driver)
    def look() -> tuple[GpuIdentity, bool, int]:
        identity = identify_gpu(index, MPI.Get_processor_name())
        is_allowed = ALLOW_SHARED_GPU.read()
        return identity, request.allow_shared or is_allowed, nccl_version()

    everyone = consensus.gather_objects(_CALL, look)
    identities = tuple(identity for identity, _, _ in everyone)
    # It is refused if any rank does not allow it.
    if not all(is_allowed for _, is_allowed, _ in everyone):
        require_own_gpus(identities)
    support = Support(False, "there is one replica")
    if consensus.size > 1:
        support = find_support(
            consensus, request.cuda_aware, identities[consensus.rank], index
        )
    versions = [version for _, _, version in everyone]
    return GpuFacts(
        index,
        identities,
        bool(shared_gpus(identities)),
        support,
        versions[0],
        why_no_nccl(versions, identities),
    )


def why_no_nccl(versions: Sequence[int], identities: Sequence[GpuIdentity]) -> str:
    """Return why NCCL cannot connect ranks; "" if no reason is known.

    Args:
      versions: of NCCL on each rank, 0 without.
      identities: of each rank's GPU.
    """
    if len(versions) == 1:
        return "there is one replica"
    # All ranks know all versions, so all give the same reason.
    if not all(versions):
        rank = list(versions).index(0)
        return (
            f"CuPy finds no NCCL on rank {rank}; run pip install nvidia-nccl-cu12 with "
            "cupy-cuda12x, or nvidia-nccl-cu13 with cupy-cuda13x"
        )
    if len(set(versions)) > 1:
        return f"the ranks have different versions of NCCL: {sorted(set(versions))}"
    # To NCCL, parts of one GPU (MIG) are the same GPU. Nodes may have equal names, as
    # containers have, but the GPUs of two nodes differ in their uuid
    gpus = {(i.host, i.pci_bus_id, "MIG" not in i.name and i.uuid) for i in identities}
    if len(gpus) < len(identities):
        return "ranks share a GPU, which NCCL refuses"
    return ""


_AWARE_CALL = "MirroredStrategy: whether MPI is CUDA-aware"
# MPIX_GPU_SUPPORT_CUDA of MPICH
_CUDA_KIND = 0


class Support(NamedTuple):
    """Whether MPI is CUDA-aware: accepts GPU pointers.

    Args:
      is_aware: whether it does.
      why: the source of this information, in a few words.
    """

    is_aware: bool
    why: str


def find_support(
    consensus: Consensus, asked_for: bool | None, identity: GpuIdentity, index: int
) -> Support:
    """Return the support, the same on all ranks. Collective.

    Args:
      consensus: of all ranks.
      asked_for: the user's option; it has priority, as has MPIDIST_CUDA_AWARE (0 or 1).
      identity: of this rank's GPU.
      index: its number in this process.

    Raises, on all ranks:
      LaunchError: the variable is not 0 or 1; the variable or the option differs
        between ranks.
    """
    library = MPI.Get_library_version().partition("\n")[0].rstrip("\0 ")

    def look() -> tuple[tuple[bool, str] | None, Support | None, str]:
        override = _override(asked_for, os.environ)
        # A job may have several kinds of GPUs; each kind is tried once.
        way = " ".join([str(probe.library_path()), *_ways(os.environ)])
        key = f"{library} | {way} | CUDA {identity.driver} | {identity.name}"
        return override, ask(library, os.environ), key

    everyone = consensus.gather_objects(_AWARE_CALL, look)
    overrides = {override for override, _, _ in everyone}
    if len(overrides) > 1:
        raise LaunchError(
            f"{CUDA_AWARE.name} or cuda_aware= differs between ranks: "
            f"{sorted(map(str, overrides))}; set the same on all ranks"
        )
    override, answer, key = everyone[consensus.rank]
    # One rank tests for all ranks with the same GPU and library
    is_first = [k for _, _, k in everyone].index(key) == consensus.rank

    def trial() -> Support | None:
        # Not tested if the user, or the library itself, says no.
        is_open = override is None and (answer is None or answer.is_aware)
        return (_cached_trial(key, index) if is_open and is_first else None) or answer

    answers = consensus.gather_objects(_AWARE_CALL, trial)
    known = [a for a in answers if a is not None]
    # All ranks must use the same transport, so the worst result counts.
    worst = min(known, key=lambda support: support.is_aware, default=None)
    if override is None:
        assert worst is not None  # the first rank has tried
        return worst
    says = "nothing else is known"
    if worst is not None:
        is_aware = "it is" if worst.is_aware else "it is not"
        says = f"otherwise {is_aware}: {worst.why}"
    return Support(override[0], f"{override[1]}, where {says}")


# How the names of variables begin that choose how MPI moves data
_WAYS = (
    *("UCX_", "FI_", "MPICH_", "MPIR_CVAR_", "MV2_", "I_MPI_"),
    *("OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_btl", "OMPI_MCA_coll", "OMPI_MCA_osc"),
    *("OMPI_MCA_accelerator", "OMPI_MCA_opal_cuda", "OMPI_MCA_mpi_cuda"),
)


def _ways(environ: Mapping[str, str]) -> list[str]:
    kept = environ_of_another_job(environ)
    return [f"{n}={kept[n]}" for n in sorted(kept) if n.startswith(_WAYS)]


def _override(
    asked_for: bool | None, environ: Mapping[str, str]
) -> tuple[bool, str] | None:
    is_aware, source = resolve(CUDA_AWARE, asked_for, environ)
    if is_aware is None:
        return None
    if source == "argument":
        return is_aware, f"cuda_aware={is_aware}"
    return is_aware, f"{CUDA_AWARE.name}={int(is_aware)}"


def ask(library: str, environ: Mapping[str, str]) -> Support | None:
    """Return what the MPI library reports about itself; None if nothing.

    Args:
      library: the first line of `MPI.Get_library_version()`.
      environ: the environment variables.
    """
    return next(_answers(library, environ), None)


def _answers(library: str, environ: Mapping[str, str]) -> Iterator[Support]:
    # MPI-4.1, section 12.4.3: which kinds of memory the user asked for and got
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    if _has_device_memory(kinds):
        yield Support(True, f"mpi_memory_alloc_kinds={kinds}")
    if "CRAY" in library.upper():
        name = "MPICH_GPU_SUPPORT_ENABLED"
        yield Support(environ.get(name) == "1", f"{name}={environ.get(name)}")
    if library.startswith("Intel"):
        name = "I_MPI_OFFLOAD"
        is_on = environ.get(name, "0") not in ("0", "")
        yield Support(is_on, f"{name}={environ.get(name)}")
    path = probe.library_path()
    if path is None:
        return
    # RTLD_NOLOAD: the library that mpi4py has loaded, not a second copy.
    loaded = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    if hasattr(loaded, "MPIX_Query_cuda_support"):
        answer = int(loaded.MPIX_Query_cuda_support())
        yield Support(answer == 1, f"MPIX_Query_cuda_support() is {answer}")
    if hasattr(loaded, "MPIX_GPU_query_support"):
        flag = ctypes.c_int()
        loaded.MPIX_GPU_query_support(_CUDA_KIND, ctypes.byref(flag))
        yield Support(flag.value == 1, f"MPIX_GPU_query_support gives {flag.value}")


def _has_device_memory(kinds: str) -> bool:
    """Return whether memory that CUDA has allocated on GPUs is among kinds of memory.

    Args:
      kinds: as in "system,cuda:host:device"; without restrictors all of a kind is.
    """
    fields = (kind.strip().split(":") for kind in kinds.split(","))
    return any(
        name == "cuda" and (not restrictors or "device" in restrictors)
        for name, *restrictors in fields
    )


def _cached_trial(key: str, index: int) -> Support:
    path = cache_path()
    known = _read(path)
    if key in known:
        return Support(known[key][0], f"{known[key][1]} ({path})")
    is_aware, why, is_certain = probe.run(index)
    # A timeout is not stored: the test may succeed next time.
    if is_certain:
        _write(path, {**known, key: [is_aware, why]})
    return Support(is_aware, why)


def cache_path(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of stored results, if the user has a place for it.

    It may be deleted at any time.
    """
    cache = user_directory("XDG_CACHE_HOME", ".cache", environ)
    return None if cache is None else cache / "mpidist" / "cuda_aware.json"


def _read(path: Path | None) -> dict[str, tuple[bool, str]]:
    """Return the stored results; none if the file is invalid, or not there."""
    try:
        content = {} if path is None else json.loads(read_regular(path))
        return {str(key): (bool(a), str(why)) for key, (a, why) in content.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _write(path: Path | None, outcomes: Mapping[str, object]) -> None:
    """Store results; if that fails, the next job tests again."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as file:
            file.write(json.dumps(outcomes, indent=1).encode())
    except OSError:
        return
