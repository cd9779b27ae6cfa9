"""A board for the ranks of each node, where their shared memory has room for one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from mpi4py import MPI

from mpidist.agreement.agree import Agreement
from mpidist.agreement.board import Board
from mpidist.memory.free_memory import as_text, free_bytes

__all__ = ["SLOT_BYTES", "make_board"]

# Of an array at a time: two of these fit into a core's cache
SLOT_BYTES = 512 << 10


def make_board(
    agreement: Agreement,
    node: MPI.Intracomm,
    operation: str,
    page_bytes: int,
    slot_bytes: int = SLOT_BYTES,
    names: Sequence[int] | None = None,
) -> Board | None:
    """Return a board for the ranks of each node, or None on all ranks. Collective.

    A page of shared memory that is not there would end the process with SIGBUS. So
    there is none, and a RuntimeWarning on rank 0, where a node has too little.

    Args:
      agreement: of all ranks.
      node: the ranks that share memory with this one; borrowed.
      operation: what it is for, for messages.
      page_bytes: see `Board`.
      slot_bytes: see `Board`.
      names: see `Board`.
    """
    needed = node.Get_size() * Board.count_bytes(page_bytes, slot_bytes)
    free = min(free_bytes(is_shared=True).values(), default=needed)
    short = [(n, f) for n, f in agreement.gather(operation, (needed, free)) if n > f]
    if not short:
        return agreement.block(
            operation, lambda: Board(node, page_bytes, slot_bytes, names)
        )
    if agreement.rank == 0:
        needed, free = short[0]
        warnings.warn(
            f"the ranks of a node need {as_text(needed)} of shared memory to work "
            f"together quickly, but {as_text(free)} are free; they go on by MPI alone, "
            "more slowly. A container may be given more: --shm-size",
            RuntimeWarning,
            stacklevel=2,
        )
    return None
