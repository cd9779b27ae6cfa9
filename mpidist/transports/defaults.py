"""Which transport is used for what where nobody has measured on the machine.

The sizes come from `benchmarks/bench_collectives.py`, on one node of 4 cores.
"""

from __future__ import annotations

from collections.abc import Container

from mpidist.transports.by_size import Table

__all__ = ["default_device_table", "default_table"]

# Between nodes: below, the library's own ways have fewer steps
_HIERARCHICAL_BYTES = 64 << 10
# On GPUs: to copy less to the host and back takes less time than two kernels
_IPC_BYTES = 32 << 10
_DEVICE_BYTES = 64 << 10
# In a node, Intel MPI is faster as long as arrays fit into caches
_INTEL_BYTES = 16 << 20


def default_table(in_node: str, library: str) -> Table:
    """Return a table for a layout.

    Args:
      in_node: the transport of ranks that share memory; "mpi" if none do.
      library: what `MPI.Get_library_version()` begins with.
    """
    by_mpi = [(0, "mpi")]
    if in_node == "hierarchical":
        reduce = [(0, "mpi"), (_HIERARCHICAL_BYTES, "hierarchical")]
        return {"allreduce": reduce, "allgatherv": by_mpi, "broadcast": by_mpi}
    near = [(0, in_node)]
    if in_node == "shared" and library.startswith("Intel"):
        reduce = [(0, "mpi"), (_INTEL_BYTES, "shared")]
        return {"allreduce": reduce, "allgatherv": by_mpi, "broadcast": near}
    if library.startswith("Open MPI"):  # the system copies for it, once
        return {"allreduce": near, "allgatherv": by_mpi, "broadcast": near}
    return {"allreduce": near, "allgatherv": near, "broadcast": near}


def default_device_table(names: Container[str]) -> Table:
    """Return a table for arrays on GPUs.

    Args:
      names: of the transports that there are.
    """
    if "nccl" in names:
        return _all_by([(0, "nccl")])
    if "ipc" in names:
        return _all_by([(0, "staging"), (_IPC_BYTES, "ipc")])
    if "device" in names:
        # Most MPI libraries add up on the host what lies on a GPU
        reduce = [(0, "mpi"), (_DEVICE_BYTES, "device")]
        return {**_all_by([(0, "mpi")]), "allreduce": reduce}
    return _all_by([(0, "staging")])


def _all_by(rows: list[tuple[int, str]]) -> dict[str, list[tuple[int, str]]]:
    return {"allreduce": rows, "allgatherv": rows, "broadcast": rows}
