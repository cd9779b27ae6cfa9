"""Other ways to add up and to gather what lies on GPUs, as one writes them by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

import mpidist

__all__ = [
    "KEPT",
    "NCCL",
    "PAGEABLE",
    "RAW",
    "RAW_HOST",
    "by_hand",
    "by_hand_with_buffers",
    "nccl_sum",
    "one_by_one",
]

RAW = "raw CUDA-aware MPI"
RAW_HOST = "staged by hand"
PAGEABLE = "pageable staging"
KEPT = "pageable staging, buffers kept"
NCCL = "raw NCCL"

_NCCL_FLOAT32, _NCCL_SUM = 7, 0


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


def one_by_one(
    comm: MPI.Intracomm, given: Sequence[Any], is_aware: bool
) -> Callable[[], list[Any]]:
    """Return a function that adds up arrays by one Allreduce each, as they lie.

    Where MPI takes no addresses of GPUs, each goes by way of host memory.
    """
    totals = [cupy.zeros_like(array) for array in given]

    def call() -> list[Any]:
        if not is_aware:
            return [by_hand(comm, array) for array in given]
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
    communicator = nccl.NcclCommunicator(comm.size, number, comm.rank)

    def call(given: Any, total: Any) -> None:
        communicator.allReduce(
            given.data.ptr,
            total.data.ptr,
            given.size,
            _NCCL_FLOAT32,
            _NCCL_SUM,
            cupy.cuda.get_current_stream().ptr,
        )

    return call
