"""Lines at the start of a job: the hardware, and how the first dataset is divided."""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

from mpidist._version import __version__
from mpidist.comm.consensus.failures import can_survive
from mpidist.comm.device_info import GpuFacts
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.comm.transports.tuning import Table, short_name
from mpidist.util import logs
from mpidist.util.available_memory import as_text
from mpidist.util.settings import BANNER

_shown: set[str] = set()


def show_once(group: ReplicaGroup, kind: str, describe: Callable[[], str]) -> None:
    """Log a line on rank 0, for the first strategy of several ranks that asks for it.

    Not collective. MPIDIST_BANNER=0 turns it off.

    Args:
      group: of the replicas.
      kind: of the line; each is logged once.
      describe: returns the text.
    """
    if group.num_replicas == 1 or kind in _shown:
        return
    _shown.add(kind)
    # Values other than 0 and 1 were refused when the strategy was created
    if group.replica_id == 0 and BANNER.read_or_default():
        logs.info("comm", describe())


def banner(group: ReplicaGroup) -> str:
    """Return the line for a strategy. Not collective."""
    nodes = len(group.topology.node_sizes)
    library = short_name(MPI.Get_library_version())
    parts = [
        f"{group.num_replicas} replicas on {nodes} node{'s' * (nodes > 1)}",
        library,
        "CPU" if group.gpus is None else _describe_gpus(group.gpus),
        f"all_reduce by {_describe_table(group.collectives.transports.table)}",
    ]
    if group.gpus is not None:
        is_aware = "" if group.gpus.support.is_aware else "not "
        parts.append(f"MPI is {is_aware}CUDA-aware ({group.gpus.support.why})")
    survives = "continues, with run_elastic," if can_survive() else "ends"
    parts.append(f"the job {survives} if a rank dies")
    return f"mpidist {__version__}: {'; '.join(parts)}"


def _describe_gpus(gpus: GpuFacts) -> str:
    names = ", ".join(sorted({gpu.name for gpu in gpus.identities}))
    return f"GPU ({names}{', shared' if gpus.is_shared else ''})"


def _describe_table(table: Table) -> str:
    """Return the transports by size: "mpi, hierarchical from 64 KiB"."""
    (_, first), *rest = table["allreduce"]
    return ", ".join([first, *(f"{name} from {as_text(edge)}" for edge, name in rest)])
