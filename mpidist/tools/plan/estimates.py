"""What a rank will about read in an epoch that is too long to go through."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidist.data.hdf5 import rows as hdf5_rows
from mpidist.data.sharding import Indices
from mpidist.data.shuffling import BlockOrder
from mpidist.tools.plan.dry_rows import DryRows, stored_bytes
from mpidist.tools.plan.shares import ORDER, Share

__all__ = [
    "Reads",
    "count_lanes",
    "estimate_in_order",
    "estimate_shuffled",
    "kept_bytes",
]

_SAMPLED_ROWS = 1 << 22  # at once, so that memory suffices


class Reads(NamedTuple):
    """What one rank reads in an epoch.

    Args:
      read_bytes: from files, in rows or chunks as they are stored; of what h5py reads,
        as many as it has in memory.
      decoded_chunks: how many rows of chunks are read whole; again if they were not
        kept.
      files: from how many files; None if these were not counted.
      is_exact: whether the bytes and chunks are no estimates.
    """

    read_bytes: float
    decoded_chunks: float
    files: int | None
    is_exact: bool


def count_lanes(share: Share, mixed: BlockOrder) -> int:
    """Return from how many lanes a rank gets rows."""
    return mixed.lanes_of(_lane_starts(share, 0, mixed)).size


def kept_bytes(share: Share) -> int:
    """Return how many bytes of decoded chunks a rank keeps in memory, at most."""
    limit = hdf5_rows.KEPT_BYTES
    if (mixed := share.pipeline.block_order(ORDER)) is not None:
        rows = mixed.rows_in_use(_lane_starts(share, 0, mixed))
        limit = share.source.layout.bytes_to_keep(rows)
    return min(limit, share.source.memory_bytes_in_blocks)


def estimate_shuffled(share: Share) -> Reads:
    """Return about what a rank reads whose epoch is too long to go through."""
    mixed = share.pipeline.block_order(ORDER)
    return _at_random(share) if mixed is None else _by_lanes(share, mixed)


def _by_lanes(share: Share, mixed: BlockOrder) -> Reads:
    """Return about what a rank reads that decodes the blocks of its lanes."""
    means = _means(share.source, mixed.blocks.rows)
    blocks = _count_blocks(share, mixed)
    read_bytes = share.rows * means.row_bytes + blocks * means.block_bytes
    return Reads(read_bytes, blocks * means.chunks, None, False)


def _at_random(share: Share) -> Reads:
    """Return about what a rank reads whose rows come from anywhere.

    The steps that are read at a time need a part of all chunks. They find those that
    are kept, or that the steps before needed.
    """
    means = _means(share.source, 1)
    groups = math.ceil(share.steps / share.group)
    rows = [share.rows * f.rows / len(share.source) / f.chunks for f in means.fields]
    needed = [-math.expm1(-each / groups) for each in rows]
    kept = _kept_groups(means.fields, needed, kept_bytes(share))
    read_bytes, chunks = share.rows * means.row_bytes, 0.0
    for field, each, part in zip(means.fields, rows, needed, strict=True):
        times = part * (1 + (groups - 1) * (1 - part) ** kept)
        times = max(times, -math.expm1(-each))
        chunks += times * field.chunks
        read_bytes += times * field.stored_bytes
    return Reads(read_bytes, chunks, None, False)


def _kept_groups(
    fields: Sequence[_Field], needed: Sequence[float], limit: int
) -> float:
    """Return how long chunks are kept after their last use, in groups of steps.

    For so long that those which were used meanwhile fill the memory (Che, Tung and
    Wang, "Hierarchical Web caching systems", IEEE JSAC 2002).
    """

    def used_bytes(groups: float) -> float:
        parts = zip(fields, needed, strict=True)
        used = [f.memory_bytes * (1 - math.pow(1 - part, groups)) for f, part in parts]
        return sum(used)

    low, high = 0.0, 60.0  # powers of two
    while high - low > 1e-3:
        middle = (low + high) / 2
        is_less = used_bytes(math.pow(2, middle)) < limit
        low, high = (middle, high) if is_less else (low, middle)
    return math.pow(2, low)


def estimate_in_order(share: Share, sampled_steps: int) -> Reads:
    """Return about what a rank reads in the order of the files.

    Args:
      share: of the rank.
      sampled_steps: of how many of its steps the rows may be asked for.
    """
    longest = max((c.chunk[0] for c in share.source.columns_in_blocks), default=1)
    if share.replicas == 1 or share.pipeline.batch_size <= longest:
        return _whole(share)  # each rank gets rows of each chunk
    groups = max(1, sampled_steps // 2 // share.group)
    half = min(groups * share.group, share.steps // 2)
    if half and half * len(share.positions(0)) <= _SAMPLED_ROWS:
        return _sample(share, half)
    return _whole(share, share.rows / len(share.source))


def _sample(share: Share, half: int) -> Reads:
    """Return what an epoch takes if it goes on like the second half of a sample.

    In the first half the chunks are read that are kept from then on.
    """
    source = share.source
    share.begin()
    share.ask(range(half))
    first_bytes, first_chunks = source.read_bytes, source.decoded_chunks
    share.ask(range(half, 2 * half))
    more = share.steps / half - 1
    return Reads(
        first_bytes + more * (source.read_bytes - first_bytes),
        first_chunks + more * (source.decoded_chunks - first_chunks),
        None,
        False,
    )


def _whole(share: Share, part: float = 1) -> Reads:
    """Return about what a rank reads that decodes a part of the chunks, each once."""
    means = _means(share.source, 1)
    stored = sum(field.stored_bytes for field in means.fields)
    chunks = sum(field.chunks for field in means.fields)
    read_bytes = share.rows * means.row_bytes + part * stored
    return Reads(read_bytes, part * chunks, None, False)


class _Field(NamedTuple):
    """What there is of a dataset in chunks that are decoded."""

    rows: int
    chunks: int
    stored_bytes: int
    memory_bytes: int


class _Means(NamedTuple):
    """What is read in the mean.

    Args:
      row_bytes: for a row, of what is not in chunks, or need not be decoded.
      chunks: for a block, the chunks of the rest.
      block_bytes: of these chunks.
      fields: the rest, by dataset.
    """

    row_bytes: float
    chunks: float
    block_bytes: float
    fields: list[_Field]


@functools.lru_cache(maxsize=2)
def _means(source: DryRows, block_rows: int) -> _Means:
    """Return the means over all files, for blocks of so many rows."""
    row_bytes = chunks = block_bytes = 0.0
    fields = []
    for columns in zip(*(file.datasets for file in source.layout.files), strict=True):
        field = _Field(0, 0, 0, 0)
        for column in columns:
            stored, part = stored_bytes(column), column.shape[0] / max(1, len(source))
            if not column.is_in_blocks:
                row_bytes += stored / max(1, len(source))
            elif column.shape[0]:
                memory = column.row_bytes * column.shape[0]
                more = column.shape[0], column.grid[0], stored, memory
                field = _Field(*map(sum, zip(field, more, strict=True)))
                count = part * max(1, block_rows / column.chunk[0])
                chunks += count
                block_bytes += count * stored / column.grid[0]
        if field.chunks:
            fields.append(field)
    return _Means(row_bytes, chunks, block_bytes, fields)


def _count_blocks(share: Share, mixed: BlockOrder) -> int:
    """Return how many blocks a rank decodes: those of its lanes.

    A block that two lanes have is decoded for each, unless all are kept.
    """
    lanes = mixed.lanes_of(_lane_starts(share, 0, mixed))
    first, last = mixed.blocks_of(lanes)
    new = np.maximum(first, np.concatenate([[-1], last[:-1]]) + 1)
    blocks = int(np.maximum(last - new + 1, 0).sum())
    whole, kept = share.source.memory_bytes_in_blocks, kept_bytes(share)
    if blocks / max(1, mixed.blocks.count) * whole > kept:
        blocks = int((last - first + 1).sum())
    # The last batch may have fewer rows, and so other lanes
    at_end = mixed.lanes_of(_lane_starts(share, share.steps - 1, mixed))
    others = np.setdiff1d(at_end, lanes).size
    blocks += min(others * mixed.window, len(share.positions(share.steps - 1)))
    return min(blocks, mixed.blocks.count) if whole <= kept else blocks


def _lane_starts(share: Share, step: int, mixed: BlockOrder) -> Indices:
    """Return one place in a batch for each lane from which a rank gets rows."""
    mine = share.positions(step)
    start = mine.start - step * share.pipeline.batch_size
    lane_start = start - start % mixed.lane_rows
    return np.arange(lane_start, start + len(mine), mixed.lane_rows)
