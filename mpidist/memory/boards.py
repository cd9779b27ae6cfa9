"""A board for the ranks of each node, where their shared memory has room for one."""

from __future__ import annotations

from mpi4py import MPI

from mpidist.agreement.agree import Agreement
from mpidist.agreement.board import Board
from mpidist.memory.free_memory import as_text, free_bytes
from mpidist.notices import warn

__all__ = ["make_board"]

# Of an array at a time: two of these fit into a core's cache
_SLOT_BYTES = 512 << 10


def make_board(
    operation: str,
    agreement: Agreement,
    node: MPI.Intracomm,
    page_bytes: int,
    *,
    is_patient: bool = False,
) -> Board | None:
    """Return a board for the ranks of each node, or None on all ranks. Collective.

    A page of shared memory that is not there would end the process with SIGBUS. So
    there is none, and a RuntimeWarning on rank 0, where a node has too little.

    Args:
      operation: what it is for, for messages.
      agreement: of all ranks.
      node: the ranks that share memory with this one; borrowed.
      page_bytes: see `Board`.
      is_patient: see `Board`.
    """
    needed = node.Get_size() * Board.count_bytes(page_bytes, _SLOT_BYTES)
    free = min(free_bytes(is_shared=True).values(), default=needed)
    short = [(n, f) for n, f in agreement.gather(operation, (needed, free)) if n > f]
    if not short:
        names = node.group.Translate_ranks(None, agreement.comm.group)
        return agreement.block(
            operation,
            lambda: Board(
                node,
                page_bytes,
                _SLOT_BYTES,
                names,
                is_patient,
                agreement.losses,
                agreement.departures,
            ),
        )
    if agreement.rank == 0:
        needed, free = short[0]
        warn(
            f"the ranks of a node need {as_text(needed)} of shared memory to work "
            f"together quickly, but {as_text(free)} are free; they go on by MPI alone, "
            "more slowly. A container may be given more: --shm-size",
            stacklevel=2,
        )
    return None
