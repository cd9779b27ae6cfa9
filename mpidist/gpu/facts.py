"""What the ranks of a strategy know of their GPUs, the same on all."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from mpi4py import MPI

from mpidist import checks
from mpidist.agreement.agree import Agreement
from mpidist.gpu.cuda_aware import Support, find_support
from mpidist.gpu.devices import (
    GpuIdentity,
    identify_gpu,
    require_own_gpus,
    shared_gpus,
)
from mpidist.gpu.runtime_facts import nccl_version
from mpidist.switches import ALLOW_SHARED_GPU, read_switch

__all__ = ["GpuFacts", "GpuRequest", "find_facts", "why_no_nccl"]

_CALL = "MirroredStrategy: GPUs"


@dataclasses.dataclass(frozen=True)
class GpuRequest:
    """What a user says of GPUs; see `MirroredStrategy`."""

    allow_shared: bool = False
    cuda_aware: bool | None = None

    def check(self) -> None:
        """Raise an ArgumentTypeError if these are not True or False."""
        checks.switch("allow_shared_gpu", self.allow_shared)
        if self.cuda_aware is not None:
            checks.switch("cuda_aware", self.cuda_aware)


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """The GPUs of a strategy.

    Args:
      index: of this rank's GPU; the rest is the same on all.
      identities: of each rank's GPU, by rank.
      is_shared: whether ranks share one.
      support: whether MPI takes addresses of their memory.
      nccl: the version of NCCL on rank 0, such as 22703; 0 without.
      no_nccl: why NCCL cannot connect these ranks; "" if it may.
    """

    index: int
    identities: tuple[GpuIdentity, ...]
    is_shared: bool
    support: Support
    nccl: int
    no_nccl: str


def find_facts(agreement: Agreement, index: int, request: GpuRequest) -> GpuFacts:
    """Return what holds for all ranks, which all have a GPU. Collective.

    Args:
      agreement: of all ranks.
      index: of this rank's GPU, in this process.
      request: what the user says.

    Raises, on all ranks:
      LaunchError: ranks share a GPU and a rank does not allow it; see also
        `find_support`.
    """

    def look() -> tuple[GpuIdentity, bool, int]:
        identity = identify_gpu(index, MPI.Get_processor_name())
        is_allowed = read_switch(os.environ, ALLOW_SHARED_GPU) or False
        return identity, request.allow_shared or is_allowed, nccl_version()

    mine = agreement.prepare(_CALL, look)
    everyone = agreement.gather(_CALL, mine)
    identities = tuple(identity for identity, _, _ in everyone)
    if not all(is_allowed for _, is_allowed, _ in everyone):
        require_own_gpus(identities)
    support = Support(False, "there is one replica")
    if agreement.size > 1:
        support = find_support(agreement, request.cuda_aware, mine[0], index)
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
    """Return why NCCL cannot connect ranks; "" if nothing is known against it.

    Args:
      versions: of NCCL on each rank, 0 without.
      identities: of each rank's GPU.
    """
    if len(versions) == 1:
        return "there is one replica"
    if not all(versions):
        rank = list(versions).index(0)
        return f"CuPy finds no NCCL on rank {rank}; pip install nvidia-nccl-cu13"
    if len(set(versions)) > 1:
        return f"the ranks have different versions of NCCL: {sorted(set(versions))}"
    # To NCCL, parts of one GPU (MIG) are the same GPU
    if len({(found.host, found.pci_bus_id) for found in identities}) < len(identities):
        return "ranks share a GPU, which NCCL refuses"
    return ""
