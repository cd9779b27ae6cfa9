"""Reading arrays of a checkpoint: each part once, by one rank, for all. Collective."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.checkpoint.reading import read_piece
from mpidist.checkpoint.tree import Leaf, Piece
from mpidist.comm.consensus.calls import Call
from mpidist.strategy.extended import StrategyExtended

__all__ = ["load"]

_SENT_BYTES = 64 << 20


def load(
    extended: StrategyExtended,
    operation: str,
    folder: Path,
    shared: Sequence[Leaf],
    own: Sequence[Leaf],
) -> dict[int, Any]:
    """Return the arrays of leaves by the id of the leaf. Collective.

    Args:
      extended: whose ranks read.
      operation: the public call, for messages.
      folder: of the checkpoint's files.
      shared: what all ranks need, the same on all.
      own: what only this rank needs.

    Raises, on all ranks:
      CheckpointError: a file cannot be read, or is damaged.
    """
    rank, ranks = extended.replica_id, extended.num_replicas
    values: dict[int, Any] = {}
    for leaf in shared:
        mine = [p for i, p in enumerate(leaf.pieces) if i % ranks == rank]
        read = functools.partial(_read, folder, leaf, mine)
        array, flat = extended.agreement.prepare(operation, read)
        for i, piece in enumerate(leaf.pieces if ranks > 1 else ()):
            _send(extended, operation, flat, piece, i % ranks)
        values[id(leaf)] = array

    def read_own() -> dict[int, Any]:
        found = {}
        for leaf in own:
            found[id(leaf)], _ = _read(folder, leaf, leaf.pieces)
        return found

    return values | extended.together(Call(operation), read_own, is_patient=True)


def _read(folder: Path, leaf: Leaf, pieces: Sequence[Piece]) -> tuple[Any, Any]:
    """Return an array for a leaf, and its bytes, with some pieces read."""
    array = np.empty(leaf.shape, leaf.dtype)
    flat = array.reshape(-1).view(np.uint8)
    for piece in pieces:
        read_piece(folder, piece, flat[piece.start : piece.start + piece.size])
    return array, flat


def _send(
    extended: StrategyExtended, operation: str, flat: Any, piece: Piece, root: int
) -> None:
    """Let all ranks have the bytes that one has read. Collective."""
    end = piece.start + piece.size
    for start in range(piece.start, end, _SENT_BYTES):
        part = flat[start : min(start + _SENT_BYTES, end)]
        part[...] = extended.collectives.broadcast(operation, part, root)
